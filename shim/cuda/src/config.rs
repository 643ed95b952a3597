//! The profile of the emulated device and host, as told by the engine's welcome message.

use crate::session::HostCost;
use prism_wire::control::{CONFIG_FORESIGHT, CONFIG_HOST_TIME, HOST_TIME_MEASURED};
use std::collections::BTreeMap;
use std::ffi::{CStr, CString};

/// What every card of the emulated node is.
#[derive(Clone, Debug)]
pub(crate) struct DeviceProfile {
    /// Marketing name.
    pub(crate) name: String,
    /// Memory of the card in bytes.
    pub(crate) memory_bytes: u64,
    /// Memory the driver's context takes before the program's first allocation.
    pub(crate) context_bytes: u64,
    /// Streaming multiprocessors.
    pub(crate) sm_count: i32,
    /// Compute capability, major part.
    pub(crate) major: i32,
    /// Compute capability, minor part.
    pub(crate) minor: i32,
    /// L2 cache.
    pub(crate) l2_bytes: i32,
    /// Shared memory of one multiprocessor.
    pub(crate) shared_memory_per_sm_bytes: u64,
    /// Shared memory of one block, after opting in.
    pub(crate) shared_memory_per_block_optin_bytes: u64,
    /// Boost clock.
    pub(crate) clock_khz: i32,
    /// Memory clock.
    pub(crate) memory_clock_khz: i32,
    /// Memory bus width.
    pub(crate) memory_bus_bits: i32,
    /// Cards of the emulated node.
    pub(crate) count: i32,
}

/// Costs of host calls in ns, by [`HostCost`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostCosts([i64; 7]);

/// Key and default of each host cost, in the order of [`HostCost`].
const HOST_COSTS: [(&str, i64); 7] = [
    ("host.kernel_launch_ns", 4_000),
    ("host.memcpy_ns", 6_000),
    ("host.event_ns", 1_000),
    ("host.sync_ns", 2_000),
    ("host.malloc_ns", 100_000),
    ("host.clock_read_ns", 20),
    ("host.query_ns", 600),
];

impl HostCosts {
    /// The cost of one call.
    #[inline]
    pub(crate) fn cost(&self, cost: HostCost) -> i64 {
        self.0[cost as usize]
    }
}

/// The parsed configuration text.
pub(crate) struct Config {
    /// The emulated card.
    pub(crate) device: DeviceProfile,
    /// The emulated host.
    pub(crate) host: HostCosts,
    /// Is host time measured instead?
    pub(crate) measures_host: bool,
    /// Does equal work on an idle stream take equal time?
    pub(crate) foresees: bool,
    values: BTreeMap<CString, CString>,
}

impl Config {
    /// Parses lines `key=value`. A missing or malformed key of the device is an error that names the key.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let mut lines = BTreeMap::new();
        for line in text.lines().filter(|line| !line.trim().is_empty()) {
            let (key, value) = line.split_once('=').ok_or_else(|| format!("profile line without '=': {line}"))?;
            lines.insert(key.trim().to_owned(), value.trim().to_owned());
        }
        let device = DeviceProfile::parse(&lines)?;
        let mut host = HostCosts([0; 7]);
        for (slot, (key, default)) in host.0.iter_mut().zip(HOST_COSTS) {
            *slot = optional(&lines, key)?.unwrap_or(default);
            if *slot < 0 {
                return Err(format!("profile key {key} is negative"));
            }
        }
        let measures_host = lines.get(CONFIG_HOST_TIME).is_some_and(|value| value == HOST_TIME_MEASURED);
        let foresees = lines.get(CONFIG_FORESIGHT).is_some_and(|value| value == "1");
        let c_string = |text: String| CString::new(text).map_err(|_| "profile text with a zero byte".to_owned());
        let values = lines
            .into_iter()
            .map(|(key, value)| Ok((c_string(key)?, c_string(value)?)))
            .collect::<Result<_, String>>()?;
        Ok(Self { device, host, measures_host, foresees, values })
    }

    /// The value of a key of the configuration text.
    pub(crate) fn value(&self, key: &CStr) -> Option<&CStr> {
        self.values.get(key).map(CString::as_c_str)
    }
}

