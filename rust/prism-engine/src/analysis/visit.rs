//! One rank of a trace, moment by moment in program order, for those who show it.

use super::plan::{Launch, NodeKind};
use super::trace::JobTrace;
use crate::graph::Graph;
use crate::sim::SimError;
use crate::units::SimTime;

/// A moment of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeView {
    /// Device work.
    Compute {
        /// Index in the program.
        op: u32,
        /// Start.
        start: SimTime,
        /// End.
        end: SimTime,
    },
    /// An event or a marker.
    Point {
        /// Index in the program.
        op: u32,
        /// When everything before it on its stream was done.
        time: SimTime,
    },
    /// The host returns from a synchronisation.
    Resume {
        /// When it was called.
        since: SimTime,
        /// When it returned.
        time: SimTime,
    },
    /// Communication.
    Launch(LaunchView),
}

/// The part of a group on one communicator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaunchView {
    /// Index in the program of its first collective (or message).
    pub op: u32,
    /// The rank's arrival.
    pub start: SimTime,
    /// Its end on the rank.
    pub end: SimTime,
    /// In words.
    pub what: String,
    /// Number of the communicator in the graph.
    pub comm: u32,
    /// Its size.
    pub members: u32,
    /// Bytes as the calls state them.
    pub bytes: u64,
    /// The same for all ranks that take part in its first collective, or in its first message.
    pub flow: u64,
}

impl JobTrace {
    /// The job.
    #[must_use]
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// Shows `show` the moments of a rank in program order. O(ops of the rank).
    pub fn visit(&self, rank: u32, mut show: impl FnMut(NodeView)) -> Result<(), SimError> {
        let times = self.fresh_times(rank)?;
        let (plan, duration) = (self.plan(rank), self.duration_of(rank));
        for (number, node) in plan.nodes.iter().enumerate() {
            let time = times[number];
            match node.kind {
                NodeKind::Compute { duration: common, .. } => {
                    let start = time - duration(node.op, common);
                    show(NodeView::Compute { op: node.op, start, end: time });
                }
                NodeKind::Point => show(NodeView::Point { op: node.op, time }),
                NodeKind::Host => {
                    // The host itself is the last thing a node waits for.
                    let own = plan.edges(number as u32).last().expect("a node waits for the host");
                    show(NodeView::Resume { since: times[own.from as usize] + own.offset, time });
                }
                NodeKind::End(launch) => {
                    let launch = &plan.launches[launch as usize];
                    show(NodeView::Launch(self.launch_view(rank, launch, times[launch.arrive as usize], time)));
                }
                NodeKind::Begin | NodeKind::Wait | NodeKind::Leave | NodeKind::Arrive(_) => {}
            }
        }
        Ok(())
    }

    fn launch_view(&self, rank: u32, launch: &Launch, start: SimTime, end: SimTime) -> LaunchView {
        let comm = self.comm_of(rank, launch);
        let calls = launch.calls.iter().map(crate::sim::Call::bytes);
        let halves = launch.halves.iter().map(|(half, _)| half.bytes());
        let bytes = calls.chain(halves).fold(0, u64::saturating_add);
        let members = self.members(comm).len() as u32;
        LaunchView {
            op: launch.op(),
            start,
            end,
            what: describe(launch),
            comm,
            members,
            bytes,
            flow: self.flow(rank, comm, launch),
        }
    }

    /// A number for what meets: communicator and number of the collective, or the two ranks and number of the message.
    fn flow(&self, rank: u32, comm: u32, launch: &Launch) -> u64 {
        let mix = |words: [u64; 4]| {
            let bytes = words.into_iter().flat_map(u64::to_le_bytes);
            // FNV-1a; never 0, which viewers take for "none".
            bytes.fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
                | 1
        };
        if launch.calls.is_empty() {
            let (half, sequence) = &launch.halves[0];
            let mine = self.member(comm, rank) as u32;
            let (from, to) = if half.is_send { (mine, half.peer) } else { (half.peer, mine) };
            return mix([u64::from(comm), u64::from(from) << 32 | u64::from(to), *sequence, 1]);
        }
        mix([u64::from(comm), 0, launch.first_call, 0])
    }
}

pub(super) fn describe(launch: &Launch) -> String {
    let mut words: Vec<String> = launch.calls.iter().map(|call| call.signature().collective).collect();
    words.dedup();
    let sends = launch.halves.iter().filter(|(half, _)| half.is_send).count();
    for (count, word) in [(sends, "Send"), (launch.halves.len() - sends, "Recv")] {
        match count {
            0 => {}
            1 => words.push(word.to_owned()),
            count => words.push(format!("{count} {word}s")),
        }
    }
    words.join(" + ")
}
