//! A session with players on it.

use super::player::{Jitter, Played, Player, Stop};
use super::store::{PATIENCE, Store};
use prism_engine::cost::kernels::KernelTable;
use prism_engine::graph::Graph;
use prism_engine::hybrid::{Session, SessionMode, SessionOptions, Summary};
use prism_engine::profile::Profile;
use prism_engine::replay::{ReplayOptions, ReplayResult, replay, replay_ranks};
use prism_engine::slice::recording::RankRecording;
use prism_engine::slice::splice::splice;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

pub(crate) fn profile() -> Profile {
    Profile::builtin("h100-sxm").expect("built in")
}

/// What a rank does, from its connection to its end.
pub(crate) type Program = Arc<dyn Fn(&mut Player) -> Played + Send + Sync>;

pub(crate) fn program(body: impl Fn(&mut Player) -> Played + Send + Sync + 'static) -> Program {
    Arc::new(body)
}

/// See the module's documentation.
pub(crate) struct Stage {
    pub(crate) session: Arc<Session>,
    pub(crate) store: Arc<Store>,
    pub(crate) seed: Option<u64>,
    world: u32,
    live: Vec<u32>,
    socket: PathBuf,
    _directory: tempfile::TempDir,
}

pub(crate) type Outcomes = BTreeMap<u32, Played>;

impl Stage {
    pub(crate) fn new(
        mode: SessionMode,
        world: u32,
        live: &[u32],
        graph: Option<&Arc<Graph>>,
        slow: &[(u32, f64)],
    ) -> Self {
        let options = SessionOptions {
            mode,
            world_size: world,
            profile: profile(),
            kernels: KernelTable::default(),
            measured_host_time: false,
            live: live.to_vec(),
            slow: slow.iter().copied().collect(),
            perturb: prism_engine::perturb::Perturbations::default(),
        };
        let session = Arc::new(Session::new(options, graph.cloned()).expect("valid options"));
        let directory = tempfile::tempdir().expect("a directory");
        let socket = session.listen(&directory.path().join("s")).expect("a socket");
        let store = Arc::new(Store::new(live));
        Self { session, store, seed: None, world, live: live.to_vec(), socket, _directory: directory }
    }

    pub(crate) fn collect(world: u32, live: &[u32]) -> Self {
        Self::new(SessionMode::Collect, world, live, None, &[])
    }

    pub(crate) fn emulate(graph: &Arc<Graph>, live: &[u32]) -> Self {
        Self::new(SessionMode::Emulate, graph.world_size(), live, Some(graph), &[])
    }

    pub(crate) fn connect(&self, rank: u32) -> Played<Player> {
        self.connect_as(rank, self.world)
    }

    pub(crate) fn connect_as(&self, rank: u32, world: u32) -> Played<Player> {
        Player::connect(&self.socket, rank, world, Arc::clone(&self.session), Arc::clone(&self.store))
    }

    /// Plays the program on every live rank.
    pub(crate) fn play(&self, program: &Program) -> Outcomes {
        self.play_on(&self.live, program)
    }

    /// Plays the program on some ranks, each on a thread of its own.
    pub(crate) fn play_on(&self, ranks: &[u32], program: &Program) -> Outcomes {
        let (send, receive) = mpsc::channel();
        for &rank in ranks {
            let (program, send) = (Arc::clone(program), send.clone());
            let player = self.connect(rank);
            let jitter =
                self.seed.map(|seed| Jitter(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ u64::from(rank + 1) << 40));
            std::thread::spawn(move || {
                let played = player.and_then(|mut player| {
                    player.jitter = jitter;
                    program(&mut player)
                });
                // The other end only goes away when the test has failed.
                let _ = send.send((rank, played));
            });
        }
        drop(send);
        let deadline = Instant::now() + PATIENCE;
        let next = |_: &u32| receive.recv_timeout(deadline.saturating_duration_since(Instant::now()));
        let outcome = |rank| next(rank).unwrap_or_else(|error| panic!("{error}: {:?}", self.session.status()));
        ranks.iter().map(outcome).collect()
    }

    /// Plays the program and ends the session.
    pub(crate) fn run(&self, program: &Program) -> (Summary, Outcomes) {
        let outcomes = self.play(program);
        (self.session.finish(), outcomes)
    }

    /// Waits until the session is in a state.
    pub(crate) fn wait_until(&self, mut is_reached: impl FnMut(&Session) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !is_reached(&self.session) {
            assert!(Instant::now() < deadline, "{:?}", self.session.status());
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// A run that must succeed.
pub(crate) fn succeed((summary, outcomes): (Summary, Outcomes)) -> Summary {
    assert_eq!(summary.failed, None);
    let failed: Vec<_> = outcomes.into_iter().filter(|(_, played)| played.is_err()).collect();
    assert_eq!(failed, Vec::<(u32, Result<(), Stop>)>::new());
    summary
}

pub(crate) fn record(world: u32, ranks: &[u32], program: &Program) -> Vec<RankRecording> {
    let stage = Stage::collect(world, ranks);
    succeed(stage.run(program));
    ranks.iter().map(|rank| stage.session.recording(*rank).expect("collected")).collect()
}

/// The graph of a job from one recording per role; `role` numbers the entries of `representatives`.
pub(crate) fn collect(world: u32, representatives: &[u32], role: impl Fn(u32) -> u32, program: &Program) -> Arc<Graph> {
    let recordings = record(world, representatives, program);
    let assignment: Vec<u32> = (0..world).map(role).collect();
    Arc::new(splice(world, &recordings, &assignment, &BTreeMap::new()).expect("programs that fit together"))
}

/// The graph of a job from recordings of all its ranks.
pub(crate) fn collect_all(world: u32, program: &Program) -> Arc<Graph> {
    let ranks: Vec<u32> = (0..world).collect();
    collect(world, &ranks, |rank| rank, program)
}

fn replay_options(slow: &[(u32, f64)]) -> ReplayOptions {
    let slow = slow.iter().map(|(rank, factor)| (prism_engine::ids::Rank(*rank), *factor)).collect();
    ReplayOptions { slow, ..ReplayOptions::new(profile()) }
}

pub(crate) fn replayed(graph: &Arc<Graph>, slow: &[(u32, f64)]) -> ReplayResult {
    replay(graph, &replay_options(slow)).expect("no deadlock")
}

/// Iteration times of every rank when all are replayed.
pub(crate) fn replayed_ranks(graph: &Arc<Graph>, slow: &[(u32, f64)]) -> Vec<Vec<i64>> {
    let report = replay_ranks(graph, &replay_options(slow)).expect("no deadlock");
    let times = |rank: &prism_engine::sim::RankReport| {
        let mut before = rank.training_begin.unwrap_or_default();
        rank.iteration_ends.iter().map(|end| (*end - std::mem::replace(&mut before, *end)).as_ns()).collect()
    };
    report.ranks.iter().map(times).collect()
}

/// Iteration times of the live ranks.
pub(crate) fn live_ranks(summary: &Summary) -> Vec<(u32, Vec<i64>)> {
    summary.ranks.iter().map(|rank| (rank.rank, rank.iteration_time_ns.clone())).collect()
}
