//! A server for tests that answers by script.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::{PIN_HEADER, PREFILL_PIN_HEADER};

/// One HTTP/1.1 request as it came.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    /// Request line and headers.
    pub(crate) head: String,
    /// The whole body.
    pub(crate) body: String,
}

impl Request {
    pub(crate) fn path(&self) -> &str {
        self.head.split(' ').nth(1).unwrap_or_default()
    }

    /// A header's value. Names are compared as they are sent: in lower case.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.head
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
    }

    /// Reads one request; `None` when the client is gone. A client waits for its answer before
    /// it sends the next, so nothing is left over.
    pub(crate) async fn read(stream: &mut TcpStream) -> Option<Self> {
        let mut bytes = Vec::new();
        loop {
            let text = String::from_utf8_lossy(&bytes);
            if let Some((head, body)) = text.split_once("\r\n\r\n") {
                let request = Self {
                    head: head.to_owned(),
                    body: body.to_owned(),
                };
                let length = request
                    .header("content-length")
                    .and_then(|n| n.parse().ok());
                if body.len() >= length.unwrap_or(0_usize) {
                    return Some(request);
                }
            }
            if stream.read_buf(&mut bytes).await.ok()? == 0 {
                return None;
            }
        }
    }
}

/// Status and body of each path, in order; the last one stays.
pub(crate) type Script = HashMap<&'static str, Vec<(u16, String)>>;

/// What stands for the pinned instance id in a scripted body.
pub(crate) const PIN: &str = "$PIN";

/// Serves `script` on a port of its own and returns its URL. Paths that are not in the script
/// are 404.
pub(crate) async fn serve(script: Script) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let script = Arc::new(Mutex::new(script));
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            tokio::spawn(talk(stream, Arc::clone(&script)));
        }
    });
    url
}

async fn talk(mut stream: TcpStream, script: Arc<Mutex<Script>>) {
    while let Some(request) = Request::read(&mut stream).await {
        let (status, body) = {
            let mut script = script.lock().unwrap();
            match script.get_mut(request.path()) {
                Some(answers) if answers.len() > 1 => answers.remove(0),
                Some(answers) => answers[0].clone(),
                None => (404, String::new()),
            }
        };
        let pin = [PIN_HEADER, PREFILL_PIN_HEADER]
            .into_iter()
            .find_map(|name| request.header(name))
            .unwrap_or_default();
        let body = body.replace(PIN, pin);
        let reply = format!(
            "HTTP/1.1 {status} X\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        if stream.write_all(reply.as_bytes()).await.is_err() {
            return;
        }
    }
}
