//! dev
#[path = "integration/sim/mod.rs"]
mod sim;
