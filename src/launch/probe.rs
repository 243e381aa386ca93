//! Whether a process counts as started.

use std::time::Duration;

use tokio::net::{TcpStream, UnixStream};
use tokio::sync::watch;

use crate::plan::Probe;

/// One probe may take this long; a starved machine answers slowly, not never.
const ONE_LOOK: Duration = Duration::from_secs(5);
/// Readiness is a matter of seconds to minutes, and every look costs the two cores that the
/// engine also needs.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Looks until all probes hold; what is missing meanwhile goes to `missing`. Never gives up:
/// whoever waits knows when.
pub async fn until_all_hold(
    probes: Vec<Probe>,
    http: reqwest::Client,
    missing: watch::Sender<String>,
) {
    for probe in &probes {
        // In order, and each once: what answered has started.
        while let Err(why) = holds(probe, &http).await {
            missing.send_replace(why);
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }
}

/// A client for probes: no proxy, whatever the machine's settings say.
pub fn http() -> reqwest::Client {
    reqwest::Client::builder()
        .no_proxy()
        .timeout(ONE_LOOK)
        .build()
        .expect("without TLS and proxies nothing can go wrong")
}

/// Whether `probe` holds now, or what is missing.
pub async fn holds(probe: &Probe, http: &reqwest::Client) -> Result<(), String> {
    tokio::time::timeout(ONE_LOOK, look(probe, http))
        .await
        .unwrap_or_else(|_| Err(format!("{}: no answer", subject(probe))))
        .map_err(|why| format!("{}: {why}", subject(probe)))
}

fn subject(probe: &Probe) -> String {
    match probe {
        Probe::Tcp { port } => format!("port {port}"),
        Probe::Unix { path } => path.display().to_string(),
        Probe::Http { url } | Probe::HttpJson { url, .. } => url.clone(),
    }
}

async fn look(probe: &Probe, http: &reqwest::Client) -> Result<(), String> {
    match probe {
        Probe::Tcp { port } => {
            TcpStream::connect(("127.0.0.1", *port))
                .await
                .map_err(|error| error.to_string())?;
        }
        Probe::Unix { path } => {
            UnixStream::connect(path)
                .await
                .map_err(|error| error.to_string())?;
        }
        Probe::Http { url } => {
            get(http, url).await?;
        }
        Probe::HttpJson {
            url,
            pointer,
            equals,
        } => {
            let document: serde_json::Value = get(http, url)
                .await?
                .json()
                .await
                .map_err(|error| format!("not JSON: {error}"))?;
            match document.pointer(pointer) {
                Some(found) if found == equals => {}
                Some(found) => return Err(format!("{pointer} is {found}, not {equals}")),
                None => return Err(format!("there is no {pointer}")),
            }
        }
    }
    Ok(())
}

async fn get(http: &reqwest::Client, url: &str) -> Result<reqwest::Response, String> {
    let answer = http.get(url).send().await.map_err(|error| {
        // The outer layers only repeat the URL.
        let mut cause: &dyn std::error::Error = &error;
        while let Some(inner) = cause.source() {
            cause = inner;
        }
        cause.to_string()
    })?;
    if answer.status().is_success() {
        Ok(answer)
    } else {
        Err(format!("HTTP {}", answer.status().as_u16()))
    }
}
