//! Requests about communicators beyond making them by id: members told by the process, memory, estimates.

use super::nccl_memory;
use super::state::State;
use crate::graph::op::{CollectiveKind, DataType, Op, OpKind, ReduceOp};
use crate::ids::{Rank, StreamId};
use crate::sim::{Answer, Peers, Question, SimOptions, Simulation};
use crate::slice::recording::CommOrigin;
use crate::units::SimTime;
use prism_wire::frame::CommPeersAnswer;
use std::collections::BTreeSet;

impl State {
    /// A communicator whose members the process knows: group ranks of `parent`, or global ranks.
    pub(super) fn comm_members(
        &mut self,
        rank: u32,
        comm_id: u32,
        parent: u32,
        ranks: &[u32],
    ) -> Result<Vec<u8>, String> {
        let members = if parent == 0 { ranks.to_vec() } else { self.members_of_parent(rank, parent, ranks)? };
        if let Some(outside) = members.iter().find(|member| **member >= self.world_size) {
            return Err(format!("rank {outside} of a communicator is none of the world's {} ranks", self.world_size));
        }
        if members.iter().collect::<BTreeSet<_>>().len() != members.len() || !members.contains(&rank) {
            return Err(format!("rank {rank} makes a communicator of {members:?}: a rank is missing or there twice"));
        }
        self.add_comm(rank, comm_id, members, CommOrigin::Explicit, parent == 0)?;
        Ok(Vec::new())
    }

    fn members_of_parent(&self, rank: u32, parent: u32, group_ranks: &[u32]) -> Result<Vec<u32>, String> {
        let parent = self.members(rank, parent)?;
        let member = |group_rank: &u32| {
            let size = parent.len();
            let known = parent.get(*group_rank as usize).copied();
            known.ok_or_else(|| format!("rank {rank} names group rank {group_rank} of a communicator of {size}"))
        };
        group_ranks.iter().map(member).collect()
    }

    fn members(&self, rank: u32, comm_id: u32) -> Result<&[u32], String> {
        let known = self.processes.get(&rank).and_then(|process| {
            let slot = process.comms.get(&comm_id)?;
            Some(process.recorded_comms.get(slot.index())?.members.as_slice())
        });
        known.ok_or_else(|| format!("rank {rank} asks about communicator {comm_id}, which it does not have"))
    }

    /// Do all members of a communicator run, and what tells it from others?
    pub(super) fn comm_peers(&self, rank: u32, comm_id: u32) -> Result<Vec<u8>, String> {
        let members = self.members(rank, comm_id)?;
        let process = &self.processes[&rank];
        let slot = process.comms[&comm_id].index();
        // Members make communicators of the same ranks in the same order.
        let earlier = process.recorded_comms[..slot].iter().filter(|comm| comm.members == members).count() as u64;
        // Two FNV-1a hashes from different beginnings: communicators are few, and told apart by their members alone.
        let hash = |start: u64| {
            let bytes = members.iter().flat_map(|member| member.to_le_bytes()).chain(earlier.to_le_bytes());
            bytes.fold(start, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
        };
        let key = [hash(0xcbf2_9ce4_8422_2325).to_le_bytes(), hash(0x9e37_79b9_7f4a_7c15).to_le_bytes()].concat();
        let key = key.try_into().map_err(|_| "a key is sixteen bytes")?;
        let all_live = members.iter().all(|member| self.processes.contains_key(member));
        Ok(CommPeersAnswer { all_live, key }.encode())
    }

    /// Device memory NCCL holds for a communicator.
    pub(super) fn comm_memory(&self, rank: u32, comm_id: u32) -> Result<Vec<u8>, String> {
        if comm_id == 0 {
            let bytes = self.processes[&rank].nccl_bytes(self.durations.profile());
            return Ok(bytes.to_le_bytes().to_vec());
        }
        let members = self.members(rank, comm_id)?;
        let process = &self.processes[&rank];
        let bytes = process.comm_uses.get(&process.comms[&comm_id]).map_or(0, |uses| {
            let group_rank = members.iter().position(|member| *member == rank).unwrap_or_default() as u32;
            nccl_memory::communicator_bytes(members, group_rank, uses, self.durations.profile())
        });
        Ok(bytes.to_le_bytes().to_vec())
    }

    /// Time of a collective that all members call at once, alone on the cluster.
    pub(super) fn comm_estimate(
        &self,
        rank: u32,
        comm_id: u32,
        f: u32,
        root: u32,
        count: u64,
    ) -> Result<Vec<u8>, String> {
        let members = self.members(rank, comm_id)?;
        let kind = CollectiveKind::from_u8(f as u8).ok_or("an estimate of an unknown collective")?;
        let dtype = DataType::from_u8((f >> 8) as u8).ok_or("an estimate of an unknown data type")?;
        let options = SimOptions { live: vec![Rank(rank)], ..SimOptions::new(self.durations.profile().clone()) };
        let estimate = || {
            let mut sim = Simulation::new(Peers::Absent, self.world_size, options)?;
            let slot = sim.live_comm(Rank(rank), members)?;
            let reduce = ReduceOp::from_u8((f >> 16) as u8);
            let collective = OpKind::Collective { slot, kind, dtype, reduce, root, count, group: 0 };
            for kind in [collective, OpKind::StreamSync] {
                sim.push(Rank(rank), Op { host_gap: SimTime::ZERO, stream: StreamId(0), kind })?;
            }
            sim.ask(Rank(rank), Question::Resume, 0);
            sim.run()?;
            Ok(sim.take_answers())
        };
        let answers = estimate().map_err(|error: crate::sim::SimError| error.to_string())?;
        match answers[..] {
            [(_, _, Answer::Resume(time))] => Ok(time.as_ns().max(0).to_le_bytes().to_vec()),
            _ => Err("the estimate of a collective has no end".to_owned()),
        }
    }
}
