//! Lets recordings play all ranks of a job.

use crate::graph::op::{Op, OpKind};
use crate::graph::{Graph, GraphBuilder, GraphError};
use crate::ids::{CommId, NameId, Rank, TemplateId};
use crate::slice::recording::{CommOrigin, ProcessGroup, RankRecording, RecordedComm};
use crate::units::SimTime;
use indexmap::IndexSet;
use rustc_hash::{FxBuildHasher, FxHashMap};
use std::borrow::Cow;
use std::collections::BTreeMap;

/// The recordings do not give a graph of the job.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SpliceError {
    /// The assignment is not of this job or these recordings.
    #[error("the assignment of ranks to recordings is wrong: {0}")]
    Assignment(String),
    /// A recording contradicts itself.
    #[error("the recording of rank {rank} contradicts itself: {message}; record the rank again")]
    Recording {
        /// The recorded rank.
        rank: u32,
        /// What is wrong.
        message: String,
    },
    /// A rank's communicator cannot be told from the recording that plays it.
    #[error(
        "rank {rank}, played by the recording of rank {recorded}: its communicator in slot {slot} ({size} members there) \
         is unknown: {message}; record rank {rank} itself"
    )]
    Unknown {
        /// The rank to be played.
        rank: u32,
        /// The rank that was recorded.
        recorded: u32,
        /// Which communicator.
        slot: u32,
        /// Size of the recorded rank's communicator.
        size: usize,
        /// Why it is unknown.
        message: String,
    },
    /// The programs do not fit together.
    #[error("the recordings do not fit together: {0}; ranks that were taken for equal may differ, record more of them")]
    Graph(#[from] GraphError),
}

/// The graph of a job of `world_size` ranks in which rank `r` does what `recordings[assignment[r]]` did.
///
/// Recordings whose programs differ in nothing but the durations of computation share a template; durations that are not the
/// template's become the ranks' own. The communicator in a slot of rank
/// `r` is found from the recorded rank's: of the process groups that contain `r`, the one with the same number; of a pair,
/// the partner at the same distance in that group. Fails if the programs do not fit together ([`Graph::check`]).
///
/// Cost: O(recorded ops + memberships of all process groups per distinct group list + slots of all ranks).
pub fn splice(
    world_size: u32,
    recordings: &[RankRecording],
    assignment: &[u32],
    meta: &BTreeMap<String, String>,
) -> Result<Graph, SpliceError> {
    check_assignment(world_size, recordings, assignment)?;
    let mut splicer = Splicer::new(world_size, recordings);
    for (rank, &index) in assignment.iter().enumerate() {
        splicer.add_rank(rank as u32, index as usize)?;
    }
    for (key, value) in meta {
        splicer.builder.set_meta(key, value);
    }
    let graph = splicer.builder.finish()?;
    graph.check()?;
    Ok(graph)
}

fn check_assignment(world_size: u32, recordings: &[RankRecording], assignment: &[u32]) -> Result<(), SpliceError> {
    let error = |text: String| Err(SpliceError::Assignment(text));
    if assignment.len() != world_size as usize {
        return error(format!("it has {} entries for {world_size} ranks", assignment.len()));
    }
    if let Some((rank, index)) = assignment.iter().enumerate().find(|(_, index)| **index as usize >= recordings.len()) {
        return error(format!("rank {rank} is given recording {index} of {}", recordings.len()));
    }
    if let Some(outside) = recordings.iter().find(|recording| recording.rank >= world_size) {
        return error(format!("rank {} was recorded, the world has {world_size} ranks", outside.rank));
    }
    match recordings.iter().find(|recording| recording.world_size != world_size) {
        Some(other) => error(format!(
            "rank {} was recorded in a world of {} ranks, not {world_size}",
            other.rank, other.world_size
        )),
        None => Ok(()),
    }
}

/// Number of a distinct member list.
type ListId = usize;

