//! The distinct ops of a graph as the walk over programs needs them, and its columns.

use super::Irregular;
use super::costs::Costs;
use crate::graph::columns::{OpRow, compute_class, reduction, tag};
use crate::graph::op::{CollectiveKind, ComputeClass, DataType};
use crate::graph::{Graph, ProgramPlace, packed};
use crate::sim::signature::{Call, Half};

/// Streams are numbered below this: a rank keeps a bit per stream.
pub(super) const MAX_STREAMS: u32 = 63;
/// Instead of a stream: the op is the host's alone. Nothing ever runs on it.
const HOST: u8 = MAX_STREAMS as u8;

/// What an op does.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Code {
    Compute,
    Call,
    Send,
    Receive,
    Record,
    Wait,
    StreamSync,
    EventSync,
    DeviceSync,
    /// Of the host alone.
    Host,
    Begin,
    IterationEnd,
}

/// A distinct op.
#[derive(Clone, Copy, Debug)]
pub(super) struct OpInfo {
    pub(super) code: Code,
    /// The stream that must be free before the host can go on.
    pub(super) stream: u8,
    /// Where its duration is summed up.
    pub(super) account: u8,
    pub(super) slot: u32,
    /// Event or peer.
    pub(super) arg: u32,
    /// Number of the call or message.
    pub(super) number: u32,
}

/// Sums of durations are kept by provenance and class.
pub(super) const ACCOUNTS: usize = 32;

/// Account of a compute op.
pub(super) fn account(provenance: u8, class: u8) -> u8 {
    provenance * 8 + class
}

impl OpInfo {
    /// Of a compute op: is it one that no slow-down stretches?
    pub(super) fn is_fixed(self) -> bool {
        compute_class(self.account % 8).is_some_and(ComputeClass::is_fixed)
    }

    fn new(row: OpRow, costs: &mut Costs) -> Result<Self, Irregular> {
        let dtype = || DataType::from_u8(row.b).ok_or(Irregular);
        let (mut stream, mut account_of, mut number) = (row.stream as u8, 0, 0);
        let code = match row.tag {
            tag::COMPUTE => {
                account_of = account(row.b, row.a);
                Code::Compute
            }
            tag::COLLECTIVE => {
                let kind = CollectiveKind::from_u8(row.a).ok_or(Irregular)?;
                let reduce = reduction(row.c).ok_or(Irregular)?;
                let (root, count) = (row.arg, row.value);
                let call = Call { op: 0, kind, dtype: dtype()?, reduce, root, count, ops: 1, continues: false };
                number = costs.number_of_call(&call);
                Code::Call
            }
            tag::POINT_TO_POINT => {
                let is_send = row.a == 1;
                let half = Half { op: 0, is_send, dtype: dtype()?, peer: row.arg, count: row.value };
                number = costs.number_of_message(half.bytes());
                if is_send { Code::Send } else { Code::Receive }
            }
            tag::EVENT_RECORD => Code::Record,
            tag::EVENT_WAIT => Code::Wait,
            tag::STREAM_SYNC => Code::StreamSync,
            tag::EVENT_SYNC => Code::EventSync,
            tag::DEVICE_SYNC => Code::DeviceSync,
            tag::ALLOC | tag::FREE => Code::Host,
            tag::TRAINING_BEGIN => Code::Begin,
            tag::ITERATION_END => Code::IterationEnd,
            _ => return Err(Irregular),
        };
        if matches!(code, Code::EventSync | Code::DeviceSync | Code::Host) {
            stream = HOST;
        } else if row.stream >= MAX_STREAMS {
            return Err(Irregular);
        }
        Ok(Self { code, stream, account: account_of, slot: row.slot, arg: row.arg, number })
    }
}

/// All distinct ops of a graph.
pub(super) fn table(graph: &Graph, costs: &mut Costs) -> Result<Vec<OpInfo>, Irregular> {
    graph.distinct_ops().map(|row| OpInfo::new(row, costs)).collect()
}

/// Numbers of ops, in any of the widths they are stored in.
pub(super) trait Number: Copy {
    fn index(self) -> usize;
}

impl Number for u8 {
    #[inline]
    fn index(self) -> usize {
        usize::from(self)
    }
}

impl Number for u16 {
    #[inline]
    fn index(self) -> usize {
        usize::from(self)
    }
}

impl Number for u32 {
    #[inline]
    fn index(self) -> usize {
        self as usize
    }
}

/// A list of a program, to be asked by the numbers of ops among those of all programs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reader {
    /// Where op 0 of all programs would be: wraps.
    bias: u64,
    base: i64,
    step: i64,
}

impl Reader {
    /// The list of the program whose first op is number `start`.
    pub(super) fn new(head: packed::Head, start: usize) -> Self {
        let bias = (head.start as u64).wrapping_sub(start as u64 * head.width as u64);
        Self { bias, base: head.base as i64, step: head.step as i64 }
    }

    /// The value of all ops, if they need no bytes.
    #[inline]
    pub(super) fn constant(&self) -> i64 {
        self.base
    }

    /// Where the value of op `row` is, in values of `width` bytes.
    #[inline]
    pub(super) fn place(&self, row: u64, width: u8) -> usize {
        self.bias.wrapping_add(row.wrapping_mul(u64::from(width))) as usize
    }

    /// The value of op `row`.
    #[inline]
    pub(super) fn get(&self, data: &[u8], row: u64, width: u8) -> i64 {
        if width == 0 {
            return self.base;
        }
        let at = self.place(row, width);
        let word = match data.get(at..at.wrapping_add(8)) {
            Some(word) => u64::from_le_bytes(word.try_into().expect("eight bytes")),
            None => tail(data, at),
        };
        // As many low bytes as a value has: 1 to 8 of them.
        let number = word & (u64::MAX >> ((64 - 8 * u32::from(width)) & 63));
        self.base.wrapping_add(self.step.wrapping_mul(number as i64))
    }
}

/// What is left of a column that ends before a whole word.
#[cold]
fn tail(data: &[u8], at: usize) -> u64 {
    let rest = data.get(at..).unwrap_or_default();
    rest.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte))
}

/// The most that gaps and durations of a program can add up to, each `stretch` times as long, from how they are stored.
pub(super) fn most_total(place: &ProgramPlace, stretch: f64) -> f64 {
    let most = |head: &packed::Head| head.base as f64 + head.step as f64 * packed::MASKS[head.width] as f64;
    (most(&place.gap) + (most(&place.duration) + 1.0) * stretch) * place.len as f64
}
