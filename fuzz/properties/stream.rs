//! Whole responses in any pieces: the first byte says how it begins and ends, `0xFF` says where a
//! piece ends.
//!
//! - Nothing that comes makes the client panic, and no cut changes what is understood.
//! - Times go forward.
//! - What is called complete is.

use hyper::body::Bytes;
use kvcr_phase1::client::stream::arrivals::{Arrivals, Connection, Ending, Head};
use kvcr_phase1::client::stream::{Outcome, understand};

fn came<'a>(how: u8, pieces: impl IntoIterator<Item = &'a [u8]>) -> Arrivals {
    let pieces: Vec<(u64, Bytes)> = (2..)
        .zip(pieces)
        .map(|(ns, piece)| (ns, Bytes::copy_from_slice(piece)))
        .collect();
    let content_type = match how & 8 {
        0 => "text/event-stream",
        _ => "application/json",
    };
    Arrivals {
        connection: Connection::default(),
        sent_ns: 0,
        head: (how & 16 == 0).then(|| Head {
            ns: 1,
            status: if how & 32 == 0 { 200 } else { 503 },
            content_type: Some(content_type.to_owned()),
        }),
        ended_ns: u64::MAX,
        pieces,
        ending: match how & 7 {
            0 | 1 => Ending::End,
            2 => Ending::Cut("cut".to_owned()),
            3 => Ending::Deadline { seconds: 1.0 },
            4 => Ending::TooLarge { limit: 1 },
            5 => Ending::HungUp,
            _ => Ending::NoConnection("refused".to_owned()),
        },
    }
}

/// Panics if `input` shows that one of them does not hold.
pub(crate) fn hold(input: &[u8]) {
    let Some((how, body)) = input.split_first() else {
        return;
    };
    let pieces: Vec<&[u8]> = body.split(|byte| *byte == 0xFF).collect();
    let seen = understand("cut", &came(*how, pieces.iter().copied()));
    let bytes = pieces.concat();
    let whole = understand("whole", &came(*how, [bytes.as_slice()]));

    assert_eq!(seen.outcome, whole.outcome);
    assert_eq!((seen.usage, &seen.finish), (whole.usage, &whole.finish));
    assert_eq!(
        (&seen.token_ids, seen.served_by),
        (&whole.token_ids, whole.served_by)
    );
    let texts = |seen: &kvcr_phase1::client::stream::Streamed| {
        let tokens = seen.tokens.iter();
        tokens
            .map(|t| (t.choice, t.text.clone(), t.thinks))
            .collect::<Vec<_>>()
    };
    assert_eq!(texts(&seen), texts(&whole));

    assert!(seen.tokens.is_sorted_by_key(|token| token.ns));
    assert!(
        seen.tokens
            .iter()
            .all(|token| !token.text.is_empty() && token.ns >= 2)
    );
    assert_eq!(seen.ttft_ns().is_some(), !seen.tokens.is_empty());
    let choices: std::collections::BTreeSet<u32> = seen.tokens.iter().map(|t| t.choice).collect();
    assert_eq!(seen.itls_ns().count(), seen.chunks() - choices.len());
    match &seen.outcome {
        Outcome::Complete => {
            assert!(seen.usage.is_some_and(|usage| usage.completion_tokens > 0));
            assert!(
                choices
                    .iter()
                    .all(|choice| seen.finish.contains_key(choice))
            );
            assert!(seen.end_to_end_ns().is_some() && seen.failure().is_none());
        }
        Outcome::Disconnected => assert_eq!(how & 7, 5),
        Outcome::Failed(_) => {
            let failure = seen.failure().unwrap();
            assert!(!failure.to_string().is_empty());
            let _ = (failure.class(), seen.observation().unwrap_err());
        }
    }
}
