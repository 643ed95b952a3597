//! AICB's own workloads (CSV, one line per call): what its physical runs execute, and with times what they measured.
//!
//! Columns by name: `comm_type`, `comm_group`, `comm_group_size`, `msg_size` (bytes of the whole buffer, as AICB's
//! `workload_applyer.py` allocates them), `stage`, `_elapsed_time` (ms). Calls run one after the other, as there. Times are of computations
//! only: those of communications are the network profile's. `epoch_end` ends an iteration; calls of stages `init...` come
//! before training. Roots are the first of their group.
//!
//! Rank = tp + TP x dp, as in [`crate::simai`]; files of one pipeline stage only.

use crate::cluster::profile_or_default;
use crate::kineto::event::CommKind;
use crate::kineto::read::kind_of_call;
use crate::simai::{Group, Options, Summary, add_comms};
use crate::{ImportError, input};
use prism_engine::graph::op::{CollectiveKind, ComputeClass, DataType, Op, OpKind, Provenance, ReduceOp};
use prism_engine::graph::{Graph, GraphBuilder};
use prism_engine::ids::{CommId, NameId, Rank, SlotId, StreamId};
use prism_engine::units::SimTime;
use std::collections::BTreeMap;
use std::path::Path;

const MAX_BYTES: u64 = 256 << 20;
const MAX_WORLD: u32 = 1 << 20;
/// Longest computation: 28 hours, ms.
const MAX_MS: f64 = 1e8;
const COMPUTE: StreamId = StreamId(0);
/// Who takes part in a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Members {
    Some(Group),
    All,
}

#[derive(Clone, Debug)]
enum Row {
    Call { kind: CollectiveKind, members: Members, bytes: u64, stage: String },
    Compute { ns: i64, stage: String },
    EpochEnd,
}

/// Is it such a file? It begins with the names of columns, after a line that names the ranks.
pub(crate) fn is_aicb(text: &str) -> bool {
    text.lines().take(2).any(|line| line.starts_with("comm_type,"))
}

/// Reads a workload of calls. Options are those of SimAI workloads; passes in a row are the file's own.
///
/// # Errors
/// The file cannot be read, is none, has messages between pipeline stages, or does not fit the options.
pub fn import(path: &Path, options: &Options) -> Result<(Graph, Summary), ImportError> {
    let bytes = input::read_small(path, MAX_BYTES)?;
    let text = String::from_utf8_lossy(&bytes);
    let mut at = 0;
    let mut columns: Option<Vec<&str>> = None;
    let (mut rows, mut sizes, mut world) = (Vec::new(), BTreeMap::new(), options.world_size);
    for (number, line) in text.lines().enumerate() {
        let offset = at;
        at += line.len() as u64 + 1;
        let line = line.trim_end();
        let Some(columns) = &columns else {
            world = world.or_else(|| world_of(line));
            columns = line.starts_with("comm_type,").then(|| line.split(',').collect());
            continue;
        };
        if line.is_empty() {
            continue;
        }
        let row = row(columns, line, &mut sizes).map_err(|what| ImportError::Format {
            path: path.to_owned(),
            expected: "workload of AICB",
            offset,
            message: format!("line {}: {what}", number + 1),
        })?;
        rows.push(row);
    }
    if rows.is_empty() {
        return Err(ImportError::unfit(format!("{} has no calls", path.display())));
    }
    if options.iterations > 1 {
        return Err(ImportError::unfit("a list of calls has its own iterations: leave --iterations out"));
    }
    build(&rows, &sizes, world, options)
}

/// `[rank0 ~ rank127]`.
fn world_of(line: &str) -> Option<u32> {
    let last = line.trim().strip_prefix('[')?.strip_suffix(']')?.rsplit("rank").next()?;
    last.trim().parse::<u32>().ok()?.checked_add(1)
}

