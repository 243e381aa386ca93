//! A page as vLLM's workers write theirs, only longer.

use std::fmt::Write;

const BOUNDS: [&str; 15] = [
    "0.001", "0.005", "0.01", "0.025", "0.05", "0.1", "0.25", "0.5", "1.0", "2.5", "5.0", "10.0",
    "30.0", "60.0", "+Inf",
];
/// What an operation is called; the last two have an escape, as a path or a message would.
const OPERATIONS: [&str; 5] = [
    "remote_deliver",
    "hint_wait",
    "control_enqueue",
    r#"say \"hello\""#,
    r"C:\\pool\nslot",
];
const WORKERS: u64 = 8;

/// At least `length` bytes: families of counters and histograms in turn, until it is enough.
pub(crate) fn page(length: usize) -> String {
    let mut page = String::with_capacity(length + (1 << 20));
    let mut family = 0;
    while page.len() < length {
        match family % 4 {
            0 => histogram(&mut page, family),
            _ => counter(&mut page, family),
        }
        family += 1;
    }
    page
}

/// Every worker with every operation.
fn labelled() -> impl Iterator<Item = (u64, &'static str)> {
    (0..WORKERS).flat_map(|worker| OPERATIONS.map(|operation| (worker, operation)))
}

/// Labels in the order of their names, as Python's client writes them; `le` stands in between.
fn labels(le: &str, worker: u64, operation: &str) -> String {
    format!(
        "dynamo_component=\"backend\",dynamo_endpoint=\"generate\",dynamo_namespace=\"dynamo\",\
         engine=\"{}\",{le}model=\"tiny\",model_name=\"tiny\",operation=\"{operation}\",\
         worker_id=\"{:x}\"",
        worker % 2,
        0x042a_a22c_0a71_1908 + worker * 7919,
    )
}

// Writing to a `String` cannot fail.

fn counter(page: &mut String, family: u32) {
    let name = format!("vllm:kvcr_family_{family}_bytes");
    let _ = writeln!(page, "# HELP {name}_total Bytes, \"moved\".");
    let _ = writeln!(page, "# TYPE {name}_total counter");
    for (worker, operation) in labelled() {
        let (labels, value) = (labels("", worker, operation), f64::from(family) * 4096.0);
        let _ = writeln!(page, "{name}_total{{{labels}}} {value:?}");
    }
    let _ = writeln!(page, "# HELP {name}_created Bytes, \"moved\".");
    let _ = writeln!(page, "# TYPE {name}_created gauge");
    for (worker, operation) in labelled() {
        let labels = labels("", worker, operation);
        let _ = writeln!(
            page,
            "{name}_created{{{labels}}} 1.796035{family:05}5630553e+09"
        );
    }
}

fn histogram(page: &mut String, family: u32) {
    let name = format!("vllm:kvcr_family_{family}_seconds");
    let _ = writeln!(page, "# HELP {name} Seconds\\nof one operation.");
    let _ = writeln!(page, "# TYPE {name} histogram");
    for (worker, operation) in labelled() {
        for (count, bound) in (0..).zip(BOUNDS) {
            let labels = labels(&format!("le=\"{bound}\","), worker, operation);
            let count = f64::from(count * family);
            let _ = writeln!(page, "{name}_bucket{{{labels}}} {count:?}");
        }
        let (labels, count) = (labels("", worker, operation), f64::from(14 * family));
        let _ = writeln!(page, "{name}_count{{{labels}}} {count:?}");
        let _ = writeln!(page, "{name}_sum{{{labels}}} {:?}", count * 0.001_37);
    }
}
