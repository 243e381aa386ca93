//! See `properties/sse.rs`; `tests/corpus.rs` asks the same of every kept input.

#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../properties/sse.rs"]
mod properties;

fuzz_target!(|input: &[u8]| properties::hold(input));
