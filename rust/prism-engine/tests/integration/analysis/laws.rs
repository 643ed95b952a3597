//! What must hold for every job.

use super::explicit::{Explicit, Node};
use crate::perturb::rules;
use crate::sim::jobs::{Job, Step, exchanging_job, job as plain_job, profile};
use prism_engine::analysis::{JobTrace, Parameter, Path, STEP, Slack, Spent, sensitivities};
use prism_engine::graph::op::OpKind;
use prism_engine::graph::{Graph, GraphBuilder};
use prism_engine::ids::{CommId, NameId, Rank, TemplateId};
use prism_engine::replay::{Contention, ReplayOptions, replay, replay_ranks};
use prism_engine::synthetic::TransformerStep;
use prism_engine::units::SimTime;
use proptest::prelude::*;
use std::sync::Arc;

/// A job, every other one with groups of messages (and a collective: of several the order would be that of their sizes).
fn job() -> impl Strategy<Value = Job> {
    let exchanging = exchanging_job().prop_map(|mut job| {
        for step in &mut job.steps {
            if let Step::Exchange { calls, .. } = step {
                calls.truncate(1);
            }
        }
        job
    });
    prop_oneof![plain_job(), exchanging]
}

fn options(job: &Job) -> ReplayOptions {
    ReplayOptions { slow: job.slow.clone(), ..ReplayOptions::new(profile()) }
}

fn has_marks(graph: &Graph) -> bool {
    let templates = (0..graph.num_templates() as u32).map(TemplateId);
    templates.into_iter().any(|t| graph.template(t).iter().any(|op| op.kind == OpKind::IterationEnd))
}

fn is_whole(path: &Path) -> bool {
    let mut at = path.start;
    path.segments.iter().all(|segment| {
        let follows = segment.start == at && segment.end > segment.start;
        at = segment.end;
        follows
    }) && at == path.end
}

/// The same graph with one compute op of one rank longer.
fn delayed(graph: &Graph, rank: u32, op: u32, by: SimTime) -> Arc<Graph> {
    let mut builder = GraphBuilder::new(graph.world_size());
    builder.intern_name(graph.name(NameId(0)));
    (0..graph.num_comms() as u32).for_each(|comm| {
        builder.add_comm(graph.comm_members(CommId(comm)).iter().copied().map(Rank).collect());
    });
    for template in (0..graph.num_templates() as u32).map(TemplateId) {
        builder.add_template("t", &graph.template(template).iter().collect::<Vec<_>>()).expect("valid");
    }
    let mut own = None;
    for r in (0..graph.world_size()).map(Rank) {
        builder.set_rank(r, graph.rank_template(r), graph.rank_slots(r).iter().copied().map(CommId).collect());
        for (o, duration) in graph.rank_overrides(r) {
            builder.override_duration(r, o, duration);
            own = if (r.0, o) == (rank, op) { Some(duration) } else { own };
        }
    }
    let kind = graph.template(graph.rank_template(Rank(rank))).op(op as usize).kind;
    let OpKind::Compute { duration, .. } = kind else { panic!("op {op} is no compute") };
    builder.override_duration(Rank(rank), op, own.unwrap_or(duration) + by);
    Arc::new(builder.finish().expect("valid"))
}

fn end(graph: &Arc<Graph>, options: &ReplayOptions) -> SimTime {
    replay_ranks(graph, options)
        .expect("no deadlock")
        .ranks
        .iter()
        .map(|rank| rank.final_time)
        .max()
        .unwrap_or_default()
}

fn compute_ops(graph: &Graph) -> Vec<(u32, u32)> {
    let ranks = 0..graph.world_size();
    let of = |rank: u32| {
        let view = graph.template(graph.rank_template(Rank(rank)));
        let ops = view.iter().enumerate().filter(|(_, op)| matches!(op.kind, OpKind::Compute { .. }));
        ops.map(move |(at, _)| (rank, at as u32)).collect::<Vec<_>>()
    };
    ranks.flat_map(of).collect()
}

