//! The duration of a piece of device work: the first that knows it says it.
//!
//! 1. A kernel table ([`super::kernels`]): measured, or imported from a trace.
//! 2. A model: of the operator by its shape, of a kernel by the bytes that its arguments say it moves, or by what its name says
//!    of the work of a launch ([`super::names`]).
//! 3. The launch geometry: a guess, marked [`Provenance::Default`].

use super::compute::{self, Work};
use super::kernels::{KernelTable, NamedRows};
use super::names::{Family, LaunchModel, NameFacts};
use crate::graph::op::{ComputeClass, Provenance};
use crate::ids::NameId;
use crate::profile::Profile;
use crate::units::SimTime;

/// A duration with what it rests on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Estimate {
    /// Time on the device.
    pub duration: SimTime,
    /// Class of work.
    pub class: ComputeClass,
    /// What the work is for.
    pub family: Family,
    /// Who says so.
    pub provenance: Provenance,
}

/// What is kept of a name.
#[derive(Clone, Debug)]
struct Named {
    facts: NameFacts,
    rows: NamedRows,
}

/// Durations on one device.
#[derive(Clone, Debug)]
pub struct Durations {
    profile: Profile,
    table: KernelTable,
    names: Vec<Option<Named>>,
}

impl Durations {
    /// Durations on `profile`'s device, from `table` where it has them.
    #[must_use]
    pub fn new(profile: Profile, table: KernelTable) -> Self {
        Self { profile, table, names: Vec::new() }
    }

    /// The profile.
    #[must_use]
    pub fn profile(&self) -> &Profile {
        &self.profile
    }

    /// The duration of `work` called `name`, whose (demangled) text is asked for when the name is new.
    pub fn estimate<'a>(&mut self, work: &Work, name: NameId, text: impl Fn() -> &'a str) -> Estimate {
        let index = name.index();
        if index >= self.names.len() {
            self.names.resize(index + 1, None);
        }
        let table = &self.table;
        let named = self.names[index].get_or_insert_with(|| Named {
            facts: NameFacts::of(text()),
            rows: if matches!(work, Work::Kernel { .. }) { table.named(text()) } else { NamedRows::default() },
        });
        let family = if matches!(work, Work::Gemm { .. }) { Family::Gemm } else { named.facts.family };
        let known = match *work {
            Work::Kernel { grid, threads_per_block, .. } => named.rows.find(grid, threads_per_block),
            _ if table.num_rows() > 0 => table.find(text(), work),
            _ => None,
        };
        let (modelled, class, provenance) =
            compute::duration_of(&self.profile, &by_name(work, named.facts.model), named.facts.pattern);
        // Bytes say little of a kernel that computes: without its shape its time stays a guess.
        let computes = matches!(family, Family::Gemm | Family::Attention | Family::Convolution);
        let is_guess = computes && named.facts.model.is_none() && matches!(work, Work::Kernel { .. });
        let provenance = if is_guess { Provenance::Default } else { provenance };
        let (duration, provenance) = known.unwrap_or((modelled, provenance));
        Estimate { duration, class, family, provenance }
    }
}

/// The work of a launch as its name has it: the bytes of a kernel that works in order are no more than its blocks can move, and
/// no more than its arguments say.
fn by_name(work: &Work, model: Option<LaunchModel>) -> Work {
    let Work::Kernel { grid, threads_per_block, bytes } = *work else { return *work };
    let [x, y, z] = grid.map(u64::from);
    match model {
        Some(LaunchModel::Streaming { bytes_per_block }) => {
            let most = x.saturating_mul(y).saturating_mul(z).saturating_mul(bytes_per_block);
            Work::Kernel { grid, threads_per_block, bytes: if bytes == 0 { most } else { most.min(bytes) } }
        }
        Some(LaunchModel::Attention { rows_per_block, head_dim, passes, input }) => {
            let rows = x.saturating_mul(rows_per_block);
            let heads = y.saturating_mul(z);
            let flops = 4.0 * passes * (rows as f64) * (rows as f64) * head_dim as f64 * heads as f64;
            // Query, key, value and result; backward their gradients as well.
            let tensors = if passes > 1.0 { 8 } else { 4 };
            let elements = rows.saturating_mul(head_dim).saturating_mul(heads);
            let bytes = elements.saturating_mul(tensors * input.size_bytes());
            Work::Operator { flops: flops as u64, bytes, input }
        }
        None => *work,
    }
}
