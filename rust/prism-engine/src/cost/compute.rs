//! Durations of device work that nobody measured.
//!
//! Every model is a roofline over the numbers of the [`Profile`]: the larger of arithmetic time and memory time, plus a
//! constant per kernel; matrix multiplications are cut into tiles and waves. One efficiency per input type is all that
//! published step times can support; finer constants fit them better and predict worse. Constants of latencies are in cycles
//! of the boost clock, because they are alike on V100 and A100, whose traces they were fitted to (`docs/accuracy.md` lists
//! them), and hardly known elsewhere.

use super::comm::{nanoseconds, share, transfer_time};
use super::names::Pattern;
use crate::graph::op::{ComputeClass, DataType, Provenance};
use crate::profile::{Device, Profile};
use crate::units::SimTime;
use prism_wire::message::CopyDirection;

/// A piece of device work as a launch describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// A kernel about which only the launch is known.
    Kernel {
        /// Blocks along x, y, z.
        grid: [u32; 3],
        /// Threads of one block.
        threads_per_block: u32,
        /// Bytes read and written, 0 if unknown.
        bytes: u64,
    },
    /// `batch` products of an m x k with a k x n matrix.
    Gemm {
        /// Rows of the result.
        m: u64,
        /// Columns of the result.
        n: u64,
        /// Length of the inner products.
        k: u64,
        /// Number of products.
        batch: u64,
        /// Type of the factors.
        input: DataType,
        /// Type of the arithmetic; tells TF32 from FP32.
        compute: DataType,
    },
    /// An operator known by its work (attention, convolution).
    Operator {
        /// Floating-point operations.
        flops: u64,
        /// Bytes read and written.
        bytes: u64,
        /// Type of its matrices.
        input: DataType,
    },
    /// A copy.
    Memcpy {
        /// How much.
        bytes: u64,
        /// From where to where.
        direction: CopyDirection,
        /// Is the host side pinned?
        pinned: bool,
    },
    /// A fill.
    Memset {
        /// How much.
        bytes: u64,
    },
}

/// Rows and columns of the result that a thread block of a matrix multiplication computes, and the share of a
/// multiprocessor's rate it reaches relative to the largest: those the vendor's libraries commonly pick on Ampere and
/// later. The shares are assumed: a small tile uses every loaded factor less often.
const GEMM_TILES: [(u64, u64, f64); 6] =
    [(128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.85), (64, 128, 0.85), (64, 64, 0.7)];

/// Cycles from the start of a tile to its first product and from its last to the written result: each wave has them once.
const TILE_CYCLES: f64 = 4_200.0;

/// Share of the rate that float32 factors multiplied as TF32 reach when their rows are no multiple of 16 bytes long: the
/// libraries then take kernels that load element by element.
const UNALIGNED_TF32: f64 = 0.5;

/// Parts that the inner products of a multiplication with few tiles are cut into at most, and the length that a part takes
/// the time of at least.
const MOST_SPLITS: u64 = 16;
const LEAST_SPLIT: u64 = 256;

/// Share of the link's bandwidth that a copy from pageable host memory reaches, because the driver stages it through a
/// pinned buffer. Assumed.
const PAGEABLE_EFFICIENCY: f64 = 0.35;

/// How kernels that wait for memory behave besides their bytes.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    /// Cycles of a launch that moves nothing.
    fixed_cycles: f64,
    /// Bytes per second that one thread has on the way at most: few threads cannot use the bandwidth.
    thread_bytes_per_s: u64,
    /// Share of the bandwidth of a stream.
    efficiency: f64,
}

const fn waiting(pattern: Pattern) -> Waiting {
    let (fixed_cycles, thread_bytes_per_s, efficiency) = match pattern {
        Pattern::Stream => (4_200.0, 160_000_000, 1.0),
        Pattern::Strided => (6_000.0, 160_000_000, 0.75),
        Pattern::Reduction => (8_500.0, 80_000_000, 0.91),
        Pattern::Rows => (8_500.0, 40_000_000, 0.91),
        Pattern::Gather => (8_500.0, 20_000_000, 1.0),
    };
    Waiting { fixed_cycles, thread_bytes_per_s, efficiency }
}

