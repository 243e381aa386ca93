//! A socket that remembers when it was last read from, and when a request was first written to
//! it: stamps are taken where the bytes cross into this process, below everything that may hold
//! them up.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};

use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use crate::stack::clock::monotonic_ns;

/// Shared with whoever asks. Relaxed: one task drives a socket and reads its stamps.
#[derive(Debug, Default)]
pub(super) struct Stamps {
    read: AtomicU64,
    /// 0 until something is written.
    written: AtomicU64,
}

impl Stamps {
    /// When the last read returned: nanoseconds of `CLOCK_MONOTONIC`.
    pub(super) fn read_ns(&self) -> u64 {
        self.read.load(Ordering::Relaxed)
    }

    /// Right before the first write since [`Self::arm`], if there was one.
    pub(super) fn written_ns(&self) -> Option<u64> {
        Some(self.written.load(Ordering::Relaxed)).filter(|ns| *ns > 0)
    }

    /// Another request begins.
    pub(super) fn arm(&self) {
        self.written.store(0, Ordering::Relaxed);
    }

    fn writes(&self) {
        if self.written.load(Ordering::Relaxed) == 0 {
            self.written.store(monotonic_ns(), Ordering::Relaxed);
        }
    }
}

/// The socket.
#[derive(Debug)]
pub(super) struct Tap {
    socket: TokioIo<TcpStream>,
    stamps: Arc<Stamps>,
}

impl Tap {
    pub(super) fn new(socket: TcpStream, stamps: Arc<Stamps>) -> Self {
        Self {
            socket: TokioIo::new(socket),
            stamps,
        }
    }
}

impl Read for Tap {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.socket).poll_read(context, buffer);
        if read.is_ready() {
            self.stamps.read.store(monotonic_ns(), Ordering::Relaxed);
        }
        read
    }
}

impl Write for Tap {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.stamps.writes();
        Pin::new(&mut self.socket).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(context)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.stamps.writes();
        Pin::new(&mut self.socket).poll_write_vectored(context, pieces)
    }
}
