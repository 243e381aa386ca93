//! What must be known of a stream while it runs: that it is over although the server holds the
//! connection, that it is too large, that it is time to hang up. Nothing else looks into the bytes
//! before the end.

use super::chunk::{self, Said};
use super::sse::Reader;

/// Bytes of the body's end that are remembered: more than `\ndata: [DONE]` with a few spaces.
const TAIL: usize = 64;

/// Looks at the pieces of one body as they come.
#[derive(Debug)]
pub(super) struct Watch {
    /// The last bytes of the body.
    tail: Vec<u8>,
    bytes: usize,
    limit: usize,
    hang_up: Option<HangUp>,
}

#[derive(Debug)]
struct HangUp {
    reader: Reader,
    /// Chunks with text that are still to come.
    left: usize,
}

/// What to do now.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Next {
    /// Go on.
    More,
    /// The last frame was seen: what follows can only be the end of the body.
    Done,
    /// More than the limit.
    TooLarge,
    /// The client was told to go now.
    HangUp,
}

impl Watch {
    /// Reads at most `limit` bytes, and goes after `chunks` chunks with text, if that is asked.
    pub(super) fn new(limit: usize, chunks: Option<usize>) -> Self {
        Self {
            tail: Vec::with_capacity(2 * TAIL),
            bytes: 0,
            limit,
            hang_up: chunks.map(|left| HangUp {
                reader: Reader::default(),
                left,
            }),
        }
    }

    /// Bytes came.
    pub(super) fn piece(&mut self, bytes: &[u8]) -> Next {
        self.bytes += bytes.len();
        if self.bytes > self.limit {
            return Next::TooLarge;
        }
        if let Some(hang_up) = &mut self.hang_up
            && hang_up.is_time(bytes)
        {
            return Next::HangUp;
        }
        self.tail
            .extend_from_slice(&bytes[bytes.len().saturating_sub(TAIL)..]);
        let surplus = self.tail.len().saturating_sub(TAIL);
        self.tail.drain(..surplus);
        match ends_with_done(&self.tail) {
            true => Next::Done,
            false => Next::More,
        }
    }

    /// The most that is read, in bytes.
    pub(super) fn limit(&self) -> usize {
        self.limit
    }

    /// Whether the client was to go before anything came.
    pub(super) fn hangs_up_at_once(&self) -> bool {
        self.hang_up
            .as_ref()
            .is_some_and(|hang_up| hang_up.left == 0)
    }
}

impl HangUp {
    fn is_time(&mut self, bytes: &[u8]) -> bool {
        let left = &mut self.left;
        self.reader.read(0, bytes, |frame| {
            if let Said::Chunk(chunk) = chunk::read(&frame)
                && chunk.has_text()
            {
                *left = left.saturating_sub(1);
            }
        });
        *left == 0
    }
}

/// Whether a line `data: [DONE]` ends here, with its line end or not yet. Within JSON there is no
/// line end, so no text of a model can look like it.
fn ends_with_done(tail: &[u8]) -> bool {
    let Some(before) = tail.trim_ascii_end().strip_suffix(b"[DONE]") else {
        return false;
    };
    let before = before.strip_suffix(b" ").unwrap_or(before);
    before
        .strip_suffix(b"data:")
        .is_some_and(|line| line.is_empty() || line.ends_with(b"\n") || line.ends_with(b"\r"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn last(pieces: &[&str]) -> Next {
        let mut watch = Watch::new(1000, None);
        pieces
            .iter()
            .fold(Next::More, |_, piece| watch.piece(piece.as_bytes()))
    }

    #[test]
    fn the_last_frame_is_seen_however_it_comes() {
        let chunk = "data: {\"choices\":[]}\n\n";
        for done in [
            "data: [DONE]\n\n",
            "data:[DONE]\r\n\r\n",
            "data: [DONE]  \r\r",
            "data: [DONE]",
        ] {
            assert_eq!(last(&[chunk, done]), Next::Done, "{done:?}");
            assert_eq!(last(&[done]), Next::Done, "{done:?}");
            for cut in 1..done.len() {
                let pieces = [chunk, &done[..cut], &done[cut..]];
                assert_eq!(last(&pieces), Next::Done, "{done:?} at {cut}");
            }
        }
        let whole = format!("{chunk}data: [DONE]\n\n");
        assert_eq!(last(&[&whole]), Next::Done);
    }

    #[test]
    fn what_only_looks_like_it_is_not() {
        for other in [
            "data: {\"choices\":[{\"text\":\"data: [DONE]",
            ": data: [DONE]\n\n",
            "data: [DONE]\n\ndata: {}\n\n",
            "data: x[DONE]\n\n",
            "[DONE]\n\n",
        ] {
            assert_eq!(last(&[other]), Next::More, "{other:?}");
        }
    }

    #[test]
    fn too_much_is_too_much_and_hanging_up_counts_text() {
        let mut watch = Watch::new(4, None);
        assert_eq!(watch.piece(b"1234"), Next::More);
        assert_eq!(watch.piece(b"5"), Next::TooLarge);

        let mut watch = Watch::new(1000, Some(2));
        assert!(!watch.hangs_up_at_once());
        assert_eq!(
            watch.piece(b": alive\n\ndata: {\"choices\":[]}\n\n"),
            Next::More
        );
        assert_eq!(
            watch.piece(b"data: {\"choices\":[{\"text\":\"a\"}]}\n\nda"),
            Next::More
        );
        assert_eq!(
            watch.piece(b"ta: {\"choices\":[{\"text\":\"b\"}]}\n\n"),
            Next::HangUp
        );
        assert!(Watch::new(1, Some(0)).hangs_up_at_once());
    }
}
