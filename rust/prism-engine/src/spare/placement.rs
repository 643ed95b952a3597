//! Which group holds the data of which shard types.

use super::{SpareError, check_groups, check_redundancy, ruler};
use crate::perturb::random::Random;
use std::collections::BTreeSet;

/// How the types of `n` groups are spread over them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Group `g` holds types `g + a` for the marks `a` of an optimal Golomb ruler: two groups share at most one type.
    Golomb,
    /// Group `g` holds types `g .. g + r`.
    Contiguous,
    /// Blocks of `r` groups hold the same `r` types (replication); the last block may be smaller.
    Disjoint,
    /// Group `g` holds types `g + a` for `r` distinct random offsets, the first of them 0.
    Random {
        /// Seed of the draw.
        seed: u64,
    },
    /// Group `g` holds types `g + a` for these offsets.
    Offsets(Vec<u32>),
}

impl Placement {
    /// The placement of this name: `golomb`, `contiguous`, `disjoint` or `random`.
    pub fn named(name: &str, seed: u64) -> Result<Self, SpareError> {
        match name {
            "golomb" => Ok(Self::Golomb),
            "contiguous" | "contig" => Ok(Self::Contiguous),
            "disjoint" => Ok(Self::Disjoint),
            "random" => Ok(Self::Random { seed }),
            other => Err(SpareError::invalid(
                "placement",
                format!("{other:?}"),
                "it must be golomb, contiguous, disjoint, random, or a list of offsets",
            )),
        }
    }

    /// The offsets of a cyclic placement. [`Self::Disjoint`] has none.
    pub fn offsets(&self, n: u32, r: u32) -> Result<Vec<u32>, SpareError> {
        check_redundancy(n, r)?;
        match self {
            Self::Golomb => {
                let marks = ruler::optimal(r).filter(|_| ruler::fits(n, r)).ok_or_else(|| {
                    let limit = ruler::max_order(n);
                    SpareError::invalid("r", r, format!("a Golomb placement of {n} groups allows at most {limit}"))
                })?;
                Ok(marks.to_vec())
            }
            Self::Contiguous => Ok((0..r).collect()),
            Self::Disjoint => Err(SpareError::invalid("placement", "\"disjoint\"", "it has blocks instead of offsets")),
            Self::Random { seed } => Ok(random_offsets(n, r, *seed)),
            Self::Offsets(offsets) => {
                check_offsets(n, offsets)?;
                if offsets.len() == r as usize {
                    return Ok(offsets.clone());
                }
                Err(SpareError::invalid("offsets", format!("{} offsets", offsets.len()), format!("r is {r}")))
            }
        }
    }

    /// Who holds what.
    pub fn stacks(&self, n: u32, r: u32) -> Result<Stacks, SpareError> {
        check_redundancy(n, r)?;
        match self {
            Self::Disjoint => Ok(Stacks::disjoint(n, r)),
            _ => Ok(Stacks::cyclic(n, &self.offsets(n, r)?)),
        }
    }
}

/// Refuses offsets that are not distinct and below `n`, or none.
pub(crate) fn check_offsets(n: u32, offsets: &[u32]) -> Result<(), SpareError> {
    check_groups(n)?;
    if offsets.is_empty() {
        return Err(SpareError::invalid("offsets", "[]", "there must be at least one"));
    }
    if let Some(offset) = offsets.iter().find(|offset| **offset >= n) {
        return Err(SpareError::invalid("offsets", offset, format!("an offset must be below the {n} groups")));
    }
    let distinct: BTreeSet<u32> = offsets.iter().copied().collect();
    if distinct.len() < offsets.len() {
        return Err(SpareError::invalid("offsets", format!("{offsets:?}"), "they must be distinct"));
    }
    Ok(())
}

fn random_offsets(n: u32, r: u32, seed: u64) -> Vec<u32> {
    let mut random = Random::of(seed, &[u64::from(n), u64::from(r)]);
    let mut offsets = BTreeSet::from([0]);
    while offsets.len() < r as usize {
        offsets.insert(random.below(n as usize) as u32);
    }
    offsets.into_iter().collect()
}

