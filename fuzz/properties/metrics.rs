//! Metrics pages: no line is lost in silence, and what was read is what stands there.

use kvcr_phase1::telemetry::Page;

/// Panics if `input` shows that one of them does not hold.
pub(crate) fn hold(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    let page = Page::parse(&text);
    assert_eq!(page.is_complete(), text.is_empty() || text.ends_with('\n'));
    let mut values = 0;
    for (series, of_series) in page.samples() {
        values += of_series.len();
        let printed = Page::parse(&format!("{series} {}\n", of_series[0]));
        let [read] = printed.values(series) else {
            panic!("{series} is not read back: {:?}", printed.problems());
        };
        assert!(
            read.to_bits() == of_series[0].to_bits() || (read.is_nan() && of_series[0].is_nan())
        );
        let _ = (page.kind(series.name()), page.is_cumulative(series.name()));
        let _ = page.read(series.name(), &[]);
    }
    let meant = text
        .lines()
        .map(|line| line.trim_matches([' ', '\t', '\r']))
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .count();
    // A line that is cut or malformed is a problem instead of a sample; a duplicate is both.
    assert!(
        values + page.problems().len() >= meant,
        "{meant} lines, {values} values"
    );
}
