//! What a `kvcr_service` is asked, in the words of a claim that it cannot grant, and what its answer
//! means. Pure: bytes and sentences.
//!
//! The service looks at a claim in this order (kvcr 0.1.1): may it watch the process that asks, is
//! the digest its own, is the pool free, can it answer where the claimant did. So a claim with the
//! right digest and an address that is no host's is refused, and the refusal says how far it got.
//! Two more things stand in the way of a grant, should that address be one after all: it names two
//! pools, where there is one, and a pool that was claimed before had another.

use std::net::SocketAddrV4;

use serde::{Deserialize, Serialize};

/// Reserved for documentation (RFC 5737): nobody's.
pub(crate) const NOWHERE: &str = "192.0.2.1";
const PORT: u16 = 9;
const VERSION: u8 = 1;
/// The service's own limit.
pub(crate) const FRAME_MAX: usize = 1 << 20;

/// What is asked, in the fields and names of KVCR's protocol.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum Message {
    /// A claim.
    Claim {
        /// Which Guard of the service.
        guard_index: u32,
        /// Must be the service's.
        compatibility_digest: String,
        /// What the claimant's tier looks like.
        tier_config: Tier,
        /// Where the claimant answers peers.
        control_host: String,
        /// Its port there.
        control_port: u16,
        /// Of the protocol.
        version: u8,
    },
    /// A claim was not served after all.
    Release {
        /// Of the protocol.
        version: u8,
        /// Whether it ever was.
        activated: bool,
    },
    /// A refusal, in words.
    Error {
        /// Why.
        message: String,
        /// Of the protocol.
        version: u8,
    },
    /// Whatever else may be said.
    #[serde(other)]
    Other,
}

/// See [`Message::Claim`].
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) struct Tier {
    /// Name and bytes of a block, for each pool.
    pub(crate) pool_layouts: Vec<(String, u64)>,
    /// A disk behind it.
    pub(crate) g3: Option<bool>,
}

/// The question, in a frame.
pub(crate) fn question(digest: &str) -> Vec<u8> {
    let pool = |name: &str| (name.to_owned(), 4096);
    frame(&Message::Claim {
        guard_index: 0,
        compatibility_digest: digest.to_owned(),
        tier_config: Tier {
            pool_layouts: vec![pool("asked"), pool("only")],
            g3: None,
        },
        control_host: NOWHERE.to_owned(),
        control_port: PORT,
        version: VERSION,
    })
}

/// Takes back what should never have been granted.
pub(crate) fn release() -> Vec<u8> {
    frame(&Message::Release {
        version: VERSION,
        activated: false,
    })
}

/// A refusal as the service writes it.
pub(crate) fn refusal(message: String) -> Vec<u8> {
    frame(&Message::Error {
        message,
        version: VERSION,
    })
}

fn frame(message: &Message) -> Vec<u8> {
    // Numbers and texts only: nothing that could fail, and an empty frame is refused.
    let body = rmp_serde::to_vec_named(message).unwrap_or_default();
    let length = u32::try_from(body.len()).unwrap_or(0);
    [&length.to_be_bytes()[..], &body].concat()
}

/// Bytes of the message behind this header; `None` for what is no header of this protocol.
pub(crate) fn length(header: [u8; 4]) -> Option<usize> {
    let length = usize::try_from(u32::from_be_bytes(header)).ok()?;
    (1..=FRAME_MAX).contains(&length).then_some(length)
}

/// The message of a frame, less its header.
pub(crate) fn read(body: &[u8]) -> Option<Message> {
    rmp_serde::from_slice(body).ok()
}

/// What a service says of its pool.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) enum Answer {
    /// Nobody had it yet.
    Free,
    /// It was claimed before, and whoever claims it next must answer here.
    Bound(SocketAddrV4),
    /// A living worker has it.
    Held,
    /// It changes hands, or the service is going away.
    Busy(String),
    /// It was started with another digest.
    OtherDigest,
    /// It cannot watch a process of ours.
    Unwatched(String),
    /// It granted what nobody can have.
    Granted,
    /// Words that nobody here knows.
    Strange(String),
}

impl Answer {
    /// What `message` means.
    pub(crate) fn of(message: &Message) -> Self {
        match message {
            Message::Error { message, .. } => Self::refused(message),
            Message::Other => Self::Granted,
            other => Self::Strange(format!("{other:?}")),
        }
    }

