//! Keeps what a live rank did as a rank recording: the op program that other ranks of its role will replay.

use crate::graph::op::{Op, OpKind};
use crate::ids::{EventId, NameId, StreamId};
use crate::slice::recording::{ProcessGroup, RankRecording, RecordedComm};
use indexmap::IndexSet;
use std::collections::BTreeMap;

/// Collects ops in program order.
#[derive(Debug, Default)]
pub(crate) struct Recorder {
    ops: Vec<Op>,
}

impl Recorder {
    pub(crate) fn push(&mut self, op: Op) {
        self.ops.push(op);
    }

    /// The finished recording. Stream and event numbers are made dense: a program creates thousands of events, but few
    /// live at the same time, and every number costs one clock per rank in the replay. So are names: their order in the
    /// session depends on which rank said them first.
    pub(crate) fn finish(
        &self,
        rank: u32,
        world_size: u32,
        names: &IndexSet<String>,
        comms: Vec<RecordedComm>,
        groups: Vec<ProcessGroup>,
    ) -> RankRecording {
        let (ops, names) = dense_names(&dense_streams(&dense_events(&self.ops)), names);
        RankRecording { rank, world_size, ops, names, comms, groups, meta: BTreeMap::new() }
    }
}

fn event_of(kind: &OpKind) -> Option<(EventId, bool)> {
    match kind {
        OpKind::EventRecord { event } => Some((*event, true)),
        OpKind::EventWait { event } | OpKind::EventSync { event } => Some((*event, false)),
        _ => None,
    }
}

fn with_event(kind: OpKind, event: EventId) -> OpKind {
    match kind {
        OpKind::EventRecord { .. } => OpKind::EventRecord { event },
        OpKind::EventWait { .. } => OpKind::EventWait { event },
        OpKind::EventSync { .. } => OpKind::EventSync { event },
        other => other,
    }
}

/// Drops records nobody waits for and waits for events that were never recorded, and gives the rest the smallest free
/// number, as a register allocator does. The host gap of a dropped op goes to the next op.
fn dense_events(ops: &[Op]) -> Vec<Op> {
    let mut last_use = vec![None; ops.len()];
    let mut recorded_at: BTreeMap<EventId, usize> = BTreeMap::new();
    let mut source = vec![None; ops.len()];
    for (index, op) in ops.iter().enumerate() {
        match event_of(&op.kind) {
            Some((event, true)) => {
                recorded_at.insert(event, index);
            }
            Some((event, false)) => {
                if let Some(&record) = recorded_at.get(&event) {
                    last_use[record] = Some(index);
                    source[index] = Some(record);
                }
            }
            None => {}
        }
    }
    let mut free: Vec<u32> = Vec::new();
    let mut next = 0;
    let mut number = vec![0; ops.len()];
    let mut carried = crate::units::SimTime::ZERO;
    let mut dense = Vec::with_capacity(ops.len());
    for (index, op) in ops.iter().enumerate() {
        let kept = match event_of(&op.kind) {
            Some((_, true)) => last_use[index].map(|_| {
                number[index] = free.pop().unwrap_or_else(|| {
                    next += 1;
                    next - 1
                });
                EventId(number[index])
            }),
            Some((_, false)) => source[index].map(|record| {
                if last_use[record] == Some(index) {
                    free.push(number[record]);
                }
                EventId(number[record])
            }),
            None => {
                dense.push(Op { host_gap: op.host_gap + carried, ..*op });
                carried = crate::units::SimTime::ZERO;
                continue;
            }
        };
        match kept {
            Some(event) => {
                dense.push(Op { host_gap: op.host_gap + carried, kind: with_event(op.kind, event), ..*op });
                carried = crate::units::SimTime::ZERO;
            }
            // The host's time of the call stays, only the op goes.
            None => carried += op.host_gap,
        }
    }
    dense
}

fn dense_streams(ops: &[Op]) -> Vec<Op> {
    let mut number: BTreeMap<StreamId, u32> = BTreeMap::new();
    let dense = |op: &Op| {
        // These belong to the device or the host: the stream number they carry means nothing, and must not differ
        // between ranks.
        let has_stream = !matches!(
            op.kind,
            OpKind::Alloc { .. } | OpKind::Free { .. } | OpKind::DeviceSync | OpKind::EventSync { .. }
        );
        let next = number.len() as u32;
        let stream = if has_stream { *number.entry(op.stream).or_insert(next) } else { 0 };
        Op { stream: StreamId(stream), ..*op }
    };
    ops.iter().map(dense).collect()
}

