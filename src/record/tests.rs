//! A stack that knows a few answers only.

use super::*;
use crate::client::testing::{PIN, Script, serve};
use crate::config::testing::cpu;
use crate::plan::testing::{canonical, installed};
use crate::stack::protocol::ProcessInfo;

/// A front door and two workers in one server, which know a few answers only.
async fn stack(log: &Path) -> StackInfo {
    let url = serve(Script::from([
        (
            "/metrics",
            vec![(200, "# TYPE a counter\na 1\n".to_owned())],
        ),
        (
            "/v1/completions",
            vec![(200, format!("{{\"pin\":\"{PIN}\"}}"))],
        ),
    ]))
    .await;
    let mut plan = canonical(&cpu(&[]), &installed()).unwrap();
    plan.frontend_url = url.clone();
    let workers = [0usize, 1].map(|index| WorkerInfo {
        process: format!("worker{index}"),
        index,
        instance_id: 7 + index as u64,
        served_model: "tiny".into(),
        serves: crate::plan::Serves::Whole,
        metrics_url: format!("{url}/metrics"),
        probes_ms: 0,
        ready_ms: 0,
    });
    let processes = ["etcd", "worker0"].map(|name| ProcessInfo {
        name: name.into(),
        pid: 1,
        start_ticks: 1,
        log: log.to_owned(),
        before: 0,
    });
    StackInfo {
        fingerprint: "f".into(),
        generation: 1,
        variant: 0,
        plan,
        processes: processes.into(),
        workers: workers.into(),
        logs: log.to_owned(),
        reference_dir: log.to_owned(),
        bring_up_ms: 0,
        steps: Vec::new(),
        started_for_this_lease: true,
    }
}

#[tokio::test]
async fn every_question_is_asked_and_a_refusal_is_an_answer() {
    let place = tempfile::tempdir().unwrap();
    let log = place.path().join("worker0.log");
    std::fs::write(
        &log,
        "Created TieringOffloadingManager with primary tier (lru)\n",
    )
    .unwrap();
    let words: serde_json::Map<String, Value> = ('a'..='z')
        .zip(1..)
        .map(|(letter, id)| (format!("Ġ{letter}{letter}"), json!(id)))
        .collect();
    let tokenizer = json!({"added_tokens": [], "model": {"type": "BPE", "vocab": words}});
    std::fs::write(place.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let mut software = installed();
    software.model = place.path().to_owned();

    let stack = stack(&log).await;
    let path = record(&cpu(&[]), &software, &stack, &place.path().join("out"))
        .await
        .unwrap();
    assert!(path.ends_with("out/cpu.json"));
    let recording: Recording = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let Surface::Response { status, .. } = &recording.surfaces["frontend GET /live"] else {
        panic!("no response");
    };
    assert_eq!(*status, 404);
    let peer = &recording.surfaces["completion from a peer"];
    let Surface::Response { excerpt, .. } = peer else {
        panic!("no response");
    };
    // Asked of the second worker.
    assert_eq!(excerpt, r#"{"pin":"8"}"#);
    let lines = Surface::log("Created TieringOffloadingManager with primary tier");
    assert_eq!(recording.surfaces["worker0 log"], lines);
    assert!(!recording.surfaces.contains_key("etcd log"));
}
