//! The lies a simulated stack can tell: a catalogue, and which of them are told now.
//!
//! A fault is switched on by `name[@process][#times]`: everywhere or in one process of the plan,
//! always or a number of times. Switches come from the profile (`sim.faults`) and, while it
//! exists, from a control file instead, so that a running stack can be told to lie and to stop.
//!
//! The table of what each fault must look like to each case is a test's (`tests/faults`).

mod catalogue;

use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use super::settings::Settings;
pub use catalogue::{CATALOGUE, Fault};

/// Who can tell a lie.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Part {
    /// Any engine, the reference too.
    Engine,
    /// The front door and router.
    Frontend,
    /// `kvcr_service` and its Guard.
    Service,
    /// The state agent.
    Agent,
}

impl Part {
    /// Whether the process that the plan calls `process` is such a one.
    fn is(self, process: &str) -> bool {
        match self {
            Self::Engine => process.starts_with("worker") || process == "reference",
            Self::Frontend => process == "frontend",
            Self::Service => process.starts_with("service"),
            Self::Agent => process == "state-agent",
        }
    }
}

/// A row of the catalogue.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// Which fault.
    pub fault: Fault,
    /// What it is switched on by.
    pub name: &'static str,
    /// Who tells it.
    pub part: Part,
    /// What happens, in a sentence.
    pub what: &'static str,
    /// The report or the check it is drawn from.
    pub source: &'static str,
}

impl Fault {
    /// Its row.
    #[must_use]
    pub fn entry(self) -> &'static Entry {
        &CATALOGUE[self as usize]
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.entry().name)
    }
}

/// A fault that is switched on: `name[@process][#times]`. A process that ends with `*` means all
/// whose names begin so: `worker*` are the engines without the reference.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct Switch {
    /// Which fault.
    pub fault: Fault,
    /// The only process that tells it; `None`: all that can.
    pub process: Option<String>,
    /// How often each process tells it; `None`: always.
    pub times: Option<u32>,
}

impl Switch {
    /// Whether the process that the plan calls so would tell it: it is meant, and its part can.
    #[must_use]
    pub fn is_told_by(&self, process: &str) -> bool {
        self.fault.entry().part.is(process) && self.reaches(process)
    }

    /// Whether the process of this name is meant.
    fn reaches(&self, process: &str) -> bool {
        match self.process.as_deref() {
            None => true,
            Some(wanted) => match wanted.strip_suffix('*') {
                Some(beginning) => process.starts_with(beginning),
                None => process == wanted,
            },
        }
    }
}

impl fmt::Display for Switch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.fault)?;
        if let Some(process) = &self.process {
            write!(f, "@{process}")?;
        }
        if let Some(times) = self.times {
            write!(f, "#{times}")?;
        }
        Ok(())
    }
}

impl FromStr for Switch {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (rest, times) = match text.split_once('#') {
            Some((rest, times)) => {
                let times: u32 = times.parse().unwrap_or(0);
                if times == 0 {
                    return Err(format!(
                        "{text:?}: how often is a number from 1, as in name#2"
                    ));
                }
                (rest, Some(times))
            }
            None => (text, None),
        };
        let (name, process) = match rest.split_once('@') {
            Some((_, "")) => return Err(format!("{text:?} names no process after `@`")),
            Some((name, process)) => (name, Some(process.to_owned())),
            None => (rest, None),
        };
        let Some(entry) = CATALOGUE.iter().find(|entry| entry.name == name) else {
            let nearest = CATALOGUE
                .iter()
                .map(|entry| entry.name)
                .min_by_key(|known| strsim::damerau_levenshtein(known, name))
                .unwrap_or_default();
            return Err(format!(
                "no fault is called {name:?}; the nearest is {nearest}"
            ));
        };
        Ok(Self {
            fault: entry.fault,
            process,
            times,
        })
    }
}

impl Serialize for Switch {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Switch {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?
            .parse()
            .map_err(serde::de::Error::custom)
    }
}

/// Switches of a control file: one a line, blank lines and `#` comments left out.
///
/// # Errors
/// The first line that is no switch, with its number.
pub fn parse_file(text: &str) -> Result<Vec<Switch>, String> {
    text.lines()
        .enumerate()
        .map(|(number, line)| (number + 1, line.trim()))
        .filter(|(_, line)| !line.is_empty() && !line.starts_with('#'))
        .map(|(number, line)| line.parse().map_err(|why| format!("line {number}: {why}")))
        .collect()
}

/// Which faults one process tells now. Asked at every point where it could lie.
#[derive(Debug)]
pub struct Faults {
    process: String,
    file: Option<PathBuf>,
    initial: Vec<Switch>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// What the control file was when it was last read.
    seen: Option<(SystemTime, u64)>,
    /// Its switches; `None` while there is no file.
    from_file: Option<Vec<Switch>>,
    told: HashMap<Fault, u32>,
}

