//! Max-min fair shares against hand cases and a plain reference.

use prism_engine::contention::FULL;
use prism_engine::contention::fair::{End, FairShare};
use proptest::prelude::*;
use std::collections::BTreeMap;

/// A flow of a random set.
#[derive(Clone, Debug)]
struct Wanted {
    start: i64,
    ports: Vec<u32>,
    cap: u64,
    occupancy: i64,
}

const PORTS: u32 = 6;

fn wanted() -> impl Strategy<Value = Wanted> {
    let ports = prop::collection::btree_set(0..PORTS, 1..4).prop_map(|ports| ports.into_iter().collect());
    let cap = prop::sample::select(vec![FULL, FULL / 2, FULL / 3, FULL / 10, 1]);
    // Work of one unit of share would take 2^32 times as long.
    (0..2000i64, ports, cap, 1..3000i64).prop_map(|(start, ports, cap, occupancy)| Wanted {
        start,
        ports,
        cap,
        occupancy,
    })
}

/// Shares by the definition, flow by flow and port by port: O(flows^2 x ports).
fn shares(flows: &BTreeMap<usize, &Wanted>) -> BTreeMap<usize, u64> {
    let mut fixed: BTreeMap<usize, u64> = BTreeMap::new();
    while fixed.len() < flows.len() {
        // What each port could give its open flows if it were divided evenly.
        let division = |port: u32| {
            let here = flows.iter().filter(|(_, flow)| flow.ports.contains(&port));
            let open = here.clone().filter(|(at, _)| !fixed.contains_key(at)).count() as u64;
            let used: u64 = here.filter_map(|(at, _)| fixed.get(at)).sum();
            (open > 0).then(|| ((FULL - used) / open, port))
        };
        let (least, port) = (0..PORTS).filter_map(division).min().expect("an open flow has ports");
        let open = |at: &usize| !fixed.contains_key(at);
        let capped: Vec<usize> = flows.keys().copied().filter(|at| open(at) && flows[at].cap <= least).collect();
        if capped.is_empty() {
            let bound =
                flows.keys().copied().filter(|at| open(at) && flows[at].ports.contains(&port)).collect::<Vec<_>>();
            fixed.extend(bound.into_iter().map(|at| (at, least)));
        } else {
            fixed.extend(capped.into_iter().map(|at| (at, flows[&at].cap)));
        }
    }
    fixed
}

/// Ends of flows by the definition: shares anew at every start and end, work counted without rounding.
fn reference(wanted: &[Wanted]) -> Vec<i64> {
    let mut left: Vec<u128> = wanted.iter().map(|flow| flow.occupancy as u128 * u128::from(flow.cap)).collect();
    let mut ends = vec![None; wanted.len()];
    let mut now = 0;
    loop {
        let under_way: BTreeMap<usize, &Wanted> =
            wanted.iter().enumerate().filter(|(at, flow)| ends[*at].is_none() && flow.start <= now).collect();
        let shares = shares(&under_way);
        let end = |(at, share): (&usize, &u64)| now + left[*at].div_ceil(u128::from(*share)) as i64;
        let next_end = shares.iter().map(end).min();
        let next_start = wanted.iter().map(|flow| flow.start).filter(|start| *start > now).min();
        let Some(next) = next_end.into_iter().chain(next_start).min() else { break };
        for (at, share) in &shares {
            left[*at] = left[*at].saturating_sub((next - now) as u128 * u128::from(*share));
            if left[*at] == 0 {
                ends[*at] = Some(next);
            }
        }
        now = next;
    }
    ends.into_iter().map(|end| end.expect("every flow ends")).collect()
}

/// Ends of flows by the engine's shares; `look` is shown every settled state.
fn engine(wanted: &[Wanted], mut look: impl FnMut(&FairShare, &BTreeMap<u32, usize>)) -> Vec<i64> {
    let mut fair = FairShare::new(PORTS);
    let mut order: Vec<usize> = (0..wanted.len()).collect();
    order.sort_by_key(|at| wanted[*at].start);
    let mut starts = order.into_iter().peekable();
    let mut foreseen: Vec<End> = Vec::new();
    let mut flows: BTreeMap<u32, usize> = BTreeMap::new();
    let mut ends = vec![0; wanted.len()];
    loop {
        foreseen.retain(|end| fair.holds(end));
        let next = foreseen.iter().map(|end| end.time).chain(starts.peek().map(|at| wanted[*at].start)).min();
        let Some(now) = next else { return ends };
        for end in foreseen.iter().filter(|end| end.time == now) {
            let flow = flows.remove(&end.flow).expect("under way");
            ends[flow] = now;
            fair.stop(end.flow);
        }
        while let Some(at) = starts.next_if(|at| wanted[*at].start == now) {
            let Wanted { ports, cap, occupancy, .. } = &wanted[at];
            flows.insert(fair.start(now, ports, *cap, *occupancy), at);
        }
        fair.settle(now, &mut foreseen);
        look(&fair, &flows);
    }
}

