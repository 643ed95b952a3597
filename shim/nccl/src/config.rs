//! What the environment says. Read when a session or an answer needs it, not kept: a forked rank has its own values.

use prism_wire::control::{ENV_DEVICE, ENV_NCCL_VERSION, ENV_RANK, ENV_REAL_NCCL, ENV_SESSION, ENV_WORLD_SIZE};
use std::path::PathBuf;

/// Version answered by default: the one torch 2.14.1 was built for.
pub(crate) const DEFAULT_NCCL_VERSION: i32 = 23_007;

/// The device this process was told to use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Device {
    /// `libprism_cuda.so` (also when nothing was said).
    Emulated,
    /// A GPU.
    Real,
    /// Plain host memory.
    Host,
}

/// Path of the session's socket, if this process has one.
pub(crate) fn session_path() -> Option<PathBuf> {
    std::env::var_os(ENV_SESSION).filter(|path| !path.is_empty()).map(PathBuf::from)
}

/// The chosen device, or the unknown name.
pub(crate) fn device() -> Result<Device, String> {
    match std::env::var(ENV_DEVICE).unwrap_or_default().as_str() {
        "" | "auto" | "emulated" => Ok(Device::Emulated),
        "real" => Ok(Device::Real),
        "host" => Ok(Device::Host),
        // "emulated:h100-sxm" names the profile too.
        name if name.starts_with("emulated:") => Ok(Device::Emulated),
        name => Err(name.to_owned()),
    }
}

/// Path of the real NCCL, if there is one to pass calls to.
pub(crate) fn real_nccl() -> Option<PathBuf> {
    std::env::var_os(ENV_REAL_NCCL).filter(|path| !path.is_empty()).map(PathBuf::from)
}

/// The number in environment variable `name`.
pub(crate) fn number(name: &str) -> Option<u32> {
    std::env::var(name).ok()?.trim().parse().ok()
}

/// The rank this process plays.
pub(crate) fn rank() -> Option<u32> {
    number(ENV_RANK).or_else(|| number("RANK"))
}

/// World size of the target job.
pub(crate) fn world_size() -> Option<u32> {
    number(ENV_WORLD_SIZE).or_else(|| number("WORLD_SIZE"))
}

/// The version code to answer, from a code (`23007`) or a dotted version (`2.30.7`), or the text that is neither.
pub(crate) fn nccl_version() -> Result<i32, String> {
    match std::env::var(ENV_NCCL_VERSION) {
        Ok(text) if !text.is_empty() => parse_version(&text).ok_or(text),
        _ => Ok(DEFAULT_NCCL_VERSION),
    }
}

fn parse_version(text: &str) -> Option<i32> {
    let parts: Vec<i32> = text.split('.').map(|part| part.parse().ok()).collect::<Option<_>>()?;
    match parts[..] {
        [code @ 2_000..100_000] => Some(code),
        [major @ 0..10, minor @ 0..100, patch @ 0..100] => Some(crate::abi::version_code(major, minor, patch)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::parse_version;

    #[test]
    fn versions_are_codes_or_dotted() {
        assert_eq!(parse_version("23007"), Some(23_007));
        assert_eq!(parse_version("2.30.7"), Some(23_007));
        assert_eq!(parse_version("2.8.4"), Some(2_804));
        for bad in ["", "two", "2.30", "1", "2.30.x", "-23007"] {
            assert_eq!(parse_version(bad), None, "{bad}");
        }
    }
}
