//! Which collectives of a group run as one, and what that is worth.

use prism_engine::collective::fusion::{Groupable, fuse};
use prism_engine::collective::{CollectiveCall, CollectiveKind, CommShape, uniform_cost};
use prism_engine::profile::Profile;
use proptest::prelude::*;

fn call(kind: CollectiveKind, key: u32, bytes: u64) -> Groupable<u32> {
    Groupable { kind, key, bytes }
}

#[test]
fn like_calls_within_four_times_the_smallest_run_as_one() {
    use CollectiveKind::{AllGather, AllReduce, AllToAll};
    let calls = [
        call(AllToAll, 0, 1 << 20),
        call(AllReduce, 0, 399),
        call(AllReduce, 0, 100),
        call(AllGather, 0, 1_000),
        call(AllReduce, 1, 100),
        call(AllReduce, 0, 400),
        call(AllToAll, 0, 1 << 20),
        call(AllReduce, 0, 5_000),
    ];
    // The all-reduces of key 0 come first, having the largest call: 100 and 399 together, 400 by itself, 5,000 by itself.
    let expected: [&[usize]; 7] = [&[2, 1], &[5], &[7], &[3], &[4], &[0], &[6]];
    assert_eq!(fuse(&calls), expected);
    let nothing: [Groupable<u32>; 0] = [];
    assert!(fuse(&nothing).is_empty());
    assert_eq!(fuse(&[call(AllReduce, 0, 0), call(AllReduce, 0, 0)]), [[1, 0]], "empty calls are alike");
}

/// Fused by brute force: of each kind and key, by size, a call joins the batch of the smallest before it.
fn slow(calls: &[Groupable<u32>]) -> Vec<Vec<u64>> {
    let mut batches: Vec<Vec<u64>> = Vec::new();
    for kind in [CollectiveKind::AllReduce, CollectiveKind::AllGather] {
        for key in 0..2 {
            let mut sizes: Vec<u64> =
                calls.iter().filter(|call| (call.kind, call.key) == (kind, key)).map(|call| call.bytes).collect();
            sizes.sort_unstable();
            let mut open: Vec<u64> = Vec::new();
            for size in sizes {
                if open.first().is_some_and(|first| size >= 4 * first && size > 0) {
                    batches.push(std::mem::take(&mut open));
                }
                open.push(size);
            }
            if !open.is_empty() {
                batches.push(open);
            }
        }
    }
    batches.sort();
    batches
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn batches_are_those_of_brute_force(
        list in prop::collection::vec((any::<bool>(), 0u32..2, prop_oneof![0u64..40, 1u64..1_000_000]), 0..20)
    ) {
        let kind = |is_gather| if is_gather { CollectiveKind::AllGather } else { CollectiveKind::AllReduce };
        let calls: Vec<_> = list.into_iter().map(|(is_gather, key, bytes)| call(kind(is_gather), key, bytes)).collect();
        let batches = fuse(&calls);
        let mut found: Vec<Vec<u64>> =
            batches.iter().map(|batch| batch.iter().map(|at| calls[*at].bytes).collect()).collect();
        found.sort();
        prop_assert_eq!(found, slow(&calls));
        let mut places = batches.concat();
        places.sort_unstable();
        prop_assert!(places.into_iter().eq(0..calls.len()));
    }
}

#[test]
fn a_hundred_small_all_reduces_cost_one_launch() {
    let profile = Profile::builtin("h100-sxm").expect("built in");
    let shape = CommShape::new(&(0..8).collect::<Vec<_>>(), &profile);
    let cost = |bytes, ops| {
        uniform_cost(&shape, &CollectiveCall { kind: CollectiveKind::AllReduce, bytes, root: 0, ops }).as_ns()
    };
    let launch = profile.network.ll.expect("described").launch_ns as i64;
    let (alone, fused) = (cost(1_024, 1), cost(102_400, 100));
    // 24 channels: five rounds of 14 hops one after the other instead of a hundred launches.
    assert!(fused < launch + 6 * (alone - launch), "{fused} ns for a batch, {alone} ns alone");
    assert!(fused > alone);
    assert!(fused * 10 < 100 * alone);
}