impl Faults {
    /// The faults of the process that the plan calls `process`.
    #[must_use]
    pub fn new(process: &str, initial: Vec<Switch>, file: Option<PathBuf>) -> Self {
        Self {
            process: process.to_owned(),
            file,
            initial,
            state: Mutex::default(),
        }
    }

    /// The faults that a process's settings name.
    #[must_use]
    pub fn of(settings: &Settings) -> Self {
        Self::new(
            &settings.process,
            settings.faults.clone(),
            settings.faults_file.clone(),
        )
    }

    /// Whether `fault` is switched on here and not used up. Says nothing was told.
    #[must_use]
    pub fn on(&self, fault: Fault) -> bool {
        self.remaining(fault).is_some()
    }

    /// The same, and one telling of it is used up.
    #[must_use]
    pub fn tell(&self, fault: Fault) -> bool {
        let told = self.remaining(fault).is_some();
        if told {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            *state.told.entry(fault).or_default() += 1;
        }
        told
    }

    fn remaining(&self, fault: Fault) -> Option<()> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        self.refresh(&mut state);
        let switches = state.from_file.as_ref().unwrap_or(&self.initial);
        let switch = switches
            .iter()
            .find(|switch| switch.fault == fault && switch.reaches(&self.process))?;
        let told = state.told.get(&fault).copied().unwrap_or(0);
        switch.times.is_none_or(|times| told < times).then_some(())
    }

    /// Reads the control file if it changed. What cannot be read tells nothing: it is renamed
    /// into place by our own commands.
    fn refresh(&self, state: &mut State) {
        let Some(file) = &self.file else { return };
        let seen = std::fs::metadata(file)
            .and_then(|meta| Ok((meta.modified()?, meta.len())))
            .ok();
        if seen == state.seen {
            return;
        }
        state.seen = seen;
        state.told.clear();
        state.from_file = seen.map(|_| {
            let text = std::fs::read_to_string(file).unwrap_or_default();
            parse_file(&text).unwrap_or_else(|why| {
                errln!("sim: {}: {why}", file.display());
                Vec::new()
            })
        });
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn the_catalogue_is_in_order_and_says_something() {
        let mut names = HashSet::new();
        for (index, entry) in CATALOGUE.iter().enumerate() {
            assert_eq!(entry.fault as usize, index, "{}", entry.name);
            assert!(names.insert(entry.name), "{} twice", entry.name);
            assert!(!entry.what.is_empty() && !entry.source.is_empty());
        }
        assert!(CATALOGUE.len() >= 45);
    }

    #[test]
    fn a_switch_is_read_as_it_is_written() {
        for text in [
            "corrupt_block",
            "corrupt_block@worker1",
            "corrupt_block@worker1#2",
        ] {
            let switch: Switch = text.parse().unwrap();
            assert_eq!(switch.to_string(), text);
        }
        for (text, why) in [
            ("corupt_block", "the nearest is corrupt_block"),
            ("corrupt_block#x", "how often"),
            ("corrupt_block@", "names no process"),
        ] {
            let error = text.parse::<Switch>().unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn a_fault_is_told_here_and_as_often_as_it_says() {
        let faults = |process: &str| {
            let switches = vec!["corrupt_block@worker1#2".parse().unwrap()];
            Faults::new(process, switches, None)
        };
        assert!(!faults("worker0").on(Fault::CorruptBlock));
        let faults = faults("worker1");
        assert!(!faults.on(Fault::SwapBlocks));
        assert!(faults.tell(Fault::CorruptBlock));
        assert!(faults.on(Fault::CorruptBlock));
        assert!(faults.tell(Fault::CorruptBlock));
        assert!(!faults.tell(Fault::CorruptBlock));
        let workers: Switch = "corrupt_block@worker*".parse().unwrap();
        assert!(workers.is_told_by("worker1") && !workers.is_told_by("reference"));
        let lost: Switch = "corrupt_block@frontend".parse().unwrap();
        assert!(!lost.is_told_by("frontend"));
        assert!("corrupt_block#0".parse::<Switch>().is_err());
    }

    #[test]
    fn the_control_file_replaces_the_profile_while_it_is_there() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("faults");
        let initial = vec!["corrupt_block".parse().unwrap()];
        let faults = Faults::new("worker0", initial, Some(file.clone()));
        assert!(faults.on(Fault::CorruptBlock));
        std::fs::write(&file, "# honest but for one thing\n\nswap_blocks#1\n").unwrap();
        assert!(!faults.on(Fault::CorruptBlock));
        assert!(faults.tell(Fault::SwapBlocks));
        assert!(!faults.on(Fault::SwapBlocks));
        std::fs::remove_file(&file).unwrap();
        assert!(faults.on(Fault::CorruptBlock));
    }

    #[test]
    fn a_line_that_is_no_switch_is_named() {
        let error = parse_file("corrupt_block\n\nnonsense\n").unwrap_err();
        assert!(error.starts_with("line 3: no fault is called"), "{error}");
    }
}
