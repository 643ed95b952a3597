"""The simulator's details as Python has them: traces, fits, pictures, tables, cases."""

from __future__ import annotations

import csv
import random
import xml.etree.ElementTree as ET
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
from prism_core import spare
from prism_core.errors import ConfigError
from test_spare import cli

FAILURES = Path(__file__).parents[3] / "shared/data/tables/failures.csv"
JOB = {"compute_s": 10.0, "all_reduce_s": 1.0, "steps": 300, "save_s": 20.0, "restart_s": 300.0, "checkpoint_steps": 20}


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_ft_01_intervals_of_young_daly_and_the_optimum() -> None:
    rows = [
        (30, 1800, 150, 328.63, 308.94, 309.0, 0.7621), (60, 9000, 300, 1039.23, 999.62, 999.6, 0.8598),
        (120, 9000, 600, 1469.69, 1390.78, 1390.8, 0.7909), (30, 180, 60, 103.92, 84.89, 85.0, 0.3783),
    ]  # fmt: skip
    for save, mtbf, restart, young, daly, exact, efficiency in rows:
        found = spare.intervals(save, restart, mtbf)
        assert found.young_s == pytest.approx(young, abs=0.005)
        assert found.daly_s == pytest.approx(daly, abs=0.005)
        assert found.exact_s == pytest.approx(exact, abs=0.06)
        assert found.efficiency == pytest.approx(efficiency, abs=5e-5)
        assert found.is_young_off == (save == 30 and mtbf == 180)


def test_ft_02_timeouts_fire_from_the_outside_to_the_inside() -> None:
    assert spare.timeouts(120, 200, 300).detection_s == 120
    for inter, intra in ((120, 100), (250, 200)):
        message = rf"intra-replica watchdog \({intra} s\) fires before the inter-replica timeout \({inter} s\)"
        with pytest.raises(ConfigError, match=message):
            spare.timeouts(inter, intra, 300)
    with pytest.raises(ConfigError, match="initialisation"):
        spare.timeouts(120, 200, 150)
    with pytest.raises(ConfigError, match="inter_replica_s is 0"):
        spare.timeouts(0, 200, 300)


def test_observed_failures_strike_when_they_were_observed(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.csv", "time_s,group,cause\n1000,3,gpu\n1000,4,gpu\n2500.5,3,host\n")
    trace = spare.read_trace(path, until_s=20_000)
    assert list(trace.failures) == [(1000, 3), (1000, 4), (2500.5, 3)]
    found = spare.simulate(12, **JOB, policy="checkpoint", trace=trace, seeds=3)  # type: ignore[arg-type]
    assert [run["failures"] for run in found["runs"]] == [3, 3, 3]
    assert [run["restarts"] for run in found["runs"]] == [2, 2, 2]
    assert found["summary"]["beyond_trace"] == 0
    short = spare.simulate(12, **JOB, policy="checkpoint", trace=path, seeds=2)  # type: ignore[arg-type]
    assert short["summary"]["beyond_trace"] == 2
    timed = write(tmp_path / "timed.csv", "time,group\n10min,3\n1h30m,4\n")
    assert list(spare.read_trace(timed).failures) == [(600, 3), (5400, 4)]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("time_s,group\n5,1\n4,2\n", "line 3: 4 is before the failure above it"),
        ("time_s,group\n-1,1\n", "line 2: time_s is '-1': it must be at least 0"),
        ("time_s,group\n5min,1\n", "without a unit"),
        ("time,group\n5min,1\n400,2\n", "line 3: time is '400': it needs a unit"),
        ("time_s,group\n5,x\n", "group is 'x'"),
        ("time_s,group\nnan,1\n", "at least 0"),
        ("time_s\n5\n", "columns group"),
        ("time_s,group\n", "no failure"),
    ],
)
def test_traces_that_are_none_are_refused_by_line(tmp_path: Path, text: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        spare.read_trace(write(tmp_path / "trace.csv", text))


def test_a_trace_of_groups_that_do_not_exist_is_refused() -> None:
    trace = spare.FailureTrace([(10.0, 12)], 100.0)
    with pytest.raises(ConfigError, match="the groups are 0 to 11"):
        spare.simulate(12, **JOB, policy="checkpoint", trace=trace)  # type: ignore[arg-type]
    backwards = spare.FailureTrace([(10.0, 1), (5.0, 2)], 100.0)
    with pytest.raises(ConfigError, match="must not be before"):
        spare.simulate(12, **JOB, policy="checkpoint", trace=backwards)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="at least 8"):
        spare.fit(trace, 13)


