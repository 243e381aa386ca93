//! Claims in the frames of the real service. Simulated workers speak in lines; these come from
//! the harness, which asks every service alike, and asks for what it cannot have. So each is refused,
//! in the real one's order and words.

use std::io;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;

use super::{OTHER_DIGEST, Service, holder};
use crate::stack::sidecar::claim::{self, Message};

/// Whether what a client says first is a frame: a length below 2^24 begins with a zero, a line never.
pub(super) async fn is_frame(stream: &mut BufReader<UnixStream>) -> io::Result<bool> {
    match stream.fill_buf().await?.first() {
        Some(first) => Ok(*first == 0),
        None => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

/// Refuses one claim.
pub(super) async fn answer(
    service: &Service,
    stream: &mut BufReader<UnixStream>,
    pid: Option<i32>,
) -> io::Result<()> {
    let mut header = [0; 4];
    stream.read_exact(&mut header).await?;
    let Some(length) = claim::length(header) else {
        let words = "invalid frame length".to_owned();
        return stream.write_all(&claim::refusal(words)).await;
    };
    let mut body = vec![0; length];
    stream.read_exact(&mut body).await?;
    let words = match claim::read(&body) {
        Some(Message::Claim {
            guard_index,
            compatibility_digest,
            control_host,
            control_port,
            ..
        }) => {
            let control = format!("{control_host}:{control_port}");
            let guard = usize::try_from(guard_index).ok();
            match (
                holder(pid),
                guard.and_then(|index| service.guards.get(index)),
            ) {
                (Err(why), _) => why,
                _ if compatibility_digest != service.digest => OTHER_DIGEST.to_owned(),
                (_, None) => format!("guard_index {guard_index} is out of range"),
                (_, Some(guard)) => guard.refuse(&control).await,
            }
        }
        _ => "invalid message payload".to_owned(),
    };
    stream.write_all(&claim::refusal(words)).await
}
