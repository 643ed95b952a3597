"""Which GPU a rank gets on a real device, and runs that did not keep time."""

from __future__ import annotations

from pathlib import Path

import pytest
from prism_core import real
from prism_core.collect import collect
from prism_core.config import CollectConfig
from prism_core.environment import ENV_REAL_NCCL, Placement, rank_environment
from prism_core.errors import ConfigError, TimekeepingError


@pytest.mark.parametrize(("chosen", "count"), [("0", 1), ("2,5", 2), ("", 0), ("-1", 0), ("GPU-1234, MIG-1", 2)])
def test_chosen_gpus_are_counted(chosen: str, count: int) -> None:
    assert real.visible_gpus({"CUDA_VISIBLE_DEVICES": chosen}) == count


def test_device_files_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    monkeypatch.setattr(real, "_DEVICE_FILES", tmp_path)
    assert real.visible_gpus({}) == 2


def test_ranks_get_gpus_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert real.assign_gpus([4321, 0, 7]) == {0: 0, 7: 1, 4321: 0}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match="no GPU is visible"):
        real.assign_gpus([0])


def test_a_rank_is_told_its_gpu_the_epoch_and_the_real_nccl() -> None:
    placement = Placement(
        world_size=64, gpus_per_node=8, device="real", socket="/s", store_host="h", store_port=1, epoch_ns=17,
        gpus={13: 1}, real_nccl="/n/libnccl.so.2",
    )  # fmt: skip
    variables = rank_environment(13, placement, [], {"PRISM_HOLD_BLOCKS": "4"})
    assert (variables["LOCAL_RANK"], variables["LOCAL_WORLD_SIZE"], variables["GROUP_RANK"]) == ("1", "8", "1")
    assert (variables["PRISM_EPOCH_NS"], variables["PRISM_HOLD_BLOCKS"]) == ("17", "4")
    assert variables[ENV_REAL_NCCL] == "/n/libnccl.so.2"


def test_what_the_user_says_is_the_real_nccl() -> None:
    assert real.real_nccl({ENV_REAL_NCCL: "/mine.so"}) == "/mine.so"


def test_a_run_that_kept_time_is_none() -> None:
    late = {"rank": 3, "release_errors": {"count": 9, "p50_ns": 10, "p99_ns": 250_000, "max_ns": 300_000}}
    assert real.release_failure([{"rank": 0}, late], 250.0) is None
    failure = real.release_failure([{"rank": 0}, late], 249.0)
    assert isinstance(failure, TimekeepingError)
    assert "rank 3" in str(failure) and "250 us late" in str(failure) and "--max-release-error" in str(failure)


def test_nothing_is_collected_on_a_real_device(tmp_path: Path) -> None:
    config = CollectConfig(command=["true"], output=tmp_path / "job.prism", world_size=8, device="real")
    with pytest.raises(ConfigError, match="emulate --device real"):
        collect(config)
