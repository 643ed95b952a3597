//! Whole jobs: the answer names the right rank, and its figures fit together.

use prism_engine::analysis::{Cause, DiagnoseOptions, Diagnosis, Parameter, Spent, diagnose};
use prism_engine::ids::Rank;
use prism_engine::profile::Profile;
use prism_engine::replay::ReplayOptions;
use prism_engine::synthetic::TransformerStep;
use std::sync::Arc;

fn answer(slow: &[(u32, f64)], step: TransformerStep) -> Diagnosis {
    let mut options = ReplayOptions::new(Profile::builtin("h100-sxm").expect("built in"));
    options.slow = slow.iter().map(|(rank, factor)| (Rank(*rank), *factor)).collect();
    diagnose(&Arc::new(step.graph().expect("valid")), &DiagnoseOptions::new(options)).expect("complete")
}

fn step() -> TransformerStep {
    TransformerStep { dp: 4, tp: 4, pp: 4, microbatches: 8, iterations: 2, ..TransformerStep::default() }
}

#[test]
fn a_slow_rank_of_a_pipeline_is_found() {
    let found = answer(&[(21, 1.2)], step());
    let culprit = found.waiting.as_ref().and_then(|waiting| waiting.culprit.as_ref()).expect("one");
    assert_eq!((culprit.ranks.as_slice(), culprit.cause), (&[Rank(21)][..], Cause::Compute));
    assert_eq!(found.iteration, Some(1));
    let path = found.critical_path.as_ref().expect("complete");
    assert_eq!(path.ns, found.iteration_time_ns[1]);
    assert_eq!(path.parts.iter().map(|part| part.ns).sum::<i64>(), path.ns);
    assert_eq!(path.ranks[0].rank, Rank(21));
    assert_eq!(found.accounts[0].why, "culprit");
    for account in &found.accounts {
        assert_eq!(account.parts.iter().map(|part| part.ns).sum::<i64>(), path.ns);
    }
    // The slow rank matters much, and more than any other.
    let elasticity = |rank| {
        let is_it = |s: &&prism_engine::analysis::Sensitivity| s.parameter == Parameter::RankSpeed { rank: Rank(rank) };
        found.sensitivities.iter().find(is_it).map(|s| s.elasticity)
    };
    let own = elasticity(21).expect("the culprit is asked about");
    let is_other = |s: &prism_engine::analysis::Sensitivity| matches!(s.parameter, Parameter::RankSpeed { rank } if rank != Rank(21));
    assert!(own > 0.4 && own <= 1.0, "{:?}", found.sensitivities);
    assert!(found.sensitivities.iter().filter(|s| is_other(s)).all(|s| s.elasticity < own / 2.0));
}

#[test]
fn a_healthy_pipeline_has_a_bubble_and_no_culprit() {
    let found = answer(&[], TransformerStep { dp: 1, tp: 1, ..step() });
    let waiting = found.waiting.as_ref().expect("complete");
    assert_eq!(waiting.culprit, None, "{}", found.headline);
    // (stages - 1) of (microbatches + stages - 1) slots: every stage has the same bubble, transfers aside.
    let bubbles = found.accounts.iter().map(|account| {
        let is_bubble = |spent| matches!(spent, Spent::Bubble { .. } | Spent::Idle);
        account.parts.iter().filter(|part| is_bubble(part.spent)).map(|part| part.share).sum::<f64>()
    });
    for bubble in bubbles {
        assert!((bubble - 3.0 / 11.0).abs() < 0.05, "{bubble}");
    }
    assert!(found.slack.as_ref().is_some_and(|slack| slack.is_exact && slack.ranks_without > 0));
}

#[test]
fn a_stage_with_more_work_is_found() {
    // Of rank 16..31, the second stage, every rank computes 30 % longer.
    let slow: Vec<(u32, f64)> = (16..32).map(|rank| (rank, 1.3)).collect();
    let found = answer(&slow, step());
    let culprit = found.waiting.as_ref().and_then(|waiting| waiting.culprit.as_ref()).expect("one");
    assert_eq!(culprit.ranks, (16..32).map(Rank).collect::<Vec<_>>());
    assert_eq!((culprit.cause, culprit.compared_with), (Cause::Program, 48));
    assert!(found.headline.starts_with("ranks 16-31 hold up the others"), "{}", found.headline);
}

#[test]
fn answers_are_the_same_every_time() {
    let text = || serde_json::to_string(&answer(&[(3, 1.1)], step())).expect("JSON");
    assert_eq!(text(), text());
}

#[test]
fn an_iteration_that_is_not_there_is_refused() {
    let graph = Arc::new(step().graph().expect("valid"));
    let replay = ReplayOptions::new(Profile::builtin("h100-sxm").expect("built in"));
    let options = DiagnoseOptions { iteration: Some(2), ..DiagnoseOptions::new(replay) };
    let error = diagnose(&graph, &options).expect_err("two iterations");
    assert_eq!(error.to_string(), "iteration 2 of 2 is not available");
}