def drawn(shape: float, groups: int = 40, until_s: float = 3000.0) -> spare.FailureTrace:
    source, failures = random.Random(1), []
    for group in range(groups):
        time = source.weibullvariate(100.0, shape)
        while time < until_s:
            failures.append((time, group))
            time += source.weibullvariate(100.0, shape)
    return spare.FailureTrace(sorted(failures), until_s)


def test_fits_find_what_was_drawn_and_say_how_good_they_are() -> None:
    clustered = spare.fit(drawn(0.7), 40)
    assert clustered.weibull_shape == pytest.approx(0.7, abs=0.05)
    assert clustered.weibull_scale_s == pytest.approx(100, rel=0.12)
    assert (clustered.best, clustered.is_good) == ("weibull", True)
    assert clustered.exponential_distance > clustered.critical_distance
    plain = spare.fit(drawn(1.0), 40)
    assert plain.group_mtbf_s == pytest.approx(100, rel=0.08)
    assert (plain.best, plain.is_good) == ("exponential", True)
    # Every group fails at the same hour of the day: neither law fits.
    daily = spare.FailureTrace([(float(day * 100 + 50), group) for day in range(20) for group in range(4)], 2000.0)
    assert not spare.fit(daily, 4).is_good
    assert "does NOT fit" in spare.fit(daily, 4).text()


def test_published_failure_counts() -> None:
    if not FAILURES.exists():
        pytest.skip("the shared data folder is not there")
    found = {source.dataset: source for source in spare.failure_table(FAILURES)}
    llama = found["llama3_405b"]
    # 419 interruptions in 54 days of 16,384 GPUs.
    assert llama.gpu_mtbf_s == pytest.approx(54 * 86_400 * 16_384 / 419)
    assert llama.low_s is not None
    assert llama.high_s is not None
    assert llama.low_s < llama.gpu_mtbf_s < llama.high_s
    assert llama.group_mtbf_s(16_384) / 3600 == pytest.approx(3.093, abs=0.001)
    assert next(iter(llama.causes)) == "Faulty GPU"
    rsc = found["meta_rsc"]
    assert any("one rate per GPU does not fit" in note for note in rsc.notes)
    assert found["acme"].gpu_mtbf_s is None
    with pytest.raises(ConfigError, match="does not say how often"):
        found["acme"].group_mtbf_s(8)


