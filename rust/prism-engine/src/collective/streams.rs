//! What the links of a collective carry, message after message: for evaluations that share links with others
//! ([`crate::lower`]). The very runs that the closed forms are evaluated with.

use super::plan::{self, Run, Way};
use super::{Algorithm, CollectiveCall, CollectiveKind, CommShape, ProtocolCosts};
use crate::units::SimTime;

/// Messages that follow each other on every link they pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stream {
    /// Full messages, then those of the last loop. Sizes are counted on whole links: a channel has a share of each.
    pub(crate) runs: [Run; 2],
    /// Share of every link that the stream's channels have, as a fraction.
    pub(crate) part: (u64, u64),
}

impl Stream {
    fn new(run: Run, part: (u64, u64)) -> Self {
        Self { runs: [run, Run::default()], part }
    }

    /// Messages of every link.
    pub(crate) fn messages(&self) -> u64 {
        self.runs[0].messages.saturating_add(self.runs[1].messages)
    }
}

/// How a collective uses its links.
#[derive(Clone, Debug)]
pub(crate) enum Streams {
    /// Round the ring; a message leaves when the one that came `lag` before has arrived.
    Ring { stream: Stream, lag: u64 },
    /// Up and down each of the two trees.
    Trees([Vec<Stream>; 2]),
    /// Along the ring from the root, or to it.
    Chain(Vec<Stream>),
    /// Messages between pairs.
    Direct,
    /// Everybody ends so long after the last one has come: time on the wire, then latency.
    Formula(SimTime, SimTime),
}

/// How a call that moves bytes between two members or more is carried out, and the links of its protocol.
pub(crate) fn streams<'a>(shape: &'a CommShape, call: &CollectiveCall) -> (Streams, &'a ProtocolCosts) {
    let way = plan::way(shape, call);
    let costs = &shape.protocols[way.protocol];
    let streams = match way.algorithm {
        Algorithm::Ring => {
            let (runs, lag) = plan::ring_runs(shape, call, way);
            let part = plan::on_channels(shape, call, way).map(|(tuned, share, _)| (share.channels, tuned.lanes()));
            Streams::Ring { stream: Stream { runs, part: part.unwrap_or((1, 1)) }, lag }
        }
        Algorithm::Tree => Streams::Trees(trees(shape, call, way)),
        Algorithm::Chain => Streams::Chain(chain(shape, call, way)),
        Algorithm::Direct => Streams::Direct,
        Algorithm::Nvls | Algorithm::NvlsTree | Algorithm::Pat => formula(shape, call, way),
    };
    (streams, costs)
}

/// Steps of a ring.
pub(crate) fn ring_steps(n: u64, kind: CollectiveKind) -> u64 {
    if kind == CollectiveKind::AllReduce { 2 * (n - 1) } else { n - 1 }
}

/// The streams of some channels: those with full parts, and the last one of every op.
fn groups(runs: [Option<Run>; 2], counts: [u64; 2], lanes: u64) -> Vec<Stream> {
    let all = counts[0] + counts[1];
    match runs {
        [Some(most), Some(last)] => {
            vec![Stream::new(most, (counts[0], lanes)), Stream::new(last, (counts[1], lanes))]
        }
        [Some(run), None] | [None, Some(run)] => vec![Stream::new(run, (all, lanes))],
        [None, None] => Vec::new(),
    }
}

fn chain(shape: &CommShape, call: &CollectiveCall, way: Way) -> Vec<Stream> {
    let runs = plan::chain_runs(shape, call, way);
    let Some((tuned, share, _)) = plan::on_channels(shape, call, way) else { return groups(runs, [1, 0], 1) };
    let last = share.channels / share.per_op.max(1);
    groups(runs, [share.channels - last, last], tuned.lanes())
}

fn trees(shape: &CommShape, call: &CollectiveCall, way: Way) -> [Vec<Stream>; 2] {
    let runs = plan::tree_runs(shape, call, way);
    let Some((tuned, share, _)) = plan::on_channels(shape, call, way) else {
        return runs.map(|runs| groups(runs, [1, 0], 1));
    };
    let counts = tuned.channels_of_trees(&share);
    [0, 1].map(|tree| groups(runs[tree], counts[tree], tuned.tree_lanes()))
}

fn formula(shape: &CommShape, call: &CollectiveCall, way: Way) -> Streams {
    let launch = shape.protocols[way.protocol].launch;
    let Some((latency, bytes)) = shape.tuned.as_deref().and_then(|tuned| tuned.expected(call, way.algorithm)) else {
        return Streams::Formula(SimTime::MAX, SimTime::ZERO);
    };
    let picoseconds = |us: f64| SimTime::from_ps((us * 1e6).round() as i64);
    let all = (picoseconds(latency + bytes) - launch).max(SimTime::ZERO);
    let wire = picoseconds(bytes).min(all);
    Streams::Formula(wire, all - wire)
}