/// Share of the time that bytes save that fit into half of the level 2 cache: some of them are there.
const CACHED_SAVING: f64 = 0.3;

/// Threads that a multiprocessor holds.
const THREADS_PER_SM: u64 = 2048;

/// Time of a launch of `threads` that moves `bytes`: a constant, and the bytes at the bandwidth of the memory or at that of
/// the threads, whichever is less.
fn streaming_time(device: &Device, bytes: u64, threads: u64, pattern: Pattern) -> SimTime {
    let waiting = waiting(pattern);
    let resident = threads.clamp(1, u64::from(device.sm_count) * THREADS_PER_SM);
    let memory = share(device.memory_bytes_per_s, device.memory_efficiency * waiting.efficiency);
    let rate = memory.min(resident.saturating_mul(waiting.thread_bytes_per_s));
    let saved = (bytes.min(device.l2_bytes / 2) as f64 * CACHED_SAVING) as u64;
    cycles(device, waiting.fixed_cycles) + transfer_time(bytes - saved, rate)
}

fn cycles(device: &Device, number: f64) -> SimTime {
    SimTime::from_secs_f64(number / (f64::from(device.clock_khz) * 1e3))
}

/// As [`duration_of`], of a kernel that reads and writes in order.
#[must_use]
pub fn duration(profile: &Profile, work: &Work) -> (SimTime, ComputeClass, Provenance) {
    duration_of(profile, work, Pattern::Stream)
}

/// Device time of `work` on `profile`'s device, its class for reports, and what the time rests on: a model, or, of a kernel
/// about which only the launch is known, a guess ([`Provenance::Default`]).
#[must_use]
pub fn duration_of(profile: &Profile, work: &Work, pattern: Pattern) -> (SimTime, ComputeClass, Provenance) {
    let device = &profile.device;
    let (time, class) = match *work {
        Work::Kernel { grid, threads_per_block, bytes } => {
            let blocks = grid.iter().fold(1u64, |product, &side| product.saturating_mul(u64::from(side)));
            let threads = blocks.saturating_mul(u64::from(threads_per_block));
            let bytes = if bytes == 0 { threads.saturating_mul(device.kernel_bytes_per_thread) } else { bytes };
            (streaming_time(device, bytes, threads, pattern), ComputeClass::Kernel)
        }
        Work::Gemm { m, n, k, batch, input, compute } => {
            let kind = arithmetic_type(input, compute);
            let is_aligned = [m, n, k].iter().all(|side| side % 4 == 0);
            let aligned = if kind == DataType::Tf32 && !is_aligned { UNALIGNED_TF32 } else { 1.0 };
            let rate = device.peak_flops.of(kind) * device.gemm_efficiency.of(kind) * aligned;
            let bytes = gemm_bytes(m, n, k, batch, input);
            let arithmetic = gemm_time(device, [m, n, k, batch], rate);
            (arithmetic.max(memory_time(device, bytes)) + overhead(device), ComputeClass::Gemm)
        }
        Work::Operator { flops, bytes, input } => {
            let rate = device.peak_flops.of(input) * device.attention_efficiency;
            let time = flop_time(flops as f64, rate).max(memory_time(device, bytes));
            (time + overhead(device), ComputeClass::Operator)
        }
        Work::Memcpy { bytes, direction, pinned } => {
            let least = cycles(device, waiting(Pattern::Stream).fixed_cycles);
            (copy_time(profile, bytes, direction, pinned).max(least), ComputeClass::Memcpy)
        }
        Work::Memset { bytes } => (streaming_time(device, bytes, u64::MAX, Pattern::Stream), ComputeClass::Memset),
    };
    let is_guess = matches!(work, Work::Kernel { bytes: 0, .. });
    (time, class, if is_guess { Provenance::Default } else { Provenance::Modelled })
}

