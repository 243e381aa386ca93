use proptest::prelude::*;
use roxmltree::Document;

use super::super::Arm;
use super::super::sample::testing::sample;
use super::*;

fn strip<'a>(label: &'a str, values: &[f64]) -> Strip<'a> {
    Strip {
        label,
        values: values.to_vec(),
        estimate: Estimate::of(values, 1).ok(),
    }
}

/// How many points the picture has, and its texts.
fn seen(svg: &str) -> (usize, Vec<String>) {
    let document = Document::parse(svg).expect("well-formed XML");
    let named = |name: &'static str| {
        let all = document.descendants();
        all.filter(move |node| node.tag_name().name() == name)
    };
    let texts = named("text").filter_map(|node| node.text());
    let texts = texts.map(|text| text.trim().to_owned()).collect();
    (named("circle").count(), texts)
}

fn has(texts: &[String], wanted: &str) -> bool {
    texts.iter().any(|text| text == wanted)
}

/// Seven rounds of all arms, with a warm-up that must not be drawn.
fn samples() -> Vec<Sample> {
    let times = [
        (Arm::Off, 120.0),
        (Arm::Cold, 126.0),
        (Arm::Local, 31.0),
        (Arm::Peer, 44.0),
        (Arm::Guard, 58.0),
    ];
    let mut samples = Vec::new();
    for round in 0..8 {
        for (arm, time) in times {
            let mut sample = sample(arm, round, time + ((round * 7 + 3) % 5) as f64);
            sample.warm_up = round == 0;
            samples.push(sample);
        }
    }
    samples
}

#[test]
fn every_arm_and_every_sample_is_in_it() {
    let samples = samples();
    let report = Report::of(&samples, 1);
    let svg = of(&samples, &report, Metric::Ttft, "profile sim, KVCR 0.1.0").unwrap();
    let (points, texts) = seen(&svg);
    assert_eq!(points, 35);
    for arm in Arm::ALL {
        assert!(has(&texts, arm.name()), "{texts:?}");
    }
    for text in [
        "time to first token, n = 7",
        "profile sim, KVCR 0.1.0",
        "ms",
        "33 ms, n = 7",
    ] {
        assert!(has(&texts, text), "{texts:?}");
    }
}

/// `INSTA` has no part in this: to accept a change, copy what the test wrote over the fixture.
#[test]
fn the_picture_is_the_same_bytes_as_ever() {
    let samples = samples();
    let report = Report::of(&samples, 1);
    let svg = of(&samples, &report, Metric::Ttft, "profile sim, KVCR 0.1.0").unwrap();
    let pinned = include_str!("../../../tests/fixtures/performance/ttft.svg");
    if svg != pinned {
        let fresh = std::env::temp_dir().join("kvcr-phase1-ttft.svg");
        std::fs::write(&fresh, &svg).unwrap();
        panic!(
            "another picture than tests/fixtures/performance/ttft.svg: {}",
            fresh.display()
        );
    }
}

#[test]
fn a_wide_range_has_a_logarithmic_axis_and_says_so() {
    let (_, near) = seen(&draw("t", "s", "ms", &[strip("a", &[10.0, 190.0])]).unwrap());
    assert!(has(&near, "ms") && has(&near, "0"), "{near:?}");
    let (points, far) = seen(&draw("t", "s", "ms", &[strip("a", &[10.0, 2000.0])]).unwrap());
    assert_eq!(points, 2);
    assert!(has(&far, "ms, logarithmic"), "{far:?}");
    assert!(has(&far, "100") && has(&far, "1000"), "{far:?}");
    // Zero has no logarithm.
    let (points, zero) = seen(&draw("t", "s", "ms", &[strip("a", &[0.0, 2000.0])]).unwrap());
    assert_eq!(points, 2);
    assert!(has(&zero, "ms"), "{zero:?}");
}

#[test]
fn nothing_one_and_equal_values_are_drawn_too() {
    assert_eq!(seen(&draw("t", "s", "ms", &[]).unwrap()).0, 0);
    let strips = [
        strip("none", &[]),
        strip("one", &[5.0]),
        strip("same", &[5.0; 4]),
    ];
    let (points, texts) = seen(&draw("t", "s", "ms", &strips).unwrap());
    assert_eq!(points, 5);
    for label in ["none", "one", "same", "n = 0", "5 ms, n = 1", "5 ms, n = 4"] {
        assert!(has(&texts, label), "{label}: {texts:?}");
    }
    assert_eq!(
        seen(&draw("t", "s", "ms", &[strip("zero", &[0.0])]).unwrap()).0,
        1
    );
}

#[test]
fn what_is_on_no_axis_is_refused() {
    for value in [f64::NAN, f64::INFINITY] {
        let refused = draw("t", "s", "ms", &[strip("a", &[1.0, value])]).unwrap_err();
        assert_eq!(
            refused.to_string(),
            format!("no picture can be drawn: {value} is on no axis")
        );
    }
}

#[test]
fn hostile_labels_stay_text() {
    let hostile = "<&\"'></text><script>\u{1}\u{0}\u{ffff}";
    let svg = draw(hostile, hostile, "ms", &[strip(hostile, &[1.0])]).unwrap();
    let (points, texts) = seen(&svg);
    assert_eq!(points, 1);
    let shown = "<&\"'></text><script>\u{fffd}\u{fffd}\u{fffd}";
    assert_eq!(texts.iter().filter(|text| *text == shown).count(), 3);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn any_label_and_any_values_are_a_picture(
        title in any::<String>(),
        strips in prop::collection::vec((any::<String>(), prop::collection::vec(0.0..1e9_f64, 0..8), -9..9_i32), 0..6),
    ) {
        let strips: Vec<Strip<'_>> = strips
            .iter()
            .map(|(label, values, power)| Strip {
                label,
                values: values.iter().map(|value| value * 10_f64.powi(*power)).collect(),
                estimate: None,
            })
            .collect();
        let svg = draw(&title, &title, "ms", &strips).unwrap();
        let (points, _) = seen(&svg);
        prop_assert_eq!(points, strips.iter().map(|strip| strip.values.len()).sum::<usize>());
        prop_assert_eq!(svg, draw(&title, &title, "ms", &strips).unwrap());
    }
}
