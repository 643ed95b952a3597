//! Round trips of every value, and arbitrary bytes.

use super::*;
use crate::control::{Contribution, UNIQUE_ID_BYTES};
use proptest::prelude::*;

fn any_kind() -> impl Strategy<Value = ControlKind> {
    use ControlKind as K;
    proptest::sample::select(vec![
        K::Hello,
        K::Name,
        K::Group,
        K::CommInit,
        K::CommSplit,
        K::Unsupported,
        K::Note,
        K::CommMembers,
        K::CommMemory,
        K::CommEstimate,
        K::ReleaseErrors,
        K::CommPeers,
        K::CommExchange,
        K::Contribute,
        K::Await,
        K::Taken,
        K::Values,
        K::Tier,
        K::Groups,
        K::Timeline,
        K::Refused,
    ])
}

fn any_hello() -> impl Strategy<Value = Hello> {
    let device = proptest::sample::select(vec![DeviceMode::Emulated, DeviceMode::Real, DeviceMode::Host]);
    (any::<[u32; 4]>(), device).prop_map(|([protocol, rank, world_size, pid], device)| Hello {
        protocol,
        rank,
        world_size,
        pid,
        device,
    })
}

fn any_request() -> impl Strategy<Value = Request> {
    let unique_id = proptest::collection::vec(any::<u8>(), UNIQUE_ID_BYTES).prop_map(|id| id.try_into().unwrap());
    prop_oneof![
        any_hello().prop_map(Request::Hello),
        (any::<u32>(), ".*").prop_map(|(id, text)| Request::Name { id, text }),
        (proptest::collection::vec(any::<u32>(), 0..100), ".*")
            .prop_map(|(ranks, name)| Request::Group { ranks, name }),
        proptest::collection::vec((proptest::collection::vec(any::<u32>(), 0..10), ".*"), 0..5).prop_map(|groups| {
            Request::Groups(groups.into_iter().map(|(ranks, name)| NamedGroup { ranks, name }).collect())
        }),
        (any::<[u32; 3]>(), unique_id).prop_map(|([comm_id, nranks, group_rank], unique_id)| Request::CommInit {
            comm_id,
            nranks,
            group_rank,
            unique_id
        }),
        (any::<[u32; 2]>(), any::<[i32; 2]>(), ".*").prop_map(|([comm_id, parent], [color, key], group_name)| {
            Request::CommSplit { comm_id, parent, color, key, group_name }
        }),
        ".*".prop_map(|name| Request::Unsupported { name }),
        (any::<u64>(), ".*").prop_map(|(count, text)| Request::Note { count, text }),
        (any::<[u32; 2]>(), proptest::collection::vec(any::<u32>(), 0..100))
            .prop_map(|([comm_id, parent], ranks)| Request::CommMembers { comm_id, parent, ranks }),
        any::<u32>().prop_map(|comm_id| Request::CommMemory { comm_id }),
        Just(Request::Timeline),
        (any::<[u32; 3]>(), any::<u64>()).prop_map(|([comm_id, f, root], count)| Request::CommEstimate {
            comm_id,
            f,
            root,
            count
        }),
        any::<[u64; 4]>().prop_map(|[count, p50_ns, p99_ns, max_ns]| Request::ReleaseErrors {
            count,
            p50_ns,
            p99_ns,
            max_ns
        }),
        any::<u32>().prop_map(|comm_id| Request::CommPeers { comm_id }),
        any::<u32>().prop_map(|comm_id| Request::CommExchange { comm_id }),
        (any::<bool>(), any_contributions())
            .prop_map(|(parks, contributions)| Request::Contribute { parks, contributions }),
        any_contributions().prop_map(|contributions| Request::Await { contributions }),
        any_contributions().prop_map(|contributions| Request::Taken { contributions }),
        (any::<[u32; 5]>(), any::<[u64; 3]>()).prop_map(
            |([comm_id, kind, dtype, op, root], [number, count, row_bytes])| Request::Values(ValuesRequest {
                comm_id,
                kind,
                dtype,
                op,
                root,
                number,
                count,
                row_bytes
            })
        ),
        (any::<[u32; 3]>(), any::<u64>()).prop_map(|([comm_id, kind, tier], count)| Request::Tier {
            comm_id,
            kind,
            tier,
            count
        }),
    ]
}

