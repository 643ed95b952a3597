"""What `prism collect` says of how far the iteration time rests on each recording."""

from __future__ import annotations

from prism_core.report import _influence_rows


def entry(rank: int, total_ns: int) -> dict[str, int]:
    return {"rank": rank, "ranks": 4, "stand_in": 0, "total_ns": total_ns}


def test_an_error_bar_is_told_with_what_it_rests_on() -> None:
    influence = {"total_ns": 1000, "left_out": [entry(3, 990), entry(5, 1000)], "alone": 0}
    rows = list(_influence_rows({**influence, "error_ppm": 5000.0, "largest_ppm": 10000.0}))
    assert rows == [("error bar", "0.500 % of the iteration time (at most 1.000 %), 2 recordings left out")]
    rows = list(_influence_rows({**influence, "alone": 2, "error_ppm": 5000.0, "largest_ppm": 10000.0}))
    assert rows[0][1].endswith("2 recordings left out, 2 more are the only ones of their kind")


def test_without_a_second_recording_there_is_none() -> None:
    assert list(_influence_rows(None)) == []
    alone = {"total_ns": 1000, "left_out": [], "alone": 3, "error_ppm": 0.0, "largest_ppm": 0.0}
    assert list(_influence_rows(alone)) == [
        ("error bar", "none: every recording is the only one of its kind (run more ranks: --verify, --ranks all)")
    ]
