//! Real values between live ranks that do not all run at once, or whose communicator has virtual members.
//!
//! A member leaves its contribution in a file of the session's directory and says so; who needs it waits here until it is
//! there. Where only some of the ranks may run at a time, a rank that waits gives up its *turn* and goes on when it has got
//! one again: its process is parked in its NCCL call, with all its memory. Any number of ranks is so played by a few that
//! run, and the values are those of all of them running at once, because who reduces reads the contributions in group-rank
//! order either way.

use super::values::Rows;
use prism_wire::control::Contribution;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long one request may wait; the process looks at its abort flags in between.
const SLICE: Duration = Duration::from_millis(50);
/// All ranks wait for each other, and nothing has changed for so long: the watchdog of a program had its chance.
const PATIENCE: Duration = Duration::from_secs(5);
/// Ranks named in a report of a deadlock.
const SHOWN: usize = 8;

/// What waiting came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Waited {
    /// Ask again.
    NotYet,
    /// All is there, and the rank has a turn.
    Ready,
    /// This rank of the job has gone without contributing.
    Gone(u32),
    /// Everybody waits: who for whom.
    Deadlock(String),
}

/// Which contribution.
type Key = (u32, u64, u32);

fn key_of(contribution: &Contribution) -> Key {
    (contribution.exchange, contribution.number, contribution.from)
}

/// A communicator as its members see it.
struct Meeting {
    /// Ranks of the job in group-rank order.
    members: Arc<[u32]>,
    /// Group ranks of members that have destroyed it.
    left: BTreeSet<u32>,
}

#[derive(Default)]
struct Inner {
    directory: Option<PathBuf>,
    /// Ranks that may run at a time; 0: all.
    at_once: usize,
    live: BTreeSet<u32>,
    /// Ranks that have a turn.
    running: BTreeSet<u32>,
    /// Ranks that have had one.
    seen: BTreeSet<u32>,
    ended: BTreeSet<u32>,
    /// What parked ranks wait for.
    parked: BTreeMap<u32, Vec<Contribution>>,
    meetings: Vec<Meeting>,
    /// By members and how many communicators with these were made before.
    numbers: BTreeMap<(Arc<[u32]>, u32), u32>,
    /// By rank and members: how many communicators it has made of these.
    made: BTreeMap<(u32, Arc<[u32]>), u32>,
    /// Contributions that are there, with the readers still to come.
    contributions: BTreeMap<Key, u32>,
    /// Answers of rules that must be the same for all who ask, with the askers still to come.
    answers: BTreeMap<(u32, u64, u32), (Arc<Rows>, u32)>,
    last_change: Option<Instant>,
}

/// The exchange of a session.
#[derive(Default)]
pub(crate) struct Exchange {
    inner: Mutex<Inner>,
    changed: Condvar,
    /// Held while a rule is asked: the second who asks gets the first one's answer.
    asking: Mutex<()>,
}

