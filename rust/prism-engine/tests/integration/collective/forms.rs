//! The closed forms equal the message-by-message evaluation, to the picosecond, on random cases.

use super::reference::{self, TreeCase};
use prism_engine::collective::credits::{self, CreditLinks};
use prism_engine::collective::{chain, ring, tree};
use proptest::prelude::*;
use proptest::strategy::Union;

/// Arrivals from "all together" to "far apart", in picoseconds.
pub(crate) fn arrivals(n: usize) -> impl Strategy<Value = Vec<i64>> {
    let spread = prop_oneof![Just(1i64), Just(5_000), Just(200_000), Just(20_000_000)];
    (spread, 0i64..1_000_000)
        .prop_flat_map(move |(spread, base)| prop::collection::vec((0..spread).prop_map(move |a| a + base), n))
}

/// Costs of `n` links: all alike, one in four different (two kinds of link), or each its own.
pub(crate) fn costs(n: usize) -> impl Strategy<Value = Vec<i64>> {
    let alike = (0i64..5_000).prop_map(move |cost| vec![cost; n]);
    let two_kinds = (0i64..3_000, 0i64..9_000, 1usize..5).prop_map(move |(near, far, period)| {
        (0..n).map(|p| if p % period == period - 1 { far } else { near }).collect()
    });
    let random = prop::collection::vec(0i64..5_000, n);
    Union::new([alike.boxed(), two_kinds.boxed(), random.boxed()])
}

#[derive(Debug)]
struct RingCase {
    messages: Vec<i64>,
    occupancy: Vec<Vec<i64>>,
    latency: Vec<i64>,
    slices: usize,
    arrivals: Vec<i64>,
}

fn ring_case() -> impl Strategy<Value = RingCase> {
    (2usize..34, 1usize..=4, 1usize..=3).prop_flat_map(|(n, slices, phases)| {
        let messages = prop_oneof![0i64..6, 1i64..(3 * n as i64), 1i64..(9 * n as i64)];
        (
            prop::collection::vec(messages, phases),
            prop::collection::vec(costs(n), phases),
            costs(n),
            Just(slices),
            arrivals(n),
        )
            .prop_map(|(messages, occupancy, latency, slices, arrivals)| RingCase {
                messages,
                occupancy,
                latency,
                slices,
                arrivals,
            })
    })
}

fn fast_ring(case: &RingCase) -> Vec<i64> {
    let phases: Vec<_> = case
        .messages
        .iter()
        .zip(&case.occupancy)
        .map(|(&messages, occupancy)| ring::Phase { messages, occupancy })
        .collect();
    let ring = ring::Ring { phases: &phases, latency: &case.latency, slices: case.slices as i64 };
    let mut out = vec![0; case.arrivals.len()];
    ring::completion(&ring, &case.arrivals, &mut out, &mut ring::RingScratch::default());
    out
}

pub(crate) fn tree_case() -> impl Strategy<Value = (TreeCase, Vec<i64>)> {
    (1usize..30, 1usize..9).prop_flat_map(|(n, chunks)| {
        // The parent of rank `r` is a random rank below it; a random rotation then moves the root about.
        let parents: Vec<_> = (0..n).map(|rank| 0..rank.max(1)).collect();
        (parents, 0..n, [costs(n), costs(n), costs(n), costs(n)], arrivals(n)).prop_map(
            move |(parents, turn, [uo, ul, down_o, dl], arrivals)| {
                let mut parent = vec![None; n];
                for rank in 1..n {
                    parent[(rank + turn) % n] = Some((parents[rank] + turn) % n);
                }
                let up = uo.into_iter().zip(ul).collect();
                let down = down_o.into_iter().zip(dl).collect();
                (TreeCase { parent, up, down, chunks }, arrivals)
            },
        )
    })
}

