//! How much alike two ranks are that do not run the very same program.
//!
//! With optimizer states sharded over replicas no two ranks copy the same pieces, yet all of them communicate alike. Two
//! recordings are *comparable* if they issue the same communications and iterations in the same order; how far apart they are is
//! what lies between: time on each stream and on the host, or, where times were measured, numbers of ops.

use super::recording::RankRecording;
use crate::graph::op::{Op, OpKind};
use crate::ids::StreamId;
use std::collections::{BTreeMap, BTreeSet};

const MILLION: i128 = 1_000_000;

/// What a rank does between two communications: picoseconds, or ops.
#[derive(Debug, Default)]
struct Between {
    host: i64,
    by_stream: BTreeMap<StreamId, i64>,
}

impl Between {
    fn total(&self) -> i128 {
        i128::from(self.host) + self.by_stream.values().map(|&amount| i128::from(amount)).sum::<i128>()
    }

    fn distance(&self, other: &Self) -> i128 {
        let streams: BTreeSet<_> = self.by_stream.keys().chain(other.by_stream.keys()).collect();
        let of = |amounts: &Self, stream| amounts.by_stream.get(stream).copied().unwrap_or(0);
        let apart: i128 = streams.into_iter().map(|stream| gap(of(self, stream), of(other, stream))).sum();
        gap(self.host, other.host) + apart
    }
}

fn gap(one: i64, other: i64) -> i128 {
    (i128::from(one) - i128::from(other)).abs()
}

/// The communications and iterations of a rank, each with what it does before.
fn skeleton(recording: &RankRecording, with_times: bool) -> (Vec<(Op, Between)>, Between) {
    let mut found = Vec::new();
    let mut between = Between::default();
    for op in &recording.ops {
        if with_times {
            between.host = between.host.saturating_add(op.host_gap.as_ps());
        }
        match op.kind {
            OpKind::Collective { .. } | OpKind::PointToPoint { .. } | OpKind::TrainingBegin | OpKind::IterationEnd => {
                found.push((*op, std::mem::take(&mut between)));
            }
            OpKind::Compute { duration, .. } => {
                let spent = between.by_stream.entry(op.stream).or_default();
                *spent = spent.saturating_add(if with_times { duration.as_ps() } else { 1 });
            }
            _ if !with_times => between.host += 1,
            _ => {}
        }
    }
    (found, between)
}

impl RankRecording {
    /// How far apart two ranks are, in millionths of what the longer one does: the sum over all stretches between two
    /// communications of the differences of host time and of each stream's time (`with_times`) or of numbers of ops.
    ///
    /// `None` if they do not issue the same communications and iterations, on the same streams, in the same order.
    pub fn distance_ppm(&self, other: &Self, with_times: bool) -> Option<u64> {
        let (mine, my_rest) = skeleton(self, with_times);
        let (theirs, their_rest) = skeleton(other, with_times);
        let same = |one: &Op, two: &Op| one.stream == two.stream && one.kind == two.kind;
        if mine.len() != theirs.len() || !mine.iter().zip(&theirs).all(|((one, _), (two, _))| same(one, two)) {
            return None;
        }
        let stretches = |ops: &[(Op, Between)], rest: &Between| {
            ops.iter().map(|(_, between)| between.total()).sum::<i128>() + rest.total()
        };
        let longer = stretches(&mine, &my_rest).max(stretches(&theirs, &their_rest));
        let apart = mine.iter().zip(&theirs).map(|((_, one), (_, two))| one.distance(two)).sum::<i128>()
            + my_rest.distance(&their_rest);
        if apart == 0 {
            return Some(0);
        }
        // Rounded up: what is not equal is not 0 apart.
        let ppm = (apart * MILLION + longer - 1) / longer.max(1);
        Some(u64::try_from(ppm).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::op::{CollectiveKind, ComputeClass, DataType, Provenance, ReduceOp};
    use crate::ids::{NameId, SlotId};
    use crate::units::SimTime;

    fn compute(ns: i64) -> OpKind {
        OpKind::Compute {
            duration: SimTime::from_ns(ns),
            name: NameId(0),
            class: ComputeClass::Memcpy,
            provenance: Provenance::Modelled,
        }
    }

    fn sum(count: u64) -> OpKind {
        OpKind::Collective {
            slot: SlotId(0),
            kind: CollectiveKind::AllReduce,
            dtype: DataType::Float32,
            reduce: ReduceOp::Sum,
            root: 0,
            count,
            group: 0,
        }
    }

    fn recording(kinds: &[OpKind]) -> RankRecording {
        let op = |kind: &OpKind| Op { host_gap: SimTime::from_ns(1), stream: StreamId(0), kind: *kind };
        RankRecording {
            rank: 0,
            world_size: 8,
            ops: kinds.iter().map(op).collect(),
            names: vec!["copy".to_owned()],
            comms: Vec::new(),
            groups: Vec::new(),
            meta: BTreeMap::new(),
        }
    }

    #[test]
    fn pieces_of_a_copy_are_alike_as_far_as_their_time_is() {
        let whole = recording(&[compute(1000), sum(8), compute(998), OpKind::IterationEnd]);
        let pieces = recording(&[compute(600), compute(400), sum(8), compute(998), OpKind::IterationEnd]);
        // One more host gap of 1 ns among 2,003 ns.
        assert_eq!(whole.distance_ppm(&pieces, true), Some(500));
        assert_eq!(pieces.distance_ppm(&whole, true), Some(500));
        assert_eq!(whole.distance_ppm(&whole, true), Some(0));
    }

    #[test]
    fn time_on_the_other_side_of_a_collective_counts_twice() {
        let before = recording(&[compute(1000), sum(8)]);
        let after = recording(&[sum(8), compute(1000)]);
        let found = before.distance_ppm(&after, true).expect("the same collective");
        assert!(found > 1_990_000, "{found}");
    }

    #[test]
    fn other_communications_are_not_comparable() {
        let mine = recording(&[sum(8), OpKind::IterationEnd]);
        assert_eq!(mine.distance_ppm(&recording(&[sum(9), OpKind::IterationEnd]), true), None);
        assert_eq!(mine.distance_ppm(&recording(&[OpKind::IterationEnd, sum(8)]), true), None);
        assert_eq!(mine.distance_ppm(&recording(&[sum(8)]), true), None);
    }

    #[test]
    fn without_times_ops_are_counted() {
        let mine = recording(&[compute(5), compute(5), sum(8), compute(5), compute(5)]);
        let slower = recording(&[compute(900), compute(5), sum(8), compute(5), compute(5)]);
        let longer = recording(&[compute(5), compute(5), sum(8), compute(5), compute(5), compute(5)]);
        assert_eq!(mine.distance_ppm(&slower, false), Some(0));
        assert_eq!(mine.distance_ppm(&longer, false), Some(200_000));
    }
}
