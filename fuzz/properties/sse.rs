//! Server-sent events in any pieces. `0xFF`, which is in no text, says where a piece ends.
//!
//! - No cut changes a frame.
//! - Each frame has the stamp of the piece that completed it; stamps never decrease.
//! - `sse-stream` reads the same events and data, as far as it reads.

use futures_util::{FutureExt, StreamExt};
use http_body_util::Full;
use hyper::body::Bytes;
use kvcr_phase1::client::stream::sse::Reader;
use sse_stream::SseStream;

#[derive(Debug, PartialEq)]
struct Kept {
    event: Option<String>,
    data: Option<String>,
    comment: Option<String>,
}

fn read<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> (Vec<(u64, Kept)>, bool) {
    let mut reader = Reader::default();
    let mut frames = Vec::new();
    for (ns, piece) in (0..).zip(pieces) {
        reader.read(ns, piece, |frame| {
            let kept = Kept {
                event: frame.event.map(str::to_owned),
                data: frame.data.map(str::to_owned),
                comment: frame.comment.map(str::to_owned),
            };
            frames.push((frame.ns, kept));
        });
    }
    (frames, reader.is_between_frames())
}

type Event = (Option<String>, Option<String>);

/// Events as the library reads them, until it gives up; and whether it did not.
fn library(bytes: &[u8]) -> (Vec<Event>, bool) {
    let mut stream = SseStream::new(Full::new(Bytes::copy_from_slice(bytes)));
    let mut events = Vec::new();
    while let Some(Some(next)) = stream.next().now_or_never() {
        match next {
            Ok(event) => events.push((event.event, event.data)),
            Err(_) => return (said(events), false),
        }
    }
    (said(events), true)
}

/// Those that say something: a comment is none to the library, an `id` none to us.
fn said(mut events: Vec<Event>) -> Vec<Event> {
    events.retain(|(event, data)| event.is_some() || data.is_some());
    events
}

/// Panics if `input` shows that one of them does not hold.
pub(crate) fn hold(input: &[u8]) {
    let pieces: Vec<&[u8]> = input.split(|byte| *byte == 0xFF).collect();
    let bytes = pieces.concat();
    let (cut, cut_end) = read(pieces.iter().copied());
    assert!(cut.is_sorted_by_key(|(ns, _)| *ns));
    let (whole, whole_end) = read([bytes.as_slice()]);
    assert_eq!(cut_end, whole_end);
    assert!(
        cut.iter()
            .map(|(_, frame)| frame)
            .eq(whole.iter().map(|(_, frame)| frame))
    );
    // What comes after the piece of a frame has no part in it.
    if let Some((ns, _)) = cut.last() {
        let until = usize::try_from(*ns).unwrap() + 1;
        assert_eq!(read(pieces[..until].iter().copied()).0, cut);
    }

    let (library, all) = library(&bytes);
    let ours = whole
        .into_iter()
        .map(|(_, frame)| (frame.event, frame.data));
    let mut ours = said(ours.collect());
    if !all {
        ours.truncate(library.len());
    }
    assert_eq!(ours, library);
}