impl DeviceProfile {
    fn parse(lines: &BTreeMap<String, String>) -> Result<Self, String> {
        let capability: String = required(lines, "device.compute_capability")?;
        let (major, minor) = capability
            .split_once('.')
            .and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)))
            .ok_or_else(|| format!("profile key device.compute_capability has the bad value {capability}"))?;
        let profile = Self {
            name: required(lines, "device.name")?,
            memory_bytes: required(lines, "device.memory_bytes")?,
            context_bytes: optional(lines, "device.context_bytes")?.unwrap_or(0),
            sm_count: required(lines, "device.sm_count")?,
            major,
            minor,
            l2_bytes: required(lines, "device.l2_bytes")?,
            shared_memory_per_sm_bytes: required(lines, "device.shared_memory_per_sm_bytes")?,
            shared_memory_per_block_optin_bytes: required(lines, "device.shared_memory_per_block_optin_bytes")?,
            clock_khz: required(lines, "device.clock_khz")?,
            memory_clock_khz: required(lines, "device.memory_clock_khz")?,
            memory_bus_bits: required(lines, "device.memory_bus_bits")?,
            count: required(lines, "node.gpus")?,
        };
        if !(1..=64).contains(&profile.count) {
            return Err(format!("profile key node.gpus has the bad value {}", profile.count));
        }
        if profile.memory_bytes == 0 || profile.memory_bytes > 1 << 39 {
            return Err(format!("profile key device.memory_bytes has the bad value {}", profile.memory_bytes));
        }
        if profile.context_bytes >= profile.memory_bytes {
            return Err("profile key device.context_bytes leaves no memory".to_owned());
        }
        Ok(profile)
    }
}

fn required<T: std::str::FromStr>(lines: &BTreeMap<String, String>, key: &str) -> Result<T, String> {
    optional(lines, key)?.ok_or_else(|| format!("the profile has no key {key}"))
}

fn optional<T: std::str::FromStr>(lines: &BTreeMap<String, String>, key: &str) -> Result<Option<T>, String> {
    let Some(text) = lines.get(key) else { return Ok(None) };
    text.parse().map(Some).map_err(|_| format!("profile key {key} has the bad value {text}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "device.name=NVIDIA H100 80GB HBM3\ndevice.memory_bytes=85899345920\ndevice.sm_count=132\n\
        device.compute_capability=9.0\ndevice.l2_bytes=52428800\ndevice.shared_memory_per_sm_bytes=233472\n\
        device.shared_memory_per_block_optin_bytes=232448\ndevice.clock_khz=1980000\ndevice.memory_clock_khz=2619000\n\
        device.memory_bus_bits=5120\nnode.gpus=8\nhost.event_ns=7\n";

    #[test]
    fn parses_a_profile() {
        let config = Config::parse(TEXT).expect("complete profile");
        assert_eq!((config.device.major, config.device.minor), (9, 0));
        assert_eq!(config.host.cost(HostCost::Event), 7);
        assert_eq!(config.host.cost(HostCost::ClockRead), 20);
        assert_eq!(config.value(c"device.sm_count"), Some(c"132"));
        assert_eq!(config.value(c"device.none"), None);
    }

    #[test]
    fn names_the_missing_key() {
        let text = TEXT.replace("device.l2_bytes=52428800\n", "");
        assert_eq!(Config::parse(&text).err().as_deref(), Some("the profile has no key device.l2_bytes"));
    }

    #[test]
    fn names_the_bad_value() {
        let text = TEXT.replace("node.gpus=8", "node.gpus=none");
        assert_eq!(Config::parse(&text).err().as_deref(), Some("profile key node.gpus has the bad value none"));
    }
}
