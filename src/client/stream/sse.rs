//! Server-sent events, from bytes as they arrived to frames that carry the stamp of the bytes
//! which completed them.
//!
//! Framing only: what a frame says is `chunk`'s.
//!
//! No crate does this for us; the code of the three that are kept was read. `sse-stream` 0.3.0
//! follows the standard and is fast, but drops comments, in which Dynamo says why a stream failed
//! (`event: error`, then `: worker died`), throws the unfinished frame at the end of a body away
//! without a word, so that a stream which was cut cannot be told from one that ended, and stops
//! for good at the first byte that is not UTF-8. `sseer` 0.3.1 and `eventsource-stream` 0.2.3
//! drop a frame without data as a browser does, so that Dynamo's errors are never seen, and wait
//! at a bare CR for the bytes that follow it, whose stamp the frame then gets;
//! `eventsource-stream` also reads a long frame again from its start with every piece of it.
//! The fuzz target `sse` compares this reader with `sse-stream` on whatever both speak of.
//!
//! What differs from the standard, on purpose: a frame without data is a frame, and so is a
//! comment alone; the caller decides what they mean. `id` and `retry` are for clients that
//! connect again, and ignored.

/// What may stand before the first line.
const BOM: &[u8] = b"\xEF\xBB\xBF";

/// One frame: the lines until an empty one.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Frame<'a> {
    /// Stamp of the bytes that completed it: nanoseconds of `CLOCK_MONOTONIC`.
    pub ns: u64,
    /// `event:`, the last one.
    pub event: Option<&'a str>,
    /// All `data:` lines, with `\n` between them; `None` without any, which is not empty data.
    pub data: Option<&'a str>,
    /// All comments, with `\n` between them.
    pub comment: Option<&'a str>,
    /// Whether every byte was UTF-8; the others are replaced (U+FFFD).
    pub is_utf8: bool,
}

/// Lines of one kind in one buffer, which is used again for the next frame.
#[derive(Clone, Debug, Default)]
struct Lines {
    text: String,
    any: bool,
}

impl Lines {
    /// Adds a line; false if it is not UTF-8.
    fn push(&mut self, line: &[u8]) -> bool {
        if self.any {
            self.text.push('\n');
        }
        self.any = true;
        match str::from_utf8(line) {
            Ok(line) => {
                self.text.push_str(line);
                true
            }
            Err(_) => {
                self.text.push_str(&String::from_utf8_lossy(line));
                false
            }
        }
    }

    fn get(&self) -> Option<&str> {
        self.any.then_some(self.text.as_str())
    }

    fn clear(&mut self) {
        self.text.clear();
        self.any = false;
    }
}

/// Reads one stream. Linear in its length, however it is cut; keeps no more than one frame.
#[derive(Clone, Debug, Default)]
pub struct Reader {
    /// The beginning of a line whose end has not come.
    line: Vec<u8>,
    /// Whether any line was read: a BOM may stand only before the first.
    begun: bool,
    /// The last byte was a CR, which an LF may follow.
    after_cr: bool,
    event: Lines,
    data: Lines,
    comment: Lines,
    garbled: bool,
}

impl Reader {
    /// Reads `bytes`, which arrived at `ns`, and gives each frame that they complete to `take`.
    pub fn read(&mut self, ns: u64, mut bytes: &[u8], mut take: impl FnMut(Frame<'_>)) {
        while !bytes.is_empty() {
            if std::mem::take(&mut self.after_cr) && bytes[0] == b'\n' {
                bytes = &bytes[1..];
                continue;
            }
            let Some(end) = bytes.iter().position(|byte| matches!(byte, b'\n' | b'\r')) else {
                self.line.extend_from_slice(bytes);
                return;
            };
            self.after_cr = bytes[end] == b'\r';
            if self.line.is_empty() {
                self.line(ns, &bytes[..end], &mut take);
            } else {
                let mut line = std::mem::take(&mut self.line);
                line.extend_from_slice(&bytes[..end]);
                self.line(ns, &line, &mut take);
                line.clear();
                self.line = line;
            }
            bytes = &bytes[end + 1..];
        }
    }

    /// Whether what was read ends with a whole frame: nothing of another has come.
    #[must_use]
    pub fn is_between_frames(&self) -> bool {
        self.line.is_empty() && !self.in_frame()
    }

    fn in_frame(&self) -> bool {
        self.event.any || self.data.any || self.comment.any
    }

    fn line(&mut self, ns: u64, mut line: &[u8], take: &mut impl FnMut(Frame<'_>)) {
        if !std::mem::replace(&mut self.begun, true) {
            line = line.strip_prefix(BOM).unwrap_or(line);
        }
        if line.is_empty() {
            if self.in_frame() {
                take(Frame {
                    ns,
                    event: self.event.get(),
                    data: self.data.get(),
                    comment: self.comment.get(),
                    is_utf8: !self.garbled,
                });
                self.event.clear();
                self.data.clear();
                self.comment.clear();
                self.garbled = false;
            }
            return;
        }
        let colon = line.iter().position(|byte| *byte == b':');
        let (field, value) = match colon {
            Some(at) => (&line[..at], &line[at + 1..]),
            None => (line, &[][..]),
        };
        let value = value.strip_prefix(b" ").unwrap_or(value);
        let read = match field {
            b"data" => self.data.push(value),
            b"event" => {
                self.event.clear();
                self.event.push(value)
            }
            b"" => self.comment.push(value),
            _ => true,
        };
        self.garbled |= !read;
    }
}

#[cfg(test)]
mod tests;