fn flow(start: i64, ports: &[u32], occupancy: i64) -> Wanted {
    Wanted { start, ports: ports.to_vec(), cap: FULL, occupancy }
}

#[test]
fn two_flows_of_one_port_get_half_each() {
    assert_eq!(engine(&[flow(0, &[0, 1], 100), flow(0, &[0, 2], 100)], |_, _| ()), [200, 200]);
    // The second comes when the first is half through, and is alone in the end.
    assert_eq!(engine(&[flow(0, &[0, 1], 100), flow(50, &[0, 2], 100)], |_, _| ()), [150, 200]);
}

#[test]
fn what_a_bottleneck_leaves_goes_to_others() {
    // Two flows share port 0; one of them shares port 1 with two more, where each gets a third. The other gets two thirds of
    // port 0, as nobody else can use it.
    let flows = [flow(0, &[0, 2], 200), flow(0, &[0, 1], 100), flow(0, &[1, 3], 100), flow(0, &[1, 4], 100)];
    let mut first = Vec::new();
    engine(&flows, |fair, flows| {
        if first.is_empty() {
            first = flows.keys().map(|flow| fair.share(*flow)).collect();
        }
    });
    let third = FULL / 3;
    assert_eq!(first, [FULL - third, third, third, third]);
}

#[test]
fn a_flow_that_needs_little_leaves_the_rest() {
    let slow = Wanted { cap: FULL / 4, ..flow(0, &[0, 1], 100) };
    // Three quarters of the port: 90 in 120.
    assert_eq!(engine(&[slow, flow(0, &[0, 2], 75)], |_, _| ()), [100, 100]);
}

#[test]
fn a_flow_alone_takes_its_time_to_the_picosecond() {
    for cap in [1, 3, FULL / 7, FULL] {
        assert_eq!(engine(&[Wanted { cap, ..flow(5, &[0, 1, 2], 12_345) }], |_, _| ()), [12_350]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn flows_end_as_by_definition(wanted in prop::collection::vec(wanted(), 1..14)) {
        prop_assert_eq!(engine(&wanted, |_, _| ()), reference(&wanted));
    }

    #[test]
    fn shares_are_max_min_fair(wanted in prop::collection::vec(wanted(), 1..14)) {
        let (mut problems, wanted) = (Vec::new(), &wanted);
        engine(wanted, |fair, flows| {
            let at_port = |port: u32| flows.iter().filter(move |(_, at)| wanted[**at].ports.contains(&port));
            for port in 0..PORTS {
                let used: u64 = at_port(port).map(|(flow, _)| fair.share(*flow)).sum();
                if used > FULL {
                    problems.push(format!("port {port} is used {used}"));
                }
            }
            for (flow, at) in flows {
                let own = fair.share(*flow);
                // Either all it can use, or a port that is full and where nobody has more (but for rounding).
                let is_bound = |port: &u32| {
                    let shares: Vec<u64> = at_port(*port).map(|(flow, _)| fair.share(*flow)).collect();
                    let slack = shares.len() as u64 * 16;
                    shares.iter().sum::<u64>() + slack >= FULL && shares.iter().all(|share| *share <= own + slack)
                };
                if own != wanted[*at].cap && !wanted[*at].ports.iter().any(is_bound) {
                    problems.push(format!("flow {at} could have more than {own}"));
                }
            }
        });
        prop_assert_eq!(problems, Vec::<String>::new());
    }

    #[test]
    fn no_flow_beats_its_ports(wanted in prop::collection::vec(wanted(), 1..14)) {
        let ends = engine(&wanted, |_, _| ());
        for (flow, end) in wanted.iter().zip(&ends) {
            prop_assert!(*end >= flow.start + flow.occupancy);
        }
        for port in 0..PORTS {
            let here = || wanted.iter().zip(&ends).filter(|(flow, _)| flow.ports.contains(&port));
            let work: u128 = here().map(|(flow, _)| flow.occupancy as u128 * u128::from(flow.cap)).sum();
            let first = here().map(|(flow, _)| flow.start).min().unwrap_or(0);
            let last = here().map(|(_, end)| *end).max().unwrap_or(0);
            prop_assert!((last - first) as u128 * u128::from(FULL) >= work, "port {}", port);
        }
    }
}
