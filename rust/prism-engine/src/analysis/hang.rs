//! A job that cannot finish, explained: the root cause first, then who is held up by it.

use crate::ids::Rank;
use crate::sim::{Blocked, Mismatch, SimError, list, shortest_cycle};
use serde::Serialize;
use std::collections::BTreeSet;

/// What kind of failure it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum HangKind {
    /// A rank is dead, and others wait for it.
    DeadRank,
    /// A rank never makes a call that others wait for.
    MissingCall,
    /// Ranks wait for each other in a circle.
    Cycle,
    /// Members of a communicator call different collectives.
    Mismatch,
    /// The two halves of a message differ in size.
    MessageMismatch,
}

/// Why a job cannot finish.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Hang {
    /// What kind.
    pub kind: HangKind,
    /// The root cause in a sentence.
    pub cause: String,
    /// The ranks to look at first, ascending.
    pub culprits: Vec<Rank>,
    /// Of a cycle, its waits in order; of dead ranks and missing calls, the calls.
    pub roots: Vec<Blocked>,
    /// Everything else that waits, nearest to the cause first.
    pub victims: Vec<Blocked>,
    /// Of a mismatch, who called what.
    pub mismatch: Option<Mismatch>,
    /// What usually mends it.
    pub advice: &'static str,
}

const SAME_CALLS: &str = "every member must make the same calls in the same order; a member with nothing to contribute \
    (no tokens for an expert, an unused layer) still has to call";
const GROUP_THEM: &str =
    "put the sends and receives that belong together into one group, or let one side receive first";
const BOTH_HALVES: &str =
    "every send needs a receive of the same size in the same order on its peer, before either ends";

const GO_ON: &str =
    "the others wait until a timeout ends them: restart from a checkpoint, or let the job go on without the rank";

impl Hang {
    /// The explanation of an error; `None` if it is no hang.
    #[must_use]
    pub fn of(error: &SimError) -> Option<Self> {
        match error {
            SimError::Deadlock { waiting } => Some(deadlock(waiting)),
            SimError::Mismatch(found) => Some(mismatch(found)),
            SimError::MessageMismatch { source_rank, destination_rank, .. } => Some(Self {
                kind: HangKind::MessageMismatch,
                cause: error.to_string(),
                culprits: sorted([*source_rank, *destination_rank]),
                roots: Vec::new(),
                victims: Vec::new(),
                mismatch: None,
                advice: BOTH_HALVES,
            }),
            _ => None,
        }
    }
}

fn sorted(ranks: impl IntoIterator<Item = Rank>) -> Vec<Rank> {
    ranks.into_iter().collect::<BTreeSet<_>>().into_iter().collect()
}

fn deadlock(waiting: &[Blocked]) -> Hang {
    let those = |is_root: fn(&Blocked) -> bool| waiting.iter().filter(|blocked| is_root(blocked)).cloned().collect();
    // Nearest to the dead: those that wait for nobody else.
    let only_dead: fn(&Blocked) -> bool =
        |blocked| !blocked.dead.is_empty() && blocked.missing.iter().all(|rank| blocked.dead.contains(rank));
    let (kind, roots): (_, Vec<Blocked>) = if waiting.iter().any(only_dead) {
        (HangKind::DeadRank, those(only_dead))
    } else if waiting.iter().any(|blocked| !blocked.dead.is_empty()) {
        (HangKind::DeadRank, those(|blocked| !blocked.dead.is_empty()))
    } else if waiting.iter().any(Blocked::is_hopeless) {
        (HangKind::MissingCall, those(Blocked::is_hopeless))
    } else {
        (HangKind::Cycle, shortest_cycle(waiting).into_iter().map(|at| waiting[at].clone()).collect())
    };
    let culprits = match kind {
        HangKind::DeadRank => sorted(roots.iter().flat_map(|root| root.dead.iter().copied())),
        HangKind::MissingCall => sorted(roots.iter().flat_map(odd_ones)),
        HangKind::Cycle => fewest(&roots).unwrap_or_else(|| sorted(roots.iter().map(|root| root.rank))),
        _ => sorted(roots.iter().map(|root| root.rank)),
    };
    let is_message = roots.iter().any(|root| is_message(&root.call));
    let advice = match kind {
        HangKind::DeadRank => GO_ON,
        HangKind::Cycle if is_message => GROUP_THEM,
        HangKind::MissingCall if is_message => BOTH_HALVES,
        _ => SAME_CALLS,
    };
    let cause = match kind {
        HangKind::DeadRank => dead_text(&roots),
        HangKind::Cycle => cycle_text(&roots),
        _ => missing_text(&roots),
    };
    let victims = victims(waiting, &roots);
    Hang { kind, cause, culprits, roots, victims, mismatch: None, advice }
}

fn is_message(call: &str) -> bool {
    call == "Send" || call == "Recv"
}

/// Of a call that some make and others never do, the smaller side; of equal ones, who does not.
fn odd_ones(root: &Blocked) -> Vec<Rank> {
    let gone: Vec<Rank> = root.ended.iter().chain(&root.never).copied().collect();
    if gone.len() > root.waiting.len() { root.waiting.clone() } else { gone }
}