fn any_contributions() -> impl Strategy<Value = Vec<Contribution>> {
    let one = (any::<[u32; 3]>(), any::<u64>()).prop_map(|([exchange, from, readers], number)| Contribution {
        exchange,
        from,
        number,
        readers,
    });
    proptest::collection::vec(one, 0..20)
}

proptest! {
    #[test]
    fn requests_survive_the_wire(request in any_request()) {
        let (kind, payload) = request.encode();
        let mut bytes = Vec::new();
        write_frame(&mut bytes, kind, &payload).unwrap();
        let mut stream = bytes.as_slice();
        let (kind, payload) = read_frame(&mut stream).unwrap().unwrap();
        prop_assert_eq!(Request::decode(kind, &payload), Ok(request));
        prop_assert!(read_frame(&mut stream).unwrap().is_none());
    }

    #[test]
    fn answers_survive_the_wire(protocol: u32, ring_records: u32, config in ".*", nranks: u32, group_rank: u32) {
        let hello = HelloAnswer { protocol, ring_records, config };
        prop_assert_eq!(HelloAnswer::decode(&hello.encode()), Ok(hello));
        let split = CommSplitAnswer { nranks, group_rank };
        prop_assert_eq!(CommSplitAnswer::decode(&split.encode()), Ok(split));
        let peers = CommPeersAnswer { all_live: nranks % 2 == 0, key: [group_rank as u8; 16] };
        prop_assert_eq!(CommPeersAnswer::decode(&peers.encode()), Ok(peers));
    }

    /// Whatever decodes is exactly what those bytes mean.
    #[test]
    fn arbitrary_payloads_are_errors_or_requests(
        kind in any_kind(),
        payload in proptest::collection::vec(any::<u8>(), 0..300),
    ) {
        if let Ok(request) = Request::decode(kind, &payload) {
            prop_assert_eq!(request.encode(), (kind, payload));
        }
    }

    #[test]
    fn arbitrary_answers_are_errors_or_answers(payload in proptest::collection::vec(any::<u8>(), 0..100)) {
        if let Ok(hello) = HelloAnswer::decode(&payload) {
            prop_assert_eq!(hello.encode(), payload.clone());
        }
        if let Ok(split) = CommSplitAnswer::decode(&payload) {
            prop_assert_eq!(split.encode(), payload.clone());
        }
        if let Ok(peers) = CommPeersAnswer::decode(&payload) {
            prop_assert_eq!(peers.encode(), payload);
        }
    }

    #[test]
    fn arbitrary_streams_end_in_an_error_or_the_end(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let mut stream = bytes.as_slice();
        while let Ok(Some(_)) = read_frame(&mut stream) {}
    }

    #[test]
    fn a_cut_request_never_decodes_as_fixed_fields(request in any_request(), cut in 1usize..8) {
        // Cutting into the fixed part must be noticed; texts can be cut anywhere.
        let (kind, payload) = request.encode();
        let fixed = match &request {
            Request::Hello(_)
            | Request::CommInit { .. }
            | Request::CommMembers { .. }
            | Request::CommMemory { .. }
            | Request::CommEstimate { .. }
            | Request::ReleaseErrors { .. }
            | Request::CommPeers { .. }
            | Request::CommExchange { .. }
            | Request::Contribute { .. }
            | Request::Await { .. }
            | Request::Taken { .. }
            | Request::Values(_)
            | Request::Tier { .. } => payload.len(),
            Request::Name { .. } => 4,
            Request::Group { ranks, .. } => 4 + 4 * ranks.len(),
            Request::CommSplit { .. } => 16,
            Request::Note { .. } => 8,
            // Every group is behind its length: a cut between two of them leaves a whole list.
            Request::Groups(groups) if groups.last().is_some_and(|group| 4 * group.ranks.len() + group.name.len() >= cut) => {
                payload.len()
            }
            Request::Groups(_) | Request::Unsupported { .. } | Request::Timeline => return Ok(()),
        };
        let end = fixed.saturating_sub(cut);
        prop_assert_eq!(Request::decode(kind, &payload[..end]), Err(FrameError::Truncated(kind)));
    }
}

