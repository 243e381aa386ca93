//! One connection: bounded lines in, bounded lines out.
//!
//! A line that is too long or not of the protocol ends that connection and nothing else.

use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;

use super::log;
use crate::stack::protocol::{Ask, Tell};

/// Longest line of a client. Theirs are a few hundred bytes.
const LINE_MAX: u64 = 16 * 1024;
/// Lines that a client may be behind with reading before it is dropped.
const OUTBOX: usize = 256;
/// A client that does not read for this long is dropped.
const WRITE_WITHIN: Duration = Duration::from_secs(60);

/// Numbers connections in order of arrival.
pub(super) type ConnId = u64;

/// What happens on connections.
#[derive(Debug)]
pub(super) enum Event {
    /// Somebody connected.
    Opened(ConnId, mpsc::Sender<Tell>),
    /// Somebody said something.
    Said(ConnId, Ask),
    /// Somebody is gone.
    Closed(ConnId),
}

/// Accepts for ever.
pub(super) async fn accept(listener: UnixListener, events: mpsc::Sender<Event>) {
    let mut id = 0;
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                id += 1;
                tokio::spawn(serve(stream, id, events.clone()));
            }
            Err(error) => {
                // Out of descriptors, most likely: it passes when connections end.
                log(&format!("accept: {error}"));
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn serve(stream: UnixStream, id: ConnId, events: mpsc::Sender<Event>) {
    let (outbox, tells) = mpsc::channel(OUTBOX);
    if events.send(Event::Opened(id, outbox)).await.is_err() {
        return;
    }
    let (reader, writer) = stream.into_split();
    tokio::select! {
        why = read(reader, id, &events) => if let Err(why) = why {
            log(&format!("connection {id}: {why}"));
        },
        // Ends when the desk drops the outbox: the client then reads EOF.
        () = write(writer, tells) => {}
    }
    let _ = events.send(Event::Closed(id)).await;
}

async fn read(
    reader: OwnedReadHalf,
    id: ConnId,
    events: &mpsc::Sender<Event>,
) -> Result<(), String> {
    let mut reader = BufReader::new(reader);
    loop {
        let mut line = Vec::new();
        let count = (&mut reader)
            .take(LINE_MAX)
            .read_until(b'\n', &mut line)
            .await
            .map_err(|error| error.to_string())?;
        if count == 0 {
            return Ok(());
        }
        if line.last() != Some(&b'\n') {
            return Err("half a line, or a line that is too long".to_owned());
        }
        let ask = serde_json::from_slice(&line)
            .map_err(|error| format!("not of the protocol: {error}"))?;
        if events.send(Event::Said(id, ask)).await.is_err() {
            return Ok(());
        }
    }
}

async fn write(mut writer: OwnedWriteHalf, mut tells: mpsc::Receiver<Tell>) {
    while let Some(tell) = tells.recv().await {
        let mut line = serde_json::to_vec(&tell).unwrap_or_default();
        line.push(b'\n');
        match tokio::time::timeout(WRITE_WITHIN, writer.write_all(&line)).await {
            Ok(Ok(())) => {}
            _ => return,
        }
    }
}
