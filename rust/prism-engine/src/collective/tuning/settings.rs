//! NCCL's environment variables, as far as they change what a collective costs.

use super::Function;
use super::tables::Version;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use thiserror::Error;

/// Algorithms by NCCL's name and number.
const ALGORITHMS: [&str; 7] = ["Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT"];
const PROTOCOLS: [&str; 3] = ["LL", "LL128", "Simple"];
const TREE: u8 = 1 << 0;
const RING: u8 = 1 << 1;
const COLLNET_DIRECT: u8 = 1 << 2;
const COLLNET_CHAIN: u8 = 1 << 3;
const NVLS: u8 = 1 << 4;
const NVLS_TREE: u8 = 1 << 5;
const PAT: u8 = 1 << 6;

/// Variables that are understood. `NCCL_COLLNET_ENABLE` only switches algorithms that are left out of the choice anyway.
const NAMES: [&str; 17] = [
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_NRINGS",
    "NCCL_MAX_NRINGS",
    "NCCL_MIN_CTAS",
    "NCCL_MAX_CTAS",
    "NCCL_NTHREADS",
    "NCCL_LL128_NTHREADS",
    "NCCL_BUFFSIZE",
    "NCCL_LL_BUFFSIZE",
    "NCCL_LL128_BUFFSIZE",
    "NCCL_NET_OVERHEAD",
    "NCCL_NVLS_ENABLE",
    "NCCL_COLLNET_ENABLE",
    "NCCL_PAT_ENABLE",
];

/// Most that a buffer or a number of threads may be: beyond it is a slip of the pen.
const MOST: u64 = 1 << 40;

/// A variable that cannot be followed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{name}={value}: {reason}")]
pub struct SettingError {
    /// Name of the variable.
    pub name: String,
    /// Its value.
    pub value: String,
    /// What is wrong with it, and what is possible.
    pub reason: String,
}

/// The settings of one job. Written as a table of names and values.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "BTreeMap<String, String>", into = "BTreeMap<String, String>")]
pub struct NcclSettings {
    pairs: BTreeMap<String, String>,
    algorithms: Option<Lists>,
    protocols: Option<Lists>,
    numbers: BTreeMap<&'static str, u64>,
}

/// A set of elements by function, and whether functions were named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Lists {
    enabled: [u8; 5],
    /// Functions about which something was said.
    said: [bool; 5],
    by_function: bool,
}

impl TryFrom<BTreeMap<String, String>> for NcclSettings {
    type Error = SettingError;

    fn try_from(pairs: BTreeMap<String, String>) -> Result<Self, SettingError> {
        Self::parse(pairs)
    }
}

impl From<NcclSettings> for BTreeMap<String, String> {
    fn from(settings: NcclSettings) -> Self {
        settings.pairs
    }
}

impl NcclSettings {
    /// Reads variables. An unknown variable or value is an error that names it, and so is an algorithm that is not modelled
    /// where no other is left.
    pub fn parse<K: Into<String>, V: Into<String>>(
        pairs: impl IntoIterator<Item = (K, V)>,
    ) -> Result<Self, SettingError> {
        let mut settings = Self::default();
        for (name, value) in pairs {
            let (name, value) = (name.into(), value.into());
            let error = |reason: String| SettingError { name: name.clone(), value: value.clone(), reason };
            if value.contains(char::is_control) {
                return Err(error("holds a control character".to_owned()));
            }
            match NAMES.iter().copied().find(|known| *known == name) {
                None => {
                    let reason = format!("changes nothing in the model (understood are: {})", NAMES.join(", "));
                    return Err(error(reason));
                }
                Some("NCCL_ALGO") => settings.algorithms = Some(algorithms(&value).map_err(error)?),
                Some("NCCL_PROTO") => settings.protocols = Some(parse_list(&value, &PROTOCOLS).map_err(error)?),
                Some(known) => {
                    settings.numbers.insert(known, parse_number(known, value.trim()).map_err(error)?);
                }
            }
            settings.pairs.insert(name, value);
        }
        Ok(settings)
    }

