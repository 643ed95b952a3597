//! Ranks whose programs differ, one by one.
//!
//! Where hardly two ranks have one program, vectors over roles have one element. This evaluator walks over the ops as the graph
//! stores them: a rank runs in the order in which its host issues its ops until it waits, and goes on when what it waits
//! for has ended; the rank that was woken last runs first, so that the members of a communicator stay in the first cache.
//! Nothing is kept per op.
//!
//! It knows nothing of live ranks, traces, and perturbations other than constant slow-downs, and explains nothing: whatever
//! it cannot finish ([`Irregular`]) is evaluated again from the beginning by roles.

mod ahead;
mod costs;
mod groups;
mod meet;
mod ops;
mod order;
mod state;
mod walk;

use super::is_factor;
use super::report::{RankReport, SimReport};
use super::role::Account;
use crate::graph::Graph;
use crate::graph::columns::Indices;
use crate::ids::Rank;
use crate::profile::Profile;
use crate::units::SimTime;
use ahead::{Ahead, Limits};
use costs::Costs;
use groups::Group;
use meet::Ended;
use ops::{ACCOUNTS, Number, OpInfo, table};
use order::Turns;
use rustc_hash::FxHashMap;
use state::{Channel, NONE, Tables, stall};
use std::collections::{BTreeMap, VecDeque};

/// The job is not one for this evaluator, for whatever reason.
#[derive(Clone, Copy, Debug)]
struct Irregular;

/// What is known of a job while it runs.
struct Machine<'a, N> {
    graph: &'a Graph,
    rows: &'a [N],
    gaps: &'a [u8],
    durations: &'a [u8],
    groups_data: &'a [u8],
    members: &'a [u32],
    ops: &'a [OpInfo],
    tables: Tables,
    costs: Costs,
    channel_numbers: FxHashMap<(u32, u32, u32), u32>,
    /// Halves that wait behind a channel's first one.
    more_halves: FxHashMap<u32, VecDeque<Channel>>,
    /// Ranks that can go on, the next at the end.
    ready: Vec<u32>,
    /// Not yet told.
    ended: Vec<Ended>,
    aheads: Vec<Ahead>,
    limits: Limits,
    /// Launches of slots that count them, by place.
    turns: FxHashMap<u32, Turns>,
    groups: Vec<Group>,
    free_groups: Vec<u32>,
    /// Group and launch in it that are under way, by place.
    active: FxHashMap<u32, (u32, u32)>,
    /// Rank, number and time of markers.
    begins: Vec<(u32, u32, i64)>,
    iteration_ends: Vec<(u32, u32, i64)>,
    /// Time of compute, by account.
    sums: [i128; ACCOUNTS],
    communication: i128,
}

/// The result of a job, if it can be evaluated here.
///
/// `slow` are slow-downs of all compute ops of a rank.
pub(crate) fn evaluate(graph: &Graph, profile: &Profile, slow: &BTreeMap<Rank, f64>) -> Option<SimReport> {
    if slow.iter().any(|(rank, factor)| rank.0 >= graph.world_size() || !is_factor(*factor)) {
        return None;
    }
    let factor = |rank: u32| slow.get(&Rank(rank)).copied().unwrap_or(1.0);
    let columns = graph.program_columns();
    match columns.rows {
        Indices::Zero(len) => run(graph, &vec![0u8; *len], profile, factor),
        Indices::U8(rows) => run(graph, rows, profile, factor),
        Indices::U16(rows) => run(graph, rows, profile, factor),
        Indices::U32(rows) => run(graph, rows, profile, factor),
    }
    .ok()
}

fn run<N: Number>(
    graph: &Graph,
    rows: &[N],
    profile: &Profile,
    factor: impl Fn(u32) -> f64,
) -> Result<SimReport, Irregular> {
    let columns = graph.program_columns();
    let mut costs = Costs::new(profile.clone());
    let ops = table(graph, &mut costs)?;
    let tables = Tables::new(graph, factor, &costs)?;
    let mut machine = Machine {
        graph,
        rows,
        gaps: columns.gaps,
        durations: columns.durations,
        groups_data: columns.groups,
        members: graph.all_members(),
        ops: &ops,
        tables,
        costs,
        channel_numbers: FxHashMap::default(),
        more_halves: FxHashMap::default(),
        ready: (0..graph.world_size()).rev().collect(),
        ended: Vec::new(),
        aheads: Vec::new(),
        limits: Limits::default(),
        turns: FxHashMap::default(),
        groups: Vec::new(),
        free_groups: Vec::new(),
        active: FxHashMap::default(),
        begins: Vec::new(),
        iteration_ends: Vec::new(),
        sums: [0; ACCOUNTS],
        communication: 0,
    };
    machine.run()?;
    machine.report()
}

impl<N: Number> Machine<'_, N> {
    /// The result, if everybody is through.
    fn report(mut self) -> Result<SimReport, Irregular> {
        let tables = &self.tables;
        let is_through = tables.ranks.iter().all(|rank| rank.stall == stall::DONE && rank.blocked == 0)
            && tables.comms.iter().all(|comm| comm.arrived == 0)
            && tables.channels.iter().all(|channel| channel.place == NONE);
        if !is_through {
            return Err(Irregular);
        }
        let mut ranks: Vec<RankReport> = Vec::with_capacity(tables.ranks.len());
        for (rank, state) in (0..).zip(&tables.ranks) {
            let words = state.words as usize;
            let clocks = &tables.words[words..words + usize::from(state.streams)];
            ranks.push(RankReport {
                rank: Rank(rank),
                training_begin: None,
                iteration_ends: Vec::with_capacity(state.iterations as usize),
                final_time: SimTime(clocks.iter().copied().fold(state.base, i64::max)),
                device_time: None,
                comms: Vec::new(),
            });
        }
        self.begins.sort_unstable();
        self.iteration_ends.sort_unstable();
        for (rank, _, time) in self.begins {
            ranks[rank as usize].training_begin = Some(SimTime(time));
        }
        for (rank, _, time) in self.iteration_ends {
            ranks[rank as usize].iteration_ends.push(SimTime(time));
        }
        let mut account = Account { communication: self.communication, ..Account::default() };
        for (number, sum) in self.sums.iter().enumerate() {
            if *sum > 0 {
                account.by_provenance[number / 8] += sum;
                account.by_class[number % 8] += sum;
            }
        }
        let world = ranks.len();
        let (ops_evaluated, device_time) = (self.graph.num_ops(), account.device_time());
        Ok(SimReport { ranks, ops_evaluated, roles: world, classes: world, device_time })
    }
}