impl Exchange {
    pub(crate) fn new(live: &[u32]) -> Self {
        let inner = Inner { live: live.iter().copied().collect(), ..Inner::default() };
        Self { inner: Mutex::new(inner), ..Self::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Nothing is left half-done under the lock.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Something happened that others may wait for.
    fn change(&self) -> MutexGuard<'_, Inner> {
        let mut inner = self.lock();
        inner.last_change = Some(Instant::now());
        self.changed.notify_all();
        inner
    }

    pub(crate) fn set_directory(&self, directory: &Path) {
        self.lock().directory = Some(directory.to_owned());
    }

    pub(crate) fn set_at_once(&self, at_once: usize) {
        self.lock().at_once = at_once;
    }

    /// Do ranks take turns?
    pub(crate) fn has_turns(&self) -> bool {
        self.lock().at_once > 0
    }

    /// Gives the rank a turn if there is one; it keeps it until it parks or ends.
    pub(crate) fn take_turn(&self, rank: u32) -> bool {
        self.change().take_turn(rank)
    }

    /// The communicator of these members that `rank` has just made: its number, and the group ranks that run.
    pub(crate) fn communicator(&self, rank: u32, members: &[u32]) -> (u32, Vec<u32>) {
        let mut inner = self.change();
        let members: Arc<[u32]> = members.into();
        let instance = inner.made.entry((rank, Arc::clone(&members))).or_default();
        let key = (Arc::clone(&members), *instance);
        *instance += 1;
        let group_ranks = (0_u32..).zip(members.iter());
        let running = group_ranks.filter(|(_, rank)| inner.live.contains(rank)).map(|(at, _)| at).collect();
        let next = inner.meetings.len() as u32;
        let number = *inner.numbers.entry(key).or_insert(next);
        if number == next {
            inner.meetings.push(Meeting { members, left: BTreeSet::new() });
        }
        (number, running)
    }

    /// The rank has destroyed the communicator: nothing more comes of it.
    pub(crate) fn leave(&self, rank: u32, exchange: u32) {
        let mut inner = self.change();
        let Some(meeting) = inner.meetings.get_mut(exchange as usize) else { return };
        if let Some(at) = meeting.members.iter().position(|member| *member == rank) {
            meeting.left.insert(at as u32);
        }
    }

    /// The rank's process is over.
    pub(crate) fn end(&self, rank: u32) {
        let mut inner = self.change();
        inner.running.remove(&rank);
        inner.parked.remove(&rank);
        inner.ended.insert(rank);
    }

    /// Contributions of `rank` lie in their files. If it `parks` its turn is free; else it runs on.
    pub(crate) fn contribute(&self, rank: u32, parks: bool, contributions: &[Contribution]) -> Result<(), String> {
        let mut inner = self.change();
        for contribution in contributions {
            if inner.rank_of(contribution) != Some(rank) {
                return Err(format!("rank {rank} contributes to a communicator as somebody else"));
            }
            if contribution.readers > 0 {
                inner.contributions.insert(key_of(contribution), contribution.readers);
            }
        }
        if parks {
            inner.running.remove(&rank);
        } else {
            inner.parked.remove(&rank);
            inner.running.insert(rank);
        }
        Ok(())
    }

    /// Waits a little until these contributions are there and the rank has a turn.
    pub(crate) fn wait(&self, rank: u32, contributions: &[Contribution]) -> Waited {
        let deadline = Instant::now() + SLICE;
        let mut inner = self.lock();
        // What was there stays until this rank has read it: the search goes on where it stopped.
        let mut num_found = 0;
        loop {
            num_found += inner.num_there(&contributions[num_found..]);
            if let Some(missing) = contributions.get(num_found).copied() {
                if let Some(gone) = inner.gone(&missing) {
                    // It goes on with an error, turn or not.
                    inner.parked.remove(&rank);
                    inner.running.insert(rank);
                    return Waited::Gone(gone);
                }
                inner.parked.insert(rank, contributions.to_vec());
            } else {
                inner.parked.remove(&rank);
                if inner.take_turn(rank) {
                    return Waited::Ready;
                }
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return inner.deadlock().map_or(Waited::NotYet, Waited::Deadlock);
            }
            inner = self.changed.wait_timeout(inner, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// `rank` has read these contributions; the last reader's goes away.
    pub(crate) fn taken(&self, contributions: &[Contribution]) {
        let mut inner = self.lock();
        for contribution in contributions {
            inner.take(contribution);
        }
    }

    /// What a rule said before about this operation; `ask` where nobody asked. `askers` members will want to know.
    pub(crate) fn answer(
        &self,
        which: (u32, u64, u32),
        askers: u32,
        ask: impl FnOnce() -> Result<Rows, String>,
    ) -> Result<Arc<Rows>, String> {
        let _asking = self.asking.lock().unwrap_or_else(PoisonError::into_inner);
        let mut inner = self.lock();
        if let Some((rows, left)) = inner.answers.get_mut(&which) {
            let rows = Arc::clone(rows);
            *left -= 1;
            if *left == 0 {
                inner.answers.remove(&which);
            }
            return Ok(rows);
        }
        drop(inner);
        let rows = Arc::new(ask()?);
        if askers > 1 {
            self.lock().answers.insert(which, (Arc::clone(&rows), askers - 1));
        }
        Ok(rows)
    }
}

impl Inner {
    fn take_turn(&mut self, rank: u32) -> bool {
        let may_run = self.at_once == 0 || self.running.contains(&rank) || self.running.len() < self.at_once;
        if may_run {
            self.running.insert(rank);
            self.seen.insert(rank);
        }
        may_run
    }

    fn rank_of(&self, contribution: &Contribution) -> Option<u32> {
        self.meetings.get(contribution.exchange as usize)?.members.get(contribution.from as usize).copied()
    }

    /// How many of these are there before the first that is not.
    fn num_there(&self, contributions: &[Contribution]) -> usize {
        contributions.iter().take_while(|one| self.contributions.contains_key(&key_of(one))).count()
    }

    fn first_missing(&self, contributions: &[Contribution]) -> Option<Contribution> {
        contributions.get(self.num_there(contributions)).copied()
    }

    /// The rank that will never contribute this, if that is certain.
    fn gone(&self, missing: &Contribution) -> Option<u32> {
        let rank = self.rank_of(missing)?;
        let has_left = self.meetings[missing.exchange as usize].left.contains(&missing.from);
        (has_left || self.ended.contains(&rank)).then_some(rank)
    }

    fn take(&mut self, contribution: &Contribution) {
        let key = key_of(contribution);
        let Some(left) = self.contributions.get_mut(&key) else { return };
        *left -= 1;
        if *left > 0 {
            return;
        }
        self.contributions.remove(&key);
        let Some(directory) = &self.directory else { return };
        // A file that cannot be removed goes with the directory.
        let _ = std::fs::remove_file(directory.join(contribution.file_name()));
        let (exchange, number, _) = key;
        let is_last = self.contributions.range((exchange, number, 0)..=(exchange, number, u32::MAX)).next().is_none();
        if is_last && !contribution.is_message() {
            let _ = std::fs::remove_file(directory.join(Contribution::result_name(exchange, number)));
        }
    }

    /// Who waits for whom, if nobody can ever go on.
    fn deadlock(&self) -> Option<String> {
        let is_quiet = self.last_change.is_some_and(|last| last.elapsed() > PATIENCE);
        let is_stuck = |rank: &u32| {
            let waits = self.parked.get(rank);
            self.ended.contains(rank) || waits.is_some_and(|waits| self.first_missing(waits).is_some())
        };
        if !is_quiet || !self.live.iter().all(is_stuck) {
            return None;
        }
        let waiting = self.parked.iter().filter_map(|(rank, waits)| {
            let missing = self.first_missing(waits)?;
            let peer = self.rank_of(&missing)?;
            let what =
                if missing.is_message() { "a message".to_owned() } else { format!("collective {}", missing.number) };
            Some(format!("rank {rank} waits in {what} of communicator {} for rank {peer}", missing.exchange))
        });
        let lines: Vec<String> = waiting.take(SHOWN).collect();
        let more = self.parked.len().saturating_sub(lines.len());
        let more = if more > 0 { format!("\n  and {more} more") } else { String::new() };
        Some(format!("deadlock: every running rank waits for another\n  {}{more}", lines.join("\n  ")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(exchange: u32, number: u64, from: u32, readers: u32) -> Contribution {
        Contribution { exchange, from, number, readers }
    }

    #[test]
    fn members_agree_on_the_number_of_a_communicator() {
        let exchange = Exchange::new(&[3, 9]);
        assert_eq!(exchange.communicator(3, &[9, 4, 3]), (0, vec![0, 2]));
        assert_eq!(exchange.communicator(3, &[9, 4, 3]), (1, vec![0, 2]));
        assert_eq!(exchange.communicator(9, &[9, 4, 3]), (0, vec![0, 2]));
        assert_eq!(exchange.communicator(9, &[3, 4, 9]), (2, vec![0, 2]), "another order is another communicator");
    }

    #[test]
    fn a_rank_goes_on_when_all_is_there_and_there_is_a_turn() {
        let exchange = Exchange::new(&[0, 1, 2]);
        exchange.set_at_once(1);
        let (number, _) = exchange.communicator(0, &[0, 1, 2]);
        assert!(exchange.take_turn(0) && exchange.take_turn(0) && !exchange.take_turn(1));
        exchange.contribute(0, true, &[of(number, 0, 0, 1)]).unwrap();
        assert_eq!(exchange.wait(0, &[of(number, 0, 1, 0)]), Waited::NotYet);
        assert!(exchange.take_turn(1));
        exchange.contribute(1, false, &[of(number, 0, 1, 1)]).unwrap();
        assert_eq!(exchange.wait(0, &[of(number, 0, 1, 0)]), Waited::NotYet, "rank 1 has the turn");
        exchange.end(1);
        assert_eq!(exchange.wait(0, &[of(number, 0, 1, 0)]), Waited::Ready);
        exchange.taken(&[of(number, 0, 1, 0)]);
        assert_eq!(exchange.wait(0, &[of(number, 0, 1, 0)]), Waited::Gone(1), "read by all its readers, and gone");
    }

    #[test]
    fn nobody_contributes_for_another() {
        let exchange = Exchange::new(&[0, 1]);
        let (number, _) = exchange.communicator(0, &[0, 1]);
        assert!(exchange.contribute(0, false, &[of(number, 0, 1, 1)]).is_err());
        assert!(exchange.contribute(0, false, &[of(7, 0, 0, 1)]).is_err());
    }

    #[test]
    fn who_leaves_is_not_waited_for() {
        let exchange = Exchange::new(&[0, 1]);
        let (number, _) = exchange.communicator(0, &[0, 1]);
        exchange.leave(1, number);
        assert_eq!(exchange.wait(0, &[of(number, 0, 1, 0)]), Waited::Gone(1));
    }
}