#[test]
fn layouts_are_those_of_the_contract() {
    let hello = Hello { protocol: 1, rank: 2, world_size: 3, pid: 4, device: DeviceMode::Host };
    let (kind, payload) = Request::Hello(hello).encode();
    assert_eq!(kind, ControlKind::Hello);
    assert_eq!(payload, [1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0, 2, 0, 0, 0]);
    let split = Request::CommSplit { comm_id: 1, parent: 2, color: -1, key: 3, group_name: "pp".into() };
    assert_eq!(split.encode().1, *b"\x01\0\0\0\x02\0\0\0\xff\xff\xff\xff\x03\0\0\0pp");
    let group = Request::Group { ranks: vec![5, 258], name: "dp".into() };
    assert_eq!(group.encode().1, *b"\x02\0\0\0\x05\0\0\0\x02\x01\0\0dp");
    let groups = Request::Groups(vec![NamedGroup { ranks: vec![5], name: "dp".into() }]);
    assert_eq!(groups.encode(), (ControlKind::Groups, b"\x0a\0\0\0\x01\0\0\0\x05\0\0\0dp".to_vec()));
    assert_eq!(encode_header(ControlKind::Note, 258).unwrap(), [7, 0, 0, 0, 2, 1, 0, 0]);
}

#[test]
fn hostile_headers_are_refused_before_anything_is_allocated() {
    let header = |kind: u32, bytes: u32| [kind.to_le_bytes(), bytes.to_le_bytes()].concat();
    let kind_of = |bytes: &[u8]| read_frame(&mut &*bytes).unwrap_err().kind();
    assert_eq!(kind_of(&header(2, u32::MAX)), io::ErrorKind::InvalidData);
    assert_eq!(kind_of(&header(2, MAX_PAYLOAD_BYTES as u32 + 1)), io::ErrorKind::InvalidData);
    assert_eq!(kind_of(&header(99, 0)), io::ErrorKind::InvalidData);
    assert_eq!(kind_of(&header(2, MAX_PAYLOAD_BYTES as u32)), io::ErrorKind::UnexpectedEof);
    assert_eq!(kind_of(&[1, 0, 0]), io::ErrorKind::UnexpectedEof);
    // A list that claims 2^32 - 1 ranks in 8 bytes.
    let group = Request::decode(ControlKind::Group, &[255; 8]);
    assert_eq!(group, Err(FrameError::Truncated(ControlKind::Group)));
}

#[test]
fn errors_name_what_is_wrong() {
    let device = Request::decode(ControlKind::Hello, &[[0; 4], [0; 4], [0; 4], [0; 4], [9, 0, 0, 0]].concat());
    assert_eq!(device, Err(FrameError::BadValue { kind: ControlKind::Hello, field: "device" }));
    assert_eq!(Request::decode(ControlKind::Unsupported, b"\xff"), Err(FrameError::NotText(ControlKind::Unsupported)));
    assert_eq!(Request::decode(ControlKind::Hello, &[0; 21]), Err(FrameError::TrailingBytes(ControlKind::Hello)));
    assert_eq!(Request::decode(ControlKind::Refused, b""), Err(FrameError::NotARequest(ControlKind::Refused)));
    let long = encode_header(ControlKind::Name, MAX_PAYLOAD_BYTES + 1);
    assert_eq!(long, Err(FrameError::TooLong { bytes: MAX_PAYLOAD_BYTES + 1 }));
}

#[test]
fn device_modes_have_the_names_of_the_environment_variable() {
    for (name, mode) in [("emulated", DeviceMode::Emulated), ("real", DeviceMode::Real), ("host", DeviceMode::Host)] {
        assert_eq!(DeviceMode::from_name(name), Some(mode));
        assert_eq!(mode.name(), name);
    }
    assert_eq!(DeviceMode::from_name("Emulated"), None);
}
