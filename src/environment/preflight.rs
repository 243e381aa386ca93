//! Asking an environment whether its parts fit: `preflight.py`, run by the interpreter in
//! question.
//!
//! It takes a second or two, so its report is kept in `<cache>/preflight` for as long as nothing
//! it looks at has changed. What the report means for a run is decided in `gate`.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::atomic;
use crate::failure::Failure;

use super::assets::{self, Recipe};
use super::install::absolute;
use super::{Installed, child, interpreter, log, packages};

/// It parses some hundred source files; a starved machine needs its time.
const LIMIT: Duration = Duration::from_secs(60);

/// The schema that is read here.
const SCHEMA: u32 = 1;

/// Raised when what decides the freshness of a kept report changes.
const KEPT_SCHEMA: u32 = 1;

/// The sources whose content the report is about, beside the metadata of all packages.
const SOURCES: &[&str] = &["kvcr", "vllm/v1/kv_offload", "dynamo/vllm"];

/// What `preflight.py` prints. Fields that are not listed are not used.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Preflight {
    /// Version of the document.
    pub schema: u32,
    /// Whether every probe is ok.
    pub ok: bool,
    /// By distribution name; none where it is not installed.
    pub packages: BTreeMap<String, Option<PackageReport>>,
    /// The most telling first.
    pub probes: Vec<PairProbe>,
}

/// One distribution.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct PackageReport {
    /// Its version.
    pub version: String,
    /// SHA-256 of its `RECORD`.
    pub record_sha256: Option<String>,
    /// Whether the files that were looked at are what `RECORD` says.
    pub intact: bool,
}

/// One question about parts that must fit.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct PairProbe {
    /// Stable name: `vllm-kvcr-names`.
    pub id: String,
    /// What must hold.
    pub need: String,
    /// What there is.
    pub found: String,
    /// Whether it holds.
    pub ok: bool,
    /// Whether there was something to look at. Not ok without it is a doubt, no proof.
    pub ran: bool,
    /// `vLLM 0.31.0 + kvcr 0.1.1`.
    pub culprit: Option<String>,
    /// What to do.
    pub hint: Option<String>,
    /// Where it stands in the source, and the issue upstream.
    pub reference: Option<String>,
}

/// A report, and what it was made from.
#[derive(Debug, Deserialize, Serialize)]
struct Kept {
    schema: u32,
    stamp: String,
    report: Preflight,
}

/// The report on `installed`: the kept one if it still holds, else a new one. `None` where no
/// releases have to fit: the simulated stack is one program.
pub fn preflight(installed: &Installed, cache: &Path) -> Result<Option<Preflight>, Failure> {
    let Some(python) = installed.program.python() else {
        return Ok(None);
    };
    let cache = &absolute(cache)?;
    // The overlay and the scripts of every environment are the same ones for now.
    let recipe = Recipe::embedded("cpu")?;
    let found = interpreter::ask(python).map_err(|why| {
        Failure::environment(format!("{} does not run", python.display()))
            .found(why)
            .hint("`kvcr-phase1 env install` makes it again")
    })?;
    let stamp = assets::hash([
        recipe.digest().as_bytes(),
        packages::stamp(&found.site).as_bytes(),
        packages::stamp_sources(&found.site, SOURCES).as_bytes(),
        installed.overlay.is_some().to_string().as_bytes(),
    ]);
    let name = assets::hash([python.as_os_str().as_encoded_bytes()]);
    let path = cache
        .join("preflight")
        .join(format!("{}.json", &name[..12]));
    if let Some(report) = kept(&path, &stamp) {
        return Ok(Some(report));
    }
    let overlay = installed.overlay.as_deref();
    let report = ask(python, overlay, &recipe, cache)?;
    // Only a convenience: a cache that cannot be written to makes the next start slower.
    if std::fs::create_dir_all(cache.join("preflight")).is_ok() {
        let kept = Kept {
            schema: KEPT_SCHEMA,
            stamp,
            report: report.clone(),
        };
        let _ = atomic::json(&kept).and_then(|text| atomic::replace(&path, &text));
    }
    Ok(Some(report))
}

fn kept(path: &Path, stamp: &str) -> Option<Preflight> {
    let kept: Kept = serde_json::from_slice(&std::fs::read(path).ok()?).ok()?;
    (kept.schema == KEPT_SCHEMA && kept.stamp == stamp).then_some(kept.report)
}

fn ask(
    python: &Path,
    overlay: Option<&Path>,
    recipe: &Recipe,
    cache: &Path,
) -> Result<Preflight, Failure> {
    let files = recipe
        .on_disk(cache)
        .map_err(|error| log::io("cannot write the preflight script", cache, &error))?;
    run(python, &files.join(assets::PREFLIGHT), overlay, LIMIT)
}

