//! Tier T2: what virtual members of a communicator contribute, by the user's rules, and the record of all tiers.

use super::state::State;
use crate::graph::op::{CollectiveKind, DataType, ReduceOp};
use crate::ids::SlotId;
use prism_wire::control::{KIND_RECEIVE, KIND_SPLIT, TIERS};
use prism_wire::frame::{MAX_PAYLOAD_BYTES, ValuesRequest};
use serde::Serialize;

/// One call that a rule may give values for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ValueCall {
    /// Rank that asks.
    pub rank: u32,
    /// Ranks of the communicator's members in group-rank order.
    pub members: Vec<u32>,
    /// Number of the communicator among those the rank has made, from 0.
    pub communicator: u32,
    /// Number of the collective among those of the communicator, or of the message among those of the pair, from 0.
    pub number: u64,
    /// Name of the collective as NCCL spells it, `Recv` or `Split`.
    pub kind: String,
    /// Name of the element type, as in [`DataType`].
    pub dtype: String,
    /// Reduction, as in [`ReduceOp`]; empty where nothing is reduced.
    pub reduce: String,
    /// Group rank of the root or the sender.
    pub root: u32,
    /// Group rank of the asking rank.
    pub group_rank: u32,
    /// Elements of one row.
    pub count: u64,
    /// Bytes of one row: what one member contributes, or, where it contributes something to each, the part for this rank.
    pub row_bytes: u64,
    /// Ranks of the job whose rows are asked for, in group-rank order.
    pub virtual_ranks: Vec<u32>,
}

/// What a rule says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rows {
    /// No rule is for this call.
    NoRule,
    /// The virtual members contribute what the running ones do (tier T1), however large it is.
    Mirror,
    /// Nothing looks at the values: the buffer stays as it is (tier T0).
    Shape,
    /// One row for all virtual members, or one for each, one after the other.
    Values(Vec<u8>),
}

/// Gives values to calls. Called from the session's threads.
pub trait ValueProvider: Send + Sync {
    /// What the virtual members contribute to this call. An error ends the run with its text.
    fn values(&self, call: &ValueCall) -> Result<Rows, String>;
}

impl Rows {
    pub(super) fn encode(&self) -> Vec<u8> {
        let (verdict, values): (u32, &[u8]) = match self {
            Self::NoRule => (0, &[]),
            Self::Mirror => (1, &[]),
            Self::Shape => (2, &[]),
            Self::Values(values) => (3, values),
        };
        let mut out = Vec::with_capacity(4 + values.len());
        out.extend(verdict.to_le_bytes());
        out.extend(values);
        out
    }

    /// Rows must be as long as the call says.
    pub(super) fn checked(self, call: &ValueCall) -> Result<Self, String> {
        let Self::Values(values) = &self else { return Ok(self) };
        let (one, num_virtual) = (call.row_bytes, call.virtual_ranks.len() as u64);
        let length = values.len() as u64;
        if length != one && Some(length) != one.checked_mul(num_virtual) {
            return Err(format!(
                "the rule for {} {} of rank {} gave {length} bytes: {one} are one row for all {num_virtual} virtual members, \
                 or as many for each",
                call.kind, call.number, call.rank
            ));
        }
        if values.len() + 4 > MAX_PAYLOAD_BYTES {
            return Err(format!(
                "the rule for {} {} of rank {} gave {length} bytes, over the limit of {MAX_PAYLOAD_BYTES}: \
                 give one row for all virtual members",
                call.kind, call.number, call.rank
            ));
        }
        Ok(self)
    }
}

/// How many payloads of a communicator came about how.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TierUse {
    /// Number of the communicator among the rank's, from 0.
    pub communicator: u32,
    /// Its number of members.
    pub size: u32,
    /// The call as NCCL spells it.
    pub call: String,
    /// `T0` shape only, `T1` mirrored, `T2` by a rule, `T3` exact with ranks in turns, `live` exact from running ranks.
    pub tier: &'static str,
    /// How many.
    pub count: u64,
}

