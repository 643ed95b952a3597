//! Programs that wait for the engine: what they are told, and what it means when nothing moves.

use super::process::{Pending, PendingKind, Process};
use super::state::{State, reply_to};
use crate::ids::Rank;
use crate::sim::{Answer, list};
use prism_wire::message::{Reply, ReplyStatus};

/// Why a simulation does not move.
enum Stillness {
    /// A live rank has not come, or is busy with itself.
    Moving,
    /// All programs wait, and some only ask whether something is complete. Nothing that is not known yet can happen before
    /// the earliest of their questions: that one is settled, and its program goes on.
    Polling(i64),
    /// Some programs wait; of the others, threads that do not drive the device ask, and may be what the program waits for.
    Watched,
    /// All programs wait for what will never come.
    Deadlock,
}

impl State {
    /// Runs the simulations as far as they go and answers; when every live rank of one waits, decides what waiting means.
    pub(crate) fn advance(&mut self) {
        self.unprocessed = 0;
        for sim in 0..self.sims.len() {
            if self.failure.is_none() {
                self.advance_sim(sim);
            }
        }
    }

    fn advance_sim(&mut self, sim: usize) {
        if let Err(error) = self.sims[sim].run() {
            self.fail(error.to_string());
            return;
        }
        if self.answer(sim) {
            return;
        }
        match self.stillness(sim) {
            Stillness::Moving => {}
            Stillness::Polling(until) => self.settle(sim, |pending| pending.host_ns <= until),
            Stillness::Watched => self.settle(sim, |pending| pending.is_background),
            Stillness::Deadlock => {
                let waiting: Vec<String> = self.sims[sim].blocked().iter().map(ToString::to_string).collect();
                let waiting = waiting.join("\n  ");
                let dead = self.dead_ranks(sim);
                if !dead.is_empty() {
                    self.fail(format!("deadlock: {dead} and nothing can move\n  {waiting}"));
                    return;
                }
                self.fail(format!("deadlock: every running rank waits and nothing can move\n  {waiting}"));
            }
        }
    }

    /// Answers open questions whether something is complete with no.
    fn settle(&mut self, sim: usize, which: impl Fn(&Pending) -> bool) {
        let processes = &self.processes;
        let is_meant = |rank: Rank, ticket: u64| {
            processes.get(&rank.0).and_then(|process| process.pending.get(&ticket)).is_some_and(&which)
        };
        self.sims[sim].settle_questions(is_meant);
        self.answer(sim);
    }

    /// What it means that the simulation of some live ranks has nothing to do.
    fn stillness(&self, sim: usize) -> Stillness {
        let running: Vec<&Process> =
            self.processes.values().filter(|process| process.sim == sim && !process.has_ended).collect();
        if running.is_empty() || running.iter().any(|process| process.pid.is_none() || !process.has_pending()) {
            return Stillness::Moving;
        }
        if running.iter().any(|process| process.driver_pending().next().is_none()) {
            return Stillness::Watched;
        }
        // The dead ask for ever.
        let alive = running.iter().filter(|process| !self.sims[sim].is_dead(Rank(process.rank)));
        let polls = alive.flat_map(|process| process.driver_pending());
        let polls = polls.filter(|pending| pending.question == PendingKind::Done);
        polls.map(|pending| pending.host_ns).min().map_or(Stillness::Deadlock, Stillness::Polling)
    }

    /// The ranks that have died, in words.
    fn dead_ranks(&self, sim: usize) -> String {
        let dead = (0..self.world_size).filter(|rank| self.sims[sim].is_dead(Rank(*rank)));
        let dead: Vec<u32> = dead.collect();
        match dead[..] {
            [] => String::new(),
            [only] => format!("rank {only} has died"),
            _ => format!("ranks {} have died", list(&dead)),
        }
    }

    fn answer(&mut self, sim: usize) -> bool {
        let answers = self.sims[sim].take_answers();
        let mut any = false;
        let mut wrong = None;
        for (rank, ticket, answer) in answers {
            let Some(process) = self.processes.get_mut(&rank.0) else { continue };
            if let (Some(foreseen), Answer::Resume(time)) = (process.foreseen.remove(&ticket), answer) {
                if time != foreseen {
                    wrong = Some((rank, foreseen.as_ps(), time.as_ps()));
                    break;
                }
                continue;
            }
            any = true;
            let Some(pending) = process.pending.remove(&ticket) else { continue };
            let (value, host_ns) = match answer {
                // A background thread waits in its own time.
                Answer::Resume(time) if pending.is_background => (0, time.as_ns().max(pending.host_ns)),
                Answer::Resume(time) => {
                    let resumed = time.as_ns().max(pending.host_ns);
                    // Calls other threads made while this one waited come after its return.
                    let since = process.last_host_ns.saturating_sub(pending.host_ns).max(0);
                    process.last_host_ns = resumed.saturating_add(since);
                    (resumed.saturating_mul(1000).saturating_sub(time.as_ps()), resumed)
                }
                Answer::Done(is_done) => (i64::from(is_done), pending.host_ns),
                Answer::Elapsed(time) => (time.as_ns(), pending.host_ns),
            };
            reply_to(
                process,
                pending.reply_slot,
                Reply { status: ReplyStatus::Ok as u32, reserved: 0, value, host_ns },
            );
        }
        if let Some((rank, foreseen, time)) = wrong {
            self.fail(format!(
                "rank {rank}: a synchronisation was foreseen to end at {foreseen} ps and ends at {time} ps: an error of the \
                 emulated device, please report it (PRISM_FORESIGHT=0 does without)"
            ));
        }
        any
    }
}
