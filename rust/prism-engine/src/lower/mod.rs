//! Message level: a job as computations, waits and single messages.
//!
//! [`Job`] is a graph of *nodes*: computations, points where a rank waits for several things, the begin and the end of every
//! launch of communication on a rank, and the messages between two ranks. A collective is an *instance* of a [`Pattern`]:
//! lanes of messages between neighbours, each lane serial, whose messages wait for messages of other lanes. These are the
//! very messages of the recurrences in [`crate::collective`]:
//!
//! ```text
//!  graph ──lower──► nodes ──enter──► instance of a pattern ──exit──► nodes        one exit per member
//!                     │                lanes x messages
//!                     └──► contention::evaluate (none, fifo, fair-share; overlap)
//!                     └──► lower::goal (a message program, for other simulators)
//! ```
//!
//! Where the closed forms are exact the messages without contention end at the same picosecond: rings, trees, chains,
//! gather, scatter and point-to-point messages. An all-to-all has no exact closed form; what replay uses is an upper form
//! (the last arrival plus the busiest port), and its messages are lowered to that form: nobody sends before everybody is
//! there, and nobody leaves before everybody is through. What takes NCCL's own formula for its time (NVLS and so on) has one
//! message per member that is under way for that long. Channels are those of the profile's tuning: [`pattern`] says how they
//! become lanes. Flow-control credits are left out on both levels: with credits, the closed forms and these messages alike
//! are a lower bound for ranks upstream of a late one.
//!
//! Memory: about 60 bytes per op of a rank, whatever the number of messages, which are made while they travel.

mod build;
mod fabric;
pub mod goal;
mod pattern;
mod ports;
mod survey;

pub use build::lower;
pub use pattern::{Message, Pattern, Wire};
pub(crate) use ports::PortMap;

use crate::collective::CommShape;
use crate::graph::op::{ComputeClass, Provenance};
use crate::ids::Rank;
use crate::profile::Profile;
use crate::units::SimTime;
use std::collections::BTreeMap;
use std::sync::Arc;

/// No node.
pub(crate) const NO_NODE: u32 = u32::MAX;

/// The lane of the host.
pub(crate) const HOST: u16 = 0;

/// How finely collectives are cut into messages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StepMessages {
    /// As the recurrences of [`crate::collective`] have them: loops, steps and slices.
    #[default]
    Fine,
    /// One message per step of a ring. A step then forwards nothing before all of it is there, so rings whose steps have
    /// slices or that go round in loops take longer than replay says. Trees, chains and pairs are as in [`Self::Fine`].
    Coarse,
}

/// How to lower a job.
#[derive(Clone, Debug)]
pub struct LowerOptions {
    /// Costs of communication.
    pub profile: Profile,
    /// Slow-down of a rank's compute ops.
    pub slow: BTreeMap<Rank, f64>,
    /// How finely collectives are cut.
    pub step_messages: StepMessages,
    /// Only what these ranks' times depend on: all ranks that share communicators with them, directly or over others.
    pub ranks: Option<Vec<Rank>>,
    /// Most messages.
    pub max_messages: u64,
}

impl LowerOptions {
    /// Messages that are evaluated unless more are allowed: some minutes of one core.
    pub const MAX_MESSAGES: u64 = 1 << 29;

    /// The whole job at full speed, in fine messages.
    #[must_use]
    pub fn new(profile: Profile) -> Self {
        let (slow, step_messages) = (BTreeMap::new(), StepMessages::Fine);
        Self { profile, slow, step_messages, ranks: None, max_messages: Self::MAX_MESSAGES }
    }
}

/// What a node stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    /// A point that is reached `delay` after everything before it.
    Join,
    /// Work of the device.
    Compute(ComputeClass, Provenance),
    /// A launch of communication begins on the rank; the first collective of it, if any, is entered.
    Begin { enter: u32 },
    /// A further collective of a launch is entered.
    Enter { enter: u32 },
    /// A launch ends on the rank. Its first predecessor is its begin.
    End,
    /// A message between two ranks leaves `delay` after both halves are posted. They are by [`Work::Join`]s.
    Transfer(u32),
}

/// A message between two ranks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Transfer {
    pub(crate) message: Message,
    /// Global ranks.
    pub(crate) ranks: (u32, u32),
    /// The nodes that wait for the message to leave, and to arrive.
    pub(crate) ends: (u32, u32),
}

/// A member comes to a collective.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Enter {
    pub(crate) instance: u32,
    /// Its group rank.
    pub(crate) member: u32,
    /// Time until it takes part.
    pub(crate) launch: SimTime,
}

