//! etcd: found, brought along, or done without.
//!
//! Dynamo can also discover through files, but loses live workers that way when the host
//! stalls, so etcd is worth a download. It is taken out of Debian's package without installing
//! that, so nothing needs root and no daemon starts.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::child::{self, Ending, Search};
use super::lock::Lock;

const ANSWER_LIMIT: Duration = Duration::from_secs(20);
const DOWNLOAD_LIMIT: Duration = Duration::from_secs(180);

/// Where the package's program lies below the directory it was unpacked to.
const UNPACKED: &str = "etcd/usr/bin/etcd";

/// Which etcd, and why.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Choice {
    pub(crate) program: Option<PathBuf>,
    /// One clause for people.
    pub(crate) reason: String,
}

/// What there is without a download: on `PATH`, or brought into `environment` before.
pub(crate) fn find(environment: Option<&Path>, search: &Search) -> Option<Choice> {
    let brought = environment.map(|directory| directory.join(UNPACKED));
    let candidates = search.all("etcd").into_iter().map(|path| (path, "on PATH"));
    candidates
        .chain(brought.map(|path| (path, "from Debian's package")))
        .find_map(|(program, origin)| {
            let version = version(&program)?;
            Some(Choice {
                reason: format!("etcd {version} {origin}: {}", program.display()),
                program: Some(program),
            })
        })
}

/// Finds one, or brings one into `environment`; discovery through files if neither works.
pub(crate) fn find_or_bring(
    environment: &Path,
    search: &Search,
    log: &Path,
    held: &Lock,
) -> Choice {
    if let Some(choice) = find(Some(environment), search) {
        return choice;
    }
    match bring(environment, search, log, held) {
        Ok(()) => find(Some(environment), search)
            .unwrap_or_else(|| without("the unpacked etcd does not run")),
        Err(why) => without(&why),
    }
}

fn without(why: &str) -> Choice {
    Choice {
        program: None,
        reason: format!(
            "discovery through files, which is less robust: no etcd on PATH, and {why}"
        ),
    }
}

fn bring(environment: &Path, search: &Search, log: &Path, held: &Lock) -> Result<(), String> {
    let apt = search.first("apt-get").ok_or("no apt to get it with")?;
    let unpack = search
        .first("dpkg-deb")
        .ok_or("no dpkg-deb to unpack it with")?;
    let temporary = tempfile::Builder::new()
        .prefix(".etcd-")
        .tempdir_in(environment)
        .map_err(|error| error.to_string())?;
    // Only so that apt's unprivileged downloader, where apt runs as root, may write here.
    let mut command = child::command(apt);
    command
        .args(["-o", "APT::Sandbox::User=root", "download", "etcd-server"])
        .current_dir(temporary.path());
    match child::work(command, DOWNLOAD_LIMIT, log, held.file()) {
        Ending::Exit(0) => {}
        ending => {
            return Err(format!(
                "`apt-get download etcd-server` failed ({ending}; a fresh machine needs `apt-get update` first)"
            ));
        }
    }
    let package = temporary
        .path()
        .read_dir()
        .ok()
        .and_then(|mut entries| entries.find_map(Result::ok))
        .ok_or("apt-get downloaded nothing")?;
    let unpacked = temporary.path().join("unpacked");
    let mut command = child::command(unpack);
    command.arg("-x").arg(package.path()).arg(&unpacked);
    match child::work(command, DOWNLOAD_LIMIT, log, held.file()) {
        Ending::Exit(0) => {
            std::fs::rename(&unpacked, environment.join("etcd")).map_err(|error| error.to_string())
        }
        ending => Err(format!("its package could not be unpacked ({ending})")),
    }
}

/// The version that a program says, if it is etcd and runs.
pub(crate) fn version(program: &Path) -> Option<String> {
    if !program.exists() {
        return None;
    }
    let mut command = child::command(program);
    command.arg("--version");
    let answer = child::ask(command, ANSWER_LIMIT);
    let line = answer.stdout.lines().next()?;
    let version = line.strip_prefix("etcd Version: ")?;
    answer.ok().then(|| version.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use rustix::fs::FlockOperation;

    use super::*;
    use crate::environment::{fakes, lock};

    fn choose(bin: &Path) -> (Choice, tempfile::TempDir) {
        let environment = tempfile::tempdir().unwrap();
        let held = lock::attempt(
            &environment.path().join("lock"),
            FlockOperation::NonBlockingLockExclusive,
        );
        let choice = find_or_bring(
            environment.path(),
            &fakes::search(bin, bin),
            &environment.path().join("log"),
            &held.unwrap().unwrap(),
        );
        (choice, environment)
    }

    #[test]
    fn path_comes_first() {
        let place = tempfile::tempdir().unwrap();
        fakes::script(
            &place.path().join("etcd"),
            "echo 'etcd Version: 3.5.1'; echo 'Git SHA: x'",
        );
        let (choice, _kept) = choose(place.path());
        assert_eq!(choice.program, Some(place.path().join("etcd")));
        assert!(choice.reason.starts_with("etcd 3.5.1 on PATH"));
    }

    #[test]
    fn an_etcd_that_does_not_run_is_passed_over() {
        let place = tempfile::tempdir().unwrap();
        fakes::script(&place.path().join("etcd"), "echo broken; exit 1");
        let (choice, _kept) = choose(place.path());
        assert_eq!(choice.program, None);
        assert!(choice.reason.contains("no apt"), "{}", choice.reason);
    }

    #[test]
    fn is_taken_out_of_debians_package() {
        let place = tempfile::tempdir().unwrap();
        fakes::script(&place.path().join("apt-get"), "echo package > etcd.deb");
        fakes::script(
            &place.path().join("dpkg-deb"),
            "/bin/mkdir -p $3/usr/bin; printf '#!/bin/sh\\necho etcd Version: 3.4.23\\n' > $3/usr/bin/etcd; /bin/chmod +x $3/usr/bin/etcd",
        );
        let (choice, environment) = choose(place.path());
        assert_eq!(choice.program, Some(environment.path().join(UNPACKED)));
        assert!(
            choice
                .reason
                .starts_with("etcd 3.4.23 from Debian's package")
        );
    }

    #[test]
    fn without_a_package_list_says_so() {
        let place = tempfile::tempdir().unwrap();
        fakes::script(&place.path().join("apt-get"), "exit 100");
        fakes::script(&place.path().join("dpkg-deb"), "exit 1");
        let (choice, _kept) = choose(place.path());
        assert_eq!(choice.program, None);
        assert!(
            choice.reason.contains("apt-get update"),
            "{}",
            choice.reason
        );
    }
}
