//! Against a server that answers with canned bytes.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;

use super::testing::Request;
use super::*;
use crate::failure::Class;

/// Instance ids that a float or a signed integer would change.
const IDS: [u64; 3] = [16_336_821_686_602_806_569, u64::MAX, 0];

/// What the server does after it has read a request.
#[derive(Clone)]
enum Then {
    /// Sends these bytes; `close` or keep the connection.
    Send { bytes: Vec<u8>, close: bool },
    /// Never answers.
    Hang,
    /// Announces nothing and sends without end.
    Flood,
}

struct Server {
    address: SocketAddr,
    connections: Arc<AtomicUsize>,
    first_request: oneshot::Receiver<Request>,
}

async fn serve(then: Then) -> Server {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let connections = Arc::new(AtomicUsize::new(0));
    let (tell, first_request) = oneshot::channel();
    let count = Arc::clone(&connections);
    tokio::spawn(async move {
        let mut tell = Some(tell);
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            count.fetch_add(1, Ordering::SeqCst);
            tokio::spawn(talk(stream, then.clone(), tell.take()));
        }
    });
    Server {
        address,
        connections,
        first_request,
    }
}

async fn talk(mut stream: TcpStream, then: Then, mut tell: Option<oneshot::Sender<Request>>) {
    while let Some(request) = Request::read(&mut stream).await {
        if let Some(tell) = tell.take() {
            let _ = tell.send(request);
        }
        match &then {
            Then::Send { bytes, close } => {
                stream.write_all(bytes).await.unwrap();
                if *close {
                    return;
                }
            }
            Then::Hang => std::future::pending().await,
            Then::Flood => {
                let head = b"HTTP/1.1 200 OK\r\n\r\n";
                stream.write_all(head).await.unwrap();
                while stream.write_all(&[b' '; 1 << 16]).await.is_ok() {}
                return;
            }
        }
    }
}

