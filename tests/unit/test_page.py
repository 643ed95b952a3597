"""The report page: what it says, that it says it safely, and that a browser shows it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import prism_core
import pytest
from prism_core import synthetic
from prism_core.errors import ConfigError
from prism_core.page import gather, gather_job, render

HOSTILE = '</script><img src=x onerror="alert(1)">&'
#: Two stages; the first needs 56 GiB.
STAGES = f"""prism-graph 1
world 4
meta "command" {json.dumps(HOSTILE)}
name {json.dumps(HOSTILE)}
comm 0-3
template "first"
  +0 s0 compute 1000000000 Gemm Default {json.dumps(HOSTILE)}
  +0 s0 alloc 60000000000
  +0 s0 AllReduce c0 Uint8 8000000 Sum
template "second"
  +0 s0 alloc 30000000000
  +0 s0 compute 2000000000 Kernel Modelled {json.dumps(HOSTILE)}
  +0 s0 AllReduce c0 Uint8 8000000 Sum
rank 0-1 template 0 comms 0
rank 2-3 template 1 comms 0
"""

#: What the page says of itself once it is drawn.
PROBE = """
<script>
addEventListener("load", () => {
  const canvas = document.getElementById("map");
  const pixels = new Uint32Array(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.buffer);
  const found = {
    colours: new Set(pixels).size, width: innerWidth, content: document.documentElement.scrollWidth,
    dark: matchMedia("(prefers-color-scheme: dark)").matches, ground: getComputedStyle(document.body).backgroundColor,
  };
  document.body.dataset.probe = JSON.stringify(found);
});
</script>
"""


def stages() -> prism_core.Graph:
    return prism_core.Graph.from_text(STAGES)


@pytest.fixture(scope="module")
def slow_job() -> str:
    """The page of a job with a straggler."""
    job = synthetic.transformer_step(dp=4, tp=4, pp=4, microbatches=8, layers=2)
    return render(gather_job(job, slow={21: 1.2}, title="a job"))


def test_a_page_says_who_is_late_and_what_changed(slow_job: str) -> None:
    for text in (
        "rank 21 holds up the others", "Before and after", "compute of rank 21 takes 1.2 times as long",
        "Critical path", "Stragglers", "<b>21</b>", "+20.0 %", "4 neighbours", "pairs, 16 apart",
        "What would change it",
    ):  # fmt: skip
        assert text in slow_job, text
    found = json.loads(re.search(r'id="map-data">(.*?)</script>', slow_job, re.S)[1])  # type: ignore[index]
    assert set(found) == {"now", "before"}
    assert sum(count for _, count in found["now"]["map"]["runs"]) == 64
    assert all(len(row) == 2 * found["now"]["map"]["columns"] for row in found["now"]["map"]["rows"])


def test_the_same_content_gives_the_same_bytes() -> None:
    assert render(gather_job(stages())) == render(gather_job(stages()))


def test_a_page_needs_nothing_but_itself_and_runs_nothing_it_was_told(slow_job: str) -> None:
    page = render(gather_job(stages(), perturb=f"# {HOSTILE}", title=HOSTILE))
    assert "<img" not in page and 'onerror="' not in page
    assert "&lt;/script&gt;&lt;img src=x onerror=&quot;alert(1)&quot;&gt;&amp;" in page
    for text in (page, slow_job):
        assert text.count("</script>") == 2
        assert not re.search(r"""(?:src|href)=(?!["']?data:,)|@import|url\(|https?://""", text.replace("src=x", ""))


def test_memory_is_shown_against_the_card() -> None:
    page = render(gather_job(stages()))
    assert "nothing wrong found" not in page, "the stages compute unequally"
    assert "0-1" in page and "56.39 GiB" in page and "71.3 %" in page
    page = render(gather_job(stages(), card_bytes=40 << 30))
    assert 'class="verdict bad"' in page and "55.88 gib" in page.lower()
    assert '<span class="over"' in page


def test_a_job_that_hangs_has_a_page() -> None:
    text = STAGES.replace("  +0 s0 AllReduce c0 Uint8 8000000 Sum\nrank", "rank")
    page = render(gather_job(prism_core.Graph.from_text(text)))
    assert "Why it hangs" in page and "ranks 2-3 ended without the call that ranks 0-1 wait for" in page


def test_a_run_finds_its_graph_or_is_told(prism: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, run = tmp_path / "job.prism", tmp_path / "run"
    stages().save(str(job))
    run.mkdir()
    rank = {
        "rank": 3, "iteration_time_ns": [5_000_000], "peak_allocated_bytes": 1 << 30, "peak_reserved_bytes": 2 << 30,
        "nccl_buffer_bytes": 0, "nccl_init_ns": 0, "communicators": [], "exit_code": 0, "last_op": None,
        "iterations": 1,
        "time_by_provenance": {}, "unsupported": {}, "notes": {},
    }  # fmt: skip
    summary = {
        "world_size": 4, "command": "train.py", "iteration_time_ns": [5_000_000], "ranks": [rank], "notes": ["a note"],
        "ranks_materialised": 2, "ops": 12, "slow": {"1": 2.0}, "perturb": None, "error": None, "store": [],
        "device_time": {"by_provenance": {"modelled": 3}, "by_class": {}},
    }  # fmt: skip
    (run / "summary.json").write_text(json.dumps(summary))
    (run / "timing.json").write_text(json.dumps({"graph": str(job)}))
    page = render(gather(run))
    for text in (
        "Before and after",
        "compute of rank 1 takes 2 times",
        "Sandbox ranks",
        "a note",
        "All ranks over time",
    ):
        assert text in page, text
    (run / "timing.json").write_text("{}")
    assert "--graph JOB.prism" in render(gather(run)) and "Sandbox ranks" in render(gather(run))
    code, out, _ = prism("report", run, "--graph", job, "-o", tmp_path / "page.html")
    assert code == 0 and "iteration time" in out and (tmp_path / "page.html").read_text() == page
    other = tmp_path / "other.prism"
    synthetic.transformer_step(dp=2, tp=1, pp=1, microbatches=1, layers=1).save(str(other))
    code, _, err = prism("report", run, "--graph", other, "-o", tmp_path / "page.html")
    assert code == 1 and "it is not the graph of this run" in err
    code, _, err = prism("report", run, "--slow", "1=2")
    assert code == 1 and "the run is over" in err


def test_a_plan_against_failures_in_a_run_folder_is_shown(tmp_path: Path) -> None:
    plan = prism_core.spare.plan(8, save_s=60, restart_s=300, system_mtbf_s=3600)
    summary = {
        "world_size": 8, "command": "x", "iteration_time_ns": [], "ranks": [], "notes": [], "error": None,
        "device_time": {"by_provenance": {}, "by_class": {}},
    }  # fmt: skip
    for name, document in (("summary", summary), ("timing", {}), ("spare", plan)):
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    assert "Training through failures" in render(gather(tmp_path))
    (tmp_path / "spare.json").write_text("[]")
    with pytest.raises(ConfigError, match="is no plan"):
        gather(tmp_path)


def test_a_graph_is_reported_as_text_json_and_page(prism: Any, tmp_path: Path) -> None:
    job = tmp_path / "job.prism"
    stages().save(str(job))
    code, out, _ = prism("report", job, "-o", tmp_path / "page.html", "--card", "40GiB")
    assert code == 0 and out.startswith("out of memory: rank")
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    code, out, _ = prism("report", job, "--json")
    assert code == 0 and json.loads(out)["memory"]["card_bytes"] == 84_942_979_072
    code, _, err = prism("report", job, "--graph", job)
    assert code == 1 and "--graph is for run folders" in err


def browse(page: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Opens a page in headless Chromium; skips where there is none."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium: apt-get install chromium")
    fixed = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=3000",
             "--enable-logging=stderr", f"--user-data-dir={page.parent / 'profile'}"]  # fmt: skip
    command = [chromium, *fixed, *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_shows_the_page(slow_job: str, tmp_path: Path, width: int, dark: bool) -> None:
    page = tmp_path / "page.html"
    page.write_text(slow_job.replace("</body>", PROBE + "</body>"))
    options = [f"--window-size={width},1600", *(["--force-dark-mode"] if dark else [])]
    shown = browse(page, *options, "--dump-dom")
    assert "CONSOLE" not in shown.stderr, shown.stderr
    found = json.loads(re.search(r'data-probe="(.*?)"', shown.stdout)[1].replace("&quot;", '"'))  # type: ignore[index]
    assert found["colours"] > 20, "the map is drawn"
    assert found["content"] <= found["width"] <= max(width, 500), "nothing sticks out"
    assert found["dark"] == dark and (found["ground"] == "rgb(14, 17, 23)") == dark
    if dark != (width == 390):
        return
    page.write_text(slow_job)
    picture = tmp_path / "page.png"
    browse(page, *options, f"--screenshot={picture}")
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and picture.stat().st_size > 30_000
