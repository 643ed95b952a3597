//! What each rule does to messages between ranks, worked out by hand, and what is refused.

use super::profile;
use super::{graph, op};
use crate::perturb::rules;
use crate::sim::jobs::message;
use prism_engine::contention::Contention;
use prism_engine::graph::Graph;
use prism_engine::ids::Rank;
use prism_engine::lower::{LowerOptions, StepMessages, lower};
use prism_engine::replay::{ReplayOptions, replay, replay_ranks};
use prism_engine::synthetic::{TransformerStep, flat_profile};
use std::collections::BTreeMap;
use std::sync::Arc;

/// 50 MB, 1 ms of a card.
const COUNT: u64 = 12_500_000;

/// Messages between ranks, all posted at once, each on a stream of its own; one card per rank.
pub(super) fn at_once(world: u32, messages: &[(u32, u32)]) -> Arc<Graph> {
    let mut programs = vec![Vec::new(); world as usize];
    let mut comms = Vec::new();
    let mut slots = vec![0; world as usize];
    for (from, to) in messages {
        comms.push(vec![*from, *to]);
        for (rank, is_send) in [(*from, true), (*to, false)] {
            let slot = slots[rank as usize];
            slots[rank as usize] += 1;
            programs[rank as usize].push(op(slot, message(slot, is_send, u32::from(is_send), COUNT, 0)));
        }
    }
    graph(&programs, &comms)
}

/// When each rank is through, µs.
fn ends(graph: &Arc<Graph>, contention: Contention) -> Vec<i64> {
    let options = ReplayOptions { contention, ..ReplayOptions::new(flat_profile(5_000, 50_000_000_000)) };
    let report = replay_ranks(graph, &options).expect("no deadlock");
    report.ranks.iter().map(|rank| rank.final_time.as_ps() / 1_000_000).collect()
}

#[test]
fn two_messages_of_one_sender() {
    let graph = at_once(3, &[(0, 1), (0, 2)]);
    assert_eq!(ends(&graph, Contention::None), [1000, 1005, 1005]);
    assert_eq!(ends(&graph, Contention::FairShare), [2000, 2005, 2005]);
    assert_eq!(ends(&graph, Contention::Fifo), [2000, 1005, 2005]);
}

#[test]
fn two_messages_to_one_receiver() {
    let graph = at_once(3, &[(1, 0), (2, 0)]);
    assert_eq!(ends(&graph, Contention::None), [1005, 1000, 1000]);
    assert_eq!(ends(&graph, Contention::FairShare), [2005, 2000, 2000]);
    // Bytes leave a sender as if the receiver were free, and queue up before it.
    assert_eq!(ends(&graph, Contention::Fifo), [2005, 1000, 1000]);
}

#[test]
fn a_bottleneck_elsewhere_leaves_room() {
    // Rank 2 receives three messages, a third of its card each. The one that shares its sender with one of them has two
    // thirds of that card.
    let graph = at_once(5, &[(0, 1), (0, 2), (3, 2), (4, 2)]);
    assert_eq!(ends(&graph, Contention::FairShare), [3000, 1505, 3005, 3000, 3000]);
}

#[test]
fn the_busiest_port_is_named() {
    let graph = at_once(5, &[(0, 1), (0, 2), (3, 2), (4, 2)]);
    let job = lower(&graph, &LowerOptions::new(flat_profile(5_000, 50_000_000_000))).expect("fits");
    let (port, used) = job.busiest_port().expect("there are messages");
    assert_eq!((port.as_str(), used.as_ns()), ("network card 0 of node 2, receiving", 3_000_000));
    // Two GPUs of one node.
    let job = lower(&at_once(2, &[(0, 1)]), &LowerOptions::new(profile())).expect("fits");
    assert_eq!(job.busiest_port().expect("there is a message").0, "NVLink of rank 0, sending");
}

#[test]
fn both_directions_are_free_of_each_other() {
    let graph = at_once(2, &[(0, 1), (1, 0)]);
    for rule in [Contention::None, Contention::FairShare, Contention::Fifo] {
        assert_eq!(ends(&graph, rule), [1005, 1005], "{rule:?}");
    }
}

#[test]
fn slow_ranks_and_constant_stragglers_are_honoured() {
    let step = TransformerStep { tp: 2, pp: 2, microbatches: 2, layers: 1, ..TransformerStep::default() };
    let graph = Arc::new(step.graph().expect("valid"));
    let options = ReplayOptions { contention: Contention::FairShare, ..ReplayOptions::new(profile()) };
    let slow = ReplayOptions { slow: BTreeMap::from([(Rank(1), 1.3)]), ..options.clone() };
    let straggler = "[[perturb]]\nkind = \"straggler\"\nranks = [1]\nfactor = 1.3\n";
    let perturbed = ReplayOptions { perturb: rules(4, straggler), ..options.clone() };
    let (plain, slow, perturbed) = (replay(&graph, &options), replay(&graph, &slow), replay(&graph, &perturbed));
    assert_eq!(slow, perturbed);
    assert!(slow.expect("no deadlock").total_time_ns > plain.expect("no deadlock").total_time_ns);
}

#[test]
fn other_perturbations_are_refused_by_name() {
    let graph = at_once(2, &[(0, 1)]);
    let jitter = "[[perturb]]\nkind = \"jitter\"\nranks = \"all\"\ndistribution = \"lognormal\"\nmu = 0\nsigma = 0.1\nmode = \"multiply\"\nseed = 1\n";
    let link = "[[perturb]]\nkind = \"slow-link\"\nranks = [0]\nbandwidth_factor = 0.5\n";
    for (text, name) in [(jitter, "Jitter"), (link, "SlowLink")] {
        let perturb = rules(2, text);
        let options = ReplayOptions { perturb, contention: Contention::Fifo, ..ReplayOptions::new(profile()) };
        let error = replay(&graph, &options).expect_err("not honoured").to_string();
        assert!(error.contains(&format!("the perturbation {name} together with contention")), "{error}");
    }
}

#[test]
fn jobs_of_too_many_messages_are_refused_with_their_number() {
    let graph = Arc::new(TransformerStep::default().graph().expect("valid"));
    let options =
        ReplayOptions { contention: Contention::Fifo, max_messages: 100_000, ..ReplayOptions::new(profile()) };
    let error = replay(&graph, &options).expect_err("too many").to_string();
    let count = |step_messages| {
        let options = LowerOptions { step_messages, ..LowerOptions::new(profile()) };
        lower(&graph, &options).expect("fits").num_messages()
    };
    let fine = count(StepMessages::Fine);
    assert!(error.starts_with(&format!("the job is {fine} messages, and at most 100000 are")), "{error}");
    assert!(count(StepMessages::Coarse) < fine);
}

#[test]
fn only_what_some_ranks_depend_on_can_be_lowered() {
    // Two pairs that have nothing to do with each other.
    let graph = at_once(4, &[(0, 1), (2, 3)]);
    let options = |ranks: &[u32]| LowerOptions {
        ranks: Some(ranks.iter().copied().map(Rank).collect()),
        ..LowerOptions::new(profile())
    };
    let job = lower(&graph, &options(&[3])).expect("fits");
    assert_eq!((job.ranks().collect::<Vec<_>>(), job.num_messages()), (vec![Rank(2), Rank(3)], 1));
    let error = lower(&graph, &options(&[4])).expect_err("no such rank").to_string();
    assert_eq!(error, "rank 4 does not exist: the world has 4 ranks");
}
