//! Engines in this process, with their HTTP surfaces and a discovery directory.

use serde_json::{Value, json};

use super::super::flags;
use super::*;
use crate::sim::discovery::Watch;
use crate::sim::model::config_json;
use crate::sim::wire::{Generate, Handover, Reply};

/// A place for engines: model, discovery and shared memory.
struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let config = config_json(Shape::DENSE).to_string();
        std::fs::write(folder.path().join("config.json"), config).unwrap();
        Self(folder)
    }

    async fn boot(&self, args: &[&str], faults: &[&str]) -> Result<Running, Failed> {
        let model = self.0.path().to_string_lossy().into_owned();
        let fixed = [
            "--model",
            &model,
            "--served-model-name",
            "tiny",
            "--block-size",
            "8",
        ];
        let args = fixed.iter().chain(args).map(|arg| (*arg).to_owned());
        let flags = flags::parse(args).unwrap();
        let mut settings = Settings::default();
        settings.latency.start_us = 0;
        settings.process = format!("{:?}", flags.role);
        settings.faults = faults.iter().map(|fault| fault.parse().unwrap()).collect();
        let environment = Environment {
            system_port: None,
            namespace: "dynamo".into(),
            discovery: Some(self.0.path().join("discovery")),
            shm: self.0.path().into(),
        };
        let faults = Faults::new(&settings.process, settings.faults.clone(), None);
        boot(&flags, &settings, &environment, Arc::new(faults)).await
    }

    fn listed(&self) -> Vec<Registration> {
        Watch::new(&self.0.path().join("discovery"), Duration::ZERO).look()
    }
}

async fn ask(address: &str, request: &Generate) -> Vec<Reply> {
    let url = format!("http://{address}/generate");
    let body = serde_json::to_string(request).unwrap();
    let post = reqwest::Client::new()
        .post(url)
        .header("content-type", "application/json");
    let text = post.body(body).send().await.unwrap().text().await.unwrap();
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

fn request(handover: Option<Handover>) -> Generate {
    Generate {
        request_id: "r1".into(),
        tokens: (1..30).collect(),
        cache_salt: None,
        max_tokens: 4,
        hint: None,
        handover,
    }
}

fn tokens(replies: &[Reply]) -> Vec<u32> {
    let ids = replies.iter().filter_map(|reply| match reply {
        Reply::Token { id, .. } => Some(*id),
        _ => None,
    });
    ids.collect()
}

#[tokio::test]
async fn an_engine_is_listed_answers_and_takes_leave() {
    let place = Place::new();
    let running = place.boot(&[], &[]).await.unwrap();
    let [listed] = &place.listed()[..] else {
        panic!("not listed");
    };
    assert!(listed.instance_id >> 63 == 1 && listed.control.is_none());
    let replies = ask(&listed.request_address, &request(None)).await;
    assert_eq!(tokens(&replies).len(), 4);
    assert!(matches!(
        replies[4],
        Reply::Done {
            prompt_tokens: 29,
            ..
        }
    ));

    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let router = http::system(running.system.clone());
    tokio::spawn(async move { axum::serve(listener, router).await });
    let get = |path: &str| reqwest::get(format!("http://{address}{path}"));
    let health: Value = get("/health").await.unwrap().json().await.unwrap();
    assert_eq!(health["endpoints"]["generate"], json!("ready"));
    let metrics = get("/metrics").await.unwrap().text().await.unwrap();
    assert!(metrics.contains("vllm:generation_tokens_total{"));
    running.system.ready.store(false, Ordering::Release);
    assert_eq!(get("/health").await.unwrap().status(), 503);
    drop(running.registered);
    assert!(place.listed().is_empty());
}

#[tokio::test]
async fn what_one_engine_prefills_another_decodes() {
    let place = Place::new();
    let whole = place.boot(&[], &[]).await.unwrap();
    let expected = ask(&place.listed()[0].request_address, &request(None)).await;
    drop(whole);
    let prefill = place
        .boot(&["--disaggregation-mode", "prefill"], &[])
        .await
        .unwrap();
    let replies = ask(&place.listed()[0].request_address, &request(None)).await;
    drop(prefill.registered);
    let Some(Reply::Done {
        handover: Some(handover),
        ..
    }) = replies.last().cloned()
    else {
        panic!("{replies:?}");
    };
    let decode = place
        .boot(&["--disaggregation-mode", "decode"], &[])
        .await
        .unwrap();
    let address = place.listed()[0].request_address.clone();
    let replies = ask(&address, &request(Some(handover.clone()))).await;
    assert_eq!(tokens(&replies), tokens(&expected));
    let page = decode.system.page.render(true).unwrap();
    let line = page
        .lines()
        .find(|line| line.contains("source=\"external_kv_transfer\""));
    assert!(line.unwrap().ends_with(" 29.0"));
    // They are handed over once.
    let again = ask(&address, &request(Some(handover))).await;
    assert!(matches!(again[..], [Reply::Failed { status: 500, .. }]));
}

#[tokio::test]
async fn an_engine_can_be_healthy_and_unknown() {
    let place = Place::new();
    let running = place.boot(&[], &["start_unregistered"]).await.unwrap();
    assert!(running.registered.is_none() && place.listed().is_empty());
    assert!(running.system.ready.load(Ordering::Acquire));
}

#[tokio::test]
async fn a_missing_model_and_a_taken_port_are_said_as_the_real_engine_says_them() {
    let place = Place::new();
    let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = taken.local_addr().unwrap().port();
    let events = json!({"endpoint": format!("tcp://*:{port}"), "enable_kv_cache_events": true});
    let failed = place
        .boot(&["--kv-events-config", &events.to_string()], &[])
        .await;
    assert_eq!(failed.err(), Some(Failed(start::events_port_taken(port))));
    std::fs::remove_file(place.0.path().join("config.json")).unwrap();
    let failed = place.boot(&[], &[]).await.err().unwrap();
    assert!(failed.0.contains("HFValidationError"));
}

#[tokio::test]
async fn a_start_can_hang_and_be_slow() {
    for fault in ["start_hangs", "start_slow"] {
        let place = Place::new();
        let faults = [fault];
        let starts = place.boot(&[], &faults);
        let waited = tokio::time::timeout(Duration::from_millis(200), starts).await;
        assert!(waited.is_err(), "{fault}");
        assert!(place.listed().is_empty());
    }
}
