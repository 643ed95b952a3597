//! NVLink as a mesh without switches: bandwidth by the number of GPUs that take part.

use prism_engine::collective::{CollectiveCall, CollectiveKind, CommShape, message, uniform_cost};
use prism_engine::cost::comm::{Link, transfer_time};
use prism_engine::profile::Profile;
use prism_engine::units::SimTime;

fn mesh() -> Profile {
    Profile::builtin("v100-dgx1").expect("built in")
}

fn all_reduce(profile: &Profile, members: &[u32], bytes: u64) -> SimTime {
    let call = CollectiveCall { kind: CollectiveKind::AllReduce, bytes, root: 0, ops: 1 };
    uniform_cost(&CommShape::new(members, profile), &call)
}

#[test]
fn a_large_all_reduce_has_the_rings_of_its_ranks() {
    let profile = mesh();
    let ring = 131.4e9 / 6.0;
    for (ranks, rings) in [(2, 1.0), (3, 2.0), (4, 4.0), (5, 1.7), (6, 2.0), (7, 4.0), (8, 6.0)] {
        let members: Vec<u32> = (0..ranks).collect();
        let seconds = all_reduce(&profile, &members, 1 << 30).as_ns() as f64 / 1e9;
        let bus = f64::from(1 << 30) * 2.0 * f64::from(ranks - 1) / f64::from(ranks) / seconds;
        assert!((bus / (rings * ring) - 1.0).abs() < 0.05, "{ranks} ranks: {bus} B/s");
    }
}

#[test]
fn rings_alike_are_as_switches() {
    let mut alike = mesh();
    alike.node.nvlink_rings = vec![6.0; 7];
    let mut switches = mesh();
    switches.node.nvlink_rings.clear();
    for members in [&[0, 1, 2][..], &[0, 1, 2, 3, 4, 5, 6, 7], &[0, 1, 8, 9]] {
        for bytes in [1 << 10, 1 << 20, 1 << 26] {
            assert_eq!(all_reduce(&alike, members, bytes), all_reduce(&switches, members, bytes));
        }
    }
}

#[test]
fn a_message_has_what_two_gpus_have() {
    let profile = mesh();
    let bytes = 1 << 28;
    let (sent, received) = message(&profile, 0, 5, bytes, SimTime::ZERO, SimTime::ZERO);
    let start = SimTime::from_ns(profile.network.collective_launch_ns as i64);
    assert_eq!(sent, start + transfer_time(bytes, 21_900_000_000));
    assert_eq!(received, sent + Link::nvlink(&profile).latency);
}

#[test]
fn fewer_gpus_of_two_nodes_have_their_rings() {
    // Three GPUs of each node have two rings of NVLink, four have four: the cards are the same.
    let profile = mesh();
    let nodes = |each: u32| -> Vec<u32> { (0..2).flat_map(|node| (0..each).map(move |gpu| 8 * node + gpu)).collect() };
    let mut slow = profile.clone();
    slow.node.nvlink_rings[2] = 0.4;
    assert!(all_reduce(&slow, &nodes(4), 1 << 28) > all_reduce(&profile, &nodes(4), 1 << 28));
    assert_eq!(all_reduce(&slow, &nodes(3), 1 << 28), all_reduce(&profile, &nodes(3), 1 << 28));
}

#[test]
fn a_mesh_that_does_not_fit_its_node_is_refused() {
    let error = |rings: &[f64]| {
        let mut profile = mesh();
        profile.node.nvlink_rings = rings.to_vec();
        Profile::from_toml(&profile.to_toml()).expect_err("refused").to_string()
    };
    assert!(error(&[1.0, 2.0]).contains("`node.nvlink_rings` must be one number for each"));
    assert!(error(&[1.0, 2.0, 4.0, 0.0, 2.0, 4.0, 6.0]).contains("from 0.1 to 32"));
    assert!(mesh().config_text().contains("node.nvlink_rings=1.0,2.0,4.0,1.7,2.0,4.0,6.0\n"));
}