/// Keeps the names that ops have, in order of first use.
fn dense_names(ops: &[Op], names: &IndexSet<String>) -> (Vec<Op>, Vec<String>) {
    let mut used: IndexSet<&str> = IndexSet::new();
    let dense = |op: &Op| {
        let mut op = *op;
        if let OpKind::Compute { name, .. } = &mut op.kind {
            let text = names.get_index(name.index()).expect("ops have names of the session");
            *name = NameId(used.insert_full(text).0 as u32);
        }
        op
    };
    let ops = ops.iter().map(dense).collect();
    (ops, used.into_iter().map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::GraphBuilder;
    use crate::graph::op::{ComputeClass, Provenance};
    use crate::ids::Rank;
    use crate::profile::Profile;
    use crate::sim::{Peers, SimOptions, Simulation};
    use crate::units::SimTime;
    use proptest::prelude::*;
    use std::sync::Arc;

    fn op_of(stream: u32, kind: OpKind) -> Op {
        Op { host_gap: SimTime::from_ns(10), stream: StreamId(stream), kind }
    }

    #[test]
    fn events_get_the_smallest_free_number_and_unused_records_go() {
        let ops = [
            op_of(7, OpKind::EventRecord { event: EventId(100) }),
            op_of(9, OpKind::EventWait { event: EventId(100) }),
            op_of(7, OpKind::EventRecord { event: EventId(101) }),
            op_of(7, OpKind::EventRecord { event: EventId(102) }),
            op_of(9, OpKind::EventWait { event: EventId(999) }),
            op_of(9, OpKind::EventSync { event: EventId(102) }),
        ];
        let dense = dense_streams(&dense_events(&ops));
        let kinds: Vec<_> = dense.iter().map(|op| (op.stream.0, op.kind, op.host_gap.as_ns())).collect();
        assert_eq!(
            kinds,
            [
                (0, OpKind::EventRecord { event: EventId(0) }, 10),
                (1, OpKind::EventWait { event: EventId(0) }, 10),
                (0, OpKind::EventRecord { event: EventId(0) }, 20),
                (0, OpKind::EventSync { event: EventId(0) }, 20),
            ]
        );
    }

    #[test]
    fn an_event_recorded_again_while_still_waited_for_keeps_both() {
        let ops = [
            op_of(0, OpKind::EventRecord { event: EventId(5) }),
            op_of(0, OpKind::EventRecord { event: EventId(6) }),
            op_of(1, OpKind::EventWait { event: EventId(5) }),
            op_of(0, OpKind::EventRecord { event: EventId(5) }),
            op_of(1, OpKind::EventWait { event: EventId(6) }),
            op_of(1, OpKind::EventWait { event: EventId(5) }),
        ];
        let dense = dense_events(&ops);
        let events: Vec<_> = dense.iter().filter_map(|op| event_of(&op.kind)).collect();
        assert_eq!(
            events,
            [
                (EventId(0), true),
                (EventId(1), true),
                (EventId(0), false),
                (EventId(0), true),
                (EventId(1), false),
                (EventId(0), false)
            ]
        );
    }

    /// A program over three streams and four events, with everything that touches either.
    fn any_ops() -> impl Strategy<Value = Vec<Op>> {
        let event = || (0..4u32).prop_map(EventId);
        let compute = |us: i64| OpKind::Compute {
            duration: SimTime::from_ns(us * 1000),
            name: NameId(0),
            class: ComputeClass::Kernel,
            provenance: Provenance::Modelled,
        };
        let kind = prop_oneof![
            3 => (0..50i64).prop_map(compute),
            3 => event().prop_map(|event| OpKind::EventRecord { event }),
            3 => event().prop_map(|event| OpKind::EventWait { event }),
            1 => event().prop_map(|event| OpKind::EventSync { event }),
            1 => Just(OpKind::StreamSync),
            1 => Just(OpKind::DeviceSync),
            1 => Just(OpKind::Alloc { bytes: 1 }),
            2 => Just(OpKind::IterationEnd),
        ];
        let op = (0..20_000i64, prop::sample::select(vec![0u32, 3, 9]), kind).prop_map(|(gap, stream, kind)| Op {
            host_gap: SimTime::from_ns(gap),
            stream: StreamId(stream),
            kind,
        });
        prop::collection::vec(op, 0..40).prop_map(|mut ops| {
            // The ends of all streams and of the host show in the result.
            ops.extend([0, 3, 9].map(|stream| op_of(stream, OpKind::IterationEnd)));
            ops.extend([op_of(0, OpKind::DeviceSync), op_of(0, OpKind::IterationEnd)]);
            ops
        })
    }

    fn iteration_ends(ops: &[Op]) -> Vec<SimTime> {
        let mut builder = GraphBuilder::new(1);
        builder.intern_name("work");
        let template = builder.add_template("program", ops).expect("valid ops");
        builder.set_rank(Rank(0), template, vec![]);
        let graph = Arc::new(builder.finish().expect("valid"));
        let profile = Profile::builtin("h100-sxm").expect("built in");
        // Not a replay: that refuses the waits for what was never recorded, which are left out here.
        let options = SimOptions::new(profile);
        let mut simulation = Simulation::new(Peers::Graph(graph), 1, options).expect("a program that fits");
        simulation.run().expect("nobody to wait for");
        simulation.report().ranks[0].iteration_ends.clone()
    }

    fn num_events(ops: &[Op]) -> usize {
        ops.iter().filter_map(|op| event_of(&op.kind)).map(|(event, _)| event.0 as usize + 1).max().unwrap_or(0)
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn dense_numbers_change_no_time(ops in any_ops()) {
            let dense = dense_streams(&dense_events(&ops));
            prop_assert_eq!(iteration_ends(&dense), iteration_ends(&ops));
            // A second time changes nothing more.
            prop_assert_eq!(&dense_streams(&dense_events(&dense)), &dense);
            prop_assert!(num_events(&dense) <= 4 && dense.iter().all(|op| op.stream.0 < 3));
        }
    }
}
