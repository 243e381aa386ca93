//! From what an installer printed to a failure that a person can act on.

use std::path::Path;

use crate::failure::Failure;

use super::child::Ending;

/// What went wrong, as far as the text tells. First match wins: the specific before the vague
/// (a full disk or a wrong hash also ends in "failed to fetch").
const KNOWN: &[(&[&str], &str, &str)] = &[
    (
        &["no space left on device", "disk quota exceeded"],
        "the disk is full",
        "`kvcr-phase1 env list` and `uv cache prune` show and free space; then run this again",
    ),
    (
        &["hash mismatch", "do not match the hashes"],
        "a downloaded file is not the one that was locked",
        "the package index (or a mirror or proxy in between) serves other files than those the lock was made from: try another index (UV_DEFAULT_INDEX), or clear a damaged download (`uv cache clean`)",
    ),
    (
        &["certificate", "tls handshake", "ssl:"],
        "the package index's certificate is not trusted",
        "point SSL_CERT_FILE at your certificates, or set UV_SYSTEM_CERTS=true",
    ),
    (
        &[
            "401 unauthorized",
            "403 forbidden",
            "status code 401",
            "status code 403",
        ],
        "the package index refused",
        "check the credentials of the index that UV_DEFAULT_INDEX (for uv) or PIP_INDEX_URL (for pip) names",
    ),
    (
        &[
            "dns error",
            "error sending request",
            "connection refused",
            "network is unreachable",
            "network connectivity is disabled",
            "name resolution",
            "timed out",
            "connecterror",
            "max retries exceeded",
            "failed to fetch",
            "client error (connect)",
            "because the network was disabled",
        ],
        "the package index cannot be reached",
        "check the network and proxy (HTTPS_PROXY); uv does not read pip's settings, so where the index is not the public one set UV_DEFAULT_INDEX",
    ),
    (
        &[
            "no matching distribution",
            "no solution found",
            "has no wheels with a matching",
            "was not found in the package registry",
        ],
        "the package index lacks a locked package for this machine",
        "the lock is for Linux on x86_64 and aarch64; a mirror may be incomplete: try another index (UV_DEFAULT_INDEX)",
    ),
];

/// Characters of a line that are quoted; the log has the rest.
const QUOTED: usize = 240;

/// A failure of `what`, from how it ended and what its log says.
pub(crate) fn explain(what: &str, ending: &Ending, log: &Path) -> Failure {
    let text = std::fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let known = KNOWN.iter().find_map(|(marks, why, hint)| {
        let line = text.lines().find(|line| {
            let line = line.to_lowercase();
            marks.iter().any(|mark| line.contains(mark))
        })?;
        Some((line, *why, *hint))
    });
    let failure = match known {
        Some((_, why, hint)) => Failure::environment(format!("{what}: {why}")).hint(hint),
        None => Failure::environment(what).hint("read the log, and run this again"),
    };
    let failure = failure.found(ending);
    match known.map(|(line, ..)| line).or_else(|| first_error(&text)) {
        Some(line) => failure.cause(tidy(line), log),
        None => failure,
    }
}

fn first_error(text: &str) -> Option<&str> {
    let marked = |line: &&str| {
        let lower = line.to_lowercase();
        lower.trim_start().starts_with("error") || line.trim_start().starts_with('×')
    };
    let last = || text.lines().rev().find(|line| !line.trim().is_empty());
    text.lines().find(marked).or_else(last)
}

/// The line without the drawing around it, and without anybody's password.
fn tidy(line: &str) -> String {
    let line = line.trim_matches(|letter: char| {
        letter.is_whitespace() || matches!(letter, '×' | '╰' | '├' | '─' | '▶' | '│')
    });
    let mut clean = String::with_capacity(line.len());
    let mut rest = line;
    while let Some(at) = rest.find("://") {
        let (before, after) = rest.split_at(at + 3);
        clean.push_str(before);
        let host = after.find(|letter: char| letter == '/' || letter.is_whitespace());
        let authority = &after[..host.unwrap_or(after.len())];
        rest = match authority.rfind('@') {
            Some(at) => {
                clean.push_str("***");
                &after[at..]
            }
            None => after,
        };
    }
    clean.push_str(rest);
    match clean.char_indices().nth(QUOTED) {
        Some((at, _)) => format!("{}…", &clean[..at]),
        None => clean,
    }
}

/// A failure of our own file work.
pub(crate) fn io(what: &str, path: &Path, error: &std::io::Error) -> Failure {
    let hint = match error.kind() {
        std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => {
            "free some space: `kvcr-phase1 env list` shows what can be removed"
        }
        _ => {
            "make it writable, or name another cache directory: --cache-dir DIR or PHASE1_CACHE_DIR=DIR"
        }
    };
    Failure::environment(format!("{what} at {}", path.display()))
        .expected("a writable directory")
        .found(error)
        .hint(hint)
}

/// Makes a directory of the cache.
pub(crate) fn create_dir(path: &Path) -> Result<(), Failure> {
    std::fs::create_dir_all(path).map_err(|error| io("cannot make the cache", path, &error))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn explained(text: &str) -> Failure {
        let place = tempfile::tempdir().unwrap();
        let log = place.path().join("install.log");
        std::fs::write(&log, text).unwrap();
        explain("uv could not install the packages", &Ending::Exit(1), &log)
    }

    #[test]
    fn known_causes_are_named_and_quoted() {
        let cases = [
            (
                "  × Failed to download `idna==3.10`\n  ├─▶ Failed to fetch: `https://index.test/x`\n  ╰─▶ Hash mismatch for `idna==3.10`\n",
                "not the one that was locked",
                "Hash mismatch for `idna==3.10`",
            ),
            (
                "error: Request failed after 3 retries\n  Caused by: Failed to fetch: `https://user:secret@index.test/simple/`\n  Caused by: dns error\n",
                "cannot be reached",
                "Caused by: Failed to fetch: `https://***@index.test/simple/`",
            ),
            (
                "error: Failed to install: torch.whl\n  Caused by: failed to write: No space left on device (os error 28)\n",
                "the disk is full",
                "Caused by: failed to write: No space left on device (os error 28)",
            ),
            (
                "Resolved 3 packages\nerror: something new\nmore\n",
                "uv could not install the packages",
                "error: something new",
            ),
        ];
        for (text, what, cause) in cases {
            let failure = explained(text);
            assert!(failure.what.ends_with(what), "{failure}");
            assert_eq!(failure.cause.as_deref(), Some(cause));
        }
    }

    #[test]
    fn an_empty_log_is_not_quoted() {
        let failure = explained("\n");
        assert_eq!(failure.cause, None);
        assert_eq!(failure.found.as_deref(), Some("exit status 1"));
    }

    #[test]
    fn passwords_are_not_repeated() {
        let cases = [
            (
                "get https://a:b@h/x and https://c@d/",
                "get https://***@h/x and https://***@d/",
            ),
            ("no url @ all", "no url @ all"),
            ("https://h/x@y", "https://h/x@y"),
            ("ends in https://", "ends in https://"),
        ];
        for (line, clean) in cases {
            assert_eq!(tidy(line), clean);
        }
    }

    #[test]
    fn long_lines_are_cut() {
        let line = tidy(&"é".repeat(1000));
        assert_eq!(line.chars().count(), QUOTED + 1);
    }
}
