//! What nobody should hand over and somebody will: each is an error that says where, within bounded memory.

mod dependencies;
mod files;
mod members;
mod numbers;
mod perturbations;

use prism_engine::graph::Graph;
use prism_engine::profile::Profile;
use prism_engine::replay::{ReplayOptions, ReplayResult, replay};
use prism_engine::sim::SimError;
use std::sync::Arc;

fn options() -> ReplayOptions {
    ReplayOptions::new(Profile::builtin("h100-sxm").expect("built in"))
}

/// The text form of a job: ranks with a program each, and communicators of the text form (`0-3`, `0 2`) that become the
/// slots of their members, in order.
fn text(comms: &[&[u32]], programs: &[&str]) -> String {
    let mut lines = vec!["prism-graph 1".to_owned(), format!("world {}", programs.len())];
    for members in comms {
        let members: Vec<_> = members.iter().map(u32::to_string).collect();
        lines.push(format!("comm {}", members.join(" ")));
    }
    for (rank, program) in programs.iter().enumerate() {
        lines.push(format!("template \"rank {rank}\""));
        lines.extend(program.lines().map(str::trim).filter(|op| !op.is_empty()).map(str::to_owned));
    }
    for rank in 0..programs.len() as u32 {
        let own = (0..comms.len()).filter(|comm| comms[*comm].contains(&rank)).map(|comm| comm.to_string());
        lines.push(format!("rank {rank} template {rank} comms {}", own.collect::<Vec<_>>().join(" ")));
    }
    lines.join("\n") + "\n"
}

fn job(comms: &[&[u32]], programs: &[&str]) -> Arc<Graph> {
    let text = text(comms, programs);
    Arc::new(Graph::from_text(&text).unwrap_or_else(|error| panic!("{error}\n{text}")))
}

fn outcome(graph: &Arc<Graph>) -> Result<ReplayResult, SimError> {
    replay(graph, &options())
}

/// What a replay says against a job. Symmetry must make no difference.
fn refusal(comms: &[&[u32]], programs: &[&str]) -> String {
    let graph = job(comms, programs);
    let error = outcome(&graph).expect_err("not a job to answer about");
    let without = replay(&graph, &ReplayOptions { symmetry: false, ..options() });
    assert_eq!(without.expect_err("the same"), error);
    error.to_string()
}

/// What is said against a text.
fn text_refusal(text: &str) -> String {
    Graph::from_text(text).expect_err(text).to_string()
}

fn says(found: &str, parts: &[&str]) {
    for part in parts {
        assert!(found.contains(part), "{found:?} does not say {part:?}");
    }
}
