//! The command line of the real `kvcr.kvcr_service`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;

use super::log::Level;

const GIB: f64 = (1u64 << 30) as f64;

/// Flags of `kvcr.kvcr_service`.
#[derive(Clone, Debug, Parser)]
#[command(name = "kvcr_service")]
pub(super) struct Options {
    /// Where workers connect.
    #[arg(long)]
    pub(super) socket_path: PathBuf,
    /// Where the pools are; must exist.
    #[arg(long)]
    pub(super) pool_dir: PathBuf,
    /// Guards, each with pools of its own.
    #[arg(long, value_parser = at_least_one)]
    pub(super) guard_count: usize,
    /// GiB of each pool of a Guard.
    #[arg(long, required = true, num_args = 1.., value_delimiter = ',', value_parser = gigabytes)]
    pub(super) pool_sizes_gb: Vec<f64>,
    /// Must be the claimants'.
    #[arg(long)]
    pub(super) compatibility_digest: String,
    /// Promote a Guard whose worker gave no sign of life for so long.
    #[arg(long, value_parser = heartbeat)]
    heartbeat_timeout_ms: Option<f64>,
    /// `DEBUG`, `INFO`, `WARNING`, `ERROR` or `CRITICAL`.
    #[arg(long)]
    pub(super) log_level: Option<Level>,
}

impl Options {
    /// Bytes that a Guard's pool has room for.
    pub(super) fn pool_bytes(&self) -> u64 {
        self.sizes().sum()
    }

    /// The sizes as Python prints a tuple.
    pub(super) fn pool_sizes(&self) -> String {
        let sizes: Vec<String> = self.sizes().map(|size| size.to_string()).collect();
        match sizes.as_slice() {
            [only] => format!("({only},)"),
            several => format!("({})", several.join(", ")),
        }
    }

    fn sizes(&self) -> impl Iterator<Item = u64> {
        self.pool_sizes_gb.iter().map(|size| (size * GIB) as u64)
    }

    /// `None`: only death counts.
    pub(super) fn heartbeat_timeout(&self) -> Option<Duration> {
        let millis = self.heartbeat_timeout_ms?;
        Some(Duration::from_secs_f64(millis / 1000.0))
    }
}

fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) | Err(_) => Err("--guard-count must be at least 1".to_owned()),
        Ok(count) => Ok(count),
    }
}

fn gigabytes(text: &str) -> Result<f64, String> {
    let size: f64 = text.parse().unwrap_or(f64::NAN);
    let page_gib = 4096.0 / GIB;
    if size.is_finite() && (page_gib..1e9).contains(&size) {
        Ok(size)
    } else {
        Err("--pool-sizes-gb must contain positive, finite numbers".to_owned())
    }
}

fn heartbeat(text: &str) -> Result<f64, String> {
    let millis: f64 = text.parse().unwrap_or(f64::NAN);
    if (1000.0..1e12).contains(&millis) {
        Ok(millis)
    } else {
        Err("--heartbeat-timeout-ms must be at least 1000 and finite".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(args: &str) -> Result<Options, clap::Error> {
        let start = "kvcr_service --socket-path s --pool-dir d --compatibility-digest x";
        Options::try_parse_from(start.split(' ').chain(args.split(' ')))
    }

    #[test]
    fn the_real_flags_are_taken() {
        let options = parse("--guard-count 2 --pool-sizes-gb 0.25 --log-level debug").unwrap();
        assert_eq!(options.pool_bytes(), 268_435_456);
        assert_eq!(options.pool_sizes(), "(268435456,)");
        assert_eq!(options.heartbeat_timeout(), None);
        assert_eq!(options.log_level, Some(Level::Debug));
        let several = parse("--guard-count 1 --pool-sizes-gb 1 2 --heartbeat-timeout-ms 1500");
        let several = several.unwrap();
        assert_eq!(several.pool_sizes(), "(1073741824, 2147483648)");
        assert_eq!(
            several.heartbeat_timeout(),
            Some(Duration::from_millis(1500))
        );
    }

    #[test]
    fn what_the_real_one_refuses_is_refused() {
        for wrong in [
            "--guard-count 0 --pool-sizes-gb 1",
            "--guard-count 1 --pool-sizes-gb 0",
            "--guard-count 1 --pool-sizes-gb inf",
            "--guard-count 1 --pool-sizes-gb 1 --heartbeat-timeout-ms 999",
            "--guard-count 1 --pool-sizes-gb 1 --log-level loud",
            // The flags before they were renamed.
            "--pool-count 1 --pool-size-gb 1",
        ] {
            assert_eq!(parse(wrong).unwrap_err().exit_code(), 2, "{wrong}");
        }
    }
}