/// Stacks of all groups before anything failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stacks {
    /// Types of each group in the order in which it computes them.
    pub of_group: Vec<Vec<u32>>,
    /// Groups that hold each type, ascending.
    pub hosts: Vec<Vec<u32>>,
}

impl Stacks {
    /// Group `g` holds types `(g + offset) mod n`.
    #[must_use]
    pub fn cyclic(n: u32, offsets: &[u32]) -> Self {
        let at = |from: u32, by: u32| ((u64::from(from) + u64::from(by)) % u64::from(n)) as u32;
        Self::from_groups((0..n).map(|group| offsets.iter().map(|offset| at(group, *offset)).collect()).collect())
    }

    fn disjoint(n: u32, r: u32) -> Self {
        let stack = |group: u32| {
            let (first, size) = (group / r * r, r.min(n - group / r * r));
            (0..size).map(|by| first + (group - first + by) % size).collect()
        };
        Self::from_groups((0..n).map(stack).collect())
    }

    fn from_groups(of_group: Vec<Vec<u32>>) -> Self {
        let mut hosts = vec![Vec::new(); of_group.len()];
        for (group, stack) in (0..).zip(&of_group) {
            for shard in stack {
                hosts[*shard as usize].push(group);
            }
        }
        Self { of_group, hosts }
    }

    /// Number of groups and of types.
    #[must_use]
    pub fn len(&self) -> u32 {
        self.of_group.len() as u32
    }

    /// Is there no group? (There always is.)
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.of_group.is_empty()
    }
}

/// A placement that keeps the copies of every type in different failure domains (racks, power feeds, switches).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpreadPlacement {
    /// Offsets on the circle of positions.
    pub offsets: Vec<u32>,
    /// Group at each position of the circle: neighbours are in different domains.
    pub order: Vec<u32>,
    /// Types of which two hosts share a domain. 0 unless domains are too few or of very different size.
    pub shared: u32,
    /// Most hosts of one type in one domain.
    pub most_in_domain: u32,
}

/// Places `r` copies of every type on groups of the given failure domains (`domains[g]`).
///
/// Groups are put on the circle round robin over the domains, largest first, so that positions whose distance is no multiple
/// of the number of domains are in different ones; then the shortest offsets are taken, one by one, whose distances to the
/// earlier ones are new (as on a Golomb ruler) and no such multiple. Where that leaves nothing, distances may repeat, and
/// only then may domains.
pub fn spread(domains: &[u32], r: u32) -> Result<SpreadPlacement, SpareError> {
    let n = u32::try_from(domains.len()).unwrap_or(u32::MAX);
    check_redundancy(n, r)?;
    let order = round_robin(domains);
    let num_domains = domains.iter().collect::<BTreeSet<_>>().len() as u32;
    let mut offsets = vec![0];
    let mut distances = BTreeSet::new();
    while offsets.len() < r as usize {
        let next = next_offset(n, num_domains, &offsets, &distances);
        for offset in &offsets {
            distances.extend([next - offset, n - (next - offset)]);
        }
        offsets.push(next);
    }
    let mut placement = SpreadPlacement { offsets, order, shared: 0, most_in_domain: 0 };
    for shard in 0..n {
        let most = most_in_one_domain(domains, &placement, shard);
        placement.shared += u32::from(most > 1);
        placement.most_in_domain = placement.most_in_domain.max(most);
    }
    Ok(placement)
}

/// The best next offset: as few as possible of the rules broken, then the shortest.
fn next_offset(n: u32, num_domains: u32, offsets: &[u32], distances: &BTreeSet<u32>) -> u32 {
    let broken = |offset: u32| {
        let apart = |other: &u32| offset - other;
        let same_domain =
            offsets.iter().map(apart).any(|by| by.is_multiple_of(num_domains) || (n - by).is_multiple_of(num_domains));
        let is_old = offsets.iter().map(apart).any(|by| distances.contains(&by) || by * 2 == n);
        (same_domain, is_old, offset)
    };
    let last = offsets[offsets.len() - 1];
    (last + 1..n).map(broken).min().map_or(last + 1, |(_, _, offset)| offset)
}

