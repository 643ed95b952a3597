//! What takes the culprit longer than its equals, and which communicators an answer speaks of.

use super::blame::{Cause, Culprit, Waiting};
use super::critical_path::Spent;
use super::diagnosis::{Account, CriticalPath};
use super::trace::JobTrace;
use crate::graph::Graph;
use crate::ids::{CommId, Rank};
use crate::sim::SimError;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// Ranks a culprit is compared with, at most.
const EQUALS: usize = 16;
/// Share of the iteration from which a difference counts.
const NOTICEABLE: f64 = 0.005;
/// Members of a communicator that are listed.
const LISTED: usize = 8;

/// Something of a rank's account that takes longer than in the accounts of its equals.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Excess {
    /// What; of communication, with the communicator that has most of it.
    #[serde(flatten)]
    pub spent: Spent,
    /// How long it takes, over all communicators.
    pub ns: i64,
    /// The median of its equals.
    pub usual_ns: i64,
}

/// Kinds of time that are compared: waiting is not, it is what the culprit has too little of.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Compute(u8),
    Collective,
    Message,
    Host,
}

fn kind(spent: Spent) -> Option<Kind> {
    match spent {
        Spent::Compute { class } => Some(Kind::Compute(class as u8)),
        Spent::Collective { .. } => Some(Kind::Collective),
        Spent::Message { .. } => Some(Kind::Message),
        Spent::Host => Some(Kind::Host),
        Spent::Waiting { .. } | Spent::Bubble { .. } | Spent::Idle => None,
    }
}

impl JobTrace {
    /// Finds out what takes the culprit longer than its equals, and corrects its cause where that is not compute.
    pub(crate) fn explain_culprit(&self, culprit: &mut Culprit, iteration: usize, length: i64) -> Result<(), SimError> {
        if culprit.cause == Cause::Program {
            return Ok(());
        }
        let first = culprit.ranks[0];
        let Some(account) = self.account(first, iteration)? else { return Ok(()) };
        let own = account.totals();
        let mut usual: BTreeMap<Kind, Vec<i64>> = BTreeMap::new();
        let others = self.equals(culprit);
        for rank in &others {
            let Some(account) = self.account(*rank, iteration)? else { continue };
            let sums = sums(&account.totals());
            for kind in own.iter().filter_map(|(spent, _)| kind(*spent)).collect::<BTreeSet<_>>() {
                usual.entry(kind).or_default().push(sums.get(&kind).copied().unwrap_or(0));
            }
        }
        let excess = |(of, ns): (Kind, i64)| {
            let mut others = usual.remove(&of)?;
            let middle = others.len() / 2;
            let usual_ns = *others.select_nth_unstable(middle).1;
            // Largest first: the first of a kind is the communicator with most of it.
            let (spent, _) = own.iter().find(|(spent, _)| kind(*spent) == Some(of))?;
            Some(Excess { spent: *spent, ns, usual_ns })
        };
        let longest = sums(&own).into_iter().filter_map(excess).max_by_key(|excess| excess.ns - excess.usual_ns);
        let is_noticeable = |excess: &Excess| (excess.ns - excess.usual_ns) as f64 >= NOTICEABLE * length as f64;
        culprit.longer = longest.filter(is_noticeable);
        if culprit.cause == Cause::NotCompute {
            culprit.cause = match culprit.longer.map(|excess| excess.spent) {
                Some(Spent::Collective { .. } | Spent::Message { .. }) => Cause::Communication,
                Some(Spent::Host) => Cause::Host,
                _ => Cause::NotCompute,
            };
        }
        Ok(())
    }

    /// Some ranks with the program of the culprit that are none; any others, if there are none such.
    fn equals(&self, culprit: &Culprit) -> Vec<Rank> {
        let program = self.graph.rank_template(culprit.ranks[0]);
        let others = || (0..self.graph.world_size()).map(Rank).filter(|rank| !culprit.ranks.contains(rank));
        let same: Vec<Rank> = others().filter(|rank| self.graph.rank_template(*rank) == program).take(EQUALS).collect();
        if same.is_empty() { others().take(EQUALS).collect() } else { same }
    }
}

fn sums(totals: &[(Spent, i64)]) -> BTreeMap<Kind, i64> {
    let mut sums = BTreeMap::new();
    for (spent, ns) in totals {
        if let Some(kind) = kind(*spent) {
            *sums.entry(kind).or_insert(0) += ns;
        }
    }
    sums
}

/// A communicator that the answer speaks of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Named {
    /// Its number.
    pub communicator: u32,
    /// Members.
    pub size: u32,
    /// The first of them, in group-rank order.
    pub members: Vec<u32>,
    /// Difference between neighbours, if it is the same for all.
    pub stride: Option<i64>,
}

/// The communicators that paths, accounts and waiting name.
pub(crate) fn named(graph: &Graph, path: &CriticalPath, accounts: &[Account], waiting: &Waiting) -> Vec<Named> {
    let parts = path.parts.iter().chain(accounts.iter().flat_map(|account| &account.parts)).map(|part| part.spent);
    let mut numbers: BTreeSet<u32> = parts.filter_map(communicator).collect();
    numbers.extend(path.longest.iter().filter_map(|segment| communicator(segment.spent)));
    numbers.extend(waiting.blame.iter().map(|blame| blame.communicator));
    numbers.extend(waiting.communicators.iter().map(|comm| comm.communicator));
    let longer = waiting.culprit.as_ref().and_then(|culprit| culprit.longer);
    numbers.extend(longer.and_then(|excess| communicator(excess.spent)));
    let name = |communicator: u32| {
        let members = graph.comm_members(CommId(communicator));
        let mut steps = members.windows(2).map(|pair| i64::from(pair[1]) - i64::from(pair[0]));
        let first = steps.next();
        Named {
            communicator,
            size: members.len() as u32,
            members: members.iter().copied().take(LISTED).collect(),
            stride: first.filter(|first| steps.all(|step| step == *first)),
        }
    };
    numbers.into_iter().map(name).collect()
}

pub(crate) fn communicator(spent: Spent) -> Option<u32> {
    match spent {
        Spent::Collective { communicator }
        | Spent::Message { communicator }
        | Spent::Waiting { communicator }
        | Spent::Bubble { communicator } => Some(communicator),
        Spent::Compute { .. } | Spent::Host | Spent::Idle => None,
    }
}
