//! Every input that fuzzing kept, through the properties that it was found with: no nightly
//! compiler is needed for that.

use std::fs;
use std::panic;
use std::path::Path;

#[path = "../fuzz/properties/metrics.rs"]
mod metrics;
#[path = "../fuzz/properties/sse.rs"]
mod sse;
#[path = "../fuzz/properties/stream.rs"]
mod stream;

fn all_hold(target: &str, hold: fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fuzz/corpus")
        .join(target);
    let mut inputs = 0;
    for entry in fs::read_dir(&folder).expect("a folder of inputs") {
        let path = entry.expect("an entry").path();
        let input = fs::read(&path).expect("an input");
        // What failed has said so already; this says on which file.
        if panic::catch_unwind(|| hold(&input)).is_err() {
            panic!("the properties do not hold for {}", path.display());
        }
        inputs += 1;
    }
    assert!(inputs > 0, "{} is empty", folder.display());
}

#[test]
fn metrics_pages() {
    all_hold("metrics", metrics::hold);
}

#[test]
fn server_sent_events() {
    all_hold("sse", sse::hold);
}

#[test]
fn whole_responses() {
    all_hold("stream", stream::hold);
}
