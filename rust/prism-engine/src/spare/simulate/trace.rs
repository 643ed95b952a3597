//! When does what fail? Renewal processes in absolute time, the same for every policy.

use crate::perturb::random::Random;
use crate::spare::{SpareError, positive};
use libm::{log, pow, tgamma};
use serde::Deserialize;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Distribution of the time between failures of one thing.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Distribution {
    /// Without memory.
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

/// What fails, and how often.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Failures {
    /// Mean time between failures of one group, seconds.
    pub group_mtbf_s: f64,
    /// Distribution of the time between failures of a group.
    pub distribution: Distribution,
    /// Groups that fail together (rack, switch, power feed): neighbours in number. 0: none do.
    pub domain_groups: u32,
    /// Mean time between failures of one domain, seconds (exponential).
    pub domain_mtbf_s: f64,
}

impl Failures {
    pub(super) fn check(&self, groups: u32) -> Result<(), SpareError> {
        positive("group_mtbf_s", self.group_mtbf_s)?;
        if let Distribution::Weibull { shape } = self.distribution
            && !(0.2..=10.0).contains(&shape)
        {
            return Err(SpareError::invalid("shape", shape, "it must be between 0.2 and 10"));
        }
        if self.domain_groups > groups {
            let expected = format!("a failure domain has at most the job's {groups} groups");
            return Err(SpareError::invalid("domain_groups", self.domain_groups, expected));
        }
        if self.domain_groups > 0 {
            positive("domain_mtbf_s", self.domain_mtbf_s)?;
        }
        Ok(())
    }
}

/// Failures in order of time.
#[derive(Debug)]
pub(super) struct Trace<'a> {
    failures: &'a Failures,
    seed: u64,
    groups: u32,
    /// Next failure of everything that can fail: time (as bits, which order like the times), thing, how many it had.
    next: BinaryHeap<Reverse<(u64, u32, u32)>>,
}

impl<'a> Trace<'a> {
    /// Groups are the things from 0; domains follow them.
    pub(super) fn new(failures: &'a Failures, groups: u32, seed: u64) -> Self {
        let domains = if failures.domain_groups == 0 { 0 } else { groups.div_ceil(failures.domain_groups) };
        let mut trace = Self { failures, seed, groups, next: BinaryHeap::new() };
        let first: Vec<_> =
            (0..groups + domains).map(|thing| Reverse((trace.after(0.0, thing, 0), thing, 0))).collect();
        trace.next = BinaryHeap::from(first);
        trace
    }

    fn after(&self, time: f64, thing: u32, count: u32) -> u64 {
        let mut random = Random::of(self.seed, &[u64::from(thing), u64::from(count)]);
        let lifetime = if thing < self.groups {
            self.failures.group_mtbf_s * self.failures.distribution.draw(&mut random)
        } else {
            self.failures.domain_mtbf_s * Distribution::Exponential.draw(&mut random)
        };
        (time + lifetime).to_bits()
    }

    /// Takes the next failure if it is not after `until`: its time and the groups it strikes.
    pub(super) fn pop(&mut self, until: f64) -> Option<(f64, std::ops::Range<u32>)> {
        let Reverse((bits, thing, count)) = *self.next.peek()?;
        let time = f64::from_bits(bits);
        if time > until {
            return None;
        }
        let following = Reverse((self.after(time, thing, count + 1), thing, count + 1));
        *self.next.peek_mut()? = following;
        let struck = match thing.checked_sub(self.groups) {
            None => thing..thing + 1,
            Some(domain) => {
                let first = domain * self.failures.domain_groups;
                first..(first + self.failures.domain_groups).min(self.groups)
            }
        };
        Some((time, struck))
    }
}
