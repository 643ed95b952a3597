//! The slices of some ranks, from a replay kept for analysis.

use crate::analysis::{JobTrace, LaunchView, NodeView};
use crate::graph::op::{ComputeClass, OpKind};
use crate::ids::Rank;
use crate::sim::SimError;
use crate::units::SimTime;

/// Most slices of a timeline: some 80 bytes each in memory, and no viewer opens more.
pub const TIMELINE_MAX_SLICES: usize = 20_000_000;

/// Where a slice lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Track {
    /// The host of a rank, where it waits.
    Host,
    /// A stream by its number.
    Stream(u32),
}

/// What a viewer shows beside a slice's name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Detail {
    /// Device work of a class.
    Compute(ComputeClass),
    /// Communication.
    Communication {
        /// Number of the communicator in the graph.
        comm: u32,
        /// Its size.
        members: u32,
        /// Bytes as the calls state them, all calls of the launch.
        bytes: u64,
    },
    /// The host waits.
    Wait,
}

/// Something that takes time on a track.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slice {
    /// Whose.
    pub rank: u32,
    /// Where.
    pub track: Track,
    /// Name, as an index of [`Timeline::names`].
    pub name: u32,
    /// Start; for communication, the arrival.
    pub start: SimTime,
    /// End.
    pub end: SimTime,
    /// What it is.
    pub detail: Detail,
    /// Slices of different ranks with the same number belong together.
    pub flow: Option<u64>,
}

/// A point in time of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// Whose.
    pub rank: u32,
    /// What, as an index of [`Timeline::names`].
    pub name: u32,
    /// When.
    pub time: SimTime,
}

/// Bytes the driver handed out to a rank, from a time on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counter {
    /// Whose.
    pub rank: u32,
    /// From when.
    pub time: SimTime,
    /// How much.
    pub bytes: u64,
}

/// What some ranks did. Everything is ordered by rank, track and start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Timeline {
    /// Names of slices and marks.
    pub names: indexmap::IndexSet<String>,
    /// Ranks in ascending order.
    pub ranks: Vec<u32>,
    /// What takes time.
    pub slices: Vec<Slice>,
    /// Ends of iterations, beginnings of training.
    pub marks: Vec<Mark>,
    /// Memory.
    pub counters: Vec<Counter>,
}

impl Timeline {
    /// The timeline of `ranks` (each once, in any order). O(ops of those ranks). An error if a rank's times are not known, or
    /// the timeline would have more than [`TIMELINE_MAX_SLICES`].
    pub fn of(trace: &JobTrace, ranks: &[Rank]) -> Result<Self, SimError> {
        let mut timeline = Self { ranks: ranks.iter().map(|rank| rank.0).collect(), ..Self::default() };
        timeline.ranks.sort_unstable();
        timeline.ranks.dedup();
        for rank in timeline.ranks.clone() {
            timeline.add_rank(trace, rank)?;
            if timeline.slices.len() > TIMELINE_MAX_SLICES {
                let what = format!("a timeline of more than {TIMELINE_MAX_SLICES} slices (name fewer ranks)");
                return Err(SimError::Unavailable { what });
            }
        }
        timeline.slices.sort_by_key(|slice| (slice.rank, slice.track, slice.start, slice.end));
        Ok(timeline)
    }

    /// Name of a slice or mark.
    pub fn name(&self, number: u32) -> &str {
        &self.names[number as usize]
    }

    fn intern(&mut self, text: &str) -> u32 {
        let at = self.names.get_index_of(text).unwrap_or_else(|| self.names.insert_full(text.to_owned()).0);
        at as u32
    }

    fn add_rank(&mut self, trace: &JobTrace, rank: u32) -> Result<(), SimError> {
        let graph = trace.graph();
        let program = graph.template(graph.rank_template(Rank(rank)));
        let wait = self.intern("wait");
        let (begin, end) = (self.intern("training begins"), self.intern("iteration ends"));
        let mut resumes = Vec::new();
        trace.visit(rank, |node| match node {
            NodeView::Compute { op, start, end } => {
                let op = program.op(op as usize);
                let OpKind::Compute { name, class, .. } = op.kind else { return };
                let name = self.intern(graph.name(name));
                let detail = if class.is_fixed() { Detail::Wait } else { Detail::Compute(class) };
                let track = Track::Stream(op.stream.0);
                self.slices.push(Slice { rank, track, name, start, end, detail, flow: None });
            }
            NodeView::Point { op, time } => {
                let name = match program.op(op as usize).kind {
                    OpKind::TrainingBegin => begin,
                    OpKind::IterationEnd => end,
                    _ => return,
                };
                self.marks.push(Mark { rank, name, time });
            }
            NodeView::Resume { since, time } => {
                resumes.push(time);
                if time > since {
                    let (track, detail) = (Track::Host, Detail::Wait);
                    self.slices.push(Slice { rank, track, name: wait, start: since, end: time, detail, flow: None });
                }
            }
            NodeView::Launch(launch) => self.add_launch(rank, program.op(launch.op as usize).stream.0, &launch),
        })?;
        self.add_memory(rank, program.iter(), &resumes);
        Ok(())
    }

    fn add_launch(&mut self, rank: u32, stream: u32, launch: &LaunchView) {
        let LaunchView { start, end, comm, members, bytes, flow, ref what, .. } = *launch;
        let name = self.intern(what);
        let detail = Detail::Communication { comm, members, bytes };
        self.slices.push(Slice { rank, track: Track::Stream(stream), name, start, end, detail, flow: Some(flow) });
    }

    /// Memory changes where the host is; `resumes` are its returns from synchronisations.
    fn add_memory(&mut self, rank: u32, ops: impl Iterator<Item = crate::graph::op::Op>, resumes: &[SimTime]) {
        let (mut host, mut resumes, mut bytes) = (SimTime::ZERO, resumes.iter(), 0_u64);
        for op in ops {
            host += op.host_gap;
            match op.kind {
                OpKind::StreamSync | OpKind::EventSync { .. } | OpKind::DeviceSync => {
                    host = resumes.next().copied().unwrap_or(host);
                    continue;
                }
                OpKind::Alloc { bytes: more } => bytes = bytes.saturating_add(more),
                OpKind::Free { bytes: less } => bytes = bytes.saturating_sub(less),
                _ => continue,
            }
            self.counters.push(Counter { rank, time: host, bytes });
        }
    }
}
