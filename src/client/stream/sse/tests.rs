//! Framing: the handed cases, and that no cut changes anything.

use proptest::prelude::*;

use super::*;

/// A frame that outlives its reader.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
struct Kept {
    ns: u64,
    event: Option<String>,
    data: Option<String>,
    comment: Option<String>,
    is_utf8: bool,
}

/// Frames of `pieces`, and whether nothing is left over.
fn read<'a>(pieces: impl IntoIterator<Item = (u64, &'a [u8])>) -> (Vec<Kept>, bool) {
    let mut reader = Reader::default();
    let mut frames = Vec::new();
    for (ns, bytes) in pieces {
        reader.read(ns, bytes, |frame| {
            frames.push(Kept {
                ns: frame.ns,
                event: frame.event.map(str::to_owned),
                data: frame.data.map(str::to_owned),
                comment: frame.comment.map(str::to_owned),
                is_utf8: frame.is_utf8,
            });
        });
    }
    (frames, reader.is_between_frames())
}

/// Data of the frames of one piece.
fn data(text: &str) -> Vec<Option<String>> {
    let (frames, whole) = read([(1, text.as_bytes())]);
    assert!(whole, "{text:?} leaves something over");
    frames.into_iter().map(|frame| frame.data).collect()
}

fn some(words: &[&str]) -> Vec<Option<String>> {
    words.iter().map(|word| Some((*word).to_owned())).collect()
}

#[test]
fn every_line_end_of_the_format_ends_a_line() {
    for end in ["\n", "\r\n", "\r"] {
        let text = format!("data: a{end}data: b{end}{end}data: c{end}{end}");
        assert_eq!(data(&text), some(&["a\nb", "c"]), "{end:?}");
    }
    // And mixed: CR CR ends a line and a frame, CR LF only a line.
    assert_eq!(
        data("data: a\r\rdata: b\r\n\ndata: c\n\r"),
        some(&["a", "b", "c"])
    );
}

#[test]
fn a_bare_cr_completes_a_frame_at_once() {
    let (frames, whole) = read([(1, &b"data: a\r\n\r"[..]), (2, b"\ndata: b\r\r")]);
    assert_eq!(
        frames.iter().map(|frame| frame.ns).collect::<Vec<_>>(),
        [1, 2]
    );
    assert!(whole);
}

#[test]
fn fields_are_read_as_the_standard_says() {
    // One space after the colon belongs to the format, no other does; a field may have no colon.
    assert_eq!(
        data("data:a\n\ndata:  b \n\ndata\n\ndata\ndata\n\nno field\nid: 7\nretry: 8\n\n"),
        some(&["a", " b ", "", "\n"])
    );
    let (frames, _) = read([(
        1,
        &b"event: other\nevent: error\n: worker died\n: twice\n\n"[..],
    )]);
    let expected = Kept {
        ns: 1,
        event: Some("error".into()),
        data: None,
        comment: Some("worker died\ntwice".into()),
        is_utf8: true,
    };
    assert_eq!(frames, [expected]);
}

#[test]
fn an_event_with_several_data_lines_is_one_frame() {
    let (frames, _) = read([(1, &b"event: add\ndata: {\ndata: }\n\ndata: x\n\n"[..])]);
    assert_eq!(frames[0].event.as_deref(), Some("add"));
    assert_eq!(frames[0].data.as_deref(), Some("{\n}"));
    // Neither stays for the next frame.
    assert_eq!(
        (frames[1].event.as_deref(), frames[1].data.as_deref()),
        (None, Some("x"))
    );
}

#[test]
fn comments_keep_alive_and_are_no_data() {
    let (frames, whole) = read((1..=30).map(|second| (second, &b": keep-alive\n\n"[..])));
    assert_eq!(frames.len(), 30);
    assert!(frames.iter().all(|frame| frame.data.is_none()) && whole);
    assert_eq!(frames[29].ns, 30);
    // Empty lines alone are nothing at all.
    assert!(data("\n\n\r\n\r\r").is_empty());
}

#[test]
fn a_bom_may_stand_before_the_first_line_only() {
    let bom = "\u{feff}";
    assert_eq!(data(&format!("{bom}data: a\n\n")), some(&["a"]));
    assert_eq!(data(&format!("data: {bom}a\n\n")), some(&["\u{feff}a"]));
    let (frames, whole) = read([
        (1, &b"\xEF"[..]),
        (2, b"\xBB"),
        (3, b"\xBFda"),
        (4, b"ta: a\n\n"),
    ]);
    assert_eq!(frames[0].data.as_deref(), Some("a"));
    assert!(whole);
    // A second one makes another field's name, which is ignored.
    assert_eq!(data(&format!("data: a\n\n{bom}data: b\n\n")), some(&["a"]));
}

