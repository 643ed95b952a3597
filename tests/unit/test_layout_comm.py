"""Communication beside computing: bytes and times worked out by hand, on a flat network of 5 us and 50 GB/s."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prism_core.config import read_profile
from prism_core.errors import ConfigError
from prism_core.estimate import Layout, estimate, parts
from prism_core.layout_comm import (
    attention_moves,
    call_ns,
    context_parallel_ns,
    data_parallel,
    key_value_bytes,
    query_bytes,
)
from prism_core.synthetic import transformer_step

H100 = read_profile("h100-sxm")
#: Every rank a node with one card, collectives plain rings.
FLAT = transformer_step(1, 1, 1, 1, 1).meta["profile"]
#: 2 sequences of 8,192 over 4 ranks: 4,096 tokens each, of 16 heads of queries and 4 of keys and values, 128 wide.
LAYOUT = Layout(
    layers=8, hidden=4096, heads=32, kv_heads=8, seq=8192, micro_batch=2, global_batch=16, tp=2, cp=4, dp=2
)  # fmt: skip
KEYS = 4096 * 4 * 128 * 2


def wire_ns(size: float) -> float:
    """One message on the flat network."""
    return 5000 + size / 50


def test_grouped_keys_and_values_are_what_is_sent() -> None:
    """Two tensors of 16 bits; queries have four times the heads."""
    assert key_value_bytes(LAYOUT) == 2 * KEYS == 8_388_608
    assert query_bytes(LAYOUT) == 4 * KEYS
    assert key_value_bytes(replace(LAYOUT, kv_heads=0)) == 8 * KEYS


@pytest.mark.parametrize(
    ("op", "size", "expected"),
    [
        ("Ring", 2 * KEYS, wire_ns(2 * KEYS)),
        ("AllGather", 4 * KEYS, 3 * wire_ns(KEYS)),
        ("ReduceScatter", 4 * KEYS, 3 * wire_ns(KEYS)),
        ("AllReduce", 4 * KEYS, 6 * wire_ns(KEYS)),
        # All three messages at once: one latency.
        ("AllToAll", 4 * KEYS, wire_ns(3 * KEYS)),
    ],
)
def test_calls_take_their_messages(op: str, size: int, expected: float) -> None:
    """Four ranks, whether or not others lie between them."""
    for stride in (1, 2):
        assert call_ns(FLAT, op, 4, stride, size) == pytest.approx(expected, abs=10)
    assert call_ns(FLAT, op, 1, 2, size) == call_ns(FLAT, op, 4, 1, 0) == 0


def test_a_ring_is_hidden_by_attention_step_by_step() -> None:
    """Forward three messages; backward keys and values first, both between, gradients last."""
    one, two = wire_ns(2 * KEYS), wire_ns(4 * KEYS)
    assert context_parallel_ns(LAYOUT, FLAT, (0, 0)) == pytest.approx((3 * one, 2 * one + 2 * two), abs=50)
    assert context_parallel_ns(LAYOUT, FLAT, (one - 7000, one + 1000)) == pytest.approx(
        (3 * 7000, 2 * (two - one - 1000)), abs=50
    )
    assert context_parallel_ns(LAYOUT, FLAT, (two, two + 10)) == (0, 0)
    assert context_parallel_ns(replace(LAYOUT, cp=1), FLAT, (0, 0)) == (0, 0)


def test_other_exchanges_are_not_hidden() -> None:
    """Gathers of keys and of values, their gradients scattered; four exchanges by heads in either direction."""
    gather = 3 * wire_ns(KEYS)
    gathered = context_parallel_ns(replace(LAYOUT, cp_comm_type="all_gather"), FLAT, (1e9, 1e9))
    assert gathered == pytest.approx((2 * gather, 4 * gather), abs=50)
    exchange = 2 * wire_ns(3 * KEYS) + 2 * wire_ns(3 * KEYS / 4)
    exchanged = context_parallel_ns(replace(LAYOUT, cp_comm_type="a2a"), FLAT, (1e9, 1e9))
    assert exchanged == pytest.approx((exchange, exchange), abs=50)


def test_a_ring_across_nodes_goes_by_the_network() -> None:
    """Two ranks 4 apart share a node of 8, 8 apart they do not: 450 GB/s of NVLink against a card of 50."""
    within, across = (call_ns(H100, "Ring", 2, stride, 100_000_000) for stride in (4, 8))
    assert within == pytest.approx(100e6 / (450 * 0.824), rel=0.15)
    assert across == pytest.approx(100e6 / (50 * 0.96), rel=0.05)


def test_attention_is_cut_into_steps_of_equal_work() -> None:
    """As much arithmetic as without context parallelism, a fourth on each rank; what is added up moves memory."""
    alone, ring = parts(replace(LAYOUT, cp=1)), parts(LAYOUT)
    flop = [[work["operator"]["flop"] for work in found.forward if "operator" in work] for found in (alone, ring)]
    assert len(flop[0]) == 1 and len(flop[1]) == 4 and 4 * sum(flop[1]) == flop[0][0]
    assert [len(step) for step in ring.ring_steps] == [1, 1] and [len(step) for step in alone.ring_steps] == [0, 0]
    query, both = 4 * KEYS, 2 * KEYS
    forward, backward = attention_moves(LAYOUT)
    assert sum(forward) == 2 * both + 2 * query + 3 * 3 * query
    assert sum(backward) == 2 * both + 2 * query + 2 * both + 3 * 3 * (query + both)
    assert attention_moves(replace(LAYOUT, cp_comm_type="a2a")) == ([], [])


def test_a_slow_network_is_exposed_in_the_step() -> None:
    """Eight tensor-parallel ranks fill a node, so rings cross: with a hundredth of the bandwidth it shows."""
    crossing = replace(LAYOUT, tp=8)
    slow = H100.replace("nic_bytes_per_s = 50000000000", "nic_bytes_per_s = 500000000")
    fast, exposed = estimate(crossing, H100), estimate(crossing, slow)
    (forward, backward), (longer, much_longer) = fast["context_layer_ns"], exposed["context_layer_ns"]
    assert exposed["forward_layer_ns"] - fast["forward_layer_ns"] == pytest.approx(longer - forward, abs=2)
    assert exposed["backward_layer_ns"] - fast["backward_layer_ns"] == pytest.approx(much_longer - backward, abs=2)
    # A message of 2 MB on half a gigabyte a second, three times; six as many bytes backward.
    assert longer == pytest.approx(3 * 2_097_152 / 0.48, rel=0.05) and much_longer == pytest.approx(
        2 * longer, rel=0.05
    )
    assert longer > 10 * forward


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"cp_comm_type": "a2a+p2p"}, "cp_comm_type is 'a2a\\+p2p': it must be one of p2p, all_gather, a2a"),
        ({"seq": 4100}, "over 4 ranks, two blocks each"),
        ({"cp_comm_type": "a2a", "kv_heads": 4}, "2 heads of keys and values"),
        ({"bucket_parameters": -1}, "bucket_parameters is -1"),
        ({"dp_sms": -1}, "dp_sms is -1"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, object], text: str) -> None:
    """The message names the number."""
    with pytest.raises(ConfigError, match=text):
        estimate(replace(LAYOUT, **changes), H100)  # type: ignore[arg-type]


#: Four data-parallel ranks, 8 layers of 12 million parameters (12 x 1024^2) and an embedding of 4.
SHARDED = Layout(
    layers=8, hidden=1024, heads=8, seq=1024, global_batch=4, dp=4, vocab=4096, dp_overlap=True,
    distributed_optimizer=True, bucket_parameters=26_214_400, dp_sms=0,
)  # fmt: skip


def test_the_first_and_the_last_bucket_are_not_hidden() -> None:
    """104,857,600 parameters in four buckets of two bytes each: a fourth of a bucket in each of three messages."""
    bucket = 3 * wire_ns(2 * 26_214_400 / 4)
    assert data_parallel(SHARDED, FLAT, 1e12, 1e12).exposed_ns == pytest.approx(2 * bucket, abs=50)
    # Nothing to hide behind: all of them.
    assert data_parallel(SHARDED, FLAT, 0, 0).exposed_ns == pytest.approx(8 * bucket, abs=200)
    # Gradients are ready in quarters of a backward pass of as much as three buckets: they queue from the first.
    assert data_parallel(SHARDED, FLAT, 1e12, 3 * bucket).exposed_ns == pytest.approx((1 + 4 - 2.25) * bucket, abs=200)
    # Without shards there is nothing to gather, and what is reduced goes round twice.
    whole = data_parallel(replace(SHARDED, distributed_optimizer=False), FLAT, 0, 1e12)
    assert whole.exposed_ns == pytest.approx(2 * bucket, abs=50)


def test_gathered_in_eight_bits_the_embedding_stays_in_sixteen() -> None:
    """12 million parameters a layer in one byte, 4 million in two."""
    found = data_parallel(replace(SHARDED, parameter_bytes=1), FLAT, 1e12, 1e12).exposed_ns
    gathered = 3 * wire_ns((8 * 12 * 1024**2 + 2 * 4096 * 1024) / 4 / 4)
    assert found == pytest.approx(3 * wire_ns(2 * 26_214_400 / 4) + gathered, abs=50)


def test_buckets_are_those_of_megatron_core() -> None:
    """40 million parameters, or a million per data-parallel rank if that is more."""
    default = replace(SHARDED, bucket_parameters=0)
    assert data_parallel(default, FLAT, 1e12, 1e12) == data_parallel(
        replace(SHARDED, bucket_parameters=40_000_000), FLAT, 1e12, 1e12
    )
    many = replace(default, dp=64, global_batch=64)
    assert data_parallel(many, FLAT, 1e12, 1e12) == data_parallel(
        replace(many, bucket_parameters=64_000_000), FLAT, 1e12, 1e12
    )


def test_communication_takes_multiprocessors() -> None:
    """33 of 132: three of four buckets run beside computing, which gets a quarter of their time longer."""
    found = data_parallel(replace(SHARDED, dp_sms=33), FLAT, 1e12, 1e12)
    assert found.slowed_ns == pytest.approx(2 * 0.25 * 3 * 3 * wire_ns(2 * 26_214_400 / 4), rel=1e-3)


def test_interleaved_blocks_leave_more_time() -> None:
    """Between two blocks of a stage come as many microbatches as there are stages."""
    layout = replace(SHARDED, pp=2, global_batch=16)
    window = 1e6
    plain = data_parallel(replace(layout, bucket_parameters=1), FLAT, window, window)
    interleaved = data_parallel(replace(layout, vp=2, bucket_parameters=1), FLAT, window, window)
    assert interleaved.exposed_ns == pytest.approx(plain.exposed_ns - 2 * window, rel=1e-3)
