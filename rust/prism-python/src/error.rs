//! Engine errors as Python exceptions: one base, one class per thing a user can act on.

use prism_engine::graph::GraphError;
use prism_engine::hybrid::SessionError;
use prism_engine::profile::ProfileError;
use prism_engine::sim::SimError;
use prism_engine::slice::splice::SpliceError;
use pyo3::exceptions::{PyException, PyOSError};
use pyo3::{PyErr, create_exception};

create_exception!(prism_core, PrismError, PyException, "Anything that goes wrong in prism_core.");
create_exception!(prism_core, GraphFormatError, PrismError, "A graph file is damaged, foreign or of another version.");
create_exception!(prism_core, ConfigError, PrismError, "Options that do not fit together or name something unknown.");
create_exception!(prism_core, DeadlockError, PrismError, "Ranks wait for each other and nothing can move.");
create_exception!(prism_core, MismatchError, PrismError, "Ranks disagree about a communication op.");
create_exception!(prism_core, ShimError, PrismError, "The preloaded libraries and the engine do not fit together.");

pub(crate) fn from_graph(error: GraphError) -> PyErr {
    match error {
        GraphError::Io { .. } => PyOSError::new_err(error.to_string()),
        GraphError::Format { .. } => GraphFormatError::new_err(error.to_string()),
        _ => ConfigError::new_err(error.to_string()),
    }
}

pub(crate) fn from_sim(error: &SimError) -> PyErr {
    let text = error.to_string();
    match error {
        SimError::Deadlock { .. } => DeadlockError::new_err(text),
        SimError::Mismatch { .. } => MismatchError::new_err(text),
        _ => ConfigError::new_err(text),
    }
}

pub(crate) fn from_session(error: &SessionError) -> PyErr {
    match error {
        SessionError::Sim(error) => from_sim(error),
        SessionError::Listen { .. } => PyOSError::new_err(error.to_string()),
        _ => ConfigError::new_err(error.to_string()),
    }
}

pub(crate) fn from_splice(error: &SpliceError) -> PyErr {
    ConfigError::new_err(error.to_string())
}

pub(crate) fn from_profile(error: &ProfileError) -> PyErr {
    ConfigError::new_err(error.to_string())
}

pub(crate) fn from_json(what: &str, error: &serde_json::Error) -> PyErr {
    ConfigError::new_err(format!("{what}: {error}"))
}
