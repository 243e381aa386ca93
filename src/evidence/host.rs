//! The machine that a result was made on, as far as results depend on it.

use serde::{Deserialize, Serialize};

use crate::gate::host;

/// The host, for `result.json`.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Host {
    /// Kernel release.
    pub kernel: String,
    /// Processor as it names itself.
    pub processor: String,
    /// Instruction set level; see [`cpu_level`].
    pub cpu_level: String,
    /// Cores this process may use.
    pub cores: usize,
    /// Memory that this process may use at most, in bytes.
    pub memory_bytes: u64,
}

/// Reads the host.
#[must_use]
pub fn read() -> Host {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    Host {
        kernel: host::kernel(),
        processor: field(&info, "model name").unwrap_or("unknown").to_owned(),
        cpu_level: cpu_level(&info),
        cores: host::cores(),
        memory_bytes: host::memory().map_or(0, |memory| memory.total),
    }
}

/// The instruction set level that decides how floating-point sums are grouped: kernels are chosen
/// by it, and rounding differs between them. `/proc/cpuinfo` text in, `x86-64-v4` out.
#[must_use]
pub fn cpu_level(cpuinfo: &str) -> String {
    let Some(flags) = field(cpuinfo, "flags") else {
        return std::env::consts::ARCH.to_owned();
    };
    let has = |wanted: &[&str]| {
        wanted
            .iter()
            .all(|flag| flags.split_whitespace().any(|found| found == *flag))
    };
    // Matrix units come on top of v4 and have kernels of their own.
    let level = if has(&["amx_tile", "amx_bf16"]) {
        "x86-64-v4-amx"
    } else if has(&["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"]) {
        "x86-64-v4"
    } else if has(&["avx2", "bmi1", "bmi2", "fma"]) {
        "x86-64-v3"
    } else {
        "x86-64-v2"
    };
    level.to_owned()
}

fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then(|| value.trim())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_level_is_the_highest_whose_flags_are_all_there() {
        let v3 = "flags\t\t: fpu avx avx2 bmi1 bmi2 fma";
        let v4 = format!("{v3} avx512f avx512bw avx512cd avx512dq avx512vl");
        let almost = format!("{v3} avx512f avx512bw");
        assert_eq!(cpu_level(v3), "x86-64-v3");
        assert_eq!(cpu_level(&v4), "x86-64-v4");
        assert_eq!(cpu_level(&almost), "x86-64-v3");
        assert_eq!(
            cpu_level(&format!("{v4} amx_tile amx_bf16")),
            "x86-64-v4-amx"
        );
        assert_eq!(cpu_level("flags : sse2"), "x86-64-v2");
    }

    #[test]
    fn no_flags_is_another_architecture() {
        assert_eq!(cpu_level("Features : fp asimd"), std::env::consts::ARCH);
    }
}