def test_details_are_passed_on_and_names_are_checked() -> None:
    common = {**JOB, "system_mtbf_s": 600.0, "r": 3, "seeds": 8}
    plain = spare.simulate(40, **common)["summary"]  # type: ignore[arg-type]
    local = spare.LocalCheckpoints(save_s=0.1, checkpoint_steps=2, restart_s=30, share=1.0)
    quick = spare.simulate(40, **common, local=local)["summary"]  # type: ignore[arg-type]
    assert quick["local_restarts"]["mean"] > 0
    assert quick["relative_time"]["mean"] < plain["relative_time"]["mean"]
    racks = spare.simulate(40, **common, domains=[(4, 20_000.0), (8, 1e6)])["summary"]  # type: ignore[arg-type]
    assert racks["failures"]["mean"] > plain["failures"]["mean"]
    whole = spare.simulate(40, **common, repair_s=60.0)["summary"]  # type: ignore[arg-type]
    assert whole["rejoins"]["mean"] > 0
    assert whole["restarts"]["mean"] < plain["restarts"]["mean"]
    with pytest.raises(ConfigError, match="restart_squared is no argument"):
        spare.simulate(40, **common, restart_squared=1.0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"local\.share is 2"):
        spare.simulate(40, **common, local=spare.LocalCheckpoints(save_s=1, checkpoint_steps=2, restart_s=1, share=2))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"system_mtbf_s": 5.0}, "more often than a step"),
        ({"system_mtbf_s": 15.0, "save_s": 20.0}, "before one checkpoint"),
        ({"system_mtbf_s": 200.0, "restart_s": 300.0}, "before one restart"),
    ],
)
def test_checkpoints_alone_get_nowhere_and_the_plan_says_why(change: dict[str, float], what: str) -> None:
    arguments = {"compute_s": 10.0, "all_reduce_s": 1.0, "steps": 50, "save_s": 2.0, "restart_s": 30.0} | change
    found = spare.plan(60, **arguments, seeds=4, redundancy=(4, 7), placements=["golomb"])  # type: ignore[arg-type]
    alone = next(each for each in found["alternatives"] if each["policy"] == "checkpoint")
    assert alone["simulated"] is None
    assert what in " ".join([alone["no_progress"], *found["warnings"]])


def test_layouts_shrink_when_groups_come_back() -> None:
    layout = spare.Layout(24, 4)
    for group in range(6):
        layout.fail([group])
    assert layout.stacks == 2
    plan = layout.rejoin([0, 1, 2, 3, 4, 5])
    assert (plan.stacks, layout.live) == (1, list(range(24)))
    assert all(shard in layout.computed(by) for shard, by in enumerate(plan.computed_by))
    with pytest.raises(ConfigError, match="has not failed"):
        layout.rejoin([3])


def test_pictures_are_svg_and_need_nothing(tmp_path: Path) -> None:
    rows = spare.frontier(60, save_s=20, restart_s=300, system_mtbf_s=300)
    found = spare.simulate(60, **JOB, system_mtbf_s=300.0, r=4, seeds=2, timeline=True)  # type: ignore[arg-type]
    spans = found["timeline"]
    assert spans[-1]["end_s"] == pytest.approx(found["runs"][0]["total_s"])
    assert all(a["end_s"] == b["start_s"] for a, b in pairwise(spans))
    assert {"train", "save"} <= {span["activity"] for span in spans}
    frontier = spare.frontier_svg({"golomb": [row for row in rows if row["placement"] == "golomb"]})
    timeline = spare.timeline_svg(spans, groups=60)
    for picture in (frontier, timeline):
        assert ET.fromstring(picture).tag.endswith("svg")
    assert len(timeline) < 100_000
    spare.save_timeline(spans, tmp_path / "one.svg", groups=60)
    assert (tmp_path / "one.svg").read_text() == timeline
    for empty in (lambda: spare.frontier_svg({}), lambda: spare.timeline_svg([], groups=2)):
        with pytest.raises(ConfigError, match="nothing to draw"):
            empty()
    with pytest.raises(ConfigError, match=r"end in \.svg or \.png"):
        spare.save_timeline(spans, tmp_path / "one.gif", groups=60)
    if find_spec("matplotlib") is None:
        with pytest.raises(ConfigError, match="matplotlib"):
            spare.save_frontier({"golomb": rows}, tmp_path / "one.png")
    else:
        spare.save_frontier({"golomb": rows}, tmp_path / "one.png")
        assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")


