//! Traces of PyTorch's profiler (Kineto): one file per rank.
//!
//! [`import`] makes an execution graph of them whose unchanged replay takes as long as the recording, and which can be replayed
//! otherwise: a slower rank, another network. `docs/guides/traces.md` says what is inferred and what is not.

pub mod assemble;
pub mod clock;
pub mod comm;
pub mod event;
pub mod execution;
pub mod iterations;
pub mod matching;
pub mod network;
pub mod program;
pub mod ranks;
pub mod read;
pub mod repair;
mod summary;

pub use summary::{Late, Summary};

use crate::cluster::{DEFAULT_PROFILE, builtin};
use crate::notes::Notes;
use crate::{ImportError, input};
use assemble::{Job, assemble};
use comm::{CommRecord, Groups, Launches};
use event::{Names, RankTrace};
use matching::{Matching, match_records};
use prism_engine::collective::tuning::{NcclSettings, Tuning};
use prism_engine::graph::Graph;
use prism_engine::profile::Profile;
use program::{Program, Source};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// Largest world that is built.
const MAX_WORLD: u32 = 1 << 22;
/// How names of traces end.
const ENDINGS: [&str; 2] = [".json", ".json.gz"];

/// How to import.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Ranks of files that do not tell theirs, by file name.
    pub ranks: BTreeMap<String, u32>,
    /// Size of the world, if the traces do not tell it.
    pub world_size: Option<u32>,
    /// The network to start from; by default that of the profile for the traces' device.
    pub profile: Option<Profile>,
    /// Kernels of NCCL that fit to nothing are kept as computations.
    pub keeps_unmatched: bool,
    /// Execution traces of PyTorch (files, or folders of them), which tell more of communications. Those among the traces are found.
    pub execution_traces: Vec<PathBuf>,
    /// Counts the bytes of traces that have been read, as they are on disk.
    pub progress: Option<Arc<AtomicU64>>,
}

/// A graph and the account of how it came about.
#[derive(Debug)]
pub struct Imported {
    /// The job.
    pub graph: Graph,
    /// The account.
    pub summary: Summary,
}

/// Reads traces (files, or folders of `.json` and `.json.gz`) and makes a graph of them.
///
/// Memory: some 60 bytes per launch and device activity of all traces, nothing per other event.
///
/// # Errors
/// A path cannot be read; a file is no trace; two files are of one rank; there is nothing on any device.
pub fn import(paths: &[PathBuf], options: &Options) -> Result<Imported, ImportError> {
    let files = input::find(paths, &ENDINGS)?;
    let mut names = Names::default();
    let mut traces = Vec::with_capacity(files.len());
    let mut executions = match &options.execution_traces[..] {
        [] => Vec::new(),
        paths => input::find(paths, &ENDINGS)?,
    };
    for file in &files {
        if execution::is_execution_trace(file)? {
            if !executions.contains(file) {
                executions.push(file.clone());
            }
            continue;
        }
        let name = file.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let stream = input::open_counted(file, options.progress.clone())?;
        traces.push(read::read_stream(stream, file, name, &mut names)?);
    }
    if traces.is_empty() {
        return Err(ImportError::unfit(
            "these are execution traces without times: traces of the profiler (traceEvents) of the same ranks are needed, too",
        ));
    }
    import_joined(traces, &executions, names, options)
}

/// The same of traces in memory.
pub fn import_traces(traces: Vec<RankTrace>, names: Names, options: &Options) -> Result<Imported, ImportError> {
    import_joined(traces, &[], names, options)
}

fn import_joined(
    traces: Vec<RankTrace>,
    executions: &[PathBuf],
    names: Names,
    options: &Options,
) -> Result<Imported, ImportError> {
    let mut notes = Notes::default();
    let is_execution = |name: &str| executions.iter().any(|path| path.file_name().is_some_and(|file| *file == *name));
    let (of_executions, of_traces) = options.ranks.clone().into_iter().partition(|(name, _)| is_execution(name));
    let ranks = ranks::assign(&traces, &of_traces, &mut notes)?;
    let mut recorded = Recorded::new(traces.into_iter().zip(ranks).map(|(trace, rank)| (rank, trace)).collect(), names);
    let (progress, traces) = (options.progress.as_ref(), &mut recorded.traces);
    recorded.joined = execution::join_all(executions, progress, traces, &of_executions, &recorded.names, &mut notes)?;
    recorded.world_size = world_size(&recorded.traces, options)?;
    recorded.prepare(&mut notes)?;
    let matching = match_records(&recorded.records, &recorded.groups);
    let offsets = recorded.clocks(&matching, &mut notes);
    let programs = recorded.programs(&matching, &offsets, options, &mut notes);
    let profile = recorded.profile(options, &mut notes)?;
    let job = Job {
        world_size: recorded.world_size,
        programs: &programs,
        matched: &matching.matched,
        groups: &recorded.groups,
        names: &recorded.names,
        profile: &profile,
        meta: &[("source", "kineto".to_owned()), ("traces", recorded.traces.len().to_string())],
    };
    let (graph, scale) = assemble(&job, &mut notes)?;
    summary::summarise(&recorded, &matching, offsets, &programs, graph, scale, notes)
}

/// Everything that was read.
struct Recorded {
    traces: BTreeMap<u32, RankTrace>,
    names: Names,
    world_size: u32,
    launches: BTreeMap<u32, Launches>,
    records: BTreeMap<u32, Vec<CommRecord>>,
    groups: Groups,
    totals: repair::Totals,
    joined: execution::Joined,
}