fn row(columns: &[&str], line: &str, sizes: &mut BTreeMap<Members, u32>) -> Result<Row, String> {
    let fields: Vec<&str> = line.split(',').map(str::trim).collect();
    let field = |name: &str| {
        let at = columns.iter().position(|column| *column == name).ok_or_else(|| format!("no column {name}"))?;
        fields.get(at).copied().ok_or_else(|| format!("no value for {name}"))
    };
    let call = field("comm_type")?;
    let call = call.strip_prefix("CommType.").unwrap_or(call);
    let stage = field("stage")?.to_owned();
    if call == "epoch_end" {
        return Ok(Row::EpochEnd);
    }
    if call == "computation" {
        let time = field("_elapsed_time")?;
        let ms: f64 = time.parse().map_err(|_| format!("a computation without a time (_elapsed_time is {time:?})"))?;
        if !(0.0..=MAX_MS).contains(&ms) {
            return Err(format!("a computation of {ms} ms"));
        }
        return Ok(Row::Compute { ns: (ms * 1e6).round() as i64, stage });
    }
    let Some(CommKind::Collective(kind)) = kind_of_call(call) else {
        return Err(format!("{call} is not supported: messages between pipeline stages are not in one stage's job"));
    };
    let members = match field("comm_group")?.trim_start_matches("CommGroup.") {
        "tp_group" => Members::Some(Group::Tensor),
        "dp_group" => Members::Some(Group::Data),
        "ep_group" => Members::Some(Group::Expert),
        "ep_dp_group" => Members::Some(Group::DataExpert),
        "all" => Members::All,
        other => return Err(format!("the group {other} is not supported: tp, dp, ep, ep_dp and all are")),
    };
    let size = field("comm_group_size")?;
    if !matches!(size, "None" | "") {
        let size: u32 = size.parse().ok().filter(|size| *size > 0).ok_or_else(|| format!("a group of {size} ranks"))?;
        let known = *sizes.entry(members).or_insert(size);
        if known != size {
            return Err(format!("a group of {size} ranks, which had {known} before"));
        }
    }
    let bytes = field("msg_size")?;
    let bytes = bytes.parse::<u64>().map_err(|_| format!("{bytes:?} is no number of bytes"))?;
    Ok(Row::Call { kind, members, bytes: if call == "barrier" { 1 } else { bytes }, stage })
}

fn build(
    rows: &[Row],
    sizes: &BTreeMap<Members, u32>,
    world: Option<u32>,
    options: &Options,
) -> Result<(Graph, Summary), ImportError> {
    let told = |group| sizes.get(&Members::Some(group)).copied();
    let needs = |members| rows.iter().any(|row| matches!(row, Row::Call { members: m, .. } if *m == members));
    let tensor = told(Group::Tensor).unwrap_or(1);
    let world = world
        .or_else(|| told(Group::Data).map(|data| tensor.saturating_mul(data)))
        .or(sizes.get(&Members::All).copied());
    let world = world
        .ok_or_else(|| ImportError::unfit("the file does not tell the number of ranks: name it with --world-size"))?;
    let expert = match options.expert_parallel.or_else(|| told(Group::Expert)) {
        Some(expert) => expert,
        None if needs(Members::Some(Group::Expert)) || needs(Members::Some(Group::DataExpert)) => {
            return Err(ImportError::unfit(
                "the file has expert-parallel calls and not their degree: name it with --expert-parallel",
            ));
        }
        None => 1,
    };
    if world > MAX_WORLD || expert == 0 || world % tensor != 0 || (world / tensor) % expert != 0 {
        return Err(ImportError::unfit(format!(
            "{world} ranks do not divide into tensor-parallel groups of {tensor} and expert-parallel groups of {expert} \
             (at most {MAX_WORLD} ranks)"
        )));
    }
    let data = world / tensor;
    let expected = [
        (Members::Some(Group::Data), data),
        (Members::Some(Group::Expert), expert),
        (Members::Some(Group::DataExpert), data / expert),
        (Members::All, world),
    ];
    for (members, wanted) in expected {
        if let Some(size) = sizes.get(&members).filter(|size| **size != wanted) {
            return Err(ImportError::unfit(format!(
                "a job of {world} ranks in tensor-parallel groups of {tensor} has groups of {wanted} where the file says {size}: \
                 of a job with pipeline stages, give the ranks of one stage with --world-size"
            )));
        }
    }
    let mut graph = GraphBuilder::new(world);
    let profile = profile_or_default(options.profile.as_ref())?;
    graph.set_meta("profile", profile.to_toml());
    graph.set_meta("source", "aicb");
    let mut comms: Vec<Vec<CommId>> = vec![Vec::new(); world as usize];
    let mut slots: BTreeMap<Members, (u32, u32)> = BTreeMap::new();
    let degrees =
        [(Group::Tensor, tensor), (Group::Data, data), (Group::Expert, expert), (Group::DataExpert, data / expert)];
    for (group, size) in degrees.into_iter().filter(|(group, size)| *size > 1 && needs(Members::Some(*group))) {
        slots.insert(Members::Some(group), (slots.len() as u32, size));
        add_comms(&mut graph, group, (tensor, data, expert), &mut comms);
    }
    if needs(Members::All) && world > 1 {
        slots.insert(Members::All, (slots.len() as u32, world));
        let everyone = graph.add_comm((0..world).map(Rank).collect());
        for list in &mut comms {
            list.push(everyone);
        }
    }
    let (ops, alone) = ops_of(rows, &slots, |stage| graph.intern_name(stage));
    let template = graph.add_template("every rank", &ops)?;
    for (rank, comms) in (0..).zip(comms) {
        graph.set_rank(Rank(rank), template, comms);
    }
    let graph = graph.finish()?;
    graph.check()?;
    let collectives = rows.iter().filter(|row| matches!(row, Row::Call { .. })).count() as u64;
    let built = ops.iter().filter(|op| matches!(op.kind, OpKind::Collective { .. })).count() as u64;
    if built + alone != collectives {
        return Err(ImportError::unfit(format!("a bug of the importer: {collectives} collectives became {built}")));
    }
    let summary = Summary {
        policy: "AICB".to_owned(),
        world_size: world,
        degrees: (tensor, expert, data),
        layers: rows.len() as u64,
        collectives,
        collectives_alone: alone,
        ops: graph.num_ops(),
    };
    Ok((graph, summary))
}

