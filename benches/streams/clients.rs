//! Runs a client as a process of its own, and reads what it reports.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use kvcr_phase1::config::{self, OwnArgs, ProcessEnv};
use kvcr_phase1::environment::peers::{self, Peer};
use kvcr_phase1::environment::{self, Search};
use kvcr_phase1::stack::wait::{self, Look};
use procfs::process::Process;
use rustix::process::{Pid, Signal, kill_process_group};

use crate::Problem;
use crate::ours::Load;
use crate::outputs::{self, Reported};
use crate::server::{MODEL, TOKENS};

/// The most that a client may take: a minute to start, and a load that takes two seconds.
const PATIENCE: Duration = Duration::from_secs(240);
/// vLLM's command wants to be called `vllm`; its benchmark does not.
const VLLM: &str = "from vllm.utils.argparse_utils import FlexibleArgumentParser as P
from vllm.benchmarks.serve import add_cli_args, main
p = P(); add_cli_args(p); main(p.parse_args())";

/// Who is measured.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Client {
    Ours,
    Vllm,
    Aiperf,
    Guidellm,
}

impl Client {
    pub(crate) const EACH: [Self; 4] = [Self::Ours, Self::Vllm, Self::Aiperf, Self::Guidellm];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Ours => "kvcr-phase1",
            Self::Vllm => "vLLM `bench serve`",
            Self::Aiperf => "aiperf",
            Self::Guidellm => "guidellm",
        }
    }
}

/// What is installed, and a directory for what clients write.
pub(crate) struct Clients {
    bench: PathBuf,
    python: PathBuf,
    aiperf: PathBuf,
    guidellm: PathBuf,
    model: String,
    scratch: PathBuf,
}

impl Clients {
    pub(crate) fn find() -> Result<Self, Problem> {
        let config = config::load(OwnArgs::default(), &ProcessEnv)?;
        let cache = &config.paths.cache;
        let said = |failure: kvcr_phase1::failure::Failure| failure.to_string();
        let product = environment::find(&config.profile, cache).map_err(said)?;
        let peer = |peer| peers::find(peer, cache, &Search::default()).map_err(said);
        Ok(Self {
            bench: std::env::current_exe()?,
            python: product.program.path().to_owned(),
            aiperf: peer(Peer::Aiperf)?,
            guidellm: peer(Peer::Guidellm)?,
            model: product.model.display().to_string(),
            scratch: Path::new(env!("CARGO_TARGET_TMPDIR")).join("streams-bench"),
        })
    }

    /// Has `client` send `count` requests at once to `url`.
    pub(crate) fn run(&self, client: Client, url: &str, count: usize) -> Result<Load, Problem> {
        let place = self.scratch.join(format!("{client:?}-{count}"));
        if place.exists() {
            fs::remove_dir_all(&place)?;
        }
        fs::create_dir_all(&place)?;
        let mut command = self.command(client, url, count, &place);
        let log = place.join("log");
        let output = File::create(place.join("stdout"))?;
        command
            .current_dir(&place)
            .stdin(Stdio::null())
            .stdout(output)
            .stderr(File::create(&log)?);
        let before = spent_by_children()?;
        finish(command)
            .map_err(|why| format!("{}: {why}; see {}", client.name(), log.display()))?;
        let cpu_s = spent_by_children()? - before;
        let read = |name: &str, parse: fn(&str) -> Option<Vec<Reported>>| {
            let path = place.join(name);
            let text = fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
            let parsed = parse(&text);
            parsed.ok_or(format!("{} is not as it was", path.display()))
        };
        let streams = match client {
            // Ticks of a hundredth are too long for it: it says itself what it spent.
            Client::Ours => {
                let text = fs::read_to_string(place.join("stdout"))?;
                return Ok(serde_json::from_str(&text)?);
            }
            Client::Vllm => read("result.json", outputs::vllm)?,
            Client::Aiperf => read("artifacts/profile_export.jsonl", outputs::aiperf)?,
            Client::Guidellm => read("result.json", outputs::guidellm)?,
        };
        Ok(Load { streams, cpu_s })
    }

    fn command(&self, client: Client, url: &str, count: usize, place: &Path) -> Command {
        let result = place.join("result.json").display().to_string();
        let (program, args) = match client {
            Client::Ours => (&self.bench, format!("--client {url} --streams {count}")),
            Client::Vllm => (
                &self.python,
                format!(
                    "-c CODE --backend openai --base-url {url} --endpoint /v1/completions --model {MODEL} \
                     --tokenizer MODEL --dataset-name random --random-input-len 16 \
                     --random-output-len {TOKENS} --num-prompts {count} --request-rate inf --ignore-eos \
                     --save-result --save-detailed --result-dir PLACE --result-filename result.json \
                     --disable-tqdm --ready-check-timeout-sec 0"
                ),
            ),
            Client::Aiperf => (
                &self.aiperf,
                format!(
                    "profile --model {MODEL} --url {url} --endpoint-type completions --streaming \
                     --tokenizer MODEL --concurrency {count} --request-count {count} --num-prompts {count} \
                     --isl 16 --osl {TOKENS} --extra-inputs ignore_eos:true --export-level records \
                     --artifact-dir PLACE/artifacts --ui none --no-server-metrics --no-gpu-telemetry"
                ),
            ),
            Client::Guidellm => (
                &self.guidellm,
                format!(
                    "run --backend kind=openai_http,target={url},model={MODEL},request_format=/v1/completions \
                     --tokenizer kind=hf_auto,model=MODEL --profile kind=concurrent,streams={count} \
                     --constraint kind=max_requests,count={count} \
                     --data kind=synthetic_text,prompt_tokens=16,output_tokens={TOKENS} \
                     --output kind=json,path={result} --disable-console"
                ),
            ),
        };
        let place = place.display().to_string();
        let args = args.split_whitespace().map(|word| {
            let word = word.replace("MODEL", &self.model).replace("PLACE", &place);
            if word == "CODE" {
                VLLM.to_owned()
            } else {
                word
            }
        });
        let mut command = Command::new(program);
        command.args(args);
        command
    }
}

/// Runs it to its end; ends it, and what it started, if it takes too long.
fn finish(mut command: Command) -> Result<(), Problem> {
    use std::os::unix::process::CommandExt;
    let mut child = command.process_group(0).spawn()?;
    let group = Pid::from_child(&child);
    let ended = wait::until_blocking(PATIENCE, Duration::from_millis(20), || {
        match child.try_wait() {
            Ok(Some(status)) => Look::Ready(status),
            Ok(None) => Look::NotYet("it runs".to_owned()),
            Err(error) => Look::Failed(error),
        }
    });
    match ended {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(status.to_string().into()),
        Err(why) => {
            kill_process_group(group, Signal::KILL)?;
            child.wait()?;
            Err(why.to_string().into())
        }
    }
}

/// Seconds of user and system time of the children that were waited for, and of theirs.
fn spent_by_children() -> Result<f64, Problem> {
    let stat = Process::myself()?.stat()?;
    let ticks = stat.cutime + stat.cstime;
    Ok(ticks as f64 / procfs::ticks_per_second() as f64)
}
