//! What a story may use: ask a worker, ask the reference, read counters, leave checks.
//!
//! Everything a story sees is written to its evidence on the way, and every wait on the product is
//! timed, so that what remains is the harness's own share.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::client::{Client, Completion, Observation};
use crate::config::Config;
use crate::evidence::ArmDir;
use crate::evidence::result::{RequestLine, Timings};
use crate::failure::{Class, Failure};
use crate::prompt::{Prompt, Prompts};
use crate::reference::{Answer, Question};
use crate::stack::lease::Lease;
use crate::stack::protocol::StackInfo;
use crate::telemetry::{Delta, Page, settle};
use crate::verdict::Check;

/// Everything one arm works with.
#[derive(Debug)]
pub struct Scene<'a> {
    /// The configuration.
    pub config: &'a Config,
    /// The running stack.
    pub stack: StackInfo,
    /// The right to use it.
    pub lease: &'a mut Lease,
    /// Prompts of exact length.
    pub prompts: Prompts,
    /// Evidence of this arm.
    pub dir: ArmDir,
    /// Waits so far.
    pub timings: Timings,
    /// Checks so far.
    pub checks: Vec<Check>,
    /// Requests so far.
    pub requests: Vec<RequestLine>,
    /// Findings no check covers.
    pub notes: Vec<String>,
    /// Reference answers so far, by label.
    pub answers: BTreeMap<String, Answer>,
    arm: &'static str,
    salt: String,
    client: Client,
    http: reqwest::Client,
}
