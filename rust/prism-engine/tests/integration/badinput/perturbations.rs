//! Changes to ranks that do not exist, or to none.

use super::{job, options, says};
use prism_engine::ids::Rank;
use prism_engine::perturb::{Perturbations, World};
use prism_engine::profile::Profile;
use prism_engine::replay::{ReplayOptions, replay};
use std::collections::BTreeMap;

fn refusal(text: &str) -> String {
    let world = World::new(2, &Profile::builtin("h100-sxm").expect("built in"));
    Perturbations::from_toml(text, world).expect_err(text).to_string()
}

#[test]
fn a_change_that_names_no_rank_names_its_entry() {
    for ranks in ["", "ranks = []", "ranks = \"\"", "nodes = []"] {
        let text = format!(
            "[[perturb]]\nkind = \"straggler\"\nranks = [0]\nfactor = 2\n[[perturb]]\nkind = \"straggler\"\nfactor = 2\n{ranks}"
        );
        says(&refusal(&text), &["perturb[1] (straggler)"]);
    }
    says(&refusal("[[perturb]]\nkind = \"straggler\"\nfactor = 2"), &["perturb[0] (straggler)", "it names no rank"]);
}

#[test]
fn a_change_to_an_unknown_rank_names_it() {
    for ranks in ["[2]", "[0, 4294967295]", "[4294967296]", "\"0-2\"", "\"1,7\""] {
        let text = format!("[[perturb]]\nkind = \"straggler\"\nranks = {ranks}\nfactor = 2");
        says(&refusal(&text), &["perturb[0] (straggler)"]);
    }
    says(&refusal("[[perturb]]\nkind = \"rank-death\"\nrank = 2\niteration = 0"), &["rank 2 does not exist"]);
}

#[test]
fn a_range_of_ranks_beyond_all_bounds_is_refused_at_once() {
    let text = "[[perturb]]\nkind = \"straggler\"\nranks = \"0-4294967295\"\nfactor = 2";
    says(&refusal(text), &["perturb[0] (straggler)", "does not exist"]);
}

#[test]
fn a_slow_rank_that_does_not_exist_is_named() {
    let graph = job(&[], &["+5 s0 device_sync", "+5 s0 device_sync"]);
    let slow = ReplayOptions { slow: BTreeMap::from([(Rank(2), 2.0)]), ..options() };
    says(&replay(&graph, &slow).expect_err("no such rank").to_string(), &["rank 2"]);
}
