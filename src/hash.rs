//! SHA-256 as this crate writes it everywhere: 64 lower-case hexadecimal digits.

use sha2::{Digest, Sha256};

/// The hash of some bytes.
pub(crate) fn sha256(bytes: impl AsRef<[u8]>) -> String {
    finish(Sha256::new_with_prefix(bytes))
}

/// The hash of what a hasher was given.
pub(crate) fn finish(hasher: Sha256) -> String {
    hasher
        .finalize()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn it_is_what_sha256sum_prints() {
        assert_eq!(
            super::sha256("abc"),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
    }
}