struct Splicer<'a> {
    world_size: u32,
    recordings: &'a [RankRecording],
    builder: GraphBuilder,
    /// By shape, with the recording it was made from.
    templates: FxHashMap<String, (TemplateId, usize)>,
    /// Template and group list of each recording in use.
    prepared: Vec<Option<Prepared>>,
    /// Durations of each recording in use that are not its template's.
    own: Vec<Vec<(u32, SimTime)>>,
    group_lists: Vec<GroupList<'a>>,
    lists: IndexSet<Vec<u32>, FxBuildHasher>,
    /// By member list and how many communicators with that list each member made before.
    comms: FxHashMap<(ListId, u32), CommId>,
}

impl<'a> Splicer<'a> {
    fn new(world_size: u32, recordings: &'a [RankRecording]) -> Self {
        Self {
            world_size,
            recordings,
            builder: GraphBuilder::new(world_size),
            templates: FxHashMap::default(),
            prepared: vec![None; recordings.len()],
            own: vec![Vec::new(); recordings.len()],
            group_lists: Vec::new(),
            lists: IndexSet::default(),
            comms: FxHashMap::default(),
        }
    }

    fn add_rank(&mut self, rank: u32, index: usize) -> Result<(), SpliceError> {
        let Prepared { template, groups } = match self.prepared[index] {
            Some(prepared) => prepared,
            None => self.prepare(index)?,
        };
        let recording = &self.recordings[index];
        let mut found = Vec::with_capacity(recording.comms.len());
        for slot in 0..recording.comms.len() {
            let list = self.resolve(groups, recording, slot, rank)?;
            found.push((list, recording.comms[slot].origin));
        }
        let slots = (0..found.len()).map(|slot| self.comm(&found, slot)).collect();
        self.builder.set_rank(Rank(rank), template, slots);
        for (op, duration) in &self.own[index] {
            self.builder.override_duration(Rank(rank), *op, *duration);
        }
        Ok(())
    }

    /// The communicator of a slot. Members of several communicators with one member list tell them apart by their order:
    /// first made first, an older process group before a newer one, a group's own before its pairs'. A process group is
    /// older than another on all its members alike, so they all agree.
    fn comm(&mut self, found: &[(ListId, CommOrigin)], slot: usize) -> CommId {
        let (list, origin) = found[slot];
        let earlier = found.iter().enumerate().filter(|(other_slot, (other, other_origin))| {
            *other == list && (age(*other_origin), *other_slot) < (age(origin), slot)
        });
        let number = earlier.count() as u32;
        if let Some(comm) = self.comms.get(&(list, number)) {
            return *comm;
        }
        let members = self.lists[list].iter().copied().map(Rank).collect();
        let comm = self.builder.add_comm(members);
        self.comms.insert((list, number), comm);
        comm
    }

    /// The first time a recording is used: its template, its group list, and whether it agrees with itself.
    fn prepare(&mut self, index: usize) -> Result<Prepared, SpliceError> {
        let recording = &self.recordings[index];
        let template = self.template(index)?;
        let known = self.group_lists.iter().rposition(|list| list.is_of(recording));
        let groups = known.unwrap_or(self.group_lists.len());
        if known.is_none() {
            self.group_lists.push(GroupList::new(self.world_size, recording)?);
        }
        for slot in 0..recording.comms.len() {
            let list = self.resolve(groups, recording, slot, recording.rank)?;
            if self.lists[list] != recording.comms[slot].members {
                let message = format!(
                    "the communicator in slot {slot} has members {}, but by its origin {:?} they would be {}",
                    brief(&recording.comms[slot].members),
                    recording.comms[slot].origin,
                    brief(&self.lists[list])
                );
                return Err(SpliceError::Recording { rank: recording.rank, message });
            }
        }
        let prepared = Prepared { template, groups };
        self.prepared[index] = Some(prepared);
        Ok(prepared)
    }

    fn template(&mut self, index: usize) -> Result<TemplateId, SpliceError> {
        let recording = &self.recordings[index];
        let shape = recording.digest_of_shape();
        if let Some((template, first)) = self.templates.get(&shape) {
            self.own[index] = durations_unlike(recording, &self.recordings[*first]);
            return Ok(*template);
        }
        let mut ops = recording.ops.clone();
        for (index, op) in ops.iter_mut().enumerate() {
            rename(op, &recording.names, &mut self.builder).map_err(|id| SpliceError::Recording {
                rank: recording.rank,
                message: format!("op {index} has name {id}, but there are {} names", recording.names.len()),
            })?;
        }
        let template = self.builder.add_template(&format!("as rank {}", recording.rank), &ops)?;
        self.templates.insert(shape, (template, index));
        Ok(template)
    }