    fn refused(words: &str) -> Self {
        let said = |part: &str| words.contains(part);
        if said("pidfd") {
            Self::Unwatched(words.to_owned())
        } else if said("digest does not match") {
            Self::OtherDigest
        } else if said("is held by another worker") {
            Self::Held
        } else if said("is busy") || said("registry is closed") {
            Self::Busy(words.to_owned())
        } else if said("cannot be moved to") {
            let address = words
                .split_once(" answers on ")
                .and_then(|(_, rest)| rest.split_whitespace().next()?.parse().ok());
            address.map_or_else(|| Self::Strange(words.to_owned()), Self::Bound)
        } else if said("control listener") && said("is unavailable")
            // The address was one after all.
            || said("pool layout must match")
            || said("another tier configuration")
        {
            Self::Free
        } else {
            Self::Strange(words.to_owned())
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Written by msgspec, of the structs of kvcr 0.1.1.
    const REAL_ERROR: &[u8] =
        b"\x83\xa4type\xa5error\xa7message\xd9&KVCR Guard 0 is held by another worker\xa7version\x01";

    #[test]
    fn an_answer_of_the_real_service_is_read() {
        let message = read(REAL_ERROR).unwrap();
        assert_eq!(Answer::of(&message), Answer::Held);
    }

    /// These bytes were read by kvcr 0.1.1's own decoder of claims, with every field as it is here.
    const READ: &[u8] = b"\x87\xa4type\xa5claim\xabguard_index\x00\xb4compatibility_digest\xa3abc\
        \xabtier_config\x82\xacpool_layouts\x92\x92\xa5asked\xcd\x10\x00\x92\xa4only\xcd\x10\x00\xa2g3\xc0\
        \xaccontrol_host\xa9192.0.2.1\xaccontrol_port\x09\xa7version\x01";

    #[test]
    fn the_question_is_what_the_real_service_read() {
        assert_eq!(&question("abc")[4..], READ);
    }

    #[test]
    fn the_question_has_every_field_of_a_claim_by_its_name() {
        let asked = question("abc");
        let (header, body) = asked.split_first_chunk::<4>().unwrap();
        assert_eq!(length(*header), Some(body.len()));
        // A map, not an array: msgspec reads structs by name.
        assert_eq!(body[0] & 0xf0, 0x80);
        let text = String::from_utf8_lossy(body);
        for name in [
            "type",
            "claim",
            "guard_index",
            "compatibility_digest",
            "tier_config",
            "pool_layouts",
            "g3",
            "control_host",
            "control_port",
            "version",
        ] {
            assert!(text.contains(name), "{name}");
        }
        let Some(Message::Claim { tier_config, .. }) = read(body) else {
            panic!("not what was written");
        };
        assert_eq!(tier_config.pool_layouts.len(), 2);
    }

    #[test]
    fn every_refusal_of_a_claim_says_how_far_it_got() {
        let of = |words: &str| Answer::refused(words);
        assert_eq!(
            of("KVCR compatibility digest does not match the service"),
            Answer::OtherDigest
        );
        for words in [
            "worker pidfd is required without SO_PEERPIDFD",
            "worker pidfd does not match socket peer",
            "cannot verify worker pidfd",
        ] {
            assert_eq!(of(words), Answer::Unwatched(words.to_owned()));
        }
        assert_eq!(
            of("KVCR Guard 0 answers on 127.0.0.1:21290 and cannot be moved to 192.0.2.1:9"),
            Answer::Bound("127.0.0.1:21290".parse().unwrap())
        );
        assert!(matches!(of("KVCR Guard 0 is busy"), Answer::Busy(_)));
        assert!(matches!(
            of("KVCR pool registry is closed"),
            Answer::Busy(_)
        ));
        for words in [
            "KVCR Guard 0 control listener 192.0.2.1:9 is unavailable: [Errno 99]",
            "pool layout must match the number of pools in the Guard",
            "KVCR pool was claimed with another tier configuration",
        ] {
            assert_eq!(of(words), Answer::Free, "{words}");
        }
        assert!(matches!(of("no"), Answer::Strange(_)));
        let moved = "KVCR Guard 0 answers on somewhere:1 and cannot be moved to 192.0.2.1:9";
        assert!(matches!(of(moved), Answer::Strange(_)));
    }

    #[test]
    fn what_another_program_says_is_no_frame() {
        assert_eq!(length(*b"HTTP"), None);
        assert_eq!(length([0; 4]), None);
        assert_eq!(length([0, 0, 0, 7]), Some(7));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            if let Some(message) = read(&bytes) {
                let _ = Answer::of(&message);
            }
        }

        #[test]
        fn a_refusal_comes_back_as_it_was_said(words in ".{0,300}") {
            let bytes = refusal(words.clone());
            let message = read(&bytes[4..]);
            prop_assert_eq!(message, Some(Message::Error { message: words, version: VERSION }));
        }
    }
}