impl Recorded {
    fn new(traces: BTreeMap<u32, RankTrace>, names: Names) -> Self {
        Self {
            traces,
            names,
            world_size: 0,
            launches: BTreeMap::new(),
            records: BTreeMap::new(),
            groups: Groups::default(),
            totals: repair::Totals::default(),
            joined: execution::Joined::default(),
        }
    }

    fn prepare(&mut self, notes: &mut Notes) -> Result<(), ImportError> {
        if self.traces.values().all(|trace| trace.activities.is_empty()) {
            return Err(ImportError::unfit(
                "the traces have nothing that ran on a device: profile with ProfilerActivity.CUDA",
            ));
        }
        let versions: BTreeSet<Option<i64>> = self.traces.values().map(|trace| trace.schema_version).collect();
        if versions.len() > 1 {
            notes.add("mixed_schema_versions", || format!("schemaVersion of the files: {versions:?}"));
        }
        for (rank, trace) in &mut self.traces {
            let totals = repair::clip(trace, *rank, &self.names);
            self.totals.before_ns += totals.before_ns;
            self.totals.after_ns += totals.after_ns;
            self.launches.insert(*rank, comm::launches(trace));
            let records = comm::records(trace, *rank, self.world_size, &self.names, &mut self.groups);
            self.records.insert(*rank, records);
            notes.merge(std::mem::take(&mut trace.notes));
        }
        Ok(())
    }

    fn clocks(&self, matching: &Matching, notes: &mut Notes) -> BTreeMap<u32, clock::Offset> {
        let end = |rank: u32, record: u32| {
            self.traces[&rank].activities[self.records[&rank][record as usize].activity as usize].end()
        };
        let offsets = clock::offsets(&self.traces.keys().copied().collect(), &matching.matched, end);
        for (rank, offset) in offsets.iter().filter(|(_, offset)| offset.ahead_ns != 0) {
            notes.add("clocks_moved", || {
                format!("rank {rank}: {} us ahead, by {} collectives", offset.ahead_ns / 1000, offset.collectives)
            });
        }
        offsets
    }

    fn programs(
        &mut self,
        matching: &Matching,
        offsets: &BTreeMap<u32, clock::Offset>,
        options: &Options,
        notes: &mut Notes,
    ) -> BTreeMap<u32, Program> {
        let wait_name = self.names.number("wait for something the trace does not tell");
        let mut matched: BTreeMap<u32, Vec<Option<u32>>> =
            self.records.iter().map(|(rank, records)| (*rank, vec![None; records.len()])).collect();
        for (number, one) in (0..).zip(&matching.matched) {
            for (rank, record) in &one.members {
                matched.get_mut(rank).expect("records have ranks")[*record as usize] = Some(number);
            }
        }
        let sources: Vec<Source<'_>> = self
            .traces
            .iter()
            .map(|(rank, trace)| Source {
                rank: *rank,
                trace,
                launches: &self.launches[rank],
                records: &self.records[rank],
                matched: &matched[rank],
                clock: offsets.get(rank).map_or(0, |offset| offset.ahead_ns),
                keeps_unmatched: options.keeps_unmatched,
                marks: iterations::find(trace, *rank, &self.launches[rank], notes),
                wait_name,
                names: &self.names,
            })
            .collect();
        let origin = sources.iter().filter_map(program::first_time).min().unwrap_or(0);
        sources.iter().map(|source| (source.rank, program::write(source, origin, notes))).collect()
    }

    fn profile(&self, options: &Options, notes: &mut Notes) -> Result<Profile, ImportError> {
        if let Some(profile) = &options.profile {
            return Ok(profile.clone());
        }
        let device = self.traces.values().find_map(|trace| trace.device.as_deref());
        let name = device.and_then(network::profile_of_device).unwrap_or_else(|| {
            notes.add("profile_assumed", || {
                let device = device.unwrap_or("the device");
                format!("no built-in profile for {device}; the network is that of {DEFAULT_PROFILE}")
            });
            DEFAULT_PROFILE
        });
        let mut profile = builtin(name)?;
        // What NCCL chose is in the recorded times; tables of a version do not follow the network's numbers.
        (profile.network.tuning, profile.network.nccl) = (Tuning::Fastest, NcclSettings::default());
        Ok(profile)
    }
}

fn world_size(traces: &BTreeMap<u32, RankTrace>, options: &Options) -> Result<u32, ImportError> {
    let claimed = traces.values().filter_map(|trace| trace.world_size);
    let highest = traces.keys().map(|rank| rank + 1);
    let lists = traces.values().flat_map(|trace| {
        let configured = trace.groups.iter().flat_map(|group| group.ranks.iter());
        let told = trace.metas.iter().flat_map(|meta| meta.ranks.iter().flat_map(|ranks| ranks.iter()));
        configured.chain(told).map(|rank| rank.saturating_add(1))
    });
    let found = claimed.chain(highest).chain(lists).max().unwrap_or(1);
    let size = options.world_size.unwrap_or(found);
    if size < found || size > MAX_WORLD {
        return Err(ImportError::unfit(format!(
            "a world of {size} ranks does not fit: the traces are of at least {found}, and at most {MAX_WORLD} are built"
        )));
    }
    Ok(size)
}
