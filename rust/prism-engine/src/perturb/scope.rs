//! Whom and what a rule is about: ranks, a window of iterations or time, classes and names of compute ops.

use crate::graph::op::ComputeClass;
use crate::ids::{Rank, StreamId};
use crate::units::SimTime;
use std::ops::Range;

/// Ranks of the job, at least one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankSet {
    words: Vec<u64>,
}

impl RankSet {
    /// The given ranks.
    #[must_use]
    pub fn of(ranks: impl IntoIterator<Item = u32>) -> Self {
        let mut words = Vec::new();
        for rank in ranks {
            let word = rank as usize / 64;
            if words.len() <= word {
                words.resize(word + 1, 0);
            }
            words[word] |= 1 << (rank % 64);
        }
        Self { words }
    }

    /// Is the rank one of them?
    #[must_use]
    pub fn contains(&self, rank: Rank) -> bool {
        self.words.get(rank.index() / 64).is_some_and(|word| word & (1 << (rank.0 % 64)) != 0)
    }

    /// The ranks, ascending.
    pub fn iter(&self) -> impl Iterator<Item = Rank> + '_ {
        (0..self.words.len() as u32 * 64).map(Rank).filter(|rank| self.contains(*rank))
    }

    /// Is no rank in it?
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|word| *word == 0)
    }
}

/// When something happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct When {
    /// `IterationEnd`s the program has issued before.
    pub iteration: u32,
    /// Virtual time at which it starts.
    pub time: SimTime,
}

/// When a rule holds. What starts inside is changed as a whole, what starts outside is not changed at all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Window {
    /// Only in these iterations (0 is everything up to and with the first `IterationEnd`).
    pub iterations: Option<Range<u32>>,
    /// Only at these times.
    pub time: Option<Range<SimTime>>,
}

impl Window {
    /// Is it always open?
    #[must_use]
    pub fn is_always(&self) -> bool {
        self.iterations.is_none() && self.time.is_none()
    }

    /// Is it open then?
    #[must_use]
    pub fn contains(&self, when: When) -> bool {
        self.iterations.as_ref().is_none_or(|range| range.contains(&when.iteration))
            && self.time.as_ref().is_none_or(|range| range.contains(&when.time))
    }
}

/// A compute op that is about to start on a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ComputeSite {
    /// Whose.
    pub rank: Rank,
    /// On which of its streams.
    pub stream: StreamId,
    /// Class of work.
    pub class: ComputeClass,
    /// Iteration and start.
    pub when: When,
    /// Ops the program has issued since the last `IterationEnd`: with the iteration, it names the op whether the rank is
    /// virtual or live.
    pub place: u32,
}

/// Which compute ops of which ranks a rule is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scope {
    /// Whose.
    pub ranks: RankSet,
    /// When.
    pub window: Window,
    /// Only ops of these classes (none: all).
    pub classes: Vec<ComputeClass>,
    /// Only ops whose name fits one of these (none: all); `*` stands for any text.
    pub names: Vec<String>,
}

impl Scope {
    /// Everything the ranks compute.
    #[must_use]
    pub fn of(ranks: RankSet) -> Self {
        Self { ranks, window: Window::default(), classes: Vec::new(), names: Vec::new() }
    }

    /// Everything of the ranks, always?
    #[must_use]
    pub fn is_everything(&self) -> bool {
        self.window.is_always() && self.classes.is_empty() && self.names.is_empty()
    }

    /// Is it about this op? (Names are not looked at here.)
    #[must_use]
    pub fn covers(&self, site: &ComputeSite) -> bool {
        self.ranks.contains(site.rank)
            && (self.classes.is_empty() || self.classes.contains(&site.class))
            && self.window.contains(site.when)
    }
}

/// Does a text fit a pattern in which `*` stands for any text?
pub(super) fn fits(pattern: &str, text: &str) -> bool {
    let Some((start, rest)) = pattern.split_once('*') else { return pattern == text };
    let Some(mut text) = text.strip_prefix(start) else { return false };
    let mut parts: Vec<&str> = rest.split('*').collect();
    let end = parts.pop().unwrap_or_default();
    for part in parts {
        let Some(at) = text.find(part) else { return false };
        text = &text[at + part.len()..];
    }
    text.ends_with(end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns() {
        let yes =
            [("gemm", "gemm"), ("*", ""), ("*gemm*", "a_gemm_b"), ("a*b*c", "aXbYc"), ("a*b", "abb"), ("**", "x")];
        for (pattern, text) in yes {
            assert!(fits(pattern, text), "{pattern} {text}");
        }
        let no = [("gemm", "gemms"), ("*gemm", "gemms"), ("a*a", "a"), ("a*b*c", "acb"), ("", "x")];
        for (pattern, text) in no {
            assert!(!fits(pattern, text), "{pattern} {text}");
        }
    }

    #[test]
    fn windows_are_half_open() {
        let window = Window { iterations: Some(1..3), time: Some(SimTime(10)..SimTime(20)) };
        let at = |iteration, time| window.contains(When { iteration, time: SimTime(time) });
        assert!(at(1, 10) && at(2, 19));
        assert!(!at(0, 10) && !at(3, 10) && !at(1, 9) && !at(1, 20));
        assert!(Window::default().contains(When { iteration: u32::MAX, time: SimTime::MAX }));
    }

    #[test]
    fn rank_sets() {
        let set = RankSet::of([130, 0, 63]);
        assert_eq!(set.iter().collect::<Vec<_>>(), [0, 63, 130].map(Rank));
        assert!(!set.contains(Rank(64)) && !set.contains(Rank(100_000)) && !set.is_empty());
        assert!(RankSet::of([]).is_empty());
    }
}
