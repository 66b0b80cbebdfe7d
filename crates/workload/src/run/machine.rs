//! Describes the machine that the driver runs on, from `/proc`.

use std::fs;

use serde::{Deserialize, Serialize};

/// The description of a machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// The name of the CPU.
    pub processor: String,
    /// Number of CPUs that this process may use.
    pub processors: usize,
    /// Total memory.
    pub memory_bytes: u64,
    /// The kernel release.
    pub kernel: String,
}

impl Machine {
    /// Describes this machine.
    pub fn this() -> Machine {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let field = |text: &str, name: &str| {
            let line = text.lines().find(|line| line.starts_with(name))?;
            Some(line.split_once(':')?.1.trim().to_owned())
        };
        let memory = field(&read("/proc/meminfo"), "MemTotal").unwrap_or_default();
        let kib: u64 = memory.trim_end_matches(" kB").parse().unwrap_or(0);
        Machine {
            processor: field(&read("/proc/cpuinfo"), "model name").unwrap_or_else(|| "unknown".to_owned()),
            processors: std::thread::available_parallelism().map_or(1, usize::from),
            memory_bytes: kib * 1024,
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn this_machine_has_memory_and_a_kernel() {
        let machine = super::Machine::this();
        assert!(machine.memory_bytes > 1 << 20 && !machine.kernel.is_empty(), "{machine:?}");
    }
}
