//! Schedules, and loads against a server that answers everything.

use proptest::prelude::*;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;

use super::*;
use crate::client::stream::Outcome;
use crate::client::testing::Request;
use crate::client::{Completion, Input};

#[test]
fn a_fixed_rate_is_even_and_a_seed_decides_the_other() {
    let fixed = Schedule::Fixed { per_second: 4.0 };
    let times = fixed.times(3).unwrap();
    assert_eq!(times, [0, 250, 500].map(Duration::from_millis));
    let poisson = |seed| {
        let per_second = 100.0;
        Schedule::Poisson { per_second, seed }
            .times(10_000)
            .unwrap()
    };
    assert_eq!(poisson(7), poisson(7));
    assert_ne!(poisson(7), poisson(8));
    // The mean of 10,000 exponential distances is within 5 % of what it should be, by far.
    let seconds = poisson(7).last().unwrap().as_secs_f64();
    assert!((95.0..105.0).contains(&seconds), "{seconds}");
    assert!(fixed.times(0).unwrap().is_empty());
}

#[test]
fn no_rate_is_refused_and_a_slow_one_never_comes() {
    for per_second in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let failure = Schedule::Fixed { per_second }.times(2).unwrap_err();
        assert!(
            failure.to_string().starts_with("Environment: a load"),
            "{failure}"
        );
    }
    let slow = Schedule::Fixed {
        per_second: f64::MIN_POSITIVE,
    };
    assert_eq!(slow.times(2).unwrap(), [Duration::ZERO, Duration::MAX]);
}

proptest! {
    #[test]
    fn times_begin_at_once_and_never_decrease(
        per_second in 0.001_f64..1e6,
        seed in any::<u64>(),
        requests in 0_usize..200,
    ) {
        for schedule in [Schedule::Fixed { per_second }, Schedule::Poisson { per_second, seed }] {
            let times = schedule.times(requests).unwrap();
            prop_assert_eq!(times.len(), requests);
            prop_assert!(times.is_sorted());
            prop_assert!(times.first().is_none_or(Duration::is_zero));
        }
    }
}

/// Answers every request with its own `prompt`.
async fn echo() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((mut socket, _)) = listener.accept().await {
            tokio::spawn(async move {
                while let Some(request) = Request::read(&mut socket).await {
                    let asked: serde_json::Value = serde_json::from_str(&request.body).unwrap();
                    let prompt = asked["prompt"].as_str().unwrap();
                    let body = format!(
                        "data: {{\"choices\":[{{\"text\":\"{prompt}\",\"index\":0,\"finish_reason\":\"stop\"}}],\"usage\":{{\"prompt_tokens\":1,\"completion_tokens\":1}}}}\n\ndata: [DONE]\n\n"
                    );
                    let answer = format!(
                        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: {}\r\n\r\n{body}",
                        body.len()
                    );
                    if socket.write_all(answer.as_bytes()).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    url
}

fn asks(count: usize) -> Vec<Ask> {
    let ask = |number: usize| {
        let completion = Completion {
            model: "tiny".into(),
            prompt: Input::Text(format!("p{number}")),
            max_tokens: 1,
            ignore_eos: true,
            pin: None,
            cache_salt: None,
        };
        Ask::plain_completion(&completion, &number.to_string())
    };
    (0..count).map(ask).collect()
}

const PATIENCE: Duration = Duration::from_secs(60);

#[tokio::test]
async fn every_shape_answers_all_in_order() {
    let url = echo().await;
    let rate = Schedule::Poisson {
        per_second: 10_000.0,
        seed: 1,
    };
    for (shape, connections) in [
        (Shape::Open(rate), 1..=12),
        (Shape::Closed { concurrency: 3 }, 1..=3),
        (Shape::Closed { concurrency: 0 }, 1..=1),
        (Shape::Burst, 12..=12),
    ] {
        let sent = run(&url, PATIENCE, asks(12), shape).await.unwrap();
        assert_eq!(sent.len(), 12);
        for (number, one) in sent.iter().enumerate() {
            let seen = &one.streamed;
            assert_eq!(seen.outcome, Outcome::Complete, "{seen:?}");
            assert_eq!(
                (seen.label.clone(), seen.text(0)),
                (number.to_string(), format!("p{number}"))
            );
            assert!(one.started_ns <= seen.sent_ns);
            let has_time = !matches!(shape, Shape::Closed { .. });
            assert_eq!(one.due_ns.is_some(), has_time);
            // Late, perhaps; early, never.
            assert!(one.due_ns.is_none_or(|due| due <= one.started_ns));
        }
        let made = sent.iter().filter(|one| !one.streamed.connection.reused);
        assert!(connections.contains(&made.count()), "{shape:?}");
    }
}

#[tokio::test]
async fn a_burst_starts_when_all_connections_stand() {
    let url = echo().await;
    let sent = run(&url, PATIENCE, asks(20), Shape::Burst).await.unwrap();
    let due = sent[0].due_ns;
    assert!(sent.iter().all(|one| one.due_ns == due));
    let first = sent.iter().map(|one| one.streamed.sent_ns).min().unwrap();
    assert!(due.unwrap() <= first);
    let last = sent.iter().map(|one| one.streamed.sent_ns).max().unwrap();
    assert_eq!(start_skew_ns(&sent), last - first);
}

#[tokio::test]
async fn what_cannot_connect_is_one_of_the_answers() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    for shape in [Shape::Burst, Shape::Closed { concurrency: 2 }] {
        let sent = run(&url, PATIENCE, asks(3), shape).await.unwrap();
        assert_eq!(sent.len(), 3);
        assert!(sent.iter().all(|one| one.streamed.failure().is_some()));
        assert_eq!(start_skew_ns(&sent), 0);
    }
}

#[tokio::test]
async fn an_open_loop_waits_for_nobody() {
    // Never answers: a loop that waited would not send the second.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let shape = Shape::Open(Schedule::Fixed { per_second: 1000.0 });
    let load = tokio::spawn(async move { run(&url, PATIENCE, asks(3), shape).await });
    let mut held = Vec::new();
    for _ in 0..3 {
        held.push(listener.accept().await.unwrap().0);
    }
    // Whoever gives a load up takes its streams along.
    load.abort();
    for socket in &mut held {
        while Request::read(socket).await.is_some() {}
    }
}