/// The call as NCCL spells it.
fn kind_name(kind: u32) -> Result<String, String> {
    match kind {
        KIND_RECEIVE => Ok("Recv".to_owned()),
        KIND_SPLIT => Ok("Split".to_owned()),
        _ => match u8::try_from(kind).ok().and_then(CollectiveKind::from_u8) {
            Some(CollectiveKind::AllToAll) => Ok("AlltoAll".to_owned()),
            Some(kind) => Ok(format!("{kind:?}")),
            None => Err(format!("a payload of unknown kind {kind}")),
        },
    }
}

impl State {
    /// The call that a request of `rank` is about, and the number of its communicator in the exchange.
    pub(super) fn value_call(&self, rank: u32, asked: &ValuesRequest) -> Result<(ValueCall, u32), String> {
        let process = self.processes.get(&rank).ok_or("unknown rank")?;
        let slot = *process.comms.get(&asked.comm_id).ok_or("values for a communicator that is not known")?;
        let comm = process.recorded_comms.get(slot.index()).ok_or("values for a communicator that is not known")?;
        let members = comm.members.clone();
        let group_rank = members.iter().position(|member| *member == rank).unwrap_or_default() as u32;
        let root = members.get(asked.root as usize).copied().ok_or("values from a root that is no member")?;
        let kind = kind_name(asked.kind)?;
        let is_from_root = matches!(kind.as_str(), "Recv" | "Broadcast" | "Scatter");
        let virtual_ranks = if is_from_root {
            vec![root]
        } else {
            members.iter().copied().filter(|member| !self.processes.contains_key(member)).collect()
        };
        let is_reduced = matches!(kind.as_str(), "AllReduce" | "Reduce" | "ReduceScatter");
        let number = |what: u32| u8::try_from(what).ok();
        let dtype = number(asked.dtype).and_then(DataType::from_u8).ok_or("values of an unknown type")?;
        let reduce = number(asked.op).map(ReduceOp::from_u8).filter(|_| is_reduced);
        let call = ValueCall {
            rank,
            members,
            communicator: slot.index() as u32,
            number: asked.number,
            kind,
            dtype: format!("{dtype:?}"),
            reduce: reduce.map(|reduce| format!("{reduce:?}")).unwrap_or_default(),
            root: asked.root,
            group_rank,
            count: asked.count,
            row_bytes: asked.row_bytes,
            virtual_ranks,
        };
        let exchange = process.exchanges.get(&asked.comm_id).copied().unwrap_or(u32::MAX);
        Ok((call, exchange))
    }

    /// Where the running members of a communicator exchange data.
    pub(super) fn comm_exchange(&mut self, rank: u32, comm_id: u32) -> Result<Vec<u8>, String> {
        let process = self.processes.get_mut(&rank).ok_or("unknown rank")?;
        let slot = process.comms.get(&comm_id).ok_or("the exchange of a communicator that is not known")?;
        let members = &process.recorded_comms[slot.index()].members;
        let (number, group_ranks) = self.exchange.communicator(rank, members);
        process.exchanges.insert(comm_id, number);
        let fields = [number, group_ranks.len() as u32].into_iter().chain(group_ranks);
        Ok(fields.flat_map(u32::to_le_bytes).collect())
    }

    /// A payload came about by a tier.
    pub(super) fn note_tier(
        &mut self,
        rank: u32,
        comm_id: u32,
        kind: u32,
        tier: u32,
        count: u64,
    ) -> Result<(), String> {
        kind_name(kind)?;
        if tier as usize >= TIERS.len() {
            return Err(format!("a payload of unknown tier {tier}"));
        }
        let process = self.processes.get_mut(&rank).ok_or("unknown rank")?;
        let slot = *process.comms.get(&comm_id).ok_or("a payload of a communicator that is not known")?;
        *process.tiers.entry((slot, kind, tier)).or_default() += count;
        Ok(())
    }
}

impl super::process::Process {
    /// How the payloads of its calls came about.
    pub(super) fn tier_uses(&self) -> Vec<TierUse> {
        let one = |(&(slot, kind, tier), &count): (&(SlotId, u32, u32), &u64)| TierUse {
            communicator: slot.index() as u32,
            size: self.recorded_comms.get(slot.index()).map_or(0, |comm| comm.members.len() as u32),
            call: kind_name(kind).unwrap_or_default(),
            tier: TIERS[tier as usize],
            count,
        };
        self.tiers.iter().map(one).collect()
    }
}