/// In a circle of waits, each call lacks ranks that wait in the next one. Where one of those sets is smaller than all others
/// it is them who came another way: one rank with its calls in another order than the rest.
fn fewest(roots: &[Blocked]) -> Option<Vec<Rank>> {
    let next = roots.iter().cycle().skip(1);
    let mut between: Vec<Vec<Rank>> = roots
        .iter()
        .zip(next)
        .map(|(root, next)| {
            let waiting: BTreeSet<Rank> = next.waiting.iter().copied().collect();
            sorted(root.missing.iter().copied().filter(|rank| waiting.contains(rank)))
        })
        .collect();
    between.sort_by_key(Vec::len);
    match &between[..] {
        [first, second, ..] if !first.is_empty() && first.len() < second.len() => Some(first.clone()),
        _ => None,
    }
}

fn missing_text(roots: &[Blocked]) -> String {
    let each = roots.iter().map(|root| {
        let Blocked { call, sequence, communicator, bytes, dtype, .. } = root;
        let gone: Vec<Rank> = sorted(root.ended.iter().chain(&root.never).copied());
        let verb = match (root.ended.is_empty(), gone.len()) {
            (false, _) => "ended without",
            (true, 1) => "never makes",
            (true, _) => "never make",
        };
        let waits = if root.waiting.len() == 1 { "waits" } else { "wait" };
        let counterpart = match call.as_str() {
            "Send" => "the receive",
            "Recv" => "the send",
            _ => "the call",
        };
        format!(
            "{} {verb} {counterpart} that {} {waits} for at op {}: {call} number {sequence} of communicator \
             {communicator}, {bytes} bytes of {dtype}",
            name(&gone),
            name(&root.waiting),
            root.op
        )
    });
    each.collect::<Vec<_>>().join("; ")
}

fn dead_text(roots: &[Blocked]) -> String {
    let each = roots.iter().map(|root| {
        let Blocked { call, sequence, communicator, bytes, dtype, .. } = root;
        let is = if root.dead.len() == 1 { "is" } else { "are" };
        let wait = if root.waiting.len() == 1 { "waits" } else { "wait" };
        format!(
            "{} {is} dead, and {} {wait} at op {}: {call} number {sequence} of communicator {communicator}, {bytes} bytes of \
             {dtype}",
            name(&root.dead),
            name(&root.waiting),
            root.op
        )
    });
    each.collect::<Vec<_>>().join("; ")
}

fn cycle_text(roots: &[Blocked]) -> String {
    let each = roots.iter().enumerate().map(|(at, root)| {
        let next = &roots[(at + 1) % roots.len()];
        let for_whom: Vec<Rank> = root.missing.iter().copied().filter(|rank| next.waiting.contains(rank)).collect();
        format!(
            "{} in {} number {} of communicator {} (op {}) for {}",
            name(&root.waiting),
            root.call,
            root.sequence,
            root.communicator,
            root.op,
            name(&for_whom)
        )
    });
    format!("a circle of waits: {}", each.collect::<Vec<_>>().join(", "))
}

pub(crate) fn name(ranks: &[Rank]) -> String {
    let plain: Vec<u32> = ranks.iter().map(|rank| rank.0).collect();
    if plain.len() == 1 { format!("rank {}", plain[0]) } else { format!("ranks {}", list(&plain)) }
}

/// What waits besides the roots, in order of distance from them.
fn victims(waiting: &[Blocked], roots: &[Blocked]) -> Vec<Blocked> {
    let mut left: Vec<&Blocked> = waiting.iter().filter(|blocked| !roots.contains(blocked)).collect();
    let mut stuck: BTreeSet<Rank> = roots.iter().flat_map(|root| root.waiting.clone()).collect();
    let mut ordered = Vec::new();
    loop {
        let (near, far): (Vec<_>, Vec<_>) =
            left.into_iter().partition(|blocked| blocked.missing.iter().any(|rank| stuck.contains(rank)));
        if near.is_empty() {
            ordered.extend(far.into_iter().cloned());
            return ordered;
        }
        stuck.extend(near.iter().flat_map(|blocked| blocked.waiting.clone()));
        ordered.extend(near.into_iter().cloned());
        left = far;
    }
}

fn mismatch(found: &Mismatch) -> Hang {
    let is_tie = found.majority_ranks.len() == found.minority_ranks.len();
    let mut cause = found.to_string();
    if is_tie {
        cause.push_str("; neither side is in the majority");
    }
    if found.sequence > 0 {
        let calls = if found.sequence == 1 { "the call before it agrees" } else { "the calls before it agree" };
        cause = format!("{cause}; {calls} in kind, size and type, which does not show that the tensors are the same");
    }
    let both = found.majority_ranks.iter().filter(|_| is_tie).chain(&found.minority_ranks).copied();
    Hang {
        kind: HangKind::Mismatch,
        cause,
        culprits: sorted(both),
        roots: Vec::new(),
        victims: Vec::new(),
        mismatch: Some(found.clone()),
        advice: SAME_CALLS,
    }
}