/// A case as the fast forms take it.
pub(super) fn with_tree(case: &TreeCase, run: impl FnOnce(&tree::Tree<'_>, &mut [i64])) -> Vec<i64> {
    let parent: Vec<_> = case.parent.iter().map(|up| up.map_or(u32::MAX, |up| up as u32)).collect();
    let depth = |rank: u32| std::iter::successors(Some(rank as usize), |at| case.parent[*at]).count();
    let mut order: Vec<_> = (0..parent.len() as u32).collect();
    order.sort_by_key(|rank| depth(*rank));
    let split = |costs: &[(i64, i64)]| costs.iter().copied().unzip::<i64, i64, Vec<_>, Vec<_>>();
    let ((uo, ul), (down_o, dl)) = (split(&case.up), split(&case.down));
    let tree = tree::Tree {
        parent: &parent,
        order: &order,
        up: tree::Edges { occupancy: &uo, latency: &ul },
        down: tree::Edges { occupancy: &down_o, latency: &dl },
        chunks: case.chunks as i64,
    };
    let mut out = vec![i64::MIN; parent.len()];
    run(&tree, &mut out);
    out
}

fn fast_tree(case: &TreeCase, arrivals: &[i64]) -> Vec<i64> {
    with_tree(case, |tree, out| tree::raise_completion(tree, arrivals, out, &mut tree::TreeScratch::default()))
}

/// Links inside the conditions of the closed forms with credits.
fn credit_links() -> impl Strategy<Value = CreditLinks> {
    let shapes = prop::sample::select(&[(2i64, 4i64), (1, 8), (2, 8), (1, 6), (4, 8)][..]);
    (shapes, 1i64..200, 100i64..4_000, 0i64..=100, 0i64..=100).prop_map(
        |((slices, slots), messages, occupancy, a, b)| {
            let credit_latency = (slots - slices) * occupancy * a / 100;
            let credit_latency = credit_latency.min((slots - 1) * occupancy);
            let latency = ((slots - 1) * occupancy - credit_latency) * b / 100;
            CreditLinks { messages, slices, occupancy, latency, slots, credit_latency }
        },
    )
}

#[test]
fn credits_outside_the_conditions_are_refused() {
    let links = CreditLinks { messages: 9, slices: 2, occupancy: 100, latency: 300, slots: 4, credit_latency: 1 };
    assert_eq!(credits::ring_completion(&links, &[0, 0, 0]), None);
    assert_eq!(credits::chain_completion(&links, &[0, 0, 0]), None);
    assert!(credits::chain_completion(&CreditLinks { latency: 299, ..links }, &[0, 0, 0]).is_some());
    assert_eq!(credits::ring_completion(&CreditLinks { latency: 0, credit_latency: 201, ..links }, &[0, 0, 0]), None);
}

impl std::fmt::Debug for TreeCase {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "parent {:?} up {:?} down {:?} chunks {}", self.parent, self.up, self.down, self.chunks)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn ring_equals_every_message(case in ring_case()) {
        let slow = reference::ring(&case.messages, &case.occupancy, &case.latency, case.slices, &case.arrivals);
        prop_assert_eq!(fast_ring(&case), slow);
    }

    #[test]
    fn ring_of_equal_links_equals_every_message(
        (arrivals, messages, slices, occupancy, latency) in (2usize..34).prop_flat_map(|n| {
            (arrivals(n), 1i64..(9 * n as i64), 1i64..5, 0i64..5_000, 0i64..9_000)
        })
    ) {
        let n = arrivals.len();
        let case = RingCase {
            messages: vec![messages],
            occupancy: vec![vec![occupancy; n]],
            latency: vec![latency; n],
            slices: slices as usize,
            arrivals,
        };
        let slow = reference::ring(&case.messages, &case.occupancy, &case.latency, case.slices, &case.arrivals);
        let Some(ring) = ring::Uniform::new(n, messages, slices, occupancy, latency) else {
            prop_assert!((messages - 1) / slices < n as i64 - 1);
            return Ok(());
        };
        let mut ends = Vec::new();
        ring.completion(&case.arrivals, &mut ends);
        prop_assert_eq!(ends, slow);
    }

    #[test]
    fn tree_equals_every_chunk((case, arrivals) in tree_case()) {
        prop_assert_eq!(fast_tree(&case, &arrivals), case.completion(&arrivals));
    }

    #[test]
    fn chain_equals_every_chunk(
        (occupancy, latency, arrivals, chunks) in
            (1usize..30).prop_flat_map(|n| (costs(n), costs(n), arrivals(n), 1usize..12))
    ) {
        let chain = chain::Chain { chunks: chunks as i64, occupancy: &occupancy, latency: &latency };
        let mut out = vec![0; arrivals.len()];
        chain::completion(&chain, &arrivals, &mut out, &mut Vec::new());
        prop_assert_eq!(out, reference::chain(chunks, &occupancy, &latency, &arrivals));
    }

    #[test]
    fn rings_and_chains_with_credits_equal_every_message(
        (links, arrivals) in (2usize..30).prop_flat_map(|n| (credit_links(), arrivals(n)))
    ) {
        let ring = credits::ring_completion(&links, &arrivals);
        prop_assert_eq!(ring, Some(reference::ring_with_credits(&links, &arrivals)));
        let chain = credits::chain_completion(&links, &arrivals);
        prop_assert_eq!(chain, Some(reference::chain_with_credits(&links, &arrivals)));
    }

    #[test]
    fn all_to_all_waits_for_everybody_and_runs_every_round(
        (cost, arrivals) in (2usize..40).prop_flat_map(|n| (0i64..5_000, arrivals(n)))
    ) {
        let end = arrivals.iter().max().expect("at least two ranks") + (arrivals.len() as i64 - 1) * cost;
        prop_assert!(reference::all_to_all(cost, &arrivals).into_iter().all(|rank_end| rank_end == end));
    }

    #[test]
    fn latest_rank_of_a_uniform_ring_waits_for_nobody_but_the_latest(
        (n, slices, messages, occupancy, latency, arrivals) in (2usize..40).prop_flat_map(|n| {
            (Just(n), 1usize..5, 1i64..200, 1i64..5_000, 0i64..9_000, arrivals(n))
        })
    ) {
        let case = |arrivals: Vec<i64>| RingCase {
            messages: vec![messages],
            occupancy: vec![vec![occupancy; n]],
            latency: vec![latency; n],
            slices,
            arrivals,
        };
        let together = fast_ring(&case(vec![0; n]));
        prop_assert!(together.iter().all(|end| *end == together[0]));
        let last = *arrivals.iter().max().expect("at least two ranks");
        prop_assert_eq!(fast_ring(&case(arrivals)).into_iter().max(), Some(last + together[0]));
    }
}
