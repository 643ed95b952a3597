//! Durations of device work that nobody measured.
//!
//! Every model is a roofline over the numbers of the [`Profile`]: the larger of arithmetic time and memory time, plus a
//! constant per kernel; matrix multiplications are cut into tiles and waves. One efficiency per input type is all that published step times can support; finer constants fit
//! them better and predict worse.

use super::comm::{nanoseconds, share, transfer_time};
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

/// Parts that the inner products of a multiplication with few tiles are cut into at most, and the length that a part takes
/// the time of at least. Assumed.
const MOST_SPLITS: u64 = 4;
const LEAST_SPLIT: u64 = 256;

/// Share of the link's bandwidth that a copy from pageable host memory reaches, because the driver stages it through a
/// pinned buffer. Assumed.
const PAGEABLE_EFFICIENCY: f64 = 0.35;

/// Device time of `work` on `profile`'s device, its class for reports, and what the time rests on: a model, or, of a kernel
/// about which only the launch is known, a guess ([`Provenance::Default`]).
#[must_use]
pub fn duration(profile: &Profile, work: &Work) -> (SimTime, ComputeClass, Provenance) {
    let device = &profile.device;
    let (time, class) = match *work {
        Work::Kernel { grid, threads_per_block, bytes } => {
            let blocks = grid.iter().fold(1u64, |product, &side| product.saturating_mul(u64::from(side)));
            let threads = blocks.saturating_mul(u64::from(threads_per_block));
            let bytes = if bytes == 0 { threads.saturating_mul(device.kernel_bytes_per_thread) } else { bytes };
            (memory_time(device, bytes).max(overhead(device)), ComputeClass::Kernel)
        }
        Work::Gemm { m, n, k, batch, input, compute } => {
            let kind = arithmetic_type(input, compute);
            let rate = device.peak_flops.of(kind) * device.gemm_efficiency.of(kind);
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
            (copy_time(profile, bytes, direction, pinned).max(overhead(device)), ComputeClass::Memcpy)
        }
        Work::Memset { bytes } => (memory_time(device, bytes).max(overhead(device)), ComputeClass::Memset),
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
    let seconds = |(rows, columns, share): (u64, u64, f64)| {
        let tiles = m.div_ceil(rows).saturating_mul(n.div_ceil(columns)).saturating_mul(batch);
        let one = |splits: u64| {
            let waves = tiles.saturating_mul(splits).div_ceil(sms) as f64;
            // A shorter part takes no less time, so that longer products never do either.
            let part = k.div_ceil(splits).max(LEAST_SPLIT.min(k));
            waves * 2.0 * rows as f64 * columns as f64 * part as f64 / (rate * share)
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
        CopyDirection::DeviceToDevice => memory_time(&profile.device, bytes.saturating_mul(2)),
        CopyDirection::HostToDevice | CopyDirection::DeviceToHost if pinned => {
            transfer_time(bytes, profile.node.pcie_bytes_per_s)
        }
        CopyDirection::HostToDevice | CopyDirection::DeviceToHost | CopyDirection::HostToHost => {
            transfer_time(bytes, share(profile.node.pcie_bytes_per_s, PAGEABLE_EFFICIENCY))
        }
    }
}
