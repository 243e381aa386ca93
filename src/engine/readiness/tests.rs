//! Against a front door and workers of one canned process: what they answer depends on the path
//! and on how often they were asked.

use std::sync::Mutex;

use super::*;
use crate::client::testing::{PIN, Script, serve};
use crate::plan::ChosenDiscovery;

const ID: u64 = 16_336_821_686_602_806_569;

fn page(id: u64, kvcr: bool) -> String {
    let mut page = format!("# TYPE up gauge\nup{{worker_id=\"{id:x}\"}} 1\n");
    if kvcr {
        page.push_str(
            "# TYPE vllm:kvcr_duration_seconds histogram\n# TYPE vllm:kvcr_transfer_blocks_total counter\n\
             # TYPE vllm:kvcr_transfer_bytes_total counter\n# TYPE vllm:kvcr_state gauge\n\
             vllm:kvcr_state{resource=\"in_flight_ops\"} 0\n",
        );
    }
    page
}

fn health(ids: &[u64]) -> String {
    let instances: Vec<_> = ids
        .iter()
        .map(|id| serde_json::json!({"endpoint": "generate", "instance_id": id, "namespace": "dynamo"}))
        .collect();
    serde_json::json!({"status": "healthy", "instances": instances}).to_string()
}

fn canary(served_by: Value) -> String {
    serde_json::json!({
        "choices": [{"text": "a", "finish_reason": "length"}],
        "usage": {"prompt_tokens": 2, "completion_tokens": 2},
        "nvext": {"worker_id": {"decode_worker_id": served_by}},
    })
    .to_string()
}

