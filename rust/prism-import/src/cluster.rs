//! The cluster that imported programs run on where nobody named one.

use crate::ImportError;
use prism_engine::profile::Profile;

/// The built-in profile of an import that tells no device.
pub(crate) const DEFAULT_PROFILE: &str = "h100-sxm";

/// A built-in profile.
pub(crate) fn builtin(name: &str) -> Result<Profile, ImportError> {
    Profile::builtin(name).map_err(|error| ImportError::unfit(error.to_string()))
}

/// The profile that was asked for, or [`DEFAULT_PROFILE`].
pub(crate) fn profile_or_default(asked: Option<&Profile>) -> Result<Profile, ImportError> {
    asked.map_or_else(|| builtin(DEFAULT_PROFILE), |profile| Ok(profile.clone()))
}
