//! The devices, through NVML.

use std::sync::mpsc;
use std::time::Duration;

use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;

use super::facts::Gpu;

/// A healthy driver answers in a fraction of this; a wedged one never does.
const LIMIT: Duration = Duration::from_secs(8);

/// Every device, or why none can be seen. A machine without a driver is ordinary.
pub(super) fn devices() -> Result<Vec<Gpu>, String> {
    let (send, receive) = mpsc::channel();
    // A call into a wedged driver cannot be interrupted, only left behind.
    std::thread::spawn(move || send.send(look().map_err(|error| words(&error))));
    receive.recv_timeout(LIMIT).unwrap_or_else(|_| {
        Err(format!(
            "the driver did not answer within {} s",
            LIMIT.as_secs()
        ))
    })
}

fn look() -> Result<Vec<Gpu>, NvmlError> {
    let nvml = Nvml::init()?;
    (0..nvml.device_count()?)
        .map(|index| {
            let device = nvml.device_by_index(index)?;
            let memory = device.memory_info()?;
            Ok(Gpu {
                index,
                uuid: device.uuid()?,
                name: device.name()?,
                used: memory.used,
                total: memory.total,
                tenants: device
                    .running_compute_processes()
                    .map_or(0, |found| found.len()),
            })
        })
        .collect()
}

fn words(error: &NvmlError) -> String {
    match error {
        NvmlError::LibloadingError(_) => "no NVIDIA driver (libnvidia-ml.so.1 is not there)".into(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_machine_without_a_driver_is_ordinary() {
        match super::devices() {
            Ok(devices) => assert!(devices.iter().all(|device| device.total > 0)),
            Err(why) => assert!(!why.is_empty()),
        }
    }
}