/// A collective of one communicator.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Instance {
    /// Index into [`Job::comms`].
    pub(crate) comm: u32,
    pub(crate) pattern: u32,
    /// Where the nodes that wait for the members' ends begin in [`Job::exits`].
    pub(crate) exits: u32,
}

/// A communicator.
#[derive(Clone, Debug)]
pub(crate) struct Comm {
    /// Global ranks in group-rank order.
    pub(crate) members: Vec<u32>,
    pub(crate) shape: Arc<CommShape>,
}

/// Points of interest of one rank.
#[derive(Clone, Debug, Default)]
pub(crate) struct Marks {
    pub(crate) training_begin: Option<u32>,
    pub(crate) iteration_ends: Vec<u32>,
    pub(crate) last: u32,
}

/// Nodes, with what each waits for.
#[derive(Clone, Debug, Default)]
pub(crate) struct Nodes {
    pub(crate) work: Vec<Work>,
    pub(crate) delay: Vec<SimTime>,
    pub(crate) rank: Vec<u32>,
    /// [`HOST`], or 1 + the stream.
    pub(crate) lane: Vec<u16>,
    /// Predecessors of node `n`: `before[start[n]..start[n + 1]]`.
    start: Vec<u32>,
    before: Vec<u32>,
    /// Releases each node needs besides those of its predecessors: by instances and messages.
    pub(crate) outside: Vec<u32>,
}

impl Nodes {
    pub(crate) fn len(&self) -> usize {
        self.work.len()
    }

    pub(crate) fn before(&self, node: u32) -> &[u32] {
        let node = node as usize;
        &self.before[self.start[node] as usize..self.start[node + 1] as usize]
    }

    pub(crate) fn push(
        &mut self,
        rank: u32,
        lane: u16,
        work: Work,
        delay: SimTime,
        before: impl IntoIterator<Item = u32>,
    ) -> u32 {
        if self.start.is_empty() {
            self.start.push(0);
        }
        self.before.extend(before);
        self.start.push(self.before.len() as u32);
        self.work.push(work);
        self.delay.push(delay);
        self.rank.push(rank);
        self.lane.push(lane);
        self.outside.push(0);
        self.len() as u32 - 1
    }

    /// The nodes after each node, the other way round: `(start, after)`.
    pub(crate) fn after(&self) -> (Vec<u32>, Vec<u32>) {
        let mut start = vec![0u32; self.len() + 1];
        self.before.iter().for_each(|before| start[*before as usize + 1] += 1);
        for node in 0..self.len() {
            start[node + 1] += start[node];
        }
        let (mut next, mut after) = (start.clone(), vec![0; self.before.len()]);
        for node in 0..self.len() as u32 {
            for before in self.before(node) {
                after[next[*before as usize] as usize] = node;
                next[*before as usize] += 1;
            }
        }
        (start, after)
    }

    /// Releases each node needs before it is reached.
    pub(crate) fn pending(&self) -> Vec<u32> {
        self.outside.iter().zip(self.start.windows(2)).map(|(outside, at)| outside + at[1] - at[0]).collect()
    }
}

/// A job at message level. See the module's documentation.
#[derive(Clone, Debug)]
pub struct Job {
    pub(crate) world_size: u32,
    /// The ranks lowered, ascending.
    pub(crate) ranks: Vec<u32>,
    pub(crate) nodes: Nodes,
    pub(crate) marks: Vec<Marks>,
    pub(crate) patterns: Vec<Pattern>,
    pub(crate) comms: Vec<Comm>,
    pub(crate) instances: Vec<Instance>,
    pub(crate) exits: Vec<u32>,
    pub(crate) enters: Vec<Enter>,
    pub(crate) transfers: Vec<Transfer>,
    pub(crate) ports: PortMap,
    pub(crate) messages: u64,
    pub(crate) num_ops: u64,
}

impl Job {
    /// Messages of the job.
    #[must_use]
    pub fn num_messages(&self) -> u64 {
        self.messages
    }

    /// Ranks, ascending.
    pub fn ranks(&self) -> impl ExactSizeIterator<Item = Rank> + '_ {
        self.ranks.iter().map(|rank| Rank(*rank))
    }

    /// Nodes of the job: its memory grows with them.
    #[must_use]
    pub fn num_nodes(&self) -> usize {
        self.nodes.len()
    }

    pub(crate) fn pattern(&self, instance: u32) -> &Pattern {
        &self.patterns[self.instances[instance as usize].pattern as usize]
    }

    pub(crate) fn comm(&self, instance: u32) -> &Comm {
        &self.comms[self.instances[instance as usize].comm as usize]
    }

    /// The node that waits for a member's end.
    pub(crate) fn exit(&self, instance: u32, member: u32) -> u32 {
        self.exits[(self.instances[instance as usize].exits + member) as usize]
    }
}