fn overhead(device: &Device) -> SimTime {
    nanoseconds(device.kernel_overhead_ns)
}

fn memory_time(device: &Device, bytes: u64) -> SimTime {
    transfer_time(bytes, share(device.memory_bytes_per_s, device.memory_efficiency))
}

fn flop_time(flops: f64, flops_per_s: f64) -> SimTime {
    SimTime::from_secs_f64(flops / flops_per_s)
}

/// The type whose peak applies: that of the factors, except that float32 factors may be multiplied as TF32.
fn arithmetic_type(input: DataType, compute: DataType) -> DataType {
    if input == DataType::Float32 && compute == DataType::Tf32 { DataType::Tf32 } else { input }
}

/// Arithmetic time of a matrix multiplication at `flops_per_s` of the whole device: tiles are handed out in waves of one per
/// multiprocessor, the last wave takes as long as a full one, and the tile (and, with few tiles, the split of the inner
/// products) that ends first is taken, as the libraries' heuristics try to.
fn gemm_time(device: &Device, [m, n, k, batch]: [u64; 4], flops_per_s: f64) -> SimTime {
    let sms = u64::from(device.sm_count);
    let rate = flops_per_s / sms as f64;
    let latency = TILE_CYCLES / (f64::from(device.clock_khz) * 1e3);
    let seconds = |(rows, columns, share): (u64, u64, f64)| {
        let tiles = m.div_ceil(rows).saturating_mul(n.div_ceil(columns)).saturating_mul(batch);
        let one = |splits: u64| {
            let waves = tiles.saturating_mul(splits).div_ceil(sms) as f64;
            // A shorter part takes no less time, so that longer products never do either.
            let part = k.div_ceil(splits).max(LEAST_SPLIT.min(k));
            let products = 2.0 * rows as f64 * columns as f64 * part as f64 / (rate * share);
            // The parts are summed by another wave.
            waves * (products + latency) + if splits > 1 { latency } else { 0.0 }
        };
        let is_useful = |splits: &u64| tiles.saturating_mul(*splits) <= sms;
        let splits = (1..=MOST_SPLITS.ilog2()).map(|doublings| 1 << doublings).filter(is_useful);
        splits.map(one).fold(one(1), f64::min)
    };
    SimTime::from_secs_f64(GEMM_TILES.into_iter().map(seconds).fold(f64::INFINITY, f64::min))
}

/// Each factor is read and the result is written once; 8-bit factors give a 16-bit result.
fn gemm_bytes(m: u64, n: u64, k: u64, batch: u64, input: DataType) -> u64 {
    let size = u128::from(input.size_bytes());
    let (m, n, k) = (u128::from(m), u128::from(n), u128::from(k));
    let one = (m * k).saturating_add(k * n).saturating_mul(size).saturating_add((m * n).saturating_mul(size.max(2)));
    u64::try_from(one.saturating_mul(u128::from(batch))).unwrap_or(u64::MAX)
}

fn copy_time(profile: &Profile, bytes: u64, direction: CopyDirection, pinned: bool) -> SimTime {
    match direction {
        // Reads and writes share the memory bus.
        CopyDirection::DeviceToDevice => {
            streaming_time(&profile.device, bytes.saturating_mul(2), u64::MAX, Pattern::Stream)
        }
        CopyDirection::HostToDevice | CopyDirection::DeviceToHost if pinned => {
            transfer_time(bytes, profile.node.pcie_bytes_per_s)
        }
        CopyDirection::HostToDevice | CopyDirection::DeviceToHost | CopyDirection::HostToHost => {
            transfer_time(bytes, share(profile.node.pcie_bytes_per_s, PAGEABLE_EFFICIENCY))
        }
    }
}