fn run(
    python: &Path,
    script: &Path,
    overlay: Option<&Path>,
    limit: Duration,
) -> Result<Preflight, Failure> {
    let mut command = child::command(python);
    command.arg("-B").arg(script).current_dir("/");
    if let Some(overlay) = overlay {
        command.arg("--overlay").arg(overlay);
    }
    let answer = child::ask(command, limit);
    let unusable = |found: String| {
        Failure::environment("the preflight did not say whether the installed releases fit")
            .expected(format!("a report of schema {SCHEMA}"))
            .found(found)
            .hint(format!(
                "run it by hand: {} {}",
                python.display(),
                script.display()
            ))
    };
    let report: Preflight = match serde_json::from_str(&answer.stdout) {
        Ok(report) => report,
        Err(_) if !answer.stderr.is_empty() || answer.stdout.is_empty() => {
            return Err(unusable(answer.complaint()));
        }
        Err(error) => return Err(unusable(format!("{error}; {}", answer.ending))),
    };
    if report.schema != SCHEMA {
        return Err(unusable(format!("schema {}", report.schema)));
    }
    Ok(report)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::environment::{Program, fakes};

    const REPORT: &str = r#"{"schema": 1, "ok": false, "python": {"version": "3.12.1"},
        "packages": {"kvcr": {"version": "0.1.1", "location": "/x", "record_sha256": "00", "intact": true, "changed": []}, "vllm": null},
        "probes": [{"id": "a", "need": "b", "found": "c", "ok": false, "ran": true, "culprit": null, "hint": null, "reference": null}],
        "facts": {}}"#;

    fn answer(script: &str) -> Result<Preflight, Failure> {
        let place = tempfile::tempdir().unwrap();
        let python = place.path().join("python");
        fakes::script(&python, script);
        run(
            &python,
            Path::new("/p.py"),
            None,
            Duration::from_millis(400),
        )
    }

    #[test]
    fn reads_a_report_whatever_the_exit_status() {
        let report = answer(&format!("cat <<'END'\n{REPORT}\nEND\nexit 1")).unwrap();
        assert!(!report.ok);
        assert_eq!(report.packages["vllm"], None);
        assert!(report.probes[0].ran);
    }

    #[test]
    fn anything_else_is_a_failure_that_quotes_it() {
        let cases = [
            ("exit 3", "found exit status 3;"),
            ("echo boom >&2; exit 1", "found exit status 1 (boom);"),
            ("echo '{\"schema\": 1'", "EOF while parsing"),
            ("echo '[]'", "invalid"),
            ("sleep 20", "found no answer within 0.4 s;"),
            (
                "echo '{\"schema\": 2, \"ok\": true, \"packages\": {}, \"probes\": []}'",
                "found schema 2;",
            ),
        ];
        for (script, found) in cases {
            let text = answer(script).unwrap_err().to_string();
            assert!(
                text.starts_with("Environment: the preflight did not say"),
                "{text}"
            );
            assert!(text.contains(found), "{script}: {text}");
        }
    }

    #[test]
    fn a_report_is_kept_until_something_changes() {
        let place = tempfile::tempdir().unwrap();
        let path = |name: &str| place.path().join(name);
        let site = path("site");
        std::fs::create_dir_all(site.join("kvcr-0.1.1.dist-info")).unwrap();
        std::fs::create_dir_all(site.join("kvcr")).unwrap();
        std::fs::write(path("report.json"), REPORT).unwrap();
        fakes::script(
            &path("python"),
            &format!(
                r#"case "$1" in
-c) echo '{{"implementation": "CPython", "version": [3, 12, 1], "executable": "/x", "site": ["{site}"]}}';;
*) echo run >> {root}/runs; cat {root}/report.json; exit 1;;
esac"#,
                site = site.display(),
                root = place.path().display()
            ),
        );
        let mut installed = Installed {
            key: String::new(),
            program: Program::Python(path("python")),
            overlay: None,
            model: PathBuf::new(),
            model_digest: String::new(),
            etcd: None,
            packages: BTreeMap::new(),
            reads_nested_tiers: false,
        };
        let runs = |installed: &Installed| {
            preflight(installed, &path("cache")).unwrap();
            let text = std::fs::read_to_string(path("runs")).unwrap();
            text.lines().count()
        };
        assert_eq!(runs(&installed), 1);
        assert_eq!(runs(&installed), 1);
        std::fs::write(site.join("kvcr/core.py"), "patched").unwrap();
        assert_eq!(runs(&installed), 2);
        std::fs::create_dir_all(site.join("nixl-1.5.0.dist-info")).unwrap();
        assert_eq!(runs(&installed), 3);
        installed.overlay = Some(path("overlay"));
        assert_eq!(runs(&installed), 4);
        std::fs::write(
            path("cache/preflight")
                .read_dir()
                .unwrap()
                .next()
                .unwrap()
                .unwrap()
                .path(),
            "{",
        )
        .unwrap();
        assert_eq!(runs(&installed), 5);
        assert_eq!(runs(&installed), 5);
    }
}