fn response(status: &str, body: &str) -> Then {
    Then::Send {
        bytes: format!(
            "HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        )
        .into(),
        close: false,
    }
}

fn completion(worker: Option<u64>) -> Completion {
    Completion {
        model: "tiny".into(),
        prompt: Input::Ids(vec![5, 6]),
        max_tokens: 3,
        ignore_eos: true,
        pin: worker.map(Pin::Worker),
        cache_salt: None,
    }
}

/// Long enough for a starved machine: no test waits for it unless it fails.
const PATIENCE: Duration = Duration::from_secs(60);

async fn ask(then: Then, deadline: Duration) -> Result<Observation, RequestFailure> {
    let server = serve(then).await;
    let client = Client::new(&format!("http://{}/", server.address), deadline).unwrap();
    client.complete(&completion(None), "cold").await
}

async fn fails(then: Then) -> RequestFailure {
    ask(then, PATIENCE).await.expect_err("no observation")
}

/// A real response of Dynamo 1.6.1 to our request.
fn good(worker: &str) -> String {
    format!(
        r#"{{"id":"cmpl-1","choices":[{{"text":"vars changesdent","index":0,"logprobs":{{"tokens":["token_id:1852","token_id:3063","token_id:787"],"token_logprobs":[-4.81,-4.81,-4.41],"top_logprobs":[{{"token_id:1852":-4.75,"token_id:2276":-5.0}},{{"token_id:3063":-4.5,"token_id:2089":-4.625}},{{"token_id:787":-4.4,"token_id:1197":-4.9}}],"text_offset":[]}},"finish_reason":"length"}}],"model":"tiny","object":"text_completion","usage":{{"prompt_tokens":8,"completion_tokens":3,"total_tokens":11,"prompt_tokens_details":{{"audio_tokens":null,"cached_tokens":0}}}},"nvext":{{"worker_id":{{"prefill_worker_id":{worker},"prefill_dp_rank":0,"decode_worker_id":{worker},"decode_dp_rank":0}},"completion_token_ids":[1852,3063,787]}}}}"#
    )
}

#[tokio::test]
async fn observes_a_completion() {
    let seen = ask(response("200 OK", &good("7")), PATIENCE).await.unwrap();
    assert_eq!(seen.label, "cold");
    assert_eq!(seen.text, "vars changesdent");
    assert_eq!(seen.tokens, ["1852", "3063", "787"]);
    assert_eq!(seen.finish_reason, "length");
    assert_eq!((seen.prompt_tokens, seen.completion_tokens), (8, 3));
    assert_eq!(seen.cached_tokens, Some(0));
    assert_eq!((seen.served_by, seen.prefilled_by), (Some(7), Some(7)));
    assert_eq!(seen.smallest_top2_gap, Some(0.125));
}

/// The ordinary pin is refused where another worker decodes.
#[tokio::test]
async fn who_prefills_is_pinned_by_a_header_of_its_own() {
    let server = serve(response("200 OK", &good("7"))).await;
    let client = Client::new(&format!("http://{}", server.address), PATIENCE).unwrap();
    let mut completion = completion(None);
    completion.pin = Pin::new(Serves::Prefill, u64::MAX);
    client.complete(&completion, "pinned").await.unwrap();
    let request = server.first_request.await.unwrap();
    let id = u64::MAX.to_string();
    assert_eq!(request.header(PREFILL_PIN_HEADER), Some(id.as_str()));
    assert_eq!(request.header(PIN_HEADER), None);
    assert_eq!(Pin::new(Serves::Decode, 7), None);
}

#[tokio::test]
async fn instance_ids_survive_both_ways() {
    for id in IDS {
        for form in [id.to_string(), format!("\"{id}\"")] {
            let server = serve(response("200 OK", &good(&form))).await;
            let client = Client::new(&format!("http://{}", server.address), PATIENCE).unwrap();
            let seen = client
                .complete(&completion(Some(id)), "pinned")
                .await
                .unwrap();
            assert_eq!(seen.served_by, Some(id));
            let request = server.first_request.await.unwrap();
            assert_eq!(
                request.header("x-dynamo-worker-instance-id"),
                Some(id.to_string().as_str())
            );
            let kept: Observation =
                serde_json::from_str(&serde_json::to_string(&seen).unwrap()).unwrap();
            // Ids and raw body survive storage; of the floats, serde_json promises only the last
            // bit but one without its `float_roundtrip`.
            assert_eq!((kept.served_by, kept.prefilled_by), (Some(id), Some(id)));
            assert_eq!(kept.raw["nvext"], seen.raw["nvext"]);
            assert!((kept.wall_ms - seen.wall_ms).abs() < 1e-6);
        }
    }
    // A float has already lost digits.
    let failure = fails(response("200 OK", &good("1.6336821686602807e19"))).await;
    assert!(
        matches!(failure.kind, RequestFailureKind::MissingField { .. }),
        "{failure}"
    );
}

#[tokio::test]
async fn asks_greedily_for_ids_and_reuses_the_connection() {
    let server = serve(response("200 OK", &good("7"))).await;
    let client = Client::new(&format!("http://{}", server.address), PATIENCE).unwrap();
    for _ in 0..3 {
        client.complete(&completion(None), "cold").await.unwrap();
    }
    assert_eq!(server.connections.load(Ordering::SeqCst), 1);
    let request = server.first_request.await.unwrap();
    assert!(
        request.head.starts_with("POST /v1/completions HTTP/1.1"),
        "{request:?}"
    );
    assert_eq!(request.header("x-dynamo-worker-instance-id"), None);
    let body: serde_json::Value = serde_json::from_str(&request.body).unwrap();
    assert_eq!(body["prompt"], json!([5, 6]));
    assert_eq!(body["temperature"], json!(0));
    assert_eq!(body["stream"], json!(false));
    assert_eq!(
        body["nvext"]["extra_fields"][2],
        json!("completion_token_ids")
    );
}

#[tokio::test]
async fn a_server_that_never_answers_meets_the_deadline() {
    let failure = ask(Then::Hang, Duration::from_millis(50))
        .await
        .unwrap_err();
    assert_eq!(failure.kind, RequestFailureKind::Deadline { seconds: 0.05 });
    assert_eq!(failure.class(), Class::Product);
}

#[tokio::test]
async fn a_body_that_stops_half_way_meets_the_deadline_or_is_cut_off() {
    let half = |close| Then::Send {
        bytes: b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{\"id\"".to_vec(),
        close,
    };
    let slow = ask(half(false), Duration::from_millis(50))
        .await
        .unwrap_err();
    assert!(
        matches!(slow.kind, RequestFailureKind::Deadline { .. }),
        "{slow}"
    );
    let cut = fails(half(true)).await;
    assert!(
        matches!(cut.kind, RequestFailureKind::Truncated { received: 5, .. }),
        "{cut}"
    );
    let unanswered = fails(Then::Send {
        bytes: Vec::new(),
        close: true,
    })
    .await;
    assert!(
        matches!(
            unanswered.kind,
            RequestFailureKind::Truncated { received: 0, .. }
        ),
        "{unanswered}"
    );
}

#[tokio::test]
async fn nobody_listens() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let client = Client::new(&format!("http://{address}"), PATIENCE).unwrap();
    let failure = client
        .complete(&completion(None), "cold")
        .await
        .unwrap_err();
    assert!(
        matches!(failure.kind, RequestFailureKind::Connect(_)),
        "{failure}"
    );
    assert_eq!(failure.class(), Class::Inconclusive);
}

#[tokio::test]
async fn a_huge_response_is_refused_announced_or_not() {
    for then in [
        Then::Flood,
        Then::Send {
            bytes: b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n".to_vec(),
            close: false,
        },
    ] {
        let failure = fails(then).await;
        assert!(
            matches!(failure.kind, RequestFailureKind::TooLarge { .. }),
            "{failure}"
        );
    }
}

#[tokio::test]
async fn every_bad_answer_has_its_name_and_class() {
    let empty = r#"{"choices":[{"text":"","finish_reason":"stop"}],"usage":{"prompt_tokens":8,"completion_tokens":0}}"#;
    let unfinished = r#"{"choices":[{"text":"a","finish_reason":null}],"usage":{"prompt_tokens":8,"completion_tokens":1}}"#;
    let refused = r#"{"message":"Invalid request","type":"Bad Request","code":400}"#;
    let dialect = r#"{"message":"Validation: Unsupported parameter(s): `logprobs`","code":400}"#;
    let late = r#"{"error":{"message":"worker died","code":500}}"#;
    let table = [
        (
            response("200 OK", "<html>"),
            "response is not JSON: <html>",
            Class::Product,
        ),
        (
            response("200 OK", empty),
            "HTTP 200 with an empty completion",
            Class::Product,
        ),
        (
            response("200 OK", "{\"choices\":[]}"),
            "HTTP 200 with an empty completion",
            Class::Product,
        ),
        (
            response("200 OK", unfinished),
            "response has no usable /choices/0/finish_reason: null",
            Class::Skew,
        ),
        (
            response("200 OK", late),
            "HTTP 200: {\"error\":",
            Class::Product,
        ),
        (
            response("200 OK", refused),
            "HTTP 200: {\"message\":",
            Class::Product,
        ),
        (
            response("400 Bad Request", refused),
            "HTTP 400: {\"message\":\"Invalid request\"",
            Class::Product,
        ),
        (
            response("400 Bad Request", dialect),
            "HTTP 400: {\"message\":\"Validation",
            Class::Skew,
        ),
        (
            response("503 Service Unavailable", ""),
            "HTTP 503: ",
            Class::Product,
        ),
    ];
    for (then, words, class) in table {
        let failure = fails(then).await;
        assert!(failure.kind.to_string().starts_with(words), "{failure}");
        assert_eq!(failure.class(), class, "{failure}");
        let failure = Failure::from(failure);
        assert!(
            failure
                .to_string()
                .starts_with(&format!("{class}: request `cold` failed")),
            "{failure}"
        );
    }
}

#[test]
fn a_token_without_text_is_not_empty_and_one_candidate_says_no_gap() {
    let reply = |body: &str| transport::Reply {
        status: 200,
        body: body.into(),
        wall_ms: 1.0,
    };
    let special = r#"{"choices":[{"text":"","finish_reason":"length","logprobs":{"tokens":["token_id:2"],"top_logprobs":[{"token_id:2":-1.0}]}}],"usage":{"prompt_tokens":8,"completion_tokens":1}}"#;
    let seen = parse::observation(&reply(special), "x").unwrap();
    assert_eq!(seen.tokens, ["2"]);
    assert_eq!(seen.smallest_top2_gap, None);
    assert_eq!((seen.cached_tokens, seen.served_by), (None, None));
}