def test_sweeps_are_tables(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    rows = spare.sweep(
        [20, 30], [300.0, 900.0], [60.0], save_s=5.0, redundancy=(2, 3), placements=["golomb"], compute_s=10.0,
        steps=40, seeds=2, progress=lambda done, total: told.append((done, total)),
    )  # fmt: skip
    assert len(rows) == 8
    assert told[-1] == (8, 8)
    assert {"simulated_relative_time_p90", "masked", "band_low"} <= set(rows[0])
    assert spare.write_table(rows, tmp_path / "rows.csv") == 8
    read = list(csv.DictReader((tmp_path / "rows.csv").read_text().splitlines()))
    assert [float(row["relative_time"]) for row in read] == [row["relative_time"] for row in rows]
    if find_spec("pyarrow") is None:
        with pytest.raises(ConfigError, match="pyarrow"):
            spare.write_table(rows, tmp_path / "rows.parquet")
    else:
        assert spare.write_table(rows, tmp_path / "rows.parquet") == 8
    with pytest.raises(ConfigError, match=r"must end in \.csv or \.parquet"):
        spare.write_table(rows, tmp_path / "rows.txt")
    with pytest.raises(ConfigError, match="steps is missing"):
        spare.sweep([20], [300.0], [60.0], save_s=5.0, compute_s=10.0)


def test_published_setups_are_printed_with_the_fair_variant() -> None:
    from prism_core.spare.published import published_text

    rows = spare.published(seeds=3)
    assert [(row["groups"], row["policy"]) for row in rows] == [
        (200, "replication"), (200, "spare"), (600, "replication"), (600, "spare"),
    ]  # fmt: skip
    for row in rows:
        assert row["as_published"]["relative_time"]["mean"] == pytest.approx(
            row["published"]["relative_time"], rel=0.06
        )
        assert row["as_published"]["availability"]["mean"] == pytest.approx(row["published"]["availability"], rel=0.05)
        assert row["as_published"]["restarts"]["mean"] > 0
    fair = [row["fair"]["relative_time"]["mean"] for row in rows]
    assert fair[0] < rows[0]["as_published"]["relative_time"]["mean"]
    assert fair[2] < rows[2]["as_published"]["relative_time"]["mean"]
    text = published_text(rows)
    assert "gain at N 600" in text
    assert "wipe-outs" in text


def test_the_command_line_of_the_simulator(tmp_path: Path) -> None:
    trace = write(
        tmp_path / "trace.csv", "time_s,group\n" + "".join(f"{at * 37},{at * 7 % 40}\n" for at in range(1, 60))
    )
    timeline = tmp_path / "timeline.svg"
    found = cli(
        "simulate", "--groups", "40", "--restart", "60s", "--step", "5s", "--steps", "200", "--checkpoint-steps", "10",
        "--checkpoint", "2s", "-r", "3", "--trace", str(trace), "--repair", "5min", "--rejoin", "3s", "--stall", "1s",
        "--local", "0.5s:2:20s:0.9", "--restart-storms", "--restart-square", "1ms", "--timeline", str(timeline),
        "--seeds", "4",
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert timeline.read_text().startswith("<svg")
    fit = cli("fit", str(trace), "--groups", "40")
    assert "does NOT fit" in fit.stdout or "fits" in fit.stdout
    table = tmp_path / "sweep.csv"
    plot = tmp_path / "sweep.svg"
    sweep = cli(
        "sweep", "--groups", "20", "--groups", "30", "--restart", "60s", "--checkpoint", "5s", "--mtbf-system", "300s",
        "-o", str(table), "--plot", str(plot), "--max-redundancy", "4",
    )  # fmt: skip
    assert sweep.returncode == 0, sweep.stderr
    assert "golomb, groups 30" in plot.read_text()
    assert sweep.stderr.startswith("prism: ")  # no bar where there is no terminal
    wrong = cli(
        "sweep", "--groups", "20", "--restart", "60s", "--checkpoint", "5s", "--mtbf-system", "1h", "-o", "x.txt"
    )
    assert (wrong.returncode, "must end in .csv or .parquet" in wrong.stderr) == (1, True)
    bad = cli(
        "plan", "--groups", "20", "--restart", "60s", "--checkpoint", "5s", "--mtbf-system", "1h", "--domain", "8"
    )
    assert "such as 8:30d" in bad.stderr