fn round_robin(domains: &[u32]) -> Vec<u32> {
    let mut by_domain: std::collections::BTreeMap<u32, Vec<u32>> = std::collections::BTreeMap::new();
    for (group, domain) in (0..).zip(domains) {
        by_domain.entry(*domain).or_default().push(group);
    }
    let mut lists: Vec<Vec<u32>> = by_domain.into_values().collect();
    lists.sort_by_key(|groups| std::cmp::Reverse(groups.len()));
    let longest = lists.first().map_or(0, Vec::len);
    (0..longest).flat_map(|at| lists.iter().filter_map(move |groups| groups.get(at).copied())).collect()
}

fn most_in_one_domain(domains: &[u32], placement: &SpreadPlacement, shard: u32) -> u32 {
    let n = domains.len() as u32;
    let mut hosts: Vec<u32> = placement
        .offsets
        .iter()
        .map(|offset| domains[placement.order[((shard + n - offset) % n) as usize] as usize])
        .collect();
    hosts.sort_unstable();
    hosts.chunk_by(|a, b| a == b).map(<[u32]>::len).max().unwrap_or(0) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn placements_hold_every_type_r_times() {
        for placement in [Placement::Golomb, Placement::Contiguous, Placement::Disjoint, Placement::Random { seed: 3 }]
        {
            let stacks = placement.stacks(24, 4).unwrap();
            assert!(stacks.hosts.iter().all(|hosts| hosts.len() == 4), "{placement:?}");
            assert!(stacks.of_group.iter().enumerate().all(|(group, stack)| stack[0] == group as u32), "{placement:?}");
        }
        let golomb = Placement::Golomb.stacks(24, 4).unwrap();
        for (group, stack) in golomb.of_group.iter().enumerate() {
            for other in &golomb.of_group[..group] {
                assert!(stack.iter().filter(|shard| other.contains(shard)).count() <= 1);
            }
        }
    }

    #[test]
    fn a_last_block_may_be_short() {
        let stacks = Placement::Disjoint.stacks(7, 3).unwrap();
        assert_eq!(stacks.of_group[5], [5, 3, 4]);
        assert_eq!(stacks.of_group[6], [6]);
        assert_eq!(stacks.hosts[6], [6]);
    }

    #[test]
    fn copies_are_kept_in_different_racks() {
        let racks: Vec<u32> = (0..96).map(|group| group / 8).collect();
        let spread = spread(&racks, 6).unwrap();
        assert_eq!((spread.shared, spread.most_in_domain), (0, 1));
        // Two racks cannot take three copies each alone.
        let feeds: Vec<u32> = (0..96).map(|group| group / 48).collect();
        let spread = super::spread(&feeds, 3).unwrap();
        assert_eq!((spread.shared, spread.most_in_domain), (96, 3.min(spread.most_in_domain)));
    }

    #[test]
    fn what_does_not_fit_is_refused_by_name() {
        let error = |result: Result<Stacks, SpareError>| result.unwrap_err().to_string();
        assert_eq!(
            error(Placement::Golomb.stacks(200, 13)),
            "r is 13: a Golomb placement of 200 groups allows at most 12"
        );
        assert_eq!(error(Placement::Golomb.stacks(1, 1)), "n is 1: there must be 2 to 1048576 groups");
        assert!(error(Placement::Contiguous.stacks(4, 5)).starts_with("r is 5"));
        assert!(error(Placement::Offsets(vec![0, 9]).stacks(4, 2)).contains("below the 4 groups"));
        assert!(error(Placement::Offsets(vec![0, 0]).stacks(4, 2)).contains("distinct"));
        assert!(Placement::named("golom", 0).unwrap_err().to_string().contains("golomb, contiguous"));
    }
}
