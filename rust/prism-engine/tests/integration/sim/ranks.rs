//! Ranks evaluated one by one end as they do by roles, in everything a report says.

use super::jobs::{Job, Step, batched_job, job, job_of, profile};
use prism_engine::graph::Graph;
use prism_engine::ids::Rank;
use prism_engine::replay::{Evaluator, ReplayOptions, replay_rank_by_rank, replay_ranks};
use prism_engine::sim::SimReport;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Evaluates the job either way. `may_refuse`: it may be no job for an evaluation rank by rank.
fn check(graph: &Arc<Graph>, slow: &BTreeMap<Rank, f64>, may_refuse: bool) -> Result<(), TestCaseError> {
    let (slow, evaluator) = (slow.clone(), Evaluator::Roles);
    let options = ReplayOptions { slow, evaluator, symmetry: false, ..ReplayOptions::new(profile()) };
    let by_roles = replay_ranks(graph, &options);
    match (by_roles, replay_rank_by_rank(graph, &options)) {
        (Ok(by_roles), Some(by_ranks)) => {
            prop_assert_eq!(by_ranks.roles, by_ranks.ranks.len());
            prop_assert_eq!(SimReport { roles: by_ranks.roles, ..by_roles }, by_ranks);
        }
        (Ok(_), None) => prop_assert!(may_refuse, "refused"),
        (Err(_), None) => {}
        (Err(error), Some(_)) => prop_assert!(false, "not found: {error}"),
    }
    Ok(())
}

/// Has the job messages beside each other, or beside collectives, in one group and communicator?
fn has_rounds(job: &Job) -> bool {
    job.width <= 2 && job.steps.iter().any(|step| matches!(step, Step::Ring { .. }))
}

fn check_job(job: &Job) -> Result<(), TestCaseError> {
    check(&job.graph(), &job.slow, has_rounds(job))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn jobs_end_alike(job in job()) {
        check_job(&job)?;
    }

    #[test]
    fn jobs_of_one_role_end_alike(job in job_of(1..2, 2..6)) {
        check_job(&job)?;
    }

    #[test]
    fn jobs_with_fused_collectives_end_alike(job in batched_job()) {
        check_job(&job)?;
    }
}
