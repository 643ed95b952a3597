//! When does what fail? Renewal processes in absolute time, or an observed trace: the same for every policy.

use crate::perturb::random::Random;
use crate::spare::{SpareError, not_negative, positive};
use libm::{log, pow, tgamma};
use serde::Deserialize;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Distribution of the time between failures of one thing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Distribution {
    /// Without memory.
    #[default]
    Exponential,
    /// Weibull; a shape below 1 means that what has just been repaired fails soonest.
    Weibull {
        /// The shape.
        shape: f64,
    },
}

impl Distribution {
    /// A time of mean 1.
    fn draw(self, random: &mut Random) -> f64 {
        let exponential = -log(random.uniform());
        match self {
            Self::Exponential => exponential,
            Self::Weibull { shape } => pow(exponential, 1.0 / shape) / tgamma(1.0 + 1.0 / shape),
        }
    }
}

/// Groups that fail together, neighbours in number: a rack, a switch, a power feed.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Domain {
    /// Groups of each.
    pub groups: u32,
    /// Mean time between failures of one of them, seconds (exponential).
    pub mtbf_s: f64,
}

/// One failure that was observed.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TracedFailure {
    /// When, seconds from the start.
    pub time_s: f64,
    /// Which group.
    pub group: u32,
}

/// Failures that were observed, in the order of time.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Trace {
    /// The failures; those of one time strike together.
    pub failures: Vec<TracedFailure>,
    /// End of the observation, seconds.
    pub until_s: f64,
}

/// Most failures of a trace.
pub const MAX_TRACE: usize = 1 << 22;

impl Trace {
    fn check(&self, groups: u32) -> Result<(), SpareError> {
        positive("trace.until_s", self.until_s)?;
        if self.failures.len() > MAX_TRACE {
            let expected = format!("at most {MAX_TRACE} failures are read");
            return Err(SpareError::invalid("trace", self.failures.len(), expected));
        }
        let mut before = 0.0;
        for (number, failure) in self.failures.iter().enumerate() {
            let time = not_negative("trace", failure.time_s)?;
            if time < before {
                let expected = format!("failure {number} (from 0) must not be before the one it follows, at {before}");
                return Err(SpareError::invalid("trace", time, expected));
            }
            if time > self.until_s {
                let expected =
                    format!("failure {number} (from 0) is after the end of the observation, {}", self.until_s);
                return Err(SpareError::invalid("trace", time, expected));
            }
            if failure.group >= groups {
                let expected = format!("failure {number} (from 0): the groups are 0 to {}", groups - 1);
                return Err(SpareError::invalid("trace", failure.group, expected));
            }
            before = time;
        }
        Ok(())
    }
}

/// What fails, and how often.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Failures {
    /// Mean time between failures of one group, seconds.
    pub group_mtbf_s: f64,
    /// Distribution of the time between failures of a group.
    pub distribution: Distribution,
    /// What fails on top, several groups at once.
    #[serde(default)]
    pub domains: Vec<Domain>,
    /// Observed failures, in place of all drawn ones: `group_mtbf_s` is then only what the closed forms know.
    #[serde(default)]
    pub trace: Option<Trace>,
}

/// Most kinds of failure domains.
const MAX_DOMAINS: usize = 16;

impl Failures {
    pub(super) fn check(&self, groups: u32) -> Result<(), SpareError> {
        positive("group_mtbf_s", self.group_mtbf_s)?;
        if let Distribution::Weibull { shape } = self.distribution
            && !(0.2..=10.0).contains(&shape)
        {
            return Err(SpareError::invalid("shape", shape, "it must be between 0.2 and 10"));
        }
        if self.domains.len() > MAX_DOMAINS {
            let expected = format!("there are at most {MAX_DOMAINS} kinds of failure domains");
            return Err(SpareError::invalid("domains", self.domains.len(), expected));
        }
        for domain in &self.domains {
            if domain.groups == 0 || domain.groups > groups {
                let expected = format!("a failure domain has 1 to {groups} groups: all the job has");
                return Err(SpareError::invalid("domain_groups", domain.groups, expected));
            }
            positive("domain_mtbf_s", domain.mtbf_s)?;
        }
        self.trace.as_ref().map_or(Ok(()), |trace| trace.check(groups))
    }

    /// Mean time between failures of anything, seconds. A failing domain counts once.
    #[must_use]
    pub fn system_mtbf_s(&self, groups: u32) -> f64 {
        let single = f64::from(groups) / self.group_mtbf_s;
        let together = self.domains.iter().map(|domain| f64::from(groups.div_ceil(domain.groups)) / domain.mtbf_s);
        1.0 / together.fold(single, |rate, domain| rate + domain)
    }
}

/// Failures in order of time.
#[derive(Debug)]
pub(super) struct FailureStream<'a> {
    failures: &'a Failures,
    seed: u64,
    groups: u32,
    /// Next failure of everything that can fail: time (as bits, which order like the times), thing, how many it had.
    next: BinaryHeap<Reverse<(u64, u32, u32)>>,
    /// Things of each kind of domain: first number, groups of each.
    domains: Vec<(u32, Domain)>,
    /// How much of the trace is over.
    traced: usize,
}

impl<'a> FailureStream<'a> {
    /// Groups are the things from 0; domains follow them.
    pub(super) fn new(failures: &'a Failures, groups: u32, seed: u64) -> Self {
        let mut count = groups;
        let mut domains = Vec::new();
        for domain in &failures.domains {
            domains.push((count, *domain));
            count += groups.div_ceil(domain.groups);
        }
        let mut stream = Self { failures, seed, groups, next: BinaryHeap::new(), domains, traced: 0 };
        if failures.trace.is_none() {
            let first = (0..count).map(|thing| Reverse((stream.after(0.0, thing, 0), thing, 0)));
            stream.next = first.collect::<Vec<_>>().into();
        }
        stream
    }

    fn domain_of(&self, thing: u32) -> (u32, Domain) {
        let kind = self.domains.partition_point(|(first, _)| *first <= thing);
        self.domains[kind - 1]
    }

    fn after(&self, time: f64, thing: u32, count: u32) -> u64 {
        let mut random = Random::of(self.seed, &[u64::from(thing), u64::from(count)]);
        let lifetime = if thing < self.groups {
            self.failures.group_mtbf_s * self.failures.distribution.draw(&mut random)
        } else {
            self.domain_of(thing).1.mtbf_s * Distribution::Exponential.draw(&mut random)
        };
        (time + lifetime).to_bits()
    }

    /// Takes the next failure if it is not after `until`: its time and the groups it strikes.
    pub(super) fn pop(&mut self, until: f64) -> Option<(f64, std::ops::Range<u32>)> {
        if let Some(trace) = &self.failures.trace {
            let failure = trace.failures.get(self.traced).filter(|failure| failure.time_s <= until)?;
            self.traced += 1;
            return Some((failure.time_s, failure.group..failure.group + 1));
        }
        let Reverse((bits, thing, count)) = *self.next.peek()?;
        let time = f64::from_bits(bits);
        if time > until {
            return None;
        }
        let following = Reverse((self.after(time, thing, count + 1), thing, count + 1));
        *self.next.peek_mut()? = following;
        if thing < self.groups {
            return Some((time, thing..thing + 1));
        }
        let (first, domain) = self.domain_of(thing);
        let start = (thing - first) * domain.groups;
        Some((time, start..(start + domain.groups).min(self.groups)))
    }
}