    /// Names of the variables that [`NcclSettings::parse`] understands.
    #[must_use]
    pub fn names() -> &'static [&'static str] {
        &NAMES
    }

    /// The variables as given, by name.
    #[must_use]
    pub fn pairs(&self) -> &BTreeMap<String, String> {
        &self.pairs
    }

    /// Is nothing set?
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.pairs.is_empty()
    }

    /// Does this version of NCCL understand the settings in this form?
    pub fn check(&self, version: Version) -> Result<(), SettingError> {
        if version.constants().rules.settings_by_function {
            return Ok(());
        }
        for (name, lists) in [("NCCL_ALGO", self.algorithms), ("NCCL_PROTO", self.protocols)] {
            if lists.is_some_and(|lists| lists.by_function) {
                let reason = format!("NCCL {version} knows no lists by function (2.24 is the first that does)");
                return Err(SettingError { name: name.to_owned(), value: self.pairs[name].clone(), reason });
            }
        }
        Ok(())
    }

    /// May a function take an algorithm?
    #[must_use]
    pub fn allows(&self, function: Function, algorithm: super::super::Algorithm) -> bool {
        use super::super::Algorithm as A;
        let bit = match algorithm {
            A::Tree => TREE,
            A::Nvls => NVLS,
            A::NvlsTree => NVLS_TREE,
            A::Pat => PAT,
            A::Ring | A::Chain | A::Direct => RING,
        };
        self.algorithms.is_none_or(|lists| lists.enabled[function as usize] & bit != 0)
    }

    /// Is something on that is so by default?
    #[must_use]
    pub fn switch(&self, name: &str) -> bool {
        self.numbers.get(name).is_none_or(|value| *value != 0)
    }

    /// May a function use the protocol with this number? `None`: nothing is said.
    #[must_use]
    pub fn allows_protocol(&self, function: Function, protocol: usize) -> Option<bool> {
        let lists = self.protocols?;
        lists.said[function as usize].then(|| lists.enabled[function as usize] & (1 << protocol) != 0)
    }

    /// Channels, if a communicator by itself would have so many and can have at most `most`.
    #[must_use]
    pub fn channels(&self, own: u32, most: u32) -> u32 {
        let number = |name| self.numbers.get(name).map(|value| (*value).min(u64::from(most)) as u32);
        let max = number("NCCL_MAX_NCHANNELS").or(number("NCCL_MAX_NRINGS")).unwrap_or(most).max(1);
        let max = max.min(number("NCCL_MAX_CTAS").unwrap_or(most).max(1));
        let min = number("NCCL_MIN_NCHANNELS").or(number("NCCL_MIN_NRINGS")).unwrap_or(0);
        let min = min.max(number("NCCL_MIN_CTAS").unwrap_or(0));
        // The minimum has the last word: channels are cut down, and then duplicated.
        own.clamp(1, most).min(max).max(min)
    }

    /// Threads of a block under the protocol with this number; `own` if nothing is said. Out of range, NCCL takes the nearest
    /// allowed number, and the most where it is no multiple of 32.
    #[must_use]
    pub fn threads(&self, protocol: usize, own: u32) -> u32 {
        let (name, least, most): (_, u64, u32) =
            if protocol == 1 { ("NCCL_LL128_NTHREADS", 160, 640) } else { ("NCCL_NTHREADS", 64, 512) };
        match self.numbers.get(name) {
            None | Some(0) => own,
            Some(threads) if threads % 32 != 0 => most,
            Some(threads) => (*threads).clamp(least, u64::from(most)) as u32,
        }
    }

    /// Buffer of a connection under the protocol with this number.
    #[must_use]
    pub fn buffer_bytes(&self, protocol: usize) -> u64 {
        // src/init.cc: 8 lines of 16 bytes, and 120 words of 8 bytes, per thread and step; 4 MiB.
        let (name, own) = [
            ("NCCL_LL_BUFFSIZE", 8 * 16 * 512 * 8),
            ("NCCL_LL128_BUFFSIZE", 120 * 8 * 640 * 8),
            ("NCCL_BUFFSIZE", 4 << 20),
        ][protocol];
        self.numbers.get(name).copied().unwrap_or(own)
    }

    /// Overhead of posting to the network, in microseconds.
    #[must_use]
    pub fn network_overhead(&self) -> Option<f64> {
        self.numbers.get("NCCL_NET_OVERHEAD").map(|ns| *ns as f64 * 1e-3)
    }
}

