//! The simulated stack shows what the real one showed when it was recorded.
//!
//! Recordings of the real stack are made again whenever its software changes, and reviewed like
//! code:
//!
//! ```text
//! kvcr-phase1 record tests/fixtures/real --profile cpu
//! kvcr-phase1 record tests/fixtures/real --profile cpu --guard
//! ```

use std::path::{Path, PathBuf};
use std::process::Command;

use kvcr_phase1::surface::{Recording, Surface, differences};

fn read(path: &Path) -> Recording {
    let text = std::fs::read(path).expect("a recording");
    serde_json::from_slice(&text).expect("a recording of this version")
}

fn real(name: &str) -> Recording {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/real");
    read(&fixtures.join(name))
}

fn kvcr_phase1(place: &Path, args: &[&str]) -> std::process::Output {
    Command::new(env!("CARGO_BIN_EXE_kvcr-phase1"))
        .args(args)
        .args(["--profile", "sim"])
        .arg(format!("--state-dir={}", place.join("s").display()))
        .arg(format!("--cache-dir={}", place.join("c").display()))
        .output()
        .expect("the program starts")
}

fn simulated(flags: &[&str], file: &str) -> Recording {
    // Sockets below it may not have long paths.
    let place = tempfile::Builder::new()
        .prefix("kvcr-")
        .tempdir_in("/tmp")
        .expect("a directory");
    let folder: PathBuf = place.path().join("recorded");
    let folder_text = folder.to_string_lossy();
    let recorded = kvcr_phase1(place.path(), &[&["record", &folder_text], flags].concat());
    kvcr_phase1(place.path(), &["down", "--force"]);
    let said = String::from_utf8_lossy(&recorded.stderr);
    assert!(recorded.status.success(), "{said}");
    read(&folder.join(file))
}

fn agree(name: &str, flags: &[&str], file: &str) {
    let found = differences(&real(name), &simulated(flags, file));
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn the_simulated_stack_looks_like_the_real_one() {
    agree("cpu.json", &[], "sim.json");
}

#[test]
fn with_guards_it_does_too() {
    agree("cpu-guard.json", &["--guard"], "sim-guard.json");
}

/// A recording in which a transfer or a hit did not happen would hold nobody to anything.
#[test]
fn recordings_of_the_real_stack_show_every_tier() {
    for name in ["cpu.json", "cpu-guard.json"] {
        let real = real(name);
        assert!(real.versions.contains_key("kvcr"), "{name}");
        let samples = |surface: &str| -> Vec<String> {
            let Some(Surface::Page { families }) = real.surfaces.get(surface) else {
                panic!("{name}: no page {surface}");
            };
            let blocks = &families["vllm:kvcr_transfer_blocks_total"];
            blocks.samples.iter().cloned().collect()
        };
        assert!(samples("worker metrics at ready").is_empty(), "{name}");
        assert_eq!(
            samples("worker0 metrics afterwards"),
            [
                "operation=local_deliver",
                "operation=local_fill",
                "operation=source_write"
            ],
            "{name}"
        );
        assert_eq!(
            samples("worker1 metrics afterwards"),
            ["operation=remote_deliver"],
            "{name}"
        );
    }
}
