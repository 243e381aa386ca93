//! The format as a whole: what is read, what is reported, and laws of them for any input.

use proptest::prelude::*;

use super::*;

fn value(page: &Page, name: &str, labels: &[(&str, &str)]) -> f64 {
    match page.read(name, labels) {
        Reading::Value(value) => value,
        other => panic!("{name}: {other:?}"),
    }
}

#[test]
fn values_of_a_label_are_listed_once_and_in_order() {
    let page = Page::parse("a{l=\"y\"} 1\nb{l=\"x\"} 1\nb{l=\"y\"} 1\nc{m=\"z\"} 1\n");
    assert_eq!(page.label_values("l"), ["x", "y"]);
    assert!(page.label_values("n").is_empty());
}

#[test]
fn a_problem_names_its_line() {
    let page = Page::parse("a 1\na 1\n");
    let problem = page.problems()[0].to_string();
    assert_eq!(problem, "line 2: the same series a second time: a 1");
}

#[test]
fn every_kind_is_told_from_the_others() {
    let kinds = [
        ("counter", Kind::Counter),
        ("gauge", Kind::Gauge),
        ("histogram", Kind::Histogram),
        ("summary", Kind::Summary),
        ("unknown", Kind::Untyped),
    ];
    for (word, kind) in kinds {
        let page = Page::parse(&format!("# TYPE f {word}\n"));
        assert_eq!(page.kind("f"), Some(kind), "{word}");
    }
}

#[test]
fn reads_what_the_format_allows() {
    let page = Page::parse(concat!(
        "# HELP a_total says \"quotes\" and \\n\n",
        "# TYPE a_total counter\n",
        "a_total{l=\"x\\\"y\\\\z\\nw\"} 1\n",
        "a_total{l=\"comma, and } brace # hash\" , } 2\n",
        "# a comment\n",
        "\n",
        "vllm:colon_total{e=\"0\"} 1.7960348847795017e+09\r\n",
        "  inf +Inf\n",
        "ninf -Inf\n",
        "stamped 5 1700000000123\n",
        "exemplar_total{a=\"b\"} 6 # {trace_id=\"x\"} 0.5 1.0\n",
        "small 1e-05\n",
    ));
    assert_eq!(page.problems(), []);
    assert_eq!(value(&page, "a_total", &[("l", "x\"y\\z\nw")]), 1.0);
    assert_eq!(value(&page, "a_total", &[]), 3.0);
    assert_eq!(
        value(&page, "vllm:colon_total", &[]),
        1_796_034_884.779_501_7
    );
    assert_eq!(page.values(&Series::new("inf", &[])), [f64::INFINITY]);
    assert_eq!(page.values(&Series::new("ninf", &[])), [f64::NEG_INFINITY]);
    assert_eq!(value(&page, "stamped", &[]), 5.0);
    assert_eq!(value(&page, "exemplar_total", &[("a", "b")]), 6.0);
    assert_eq!(value(&page, "small", &[]), 1e-5);
}

#[test]
fn nothing_is_lost_in_silence() {
    for (line, fault) in [
        ("1name 2", "no metric name"),
        ("a", "no value"),
        ("a x", "value is not a number"),
        ("a 1 x", "timestamp is not a number"),
        ("a 1 2 3", "words after the timestamp"),
        ("a{b=\"c\" 1", "neither , nor } after a label"),
        ("a{b=\"c", "label value has no end"),
        ("a{b=c} 1", "label value is not quoted"),
        ("a{b=\"\\t\"} 1", "unknown escape in a label value"),
        ("a{b=\"1\",b=\"2\"} 1", "a label twice in one series"),
        ("a{b} 1", "no = after a label name"),
        ("a{} ", "no value"),
    ] {
        let page = Page::parse(&format!("{line}\n"));
        assert_eq!(page.samples().count(), 0, "{line}");
        assert_eq!(page.problems()[0].fault, Fault::Malformed(fault), "{line}");
        assert!(page.is_complete());
    }
}

#[test]
fn duplicates_are_kept_and_reported_and_unreadable() {
    let page = Page::parse("a{x=\"1\"} 1\na{x=\"1\"} 2\n");
    assert_eq!(page.values(&Series::new("a", &[("x", "1")])), [1.0, 2.0]);
    assert_eq!(page.problems()[0].fault, Fault::Duplicate);
    assert!(matches!(page.read("a", &[]), Reading::Unusable(_)));
}

#[test]
fn a_cut_line_is_reported_and_not_read() {
    let page = Page::parse("a 1\nb 12");
    assert!(!page.is_complete());
    assert_eq!(page.read("b", &[]), Reading::Absent);
    assert_eq!(page.read("a", &[]), Reading::Value(1.0));
}

#[test]
fn declared_without_a_sample_is_silent_and_undeclared_is_absent() {
    let page = Page::parse("# TYPE d histogram\n# TYPE c_total counter\nc_total{x=\"1\"} 0\n");
    assert_eq!(page.read("d_count", &[]), Reading::Silent);
    assert_eq!(page.read("c_total", &[("x", "2")]), Reading::Silent);
    assert_eq!(page.read("c_total", &[("x", "1")]), Reading::Value(0.0));
    assert_eq!(page.read("e_total", &[]), Reading::Absent);
}

#[test]
fn a_page_of_five_megabytes_is_read_completely() {
    let mut text = String::from("# TYPE m_total counter\n");
    let mut lines = 0_u32;
    while text.len() < 5 << 20 {
        text.push_str(&format!(
            "m_total{{engine=\"0\",worker=\"{lines}\"}} {lines}.0\n"
        ));
        lines += 1;
    }
    let page = Page::parse(&text);
    assert_eq!(page.problems(), []);
    assert_eq!(page.samples().count(), lines as usize);
}

proptest! {
    #[test]
    fn what_is_printed_is_read_back(
        name in "[a-zA-Z_:][a-zA-Z0-9_:]{0,20}",
        labels in proptest::collection::btree_map("[a-zA-Z_][a-zA-Z0-9_]{0,8}", any::<String>(), 0..4),
        value in any::<f64>(),
    ) {
        // Values never hold a bare carriage return or newline: the latter is escaped, and
        // `lines` takes the former only at the end of a line, where a digit stands.
        let labels: Vec<_> = labels.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
        let series = Series::new(name, &labels);
        let page = Page::parse(&format!("{series} {value}\n"));
        prop_assert_eq!(page.problems(), &[]);
        let [read] = page.values(&series) else { panic!("{series} is not there") };
        prop_assert!(read.to_bits() == value.to_bits() || (read.is_nan() && value.is_nan()));
    }

    #[test]
    fn no_input_panics(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        let _ = Page::parse(&String::from_utf8_lossy(&bytes));
    }

    #[test]
    fn nothing_that_looks_like_a_page_panics(text in "[a{}\",=\\\\n#\n 1+.eINaTYP_]{0,80}") {
        let _ = Page::parse(&text);
    }
}
