"""Tables as Parquet and pictures as PNG, read back, where pyarrow and matplotlib are (`make test-extras`)."""

from __future__ import annotations

import csv
import importlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from prism_core import spare, synthetic
from prism_core.export import export_timeline
from test_spare import cli

needs_parquet = pytest.mark.skipif(find_spec("pyarrow") is None, reason="needs pyarrow: make test-extras")
needs_plots = pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs matplotlib: make test-extras")


def read_table(path: Path) -> list[dict[str, Any]]:
    """Rows of a Parquet file."""
    return importlib.import_module("pyarrow.parquet").read_table(path).to_pylist()


def pixels(path: Path) -> Any:
    """Red, green, blue and opacity of a picture, 0 to 1, by row and column."""
    return importlib.import_module("matplotlib.image").imread(path)


def share_of(picture: Any, colour: str) -> float:
    """Share of the pixels that have this colour (as #rrggbb), nearly."""
    wanted = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return float((abs(picture[:, :, :3] - wanted).max(axis=2) < 0.02).mean())


@needs_parquet
def test_a_sweep_comes_back_from_parquet_as_it_was(tmp_path: Path) -> None:
    rows = spare.sweep(
        [20, 30], [300.0, 900.0], [60.0], save_s=5.0, redundancy=(2, 3), placements=["golomb"], compute_s=10.0,
        steps=40, seeds=2,
    )  # fmt: skip
    assert spare.write_table(rows, tmp_path / "rows.parquet") == 8
    assert read_table(tmp_path / "rows.parquet") == rows


@needs_parquet
def test_the_command_line_writes_the_same_table_as_csv_and_as_parquet(tmp_path: Path) -> None:
    for name in ("sweep.csv", "sweep.parquet"):
        found = cli(
            "sweep", "--groups", "20", "--groups", "30", "--restart", "60s", "--checkpoint", "5s", "--mtbf-system",
            "300s", "-o", str(tmp_path / name), "--max-redundancy", "4",
        )  # fmt: skip
        assert found.returncode == 0, found.stderr
    parquet = read_table(tmp_path / "sweep.parquet")
    table = list(csv.DictReader((tmp_path / "sweep.csv").read_text().splitlines()))
    assert len(parquet) == len(table) > 8
    assert [{key: str(value) for key, value in row.items()} for row in parquet] == [
        {key: value or "None" for key, value in row.items()} for row in table
    ]


@needs_parquet
def test_a_timeline_is_the_same_as_csv_and_as_parquet(tmp_path: Path) -> None:
    graph = synthetic.transformer_step(2, 2, 2, 4, 2, iterations=2)
    export_timeline(graph, tmp_path / "ops.csv", "csv", ranks=[0, 3])
    export_timeline(graph, tmp_path / "ops.parquet", "parquet", ranks=[0, 3])
    parquet = read_table(tmp_path / "ops.parquet")
    table = list(csv.DictReader((tmp_path / "ops.csv").read_text().splitlines()))
    assert len(parquet) == len(table) > 10
    assert {type(row["start_ns"]) for row in parquet} == {int}
    assert {row["rank"] for row in parquet} == {0, 3}
    assert [{key: "" if value is None else str(value) for key, value in row.items()} for row in parquet] == table


@needs_plots
def test_a_frontier_is_drawn(tmp_path: Path) -> None:
    picture = tmp_path / "frontier.png"
    found = cli(
        "sweep", "--groups", "60", "--restart", "10min", "--checkpoint", "20s", "--mtbf-system", "300s", "-o",
        str(tmp_path / "sweep.csv"), "--plot", str(picture), "--max-redundancy", "8",
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    shown = pixels(picture)
    assert shown.shape[:2] == (675, 1200)
    # Mostly white paper; lines and bands on it.
    assert 0.5 < share_of(shown, "#ffffff") < 0.99


@needs_plots
def test_a_training_is_drawn_with_its_activities_in_their_shares(tmp_path: Path) -> None:
    training = {"activity": "train", "live": 60, "stacks": 1}
    restart = {"activity": "restart", "live": 58, "stacks": 1}
    spans = [{"start_s": 0.0, "end_s": 900.0, **training}, {"start_s": 900.0, "end_s": 1200.0, **restart}]
    spare.save_timeline(spans, tmp_path / "one.png", groups=60)
    shown = pixels(tmp_path / "one.png")
    from prism_core.spare.plots import _ACTIVITIES

    train, other = (share_of(shown, _ACTIVITIES[name]) for name in ("train", "restart"))
    assert train / other == pytest.approx(3, rel=0.05)
    assert train + other > 0.5


@needs_plots
def test_the_command_line_draws_the_timeline_of_a_simulation(tmp_path: Path) -> None:
    picture = tmp_path / "training.png"
    found = cli(
        "simulate", "--groups", "40", "--restart", "60s", "--step", "5s", "--steps", "200", "--checkpoint-steps", "10",
        "--checkpoint", "2s", "-r", "3", "--mtbf-system", "60s", "--timeline", str(picture), "--seeds", "1",
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert share_of(pixels(picture), "#ffffff") < 0.7