#[test]
fn characters_and_prefixes_may_be_split_over_segments() {
    let text = "data: grüße 🦀\n\n";
    for cut in 1..text.len() {
        let (first, second) = text.as_bytes().split_at(cut);
        let (frames, whole) = read([(1, first), (2, second)]);
        assert_eq!(frames[0].data.as_deref(), Some("grüße 🦀"), "at {cut}");
        assert!(frames[0].is_utf8 && whole);
        assert_eq!(frames[0].ns, 2);
    }
}

#[test]
fn two_frames_of_one_segment_have_its_stamp() {
    let (frames, _) = read([(5, &b"data: a\n\ndata: b\n\nda"[..]), (9, b"ta: c\n\n")]);
    assert_eq!(
        frames.iter().map(|frame| frame.ns).collect::<Vec<_>>(),
        [5, 5, 9]
    );
}

#[test]
fn a_frame_of_a_mebibyte_comes_in_any_pieces() {
    let text = "x".repeat(1 << 20);
    let whole = format!("data: {text}\n\n");
    // Byte by byte: a reader that looks twice at what it has would not come back from this.
    for size in [1, 1460, 1 << 16, whole.len()] {
        let pieces = whole.as_bytes().chunks(size).enumerate();
        let (frames, whole) = read(pieces.map(|(at, piece)| (at as u64, piece)));
        assert_eq!(frames.len(), 1);
        assert!(
            frames[0].data.as_deref() == Some(&text) && whole,
            "pieces of {size}"
        );
    }
}

#[test]
fn what_is_not_utf8_is_marked_and_costs_only_its_frame() {
    let (frames, _) = read([(1, &b"data: a\xFFb\n\ndata: c\n\n"[..])]);
    assert_eq!(frames[0].data.as_deref(), Some("a\u{fffd}b"));
    assert_eq!((frames[0].is_utf8, frames[1].is_utf8), (false, true));
}

#[test]
fn what_is_cut_is_seen_as_cut() {
    for (text, between) in [
        ("", true),
        ("data: a\n\n", true),
        ("data: a\n\n\n", true),
        ("data: a\n\nd", false),
        ("data: a\n", false),
        (": alive\n", false),
        ("data: a", false),
    ] {
        assert_eq!(read([(1, text.as_bytes())]).1, between, "{text:?}");
    }
}

/// Bytes as servers may send them: any frames, any line ends, with or without a BOM.
fn stream() -> impl Strategy<Value = Vec<u8>> {
    let line = prop_oneof![
        4 => "[^\r\n]{0,20}".prop_map(|text| format!("data: {text}")),
        1 => "[^\r\n]{0,8}".prop_map(|text| format!(":{text}")),
        1 => "[^\r\n:]{0,8}".prop_map(|text| format!("event:{text}")),
        1 => "[^\r\n]{0,8}",
    ];
    let end = prop_oneof![Just("\n"), Just("\r\n"), Just("\r")];
    let lines = proptest::collection::vec((line, end, any::<bool>()), 0..12);
    (any::<bool>(), lines).prop_map(|(bom, lines)| {
        let mut text = String::from(if bom { "\u{feff}" } else { "" });
        for (line, end, last) in lines {
            text.push_str(&line);
            text.push_str(end);
            if last {
                text.push_str(end);
            }
        }
        text.into_bytes()
    })
}

/// The pieces of `bytes`, cut at `cuts`; the stamp of each is the place of its last byte.
fn pieces<'a>(bytes: &'a [u8], cuts: &[prop::sample::Index]) -> Vec<(u64, &'a [u8])> {
    let mut at: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
    at.extend([0, bytes.len()]);
    at.sort_unstable();
    at.windows(2)
        .map(|pair| (pair[1] as u64, &bytes[pair[0]..pair[1]]))
        .collect()
}

proptest! {
    #[test]
    fn no_cut_changes_a_frame_and_each_has_the_stamp_of_its_last_byte(
        bytes in stream(),
        cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..10),
    ) {
        let singly = (1..).zip(bytes.chunks(1));
        let (exact, exact_end) = read(singly);
        let pieces = pieces(&bytes, &cuts);
        let (frames, end) = read(pieces.iter().copied());
        prop_assert_eq!(end, exact_end);
        prop_assert!(frames.is_sorted_by_key(|frame| frame.ns));
        // A frame that is read byte by byte has the place of its last byte for a stamp.
        let expected: Vec<Kept> = exact
            .into_iter()
            .map(|frame| {
                let piece = pieces.iter().find(|(last, _)| *last >= frame.ns);
                Kept { ns: piece.map_or(0, |(last, _)| *last), ..frame }
            })
            .collect();
        prop_assert_eq!(frames, expected);
    }

    #[test]
    fn no_bytes_panic(pieces in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..40), 0..10)) {
        let (_, _) = read((0..).zip(pieces.iter().map(Vec::as_slice)));
    }
}