/// A front door and worker, both of which are ready, in one server.
fn ready() -> Script {
    Script::from([
        ("/metrics", vec![(200, page(ID, true))]),
        ("/health", vec![(200, health(&[7, ID]))]),
        (
            "/v1/models",
            vec![(200, r#"{"data":[{"id":"tiny"}]}"#.to_owned())],
        ),
        ("/v1/completions", vec![(200, canary(ID.into()))]),
    ])
}

fn worker(index: usize, url: &str) -> PlannedWorker {
    PlannedWorker {
        process: format!("worker{index}"),
        index,
        served_model: "tiny".into(),
        metrics_url: format!("{url}/metrics"),
        health_url: format!("{url}/health"),
        kvcr: true,
        serves: Serves::Whole,
    }
}

fn plan(frontend: &str, workers: Vec<PlannedWorker>) -> Plan {
    Plan {
        topology: "aggregated".into(),
        discovery: ChosenDiscovery {
            backend: "etcd".into(),
            reason: "a test".into(),
        },
        processes: Vec::new(),
        frontend_url: frontend.to_owned(),
        workers,
        reference: None,
        directories: Vec::new(),
        shm_prefixes: Vec::new(),
        shm_bytes: 0,
        external: Vec::new(),
    }
}

async fn run(script: Script) -> (Result<Vec<WorkerInfo>, Failure>, Vec<String>) {
    let url = serve(script).await;
    run_plan(&plan(&url, vec![worker(0, &url)])).await
}

async fn run_plan(plan: &Plan) -> (Result<Vec<WorkerInfo>, Failure>, Vec<String>) {
    let said = Mutex::new(Vec::new());
    let say = |text| said.lock().unwrap().push(text);
    let result = await_workers(plan, Group::Core, &say).await;
    (result, said.into_inner().unwrap())
}

#[tokio::test]
async fn a_ready_worker_is_found_with_its_exact_id() {
    let (result, said) = run(ready()).await;
    let workers = result.unwrap();
    assert_eq!(workers[0].instance_id, ID);
    assert_eq!(
        (workers[0].process.as_str(), workers[0].probes_ms),
        ("worker0", 0)
    );
    assert_eq!(
        said.last().unwrap(),
        &format!("worker0: ready as instance {ID}")
    );
}

#[tokio::test]
async fn what_is_not_there_yet_is_waited_for_and_said_once() {
    let mut script = ready();
    let not_yet = r#"{"message":"Invalid request","type":"Bad Request","code":400}"#;
    script.insert(
        "/metrics",
        vec![
            (503, String::new()),
            (503, String::new()),
            (200, "up 1\n".into()),
            (200, page(ID, true)),
        ],
    );
    script.insert("/health", vec![(200, health(&[])), (200, health(&[ID]))]);
    script.insert(
        "/v1/models",
        vec![
            (200, r#"{"data":[]}"#.into()),
            (200, r#"{"data":[{"id":"tiny"}]}"#.into()),
        ],
    );
    script.insert(
        "/v1/completions",
        vec![
            (400, not_yet.into()),
            (404, "{}".into()),
            (503, "{}".into()),
            (200, canary(ID.into())),
        ],
    );
    let (result, said) = run(script).await;
    result.unwrap();
    let said: Vec<_> = said
        .iter()
        .map(|line| line.split(": ").nth(1).unwrap())
        .collect();
    let listed = format!("listed as instance {ID}; its canary is on its way");
    assert_eq!(
        said,
        [
            "no metrics page",
            "its metrics page names no worker_id yet",
            &format!("the front door does not list instance {ID}"),
            "the front door does not list model `tiny`",
            &listed,
            "canary",
            &listed,
            "canary",
            &listed,
            "canary",
            &listed,
            &format!("ready as instance {ID}"),
        ]
    );
}

fn handed_over(prefill: Value, decode: Value) -> String {
    let mut answer: Value = serde_json::from_str(&canary(decode)).unwrap();
    answer["nvext"]["worker_id"]["prefill_worker_id"] = prefill;
    answer.to_string()
}

async fn prefills(answers: Vec<(u16, String)>) -> (Result<Vec<WorkerInfo>, Failure>, Vec<String>) {
    let mut script = ready();
    script.insert("/v1/completions", answers);
    let url = serve(script).await;
    let prefill = PlannedWorker {
        serves: Serves::Prefill,
        ..worker(0, &url)
    };
    run_plan(&plan(&url, vec![prefill])).await
}

/// Until the router knows prefill engines, a decode engine does everything, whoever is pinned.
#[tokio::test]
async fn a_prefill_worker_is_ready_once_its_canary_is_decoded_elsewhere() {
    let pinned = handed_over(PIN.into(), 7.into());
    let answers = vec![(200, canary(7.into())), (200, pinned)];
    let (result, said) = prefills(answers).await;
    let workers = result.unwrap();
    assert_eq!(
        (workers[0].instance_id, workers[0].serves),
        (ID, Serves::Prefill)
    );
    let waited = "worker0: canary: the router does not prefill apart yet".to_owned();
    assert!(said.contains(&waited), "{said:?}");
}

#[tokio::test]
async fn a_canary_that_another_worker_prefilled_is_the_products() {
    let answers = vec![(200, handed_over(8.into(), 7.into()))];
    let failure = prefills(answers).await.0.unwrap_err();
    assert_eq!(failure.class, Class::Product);
    assert!(
        failure.to_string().contains("found served by 8"),
        "{failure}"
    );
}

/// It cannot be pinned: its canary is whoever's, and has to have ended with it.
#[tokio::test]
async fn who_decodes_is_ready_once_a_request_ended_with_it() {
    for (decode, ready) in [(Value::from(ID), true), (7.into(), false)] {
        let mut script = self::ready();
        script.insert(
            "/v1/completions",
            vec![(200, handed_over(7.into(), decode))],
        );
        let url = serve(script).await;
        let decode = PlannedWorker {
            serves: Serves::Decode,
            kvcr: false,
            ..worker(2, &url)
        };
        let (result, _) = run_plan(&plan(&url, vec![decode])).await;
        assert_eq!(result.is_ok(), ready);
    }
}

#[tokio::test]
async fn a_canary_served_elsewhere_is_the_products() {
    let mut script = ready();
    script.insert("/v1/completions", vec![(200, canary(7.into()))]);
    let failure = run(script).await.0.unwrap_err();
    assert_eq!(failure.class, Class::Product);
    assert!(
        failure.to_string().contains("found served by 7"),
        "{failure}"
    );
}

#[tokio::test]
async fn an_answer_that_cannot_become_right_fails_at_once() {
    for (status, body, class) in [
        (200, canary(Value::Null), Class::Skew),
        (
            400,
            r#"{"message":"Unsupported parameter(s): `logprobs`"}"#.to_owned(),
            Class::Skew,
        ),
        (
            200,
            r#"{"choices":[{"text":""}],"usage":{"prompt_tokens":2,"completion_tokens":0}}"#
                .to_owned(),
            Class::Product,
        ),
    ] {
        let mut script = ready();
        script.insert("/v1/completions", vec![(status, body.clone())]);
        assert_eq!(run(script).await.0.unwrap_err().class, class, "{body}");
    }
}

#[tokio::test]
async fn one_process_is_not_two_workers() {
    let url = serve(ready()).await;
    let twice = plan(&url, vec![worker(0, &url), worker(1, &url)]);
    let failure = run_plan(&twice).await.0.unwrap_err();
    assert_eq!(failure.class, Class::Environment);
}

#[tokio::test]
async fn workers_come_back_by_index_each_with_its_own_id() {
    let mut script = ready();
    script.insert(
        "/metrics",
        vec![(503, String::new()), (200, page(ID, true))],
    );
    script.insert("/w1/metrics", vec![(200, page(7, true))]);
    script.insert("/v1/completions", vec![(200, canary(PIN.into()))]);
    let url = serve(script).await;
    let second = worker(1, &format!("{url}/w1"));
    let both = plan(&url, vec![second, worker(0, &url)]);
    let found: Vec<_> = run_plan(&both).await.0.unwrap();
    let found: Vec<_> = found.iter().map(|w| (w.index, w.instance_id)).collect();
    assert_eq!(found, [(0, ID), (1, 7)]);
}

#[tokio::test]
async fn a_plan_without_the_group_is_refused() {
    let say = |_| ();
    let failure = await_workers(&plan("http://127.0.0.1:1", vec![]), Group::Reference, &say).await;
    assert_eq!(failure.unwrap_err().class, Class::Environment);
}

#[tokio::test]
async fn telemetry_that_stays_away_is_a_skew_and_names_what_is_missing() {
    let mut script = ready();
    script.insert("/metrics", vec![(200, page(ID, false))]);
    let url = serve(script).await;
    let probe = |telemetry_window| Probe {
        frontend: url.clone(),
        client: Client::new(&url, CANARY_DEADLINE).unwrap(),
        transport: Transport::new(LOOK_DEADLINE).unwrap(),
        scraper: Scraper::new(LOOK_DEADLINE).unwrap(),
        telemetry_window,
    };
    let workers = vec![worker(0, &url)];
    let failure = probe(Duration::ZERO)
        .all(workers, &|_| ())
        .await
        .unwrap_err();
    assert_eq!(failure.class, Class::Skew);
    assert!(failure.to_string().contains("kvcr_state"), "{failure}");
    // Within the window it is waited for.
    let (worker, mut listed) = (worker(0, &url), None);
    let look = probe(TELEMETRY_WINDOW);
    let look = look.look(&worker, &mut listed, &mut |_| ()).await;
    assert!(matches!(look, Err(Wait::NotYet(_))));
    // Without KVCR nothing is missing.
    let off = PlannedWorker {
        kvcr: false,
        ..worker
    };
    let found = probe(Duration::ZERO).all(vec![off], &|_| ()).await.unwrap();
    assert_eq!(found[0].worker.instance_id, ID);
}

#[test]
fn ids_are_read_exactly_or_not_at_all() {
    let id = |text: &str| instance_id(&Page::parse(text));
    assert_eq!(id(&page(u64::MAX, false)), Ok(u64::MAX));
    assert!(id("up{worker_id=\"xyz\"} 1\n").is_err());
    assert!(id("up{worker_id=\"1\"} 1\nup{worker_id=\"2\"} 1\n").is_err());
    assert!(!lists_instance(
        &serde_json::json!({"instances": [{"endpoint": "generate", "instance_id": ID as f64}]}),
        ID
    ));
}