fn slack_of(slack: &Slack, rank: u32, op: u32) -> SimTime {
    let own = &slack.by_rank[rank as usize];
    own[own.binary_search_by_key(&op, |(op, _)| *op).expect("every op on a stream has slack")].1
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_path_and_every_account_fill_the_iteration(job in job()) {
        let (graph, options) = (job.graph(), options(&job));
        let trace = JobTrace::record(&graph, &options).expect("no deadlock");
        let times = replay(&graph, &options).expect("no deadlock").iteration_time_ns;
        prop_assert_eq!(trace.num_iterations(), times.len());
        for (iteration, time) in times.iter().enumerate() {
            // Markers on different streams may come in the wrong order.
            let time = &(*time).max(0);
            let path = trace.critical_path(iteration).expect("known").expect("there");
            prop_assert!(is_whole(&path), "{:?}", path);
            prop_assert_eq!(path.total_ns(), *time);
            prop_assert_eq!(path.totals().iter().map(|(_, ns)| ns).sum::<i64>(), *time);
            prop_assert_eq!(path.by_rank().iter().map(|(_, ns)| ns).sum::<i64>(), *time);
            let waits = |spent| matches!(spent, Spent::Waiting { .. } | Spent::Bubble { .. } | Spent::Idle);
            prop_assert!(!path.segments.iter().any(|segment| waits(segment.spent)), "{:?}", path);
            for rank in (0..graph.world_size()).map(Rank) {
                let Some(account) = trace.account(rank, iteration).expect("known") else { continue };
                prop_assert!(is_whole(&account), "{:?}", account);
                prop_assert_eq!(account.total_ns(), *time);
                prop_assert!(account.segments.iter().all(|segment| segment.rank == rank));
            }
        }
        prop_assert_eq!(trace.critical_path(times.len()).expect("known"), None);
    }

    /// Against relaxation over an explicit list of edges: times, slack, and that the path is made of edges that are tight.
    #[test]
    fn path_and_slack_are_those_of_a_longest_path_search(job in job()) {
        let (graph, options) = (job.graph(), options(&job));
        let explicit = Explicit::of(&graph, &profile(), &job.slow);
        let trace = JobTrace::record(&graph, &options).expect("no deadlock");
        prop_assert_eq!(SimTime::from_ps(explicit.end()), end(&graph, &options));
        let slack = trace.slack().expect("small");
        prop_assert!(slack.is_exact);
        for (rank, own) in (0..).zip(&slack.by_rank) {
            for (op, slack) in own {
                let node = explicit.over(rank, *op as usize);
                prop_assert_eq!(explicit.slack(node), slack.as_ps(), "rank {} op {}", rank, op);
            }
        }
        if has_marks(&graph) {
            return Ok(());
        }
        let path = trace.critical_path(0).expect("known").expect("there");
        for segment in &path.segments {
            let op = segment.op as usize;
            let node = explicit.over(segment.rank.0, op);
            match segment.spent {
                Spent::Compute { .. } => {
                    prop_assert_eq!((explicit.times[&node], explicit.slack(node)), (segment.end.as_ps(), 0));
                }
                Spent::Collective { .. } | Spent::Message { .. } => {
                    prop_assert_eq!((explicit.times[&node], explicit.slack(node)), (segment.end.as_ps(), 0));
                    let holder = segment.held_by.expect("communication has a holder").0;
                    let start = segment.start.as_ps();
                    let is_start = |node: &Node| matches!(node, Node::Arrive(rank, _) if *rank == holder);
                    let found = explicit.times.iter().any(|(node, time)| {
                        is_start(node) && *time == start && explicit.slack(*node) == 0
                    });
                    prop_assert!(found, "nobody arrives at {}", start);
                }
                _ => {}
            }
        }
    }

    #[test]
    fn a_delay_within_slack_costs_nothing_and_beyond_it_costs_what_is_beyond(
        job in job(), pick in any::<prop::sample::Index>(), beyond in 1..1_000_000i64,
    ) {
        let (graph, options) = (job.graph(), ReplayOptions::new(profile()));
        let ops = compute_ops(&graph);
        if ops.is_empty() {
            return Ok(());
        }
        let (rank, op) = ops[pick.index(ops.len())];
        let slack = JobTrace::record(&graph, &options).expect("no deadlock").slack().expect("small");
        let before = end(&graph, &options);
        let own = slack_of(&slack, rank, op);
        prop_assert_eq!(end(&delayed(&graph, rank, op, own), &options), before);
        let late = end(&delayed(&graph, rank, op, own + SimTime::from_ps(beyond)), &options);
        prop_assert_eq!(late, before + SimTime::from_ps(beyond));
    }

    /// The end is a maximum of sums in the durations: it grows at least as the critical path does.
    #[test]
    fn a_slower_rank_costs_at_least_its_share_of_the_path(job in job(), pick in any::<prop::sample::Index>()) {
        let (graph, options) = (job.graph(), options(&job));
        let rank = Rank(pick.index(graph.world_size() as usize) as u32);
        let trace = JobTrace::record(&graph, &options).expect("no deadlock");
        let last = trace.num_iterations() - 1;
        if last > 0 {
            // The start of a later iteration moves too.
            return Ok(());
        }
        let path = trace.critical_path(0).expect("known").expect("there");
        let is_own = |spent: Spent| matches!(spent, Spent::Compute { .. });
        let on_path = path.segments.iter().filter(|s| s.rank == rank && is_own(s.spent));
        let on_path: i64 = on_path.map(|s| (s.end - s.start).as_ps()).sum();
        let ops = graph.num_ops() as f64;
        let found = sensitivities(&graph, &options, 0, &[Parameter::RankSpeed { rank }]).expect("no deadlock");
        let least = on_path as f64 * STEP / 1000.0 - ops / 1000.0 - 1.0;
        prop_assert!(found[0].change_ns as f64 >= least, "{:?} < {}", found, least);
    }

    #[test]
    fn waiting_is_that_of_the_accounts(job in job()) {
        let (graph, options) = (job.graph(), options(&job));
        let trace = JobTrace::record(&graph, &options).expect("no deadlock");
        let waiting = trace.waiting(0).expect("known").expect("there");
        prop_assert_eq!(waiting.ranks_examined, graph.world_size());
        for (rank, waited) in &waiting.by_rank {
            let Some(account) = trace.account(*rank, 0).expect("known") else { continue };
            let is_wait = |spent| matches!(spent, Spent::Waiting { .. } | Spent::Bubble { .. });
            let in_account: i64 =
                account.segments.iter().filter(|s| is_wait(s.spent)).map(|s| (s.end - s.start).as_ps()).sum();
            // An account stops waiting at the arrival that held it; others may have come later without holding it.
            prop_assert!(waited.as_ps() >= in_account, "rank {} {} {}", rank, waited.as_ps(), in_account);
        }
    }

    /// Durations that depend on the op, the iteration and the time: those of the replay count.
    #[test]
    fn perturbed_jobs_are_explained_as_well(job in job()) {
        let text = "[[perturb]]\nkind = \"straggler\"\nranks = [0]\nfactor = 1.7\niterations = [0, 1]\n\
                    [[perturb]]\nkind = \"jitter\"\nranks = [0]\ndistribution = \"normal\"\nmean = 1\nstd = 0.1\n\
                    mode = \"multiply\"\nseed = 1\n";
        let perturb = rules(job.world_size(), text);
        let (graph, options) = (job.graph(), ReplayOptions { perturb, ..options(&job) });
        let trace = JobTrace::record(&graph, &options).expect("no deadlock");
        let times = replay(&graph, &options).expect("no deadlock").iteration_time_ns;
        for (iteration, time) in times.iter().enumerate() {
            let path = trace.critical_path(iteration).expect("known").expect("there");
            prop_assert!(is_whole(&path), "{:?}", path);
            prop_assert_eq!(path.total_ns(), (*time).max(0));
        }
        let slack = trace.slack().expect("small");
        prop_assert!(slack.by_rank.iter().flatten().all(|(_, slack)| *slack >= SimTime::ZERO));
    }
}

