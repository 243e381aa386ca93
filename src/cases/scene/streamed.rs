//! Streamed requests: those whose times are kept.

use std::time::Instant;

use serde_json::json;

use super::{Scene, file_name, millis};
use crate::client::stream::{Ask, Streamed};
use crate::client::{Completion, Observation};
use crate::failure::Failure;
use crate::prompt::Prompt;

/// Who is asked.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Whom {
    /// A worker under test, by index.
    Worker(usize),
    /// The engine without KVCR.
    Reference,
}

impl Scene<'_> {
    /// Streams the answer of one engine to `prompt`, and checks that this one gave it. Under its own
    /// `salt` a prompt shares nothing with any other.
    ///
    /// # Errors
    /// The request's failure, as the class that has to act.
    pub async fn stream(
        &mut self,
        label: &str,
        prompt: &Prompt,
        whom: Whom,
        salt: Option<String>,
    ) -> Result<(Observation, Streamed), Failure> {
        let target = match whom {
            Whom::Worker(index) => self.worker(index)?,
            Whom::Reference => self.reference_engine().await?,
        };
        let completion = self.completion(label, prompt, &target, salt)?;
        let ask = Ask::completion(&completion, label);
        let began = Instant::now();
        let streamed = self.streams.ask(&ask).await;
        let spent = millis(began);
        match whom {
            Whom::Worker(_) => self.told.timings.requests += spent,
            Whom::Reference => self.told.timings.reference_requests += spent,
        }
        self.keep_stream(&target.process, &completion, prompt, &streamed)?;
        let seen = streamed.observation()?;
        self.served(label, prompt, &target, &seen);
        Ok((seen, streamed))
    }

    fn keep_stream(
        &self,
        process: &str,
        asked: &Completion,
        prompt: &Prompt,
        streamed: &Streamed,
    ) -> Result<(), Failure> {
        let file = format!("requests/{}.json", file_name(process, &streamed.label));
        let Prompt { text, sha256, .. } = prompt;
        let document =
            json!({"asked": asked, "text": text, "sha256": sha256, "streamed": streamed});
        self.dir.json(&file, &document)
    }

    /// The salt of `part` of this lease: what is asked under it shares nothing with other parts.
    #[must_use]
    pub fn salt_of(&self, part: &str) -> String {
        format!("{}-{part}", self.salt)
    }
}
