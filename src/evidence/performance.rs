//! What is kept of measurements: every one of them, in which order, what they come to, pictures.

use super::{ArmDir, cannot_write};
use crate::atomic;
use crate::failure::Failure;
use crate::performance::judge::Report;
use crate::performance::order::Order;
use crate::performance::plot;
use crate::performance::sample::{self, Metric, Sample};

/// Everything that a performance verdict stands on.
#[derive(Clone, Copy, Debug)]
pub struct Measured<'a> {
    /// In which order arms were measured: `order.json`.
    pub order: &'a Order,
    /// Each request, warm-up too: `samples.jsonl`.
    pub samples: &'a [Sample],
    /// What they come to: `performance.json`.
    pub report: &'a Report,
    /// What they were measured on, for the pictures: profile and versions.
    pub setting: &'a str,
}

impl ArmDir {
    /// Writes all of it, each file whole or not at all, and a picture for each metric that was
    /// measured (`ttft.svg`). The samples come first: what follows from them can be made again.
    ///
    /// # Errors
    /// Environment, if a file cannot be written; Inconclusive, if a sample is no measurement.
    pub fn performance(&self, measured: &Measured<'_>) -> Result<(), Failure> {
        let whole = |name: &str, text: &str| {
            let path = self.path.join(name);
            atomic::replace(&path, text.as_bytes()).map_err(|error| cannot_write(&path, &error))
        };
        let no_measurement = |why: &dyn std::fmt::Display| {
            Failure::inconclusive("a measurement cannot be kept")
                .expected("times that are finite and above 0")
                .found(why)
        };
        let lines = sample::write(measured.samples).map_err(|why| no_measurement(&why))?;
        whole("samples.jsonl", &lines)?;
        self.json("order.json", measured.order)?;
        self.json("performance.json", measured.report)?;
        for metric in Metric::ALL {
            let mut rows = measured.report.rows.iter();
            if rows.any(|row| row.metric == metric) {
                let picture = plot::of(measured.samples, measured.report, metric, measured.setting)
                    .map_err(|why| no_measurement(&why))?;
                whole(&format!("{metric}.svg"), &picture)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::failure::Class;
    use crate::performance::Arm;

    fn samples() -> Vec<Sample> {
        let sample = |round: usize, arm: Arm| Sample {
            arm,
            round,
            position: 0,
            warm_up: round == 0,
            ttft_ms: 10.0 + round as f64,
            itl_ms: Vec::new(),
            end_to_end_ms: 30.0,
            prompt_tokens: 512,
            tokens: 1,
            cached_tokens: None,
            blocks: Some(7),
        };
        let rounds = (0..8).flat_map(|round| [sample(round, Arm::Off), sample(round, Arm::Local)]);
        rounds.collect()
    }

    #[test]
    fn what_was_measured_can_be_read_and_judged_again() {
        let folder = tempfile::tempdir().expect("tempdir");
        let arm = ArmDir::create(folder.path(), "run", "tc05::arms", 1).expect("arm");
        let (samples, order) = (samples(), Order::new(&[Arm::Off, Arm::Local], 7, 1, 9));
        let report = Report::of(&samples, 9);
        let measured = Measured {
            order: &order,
            samples: &samples,
            report: &report,
            setting: "profile sim",
        };
        arm.performance(&measured).expect("written");
        let read = |name: &str| fs::read_to_string(arm.path().join(name)).expect(name);
        let again = sample::read(&read("samples.jsonl")).expect("samples");
        assert_eq!(again, samples);
        assert_eq!(Report::of(&again, report.seed), report);
        let kept: Report = serde_json::from_str(&read("performance.json")).expect("report");
        assert_eq!(kept, report);
        let kept: Order = serde_json::from_str(&read("order.json")).expect("order");
        assert_eq!(kept, order);
        assert!(read("ttft.svg").starts_with("<svg"));
        // Answers of one token have nothing between tokens, and so no picture of it.
        assert!(!arm.path().join("itl.svg").exists());
    }

    #[test]
    fn a_time_that_is_none_is_not_kept_as_if_it_were() {
        let folder = tempfile::tempdir().expect("tempdir");
        let arm = ArmDir::create(folder.path(), "run", "tc05::arms", 1).expect("arm");
        let mut samples = samples();
        samples[3].ttft_ms = f64::NAN;
        let measured = Measured {
            order: &Order::new(&[], 0, 0, 1),
            samples: &samples,
            report: &Report::of(&samples, 1),
            setting: "",
        };
        let failure = arm.performance(&measured).expect_err("no time");
        assert_eq!(failure.class, Class::Inconclusive);
        assert!(failure.to_string().contains("line 4"), "{failure}");
        assert!(!arm.path().join("samples.jsonl").exists());
    }
}