/// The program of every rank, and how many calls have no one else in their group.
fn ops_of(rows: &[Row], slots: &BTreeMap<Members, (u32, u32)>, mut name: impl FnMut(&str) -> NameId) -> (Vec<Op>, u64) {
    let mut ops = Vec::new();
    let mut push = |kind| ops.push(Op { host_gap: SimTime::ZERO, stream: COMPUTE, kind });
    let (mut alone, mut is_training, mut is_open) = (0, false, false);
    for row in rows {
        let stage = match row {
            Row::Call { stage, .. } | Row::Compute { stage, .. } => stage,
            Row::EpochEnd => {
                if is_training {
                    push(OpKind::IterationEnd);
                    is_open = false;
                }
                continue;
            }
        };
        if !is_training && !stage.starts_with("init") {
            push(OpKind::TrainingBegin);
            is_training = true;
        }
        is_open = is_training;
        match row {
            Row::Compute { ns, stage } => push(OpKind::Compute {
                duration: SimTime::from_ns(*ns),
                name: name(stage),
                class: ComputeClass::Kernel,
                provenance: Provenance::Imported,
            }),
            Row::Call { kind, members, bytes, .. } => match slots.get(members) {
                Some((slot, size)) => push(OpKind::Collective {
                    slot: SlotId(*slot),
                    kind: *kind,
                    dtype: DataType::Uint8,
                    reduce: ReduceOp::Sum,
                    root: 0,
                    count: count(*kind, *bytes, *size),
                    group: 0,
                }),
                None => alone += 1,
            },
            Row::EpochEnd => {}
        }
    }
    if !is_training {
        push(OpKind::TrainingBegin);
    }
    if is_open || !is_training {
        push(OpKind::IterationEnd);
    }
    (ops, alone)
}

/// Bytes as NCCL counts elements: a rank's share of what is gathered or scattered. AICB pads to whole shares.
fn count(kind: CollectiveKind, bytes: u64, size: u32) -> u64 {
    use CollectiveKind as C;
    match kind {
        C::AllReduce | C::Broadcast | C::Reduce => bytes,
        C::AllGather | C::ReduceScatter | C::AllToAll | C::Gather | C::Scatter => bytes.div_ceil(u64::from(size)),
    }
}