fn parse_number(name: &str, text: &str) -> Result<u64, String> {
    let number: u64 = text.parse().map_err(|_| "must be a whole number".to_owned())?;
    let is_buffer = name.ends_with("BUFFSIZE");
    let (least, most) = match name {
        // Eight steps of at least one grain each.
        _ if is_buffer => (1 << 15, MOST),
        "NCCL_NVLS_ENABLE" | "NCCL_COLLNET_ENABLE" | "NCCL_PAT_ENABLE" => (0, 2),
        name if name.starts_with("NCCL_MAX_") => (1, MOST),
        _ => (0, MOST),
    };
    if (least..=most).contains(&number) { Ok(number) } else { Err(format!("must be from {least} to {most}")) }
}

fn algorithms(text: &str) -> Result<Lists, String> {
    let lists = parse_list(text, &ALGORITHMS)?;
    for function in Function::ALL.into_iter().rev() {
        let enabled = lists.enabled[function as usize];
        let (modelled, others) = match function {
            Function::AllReduce => (TREE | RING | NVLS | NVLS_TREE, COLLNET_DIRECT | COLLNET_CHAIN),
            Function::AllGather | Function::ReduceScatter => (RING | NVLS | PAT, COLLNET_DIRECT),
            Function::Broadcast | Function::Reduce => (RING, 0),
        };
        if enabled & modelled == 0 && enabled & others != 0 {
            let left: Vec<_> = (0..ALGORITHMS.len())
                .filter(|number| enabled & others & (1 << number) != 0)
                .map(|number| ALGORITHMS[number])
                .collect();
            let name = function.name();
            return Err(format!(
                "leaves only {} for {name}, which is not modelled; add {}",
                left.join(", "),
                if function == Function::AllReduce { "Ring or Tree" } else { "Ring" }
            ));
        }
    }
    Ok(lists)
}

/// `a,b`, `^a,b` (all but), `a,b;function:c;function:^d`.
fn parse_list(text: &str, elements: &[&str]) -> Result<Lists, String> {
    let mut lists = Lists { enabled: [u8::MAX; 5], said: [false; 5], by_function: false };
    for (at, entry) in text.split(';').filter(|entry| !entry.trim().is_empty()).enumerate() {
        let (function, list) = match entry.split_once(':') {
            Some((function, list)) => (Some(function.trim()), list),
            None if at == 0 => (None, entry),
            None => return Err(format!("`{entry}` names no function (only the first list may do without)")),
        };
        let (is_exclusion, names) = match list.trim().strip_prefix('^') {
            Some(names) => (true, names),
            None => (false, list),
        };
        let mut set = 0;
        for name in names.split(',').map(str::trim).filter(|name| !name.is_empty()) {
            let number = elements.iter().position(|element| element.eq_ignore_ascii_case(name));
            let known = elements.join(", ");
            set |= 1 << number.ok_or_else(|| format!("`{name}` is unknown (there are: {known})"))?;
        }
        let enabled = if is_exclusion { !set } else { set };
        let mut found = false;
        for known in Function::ALL {
            if function.is_none_or(|function| function.eq_ignore_ascii_case(known.name())) {
                (lists.enabled[known as usize], lists.said[known as usize], found) = (enabled, true, true);
            }
        }
        if !found {
            let known = Function::ALL.map(Function::name).join(", ");
            return Err(format!("function `{}` is unknown (there are: {known})", function.unwrap_or_default()));
        }
        lists.by_function |= function.is_some();
    }
    Ok(lists)
}