    /// Members of the communicator that `rank` has in `slot` when it does what was recorded.
    fn resolve(
        &mut self,
        groups: usize,
        recording: &RankRecording,
        slot: usize,
        rank: u32,
    ) -> Result<ListId, SpliceError> {
        let comm = &recording.comms[slot];
        let unknown = |message: String| SpliceError::Unknown {
            rank,
            recorded: recording.rank,
            slot: slot as u32,
            size: comm.members.len(),
            message,
        };
        let groups = &mut self.group_lists[groups];
        match comm.origin {
            CommOrigin::Group { ordinal, .. } => {
                let group = groups.nth(rank, ordinal).map_err(unknown)?.group;
                if let Some(list) = groups.lists[group] {
                    return Ok(list);
                }
                let list = intern(&mut self.lists, &groups.of[group].ranks);
                groups.lists[group] = Some(list);
                Ok(list)
            }
            CommOrigin::Pair { ordinal, lo, hi, .. } => {
                let recorded = groups.nth(recording.rank, ordinal).map_err(unknown)?;
                let own = groups.nth(rank, ordinal).map_err(unknown)?;
                let ranks = &groups.of[own.group].ranks;
                let (lo, hi) =
                    shift_pair(lo, hi, recorded.group_rank, own.group_rank, ranks.len() as u32).map_err(unknown)?;
                Ok(intern(&mut self.lists, &[ranks[lo as usize], ranks[hi as usize]]))
            }
            CommOrigin::Explicit if comm.members.contains(&rank) => Ok(intern(&mut self.lists, &comm.members)),
            CommOrigin::Explicit => {
                Err(unknown("nothing but its members is recorded, and it is not one of them".to_owned()))
            }
        }
    }
}

/// The order in which members of several communicators tell them apart.
fn age(origin: CommOrigin) -> (u32, u32, u8) {
    match origin {
        CommOrigin::Group { ordinal, instance } => (instance, ordinal, 0),
        CommOrigin::Pair { ordinal, instance, .. } => (instance, ordinal, 1),
        CommOrigin::Explicit => (u32::MAX, u32::MAX, 2),
    }
}

/// How many of a rank's communicators with the members of the one in `slot` come before it.
pub(super) fn comm_number(comms: &[RecordedComm], slot: usize) -> u32 {
    let own = &comms[slot];
    let earlier = comms.iter().enumerate().filter(|(other_slot, other)| {
        other.members == own.members && (age(other.origin), *other_slot) < (age(own.origin), slot)
    });
    earlier.count() as u32
}

/// The pair of group ranks that `own` has if `recorded` has `lo` and `hi`: the partner is at the same distance in the ring
/// of the group's `size` ranks.
fn shift_pair(lo: u32, hi: u32, recorded: u32, own: u32, size: u32) -> Result<(u32, u32), String> {
    let partner = match recorded {
        _ if lo >= hi => return Err(format!("{lo}:{hi} is not a pair")),
        _ if recorded == lo => hi,
        _ if recorded == hi => lo,
        _ => return Err(format!("group rank {recorded} is not in the pair {lo}:{hi}")),
    };
    if own == recorded {
        return if hi < size { Ok((lo, hi)) } else { Err(format!("its process group has only {size} ranks")) };
    }
    let distance = i64::from(partner) - i64::from(recorded);
    let partner = (i64::from(own) + distance).rem_euclid(i64::from(size)) as u32;
    if (own < partner) != (distance > 0) || own == partner {
        return Err(format!(
            "its partner would be group rank {partner} of {size}, on the other side of its own group rank {own} than recorded"
        ));
    }
    Ok((own.min(partner), own.max(partner)))
}

/// What is known of a recording after its first use.
#[derive(Clone, Copy)]
struct Prepared {
    template: TemplateId,
    groups: usize,
}