/// Links that are slow in a window, everywhere or on some ranks, and unequal shares of exchanges.
fn any_network_rules(world_size: u32) -> impl Strategy<Value = String> {
    let window = prop_oneof![
        Just(String::new()),
        Just("iterations = [0, 1]\n".to_owned()),
        (0..40_000_i64, 1..60_000_i64).prop_map(|(from, length)| format!("time_ns = [{from}, {}]\n", from + length)),
    ];
    let link = (0..world_size, 1..10_u32, 0..3000_u32, window.clone()).prop_map(|(rank, tenths, latency, window)| {
        format!(
            "[[perturb]]\nkind = \"slow-link\"\nranks = [{rank}]\nbandwidth_factor = 0.{tenths}\n\
             added_latency_ns = {latency}\n{window}"
        )
    });
    prop::collection::vec(link, 1..3).prop_map(|rules| rules.concat())
}

fn perturbed_job() -> impl Strategy<Value = (Job, String)> {
    job().prop_flat_map(|job| {
        let text = any_network_rules(job.world_size());
        (Just(job), text)
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever was done to the links, every end is explained by an arrival, and the parts add up.
    #[test]
    fn jobs_on_changed_links_are_explained_as_well((job, text) in perturbed_job()) {
        let perturb = rules(job.world_size(), &text);
        let (graph, options) = (job.graph(), ReplayOptions { perturb, ..options(&job) });
        let trace = JobTrace::record(&graph, &options).expect("no deadlock");
        let times = replay(&graph, &options).expect("no deadlock").iteration_time_ns;
        for (iteration, time) in times.iter().enumerate() {
            let path = trace.critical_path(iteration).expect("known").expect("there");
            prop_assert!(is_whole(&path), "{:?}", path);
            prop_assert_eq!(path.total_ns(), (*time).max(0));
            for rank in (0..graph.world_size()).map(Rank) {
                let Some(account) = trace.account(rank, iteration).expect("known") else { continue };
                prop_assert_eq!(account.total_ns(), (*time).max(0));
            }
        }
        prop_assert!(trace.waiting(0).expect("known").is_some());
        let slack = trace.slack().expect("small");
        prop_assert!(slack.by_rank.iter().flatten().all(|(_, slack)| *slack >= SimTime::ZERO));
    }

    /// A rule that holds for ever leaves slack what it is: a delay within it costs nothing, one beyond it what is beyond.
    #[test]
    fn slack_on_links_that_are_slow_for_ever_is_exact(
        job in job(), rank in any::<prop::sample::Index>(), pick in any::<prop::sample::Index>(), beyond in 1..1_000_000i64,
    ) {
        let slow = rank.index(job.world_size() as usize);
        let text = format!("[[perturb]]\nkind = \"slow-link\"\nranks = [{slow}]\nbandwidth_factor = 0.3\n");
        let perturb = rules(job.world_size(), &text);
        let (graph, options) = (job.graph(), ReplayOptions { perturb, ..ReplayOptions::new(profile()) });
        let ops = compute_ops(&graph);
        if ops.is_empty() {
            return Ok(());
        }
        let (rank, op) = ops[pick.index(ops.len())];
        let own = slack_of(&JobTrace::record(&graph, &options).expect("no deadlock").slack().expect("small"), rank, op);
        let before = end(&graph, &options);
        prop_assert_eq!(end(&delayed(&graph, rank, op, own), &options), before);
        let late = end(&delayed(&graph, rank, op, own + SimTime::from_ps(beyond)), &options);
        prop_assert_eq!(late, before + SimTime::from_ps(beyond));
    }
}

/// A transformer step whose experts get unequal shares: the path goes through their exchange.
#[test]
fn unequal_experts_are_on_the_critical_path() {
    let text = "[[perturb]]\nkind = \"imbalance\"\nranks = [0, 1, 2, 3]\nfactors = [4.0, 1.0, 1.0, 1.0]\n";
    let step = TransformerStep { tp: 1, pp: 1, dp: 4, ep: 4, microbatches: 2, ..TransformerStep::default() };
    let graph = Arc::new(step.graph().expect("valid"));
    let options = |text: &str| ReplayOptions { perturb: rules(4, text), ..ReplayOptions::new(profile()) };
    let exchange = |text: &str| {
        let trace = JobTrace::record(&graph, &options(text)).expect("no deadlock");
        let path = trace.critical_path(0).expect("known").expect("there");
        let is_collective = |spent: &Spent| matches!(spent, Spent::Collective { .. });
        path.totals().iter().filter(|(spent, _)| is_collective(spent)).map(|(_, ns)| ns).sum::<i64>()
    };
    let (even, uneven) = (exchange(""), exchange(text));
    assert!(uneven > even, "{uneven} is not longer than {even}");
}

#[test]
fn contention_is_refused_by_name() {
    let graph = Arc::new(TransformerStep { tp: 2, pp: 1, ..TransformerStep::default() }.graph().expect("valid"));
    let options = ReplayOptions { contention: Contention::FairShare, ..ReplayOptions::new(profile()) };
    let error = JobTrace::record(&graph, &options).err().expect("refused");
    assert_eq!(error.to_string(), "an analysis under contention or overlap is not available");
}
