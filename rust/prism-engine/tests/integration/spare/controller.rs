//! The controller against a maximum-flow oracle that knows nothing of layouts, and the laws of a reordering.

use prism_engine::spare::layout::{Action, Layout};
use prism_engine::spare::placement::{Placement, Stacks};
use proptest::prelude::*;
use std::collections::BTreeMap;

/// Least cost of giving every type to a live host, none with more than `capacity` types, or `None`: successive shortest paths
/// by Bellman and Ford over an explicit network. Slow and plain.
fn min_cost(stacks: &Stacks, live: &[bool], capacity: i64, cost: impl Fn(u32, u32) -> i64) -> Option<i64> {
    let n = stacks.hosts.len();
    let (source, sink) = (2 * n, 2 * n + 1);
    // (from, to, room, cost); the reverse of edge e is e ^ 1.
    let mut edges: Vec<(usize, usize, i64, i64)> = Vec::new();
    let mut add =
        |from: usize, to: usize, room: i64, cost: i64| edges.extend([(from, to, room, cost), (to, from, 0, -cost)]);
    for shard in 0..n {
        add(source, shard, 1, 0);
        for group in stacks.hosts[shard].iter().filter(|group| live[**group as usize]) {
            add(shard, n + *group as usize, 1, cost(shard as u32, *group));
        }
        if live[shard] {
            add(n + shard, sink, capacity, 0);
        }
    }
    let mut total = 0;
    for _ in 0..n {
        let mut distance = vec![i64::MAX; 2 * n + 2];
        let mut by = vec![usize::MAX; 2 * n + 2];
        distance[source] = 0;
        let mut has_changed = true;
        while has_changed {
            has_changed = false;
            for (e, (from, to, room, cost)) in edges.iter().enumerate() {
                if *room > 0 && distance[*from] != i64::MAX && distance[*from] + cost < distance[*to] {
                    distance[*to] = distance[*from] + cost;
                    by[*to] = e;
                    has_changed = true;
                }
            }
        }
        if distance[sink] == i64::MAX {
            return None;
        }
        total += distance[sink];
        let mut at = sink;
        while at != source {
            let e = by[at];
            edges[e].2 -= 1;
            edges[e ^ 1].2 += 1;
            at = edges[e].0;
        }
    }
    Some(total)
}

fn placements() -> impl Strategy<Value = (u32, u32, Placement)> {
    (8u32..26, 2u32..5, 0u64..1000, 0..4).prop_map(|(n, r, seed, which)| {
        let n = n.max(r * (r - 1) * 2 + 1);
        let placement = match which {
            0 => Placement::Golomb,
            1 => Placement::Contiguous,
            2 => Placement::Disjoint,
            _ => Placement::Random { seed },
        };
        (n, r, placement)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn reordering_is_minimal_in_entries_and_in_moves(
        (n, r, placement) in placements(),
        order in proptest::collection::vec(any::<u32>(), 1..24),
        together in 1usize..3,
    ) {
        let stacks = placement.stacks(n, r).unwrap();
        let mut layout = Layout::new(stacks.clone());
        let mut live = vec![true; n as usize];
        let order: Vec<u32> = order.into_iter().map(|group| group % n).collect();
        for groups in order.chunks(together) {
            let mut groups: Vec<u32> = groups.iter().copied().filter(|group| live[*group as usize]).collect();
            groups.sort_unstable();
            groups.dedup();
            if groups.len() == live.iter().filter(|live| **live).count() {
                break;
            }
            let before: BTreeMap<u32, Vec<u32>> = (0..n).map(|group| (group, layout.computed(group).to_vec())).collect();
            let had = layout.stacks();
            for group in &groups {
                live[*group as usize] = false;
            }
            let plan = layout.fail(&groups).unwrap();
            let is_covered = |shard: u32| (0..n).any(|group| live[group as usize] && before[&group].contains(&shard));
            let cost = |shard: u32, group: u32| i64::from(!before[&group].contains(&shard));
            match plan.action {
                Action::WipeOut => {
                    prop_assert!(!plan.lost.is_empty());
                    let has_host = |shard: &u32| stacks.hosts[*shard as usize].iter().any(|group| live[*group as usize]);
                    prop_assert!(!plan.lost.iter().any(has_host));
                    prop_assert_eq!(min_cost(&stacks, &live, i64::from(n), cost), None);
                    break;
                }
                Action::Continue => {
                    prop_assert!((0..n).all(is_covered));
                    prop_assert!(plan.moves.is_empty() && plan.stacks == had);
                }
                Action::Reorder => {
                    prop_assert!(!(0..n).all(is_covered));
                    let least = (had..=n).find(|s| min_cost(&stacks, &live, i64::from(*s), cost).is_some()).unwrap();
                    prop_assert_eq!(plan.stacks, least);
                    let cheapest = min_cost(&stacks, &live, i64::from(least), cost).unwrap();
                    prop_assert_eq!(plan.moves.len() as i64, cheapest);
                }
            }
            for (shard, group) in (0..).zip(&plan.computed_by) {
                prop_assert!(live[*group as usize] && layout.computed(*group).contains(&shard));
            }
            for group in (0..n).filter(|group| live[*group as usize]) {
                prop_assert!(layout.computed(group).len() <= plan.stacks as usize);
                for moved in plan.moves.iter().filter(|moved| moved.group == group) {
                    prop_assert!(layout.computed(group).contains(&moved.shard));
                    prop_assert!(!before[&group].contains(&moved.shard));
                }
            }
        }
    }
}

#[test]
fn failures_that_cannot_be_are_refused() {
    let mut layout = Layout::new(Placement::Golomb.stacks(20, 3).unwrap());
    assert!(layout.fail(&[20]).unwrap_err().to_string().contains("0 to 19"));
    assert!(layout.fail(&[3, 3]).unwrap_err().to_string().contains("failed already"));
    assert_eq!(layout.live(), 20, "nothing was lost by the errors");
    layout.fail(&[3]).unwrap();
    assert!(layout.fail(&[3]).is_err());
    layout.reset();
    assert_eq!(layout.stacks(), 1);
    layout.fail(&[3]).unwrap();
}
