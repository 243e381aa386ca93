//! Pages that were handed to us as the ones on which a parser breaks, each with its right reading.

use super::*;

#[test]
fn what_is_no_number_to_count_with_is_unusable_and_not_zero() {
    let page = Page::parse(concat!(
        "# TYPE a gauge\na NaN\n",
        "b +Inf\n",
        "c{x=\"1\"} 1\nc{x=\"2\"} NaN\n",
    ));
    assert_eq!(page.problems(), []);
    for name in ["a", "b", "c"] {
        let read = page.read(name, &[]);
        assert!(matches!(read, Reading::Unusable(_)), "{name}: {read:?}");
        assert_eq!((read.counted(), read.exact()), (None, None));
    }
    // A neighbour of it is not spoilt.
    assert_eq!(page.read("c", &[("x", "1")]), Reading::Value(1.0));
    assert!(page.values(&Series::new("a", &[]))[0].is_nan());
}

#[test]
fn every_spelling_of_a_number_is_read() {
    for (word, value) in [
        ("1.7960348847795017e+09", 1_796_034_884.779_501_7),
        ("1e-05", 1e-5),
        ("1E3", 1e3),
        ("-0", -0.0),
        ("9007199254740993", 9_007_199_254_740_992.0),
        ("4.9e-324", f64::from_bits(1)),
        ("+Inf", f64::INFINITY),
        ("-Inf", f64::NEG_INFINITY),
    ] {
        let page = Page::parse(&format!("a {word}\n"));
        let [read] = page.values(&Series::new("a", &[])) else {
            panic!("{word} is not read")
        };
        assert_eq!(read.to_bits(), f64::to_bits(value), "{word}");
    }
}

#[test]
fn escapes_are_undone_and_stay_one_line() {
    let page = Page::parse("a{path=\"C:\\\\n\\n\\\"x\\\"\"} 1\nb 2\n");
    assert_eq!(page.problems(), []);
    assert_eq!(page.label_values("path"), ["C:\\n\n\"x\""]);
    assert_eq!(page.read("b", &[]), Reading::Value(2.0));
}

#[test]
fn timestamps_and_exemplars_are_no_values() {
    let page = Page::parse(concat!(
        "a 5 1700000000123\n",
        "b_bucket{le=\"0.5\"} 6 # {trace_id=\"a # b\"} 0.43 1700000000.123\n",
        "c 7 1700000000123 # {} 1\n",
        "# EOF\n",
    ));
    assert_eq!(page.problems(), []);
    for (name, value) in [("a", 5.0), ("b_bucket", 6.0), ("c", 7.0)] {
        assert_eq!(page.read(name, &[]), Reading::Value(value));
    }
}

#[test]
fn a_histogram_without_its_count_says_nothing_of_it() {
    let page = Page::parse(concat!(
        "# TYPE d histogram\n",
        "d_bucket{le=\"0.5\"} 1\n",
        "d_bucket{le=\"+Inf\"} 2\n",
        "d_sum 0.75\n",
    ));
    assert_eq!(page.problems(), []);
    // Not 2, which the last bucket would suggest, and not 0 as a value.
    assert_eq!(page.read("d_count", &[]), Reading::Silent);
    assert_eq!(page.read("d_sum", &[]), Reading::Value(0.75));
    assert_eq!(
        page.read("d_bucket", &[("le", "+Inf")]),
        Reading::Value(2.0)
    );
    assert!(page.is_cumulative("d_bucket") && !page.is_cumulative("d_sum"));
}

#[test]
fn megabytes_of_duplicates_are_all_reported() {
    let line = "a_total{engine=\"0\",model_name=\"tiny\"} 1.0\n";
    let count = (5 << 20) / line.len();
    let page = Page::parse(&line.repeat(count));
    assert_eq!(page.samples().count(), 1);
    assert_eq!(page.problems().len(), count - 1);
    assert!(matches!(page.read("a_total", &[]), Reading::Unusable(_)));
}

#[test]
fn a_page_that_is_cut_anywhere_is_never_read_wrongly() {
    let text = "# TYPE a_total counter\na_total{l=\"x\\\"y\"} 12\nb 345 1700000000123\n";
    let whole = Page::parse(text);
    for cut in 1..text.len() {
        let page = Page::parse(&text[..cut]);
        let at_a_line = text[..cut].ends_with('\n');
        assert_eq!(page.is_complete(), at_a_line, "at {cut}");
        // What is left reads as in the whole page, or not at all.
        for (series, values) in page.samples() {
            assert_eq!(whole.values(series), values, "at {cut}");
        }
    }
}