/// Process groups of a job and, for every rank, those that contain it.
struct GroupList<'a> {
    of: Cow<'a, [ProcessGroup]>,
    /// Member list of each group, once needed.
    lists: Vec<Option<ListId>>,
    start: Vec<usize>,
    memberships: Vec<Membership>,
}

/// A rank's place in a process group.
#[derive(Clone, Copy, Default)]
struct Membership {
    group: usize,
    group_rank: u32,
}

impl<'a> GroupList<'a> {
    fn new(world_size: u32, recording: &'a RankRecording) -> Result<Self, SpliceError> {
        let of: Cow<'a, [ProcessGroup]> = if recording.groups.is_empty() {
            Cow::Owned(vec![ProcessGroup { name: String::new(), ranks: (0..world_size).collect() }])
        } else {
            Cow::Borrowed(&recording.groups)
        };
        let mut start = vec![0; world_size as usize + 1];
        for group in of.iter() {
            for rank in &group.ranks {
                let count = start.get_mut(*rank as usize + 1).ok_or_else(|| SpliceError::Recording {
                    rank: recording.rank,
                    message: format!("process group {:?} has rank {rank}, the world {world_size} ranks", group.name),
                })?;
                *count += 1;
            }
        }
        (1..start.len()).for_each(|rank| start[rank] += start[rank - 1]);
        let mut next = start.clone();
        let mut memberships = vec![Membership::default(); start[world_size as usize]];
        for (group, ranks) in of.iter().map(|group| &group.ranks).enumerate() {
            for (group_rank, rank) in ranks.iter().enumerate() {
                memberships[next[*rank as usize]] = Membership { group, group_rank: group_rank as u32 };
                next[*rank as usize] += 1;
            }
        }
        Ok(Self { lists: vec![None; of.len()], of, start, memberships })
    }

    /// Are these the groups of the recording? Recordings of one job usually have equal lists.
    fn is_of(&self, recording: &RankRecording) -> bool {
        match &self.of {
            Cow::Owned(_) => recording.groups.is_empty(),
            Cow::Borrowed(groups) => *groups == recording.groups,
        }
    }

    /// The `ordinal`-th group that contains `rank`.
    fn nth(&self, rank: u32, ordinal: u32) -> Result<Membership, String> {
        let own = &self.memberships[self.start[rank as usize]..self.start[rank as usize + 1]];
        own.get(ordinal as usize).copied().ok_or_else(|| {
            format!(
                "rank {rank} is in {} of the {} recorded process groups, number {ordinal} is wanted",
                own.len(),
                self.of.len()
            )
        })
    }
}

fn intern(lists: &mut IndexSet<Vec<u32>, FxBuildHasher>, members: &[u32]) -> ListId {
    lists.get_index_of(members).unwrap_or_else(|| lists.insert_full(members.to_vec()).0)
}

/// Replaces the op's name id by the graph's; the id is the error when it has no text.
fn rename(op: &mut Op, names: &[String], builder: &mut GraphBuilder) -> Result<(), NameId> {
    if let OpKind::Compute { name, .. } = &mut op.kind {
        let text = names.get(name.index()).ok_or(*name)?;
        *name = builder.intern_name(text);
    }
    Ok(())
}

/// Durations of a recording that another one of the same shape does not have.
fn durations_unlike(recording: &RankRecording, other: &RankRecording) -> Vec<(u32, SimTime)> {
    let both = recording.ops.iter().zip(&other.ops).enumerate();
    let unlike = both.filter_map(|(index, (mine, theirs))| match (mine.kind, theirs.kind) {
        (OpKind::Compute { duration: mine, .. }, OpKind::Compute { duration: theirs, .. }) if mine != theirs => {
            Some((index as u32, mine))
        }
        _ => None,
    });
    unlike.collect()
}

/// The beginning of a list, for messages.
fn brief(ranks: &[u32]) -> String {
    const SHOWN: usize = 8;
    let more = if ranks.len() > SHOWN { format!(" and {} more", ranks.len() - SHOWN) } else { String::new() };
    format!("{:?}{more}", &ranks[..ranks.len().min(SHOWN)])
}
