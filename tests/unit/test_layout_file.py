"""`prism estimate`: a file says what `Layout` says, and what it says wrongly is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from prism_core.config import read_profile
from prism_core.errors import ConfigError
from prism_core.estimate import Layout, estimate, state_bytes
from prism_core.kernels import read_tables
from prism_core.layout_file import estimate_document, estimate_text, layout_of, read_layout
from prism_core.profiles import write_profile

ROOT = Path(__file__).resolve().parents[2]
SMALL: dict[str, Any] = {"layers": 4, "hidden": 1024, "heads": 8, "seq": 512, "global_batch": 8}


def written(folder: Path, text: str) -> Path:
    path = folder / "layout.toml"
    path.write_text(text)
    return path


def test_the_example_is_what_python_says_of_it() -> None:
    layout, device = read_layout(ROOT / "examples/estimate/llama3-405b.toml")
    assert device == "h100-sxm"
    expected = Layout(
        layers=126, hidden=16384, heads=128, kv_heads=8, ffn=53248, gated=True, vocab=128256, seq=8192,
        global_batch=2048, tp=8, pp=16, vp=8, dp=64, gradient_bytes_per_parameter=4, ends_are_layers=True,
        sequence_parallel=True, rotary=True, untied_embeddings=True,
    )  # fmt: skip
    assert layout == expected
    document = estimate_document(layout, device)
    found = estimate(expected, read_profile("h100-sxm"))
    assert {key: document[key] for key in found} == found
    assert document["world_size"] == 8192 and document["bubble"] == 15 / (8 * 32)
    # 6 N per token and attention's 6 L h s, of 405e9 parameters: published 430 TFLOP/s at 11.57 s, by 6 N alone.
    per_token = 6 * 405e9 + 6 * 126 * 16384 * 8192
    assert document["model_flop_per_s_per_gpu"] == pytest.approx(per_token * document["tokens_per_s"] / 8192, rel=0.01)
    assert document["mfu"] == pytest.approx(document["model_flop_per_s_per_gpu"] / 989.4e12, rel=0.001)


def test_settings_are_stronger_than_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "[layout]\n" + "\n".join(f"{key} = {value}" for key, value in SMALL.items()))
    layout, device = read_layout(path, ["layout.tp=2", "device=a100-sxm"])
    assert layout == Layout(**SMALL, tp=2) and device == "a100-sxm"


def test_a_profile_beside_the_layout_is_found_from_anywhere(tmp_path: Path) -> None:
    write_profile("a100-sxm", tmp_path / "site.toml", ["node.gpus=4"])
    keys = "\n".join(f"{key} = {value}" for key, value in SMALL.items())
    layout, device = read_layout(written(tmp_path, f'device = "site.toml"\n[layout]\n{keys}\n'))
    assert device == str(tmp_path / "site.toml")
    assert (
        estimate_document(layout, device)["iteration_time_ns"]
        == estimate_document(layout, "a100-sxm")["iteration_time_ns"]
    )


def test_computing_is_counted_by_what_it_rests_on(tmp_path: Path) -> None:
    layout = Layout(**SMALL, dtype="bf16")
    plain = estimate_document(layout, "h100-sxm")
    assert plain["device_time"]["by_provenance"].keys() == {"modelled"}
    # One of a layer's forward products: 512 tokens, 3 x 1024 columns.
    table = tmp_path / "kernels.toml"
    table.write_text(
        'version = 1\ndevice = "NVIDIA H100 80GB HBM3"\nprovenance = "measured"\nsource = "by hand"\n'
        '[[gemm]]\nm = 512\nn = 3072\nk = 1024\nbatch = 1\ninput = "bf16"\ncompute = "bf16"\n'
        "ns = 40000.0\nsamples = 3\n"
    )
    known = estimate_document(layout, "h100-sxm", [table])
    assert known["device_time"]["by_provenance"]["measured"] == 40000 * 4 * 8
    assert "compute measured" in estimate_text(known) and read_tables([table])


def test_states_of_the_fullest_rank_by_hand() -> None:
    layer, vocabulary = 12 * 1024 * 1024, 51200 * 1024
    assert state_bytes(Layout(**SMALL)) == 16 * (4 * layer + vocabulary)
    assert state_bytes(Layout(**SMALL, dp=4, distributed_optimizer=True)) == (4 + 12 // 4) * (4 * layer + vocabulary)
    assert state_bytes(Layout(**SMALL, dp=4, fully_sharded=True)) == 16 * (4 * layer + vocabulary) // 4
    # Six places on three stages: a layer and the embedding, two layers, a layer and the head.
    ends = Layout(**SMALL, pp=3, ends_are_layers=True, gradient_bytes_per_parameter=4)
    assert state_bytes(ends) == 18 * max(layer + vocabulary, 2 * layer)
    assert state_bytes(Layout(**SMALL, ends_are_layers=True)) == 16 * (4 * layer + vocabulary)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tp": 0}, "tp is 0: it must be within 1 and"),
        ({"layer": 3}, "layout.layer is unknown: layers, hidden, heads,"),
        ({"heads": "8"}, "layout.heads is '8': it must be of type int"),
        ({"gated": 1}, "layout.gated is 1: it must be of type bool"),
        ({"layers": True}, "layout.layers is True: it must be of type int"),
        ({"dtype": "int4"}, "dtype is 'int4': it must be one of bf16, fp16, fp32, fp8"),
        ({"tp_overlap": 1.5}, "tp_overlap is 1.5: a share is within 0 and 1"),
        ({"dp": 1 << 21, "global_batch": 1 << 21}, "2,097,152 ranks: more than"),
        ({"hidden": 1000, "heads": 16}, "hidden, 1000, is no multiple of 16 heads"),
        ({"pp": 2, "vp": 3}, "the 2 layers of a stage cannot be spread evenly over 3 blocks"),
        ({"pp": 2, "vp": 2, "global_batch": 7}, "the microbatches, 7, must be a multiple of pp, 2"),
        ({"global_batch": 1 << 20}, "a step is too long to estimate"),
    ],
)
def test_what_cannot_be_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layout_of(SMALL | change)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layers = 3", "'layers' is no key of a layout file: device, layout"),
        ("device = 'h100-sxm'", r"has no table \[layout\]"),
        ("device = 3\n[layout]", "device is 3"),
        ("[layout]\nlayers = 3", r"\[layout\] lacks hidden, heads, seq, global_batch"),
        ("[layout", "the layout .* is not TOML"),
    ],
)
def test_a_file_that_is_none(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read_layout(written(tmp_path, text))


def test_from_the_command_line(prism: Any, tmp_path: Path) -> None:
    path = written(tmp_path, "[layout]\n" + "\n".join(f"{key} = {value}" for key, value in SMALL.items()))
    code, out, _ = prism("estimate", path, "--device", "a100-sxm", "--set", "layout.dp=2", "--json")
    document = json.loads(out)
    assert code == 0 and document["device"] == "a100-sxm" and document["world_size"] == 2
    code, out, err = prism("estimate", path, "--set", "layout.dp=3", "--json")
    assert code == 1 and "no multiple of micro batch" in json.loads(out)["error"]["message"]
    assert err.startswith("prism: error: the global batch")
