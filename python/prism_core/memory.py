"""What a rank holds on its device: the program's own allocator, and NCCL's buffers, which no allocator of it sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from prism_core.config import device_entry, read_profile
from prism_core.errors import ConfigError
from prism_core.units import byte_count

#: What a number of bytes rests on: recorded exactly, told by the user, computed by the engine's model, or not known.
Basis = Literal["recorded", "given", "modelled", "unknown"]

_MIB, _GIB = 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Memory of one rank, by who took it."""

    #: Peak of the program's allocator, bytes: exact.
    framework_bytes: int
    #: NCCL's buffers, bytes; `None` where they are not known.
    communicator_bytes: int | None
    #: What `communicator_bytes` rests on.
    basis: Basis
    #: Why they are not, or not wholly, known.
    remark: str = ""

    @property
    def total_bytes(self) -> int | None:
        """Both together, without the driver's context; `None` where a part is not known."""
        return None if self.communicator_bytes is None else self.framework_bytes + self.communicator_bytes

    def lines(self) -> list[tuple[str, str]]:
        """The three lines of a report. A total never leaves out what is not known."""
        framework = f"{self.framework_bytes / _GIB:.2f} GiB"
        remark = f" ({self.remark})" if self.remark else ""
        if self.communicator_bytes is None:
            communicators, total = "unknown", f"unknown + {framework}"
        else:
            size = self.communicator_bytes
            communicators = f"{size / _MIB:.0f} MiB ({size / _GIB:.3f} GiB), {self.basis}"
            total = f"{(self.framework_bytes + size) / _GIB:.3f} GiB + context"
        return [
            ("framework peak", f"{framework}, recorded"),
            ("communicator buffers", communicators + remark),
            ("total", total),
        ]


def device_memory(
    framework_bytes: int,
    communicator_sizes: Sequence[int],
    table: Mapping[int, int] | None = None,
    modelled_bytes: int | None = None,
) -> DeviceMemory:
    """Memory of a rank that is in communicators of these sizes.

    `table` has the bytes that a communicator costs by its number of ranks, as measured on the target machine. Without
    it `modelled_bytes` counts, if there is such a number. A communicator of a single rank is not free: only a table
    knows it.
    """
    if table is not None:
        missing = sorted({size for size in communicator_sizes if size not in table})
        if not missing:
            given = sum(table[size] for size in communicator_sizes)
            return DeviceMemory(framework_bytes=framework_bytes, communicator_bytes=given, basis="given")
        remark = f"the table has no communicator of {', '.join(map(str, missing))} ranks"
        return DeviceMemory(framework_bytes=framework_bytes, communicator_bytes=None, basis="unknown", remark=remark)
    if modelled_bytes is None:
        return DeviceMemory(framework_bytes=framework_bytes, communicator_bytes=None, basis="unknown")
    alone = sum(size == 1 for size in communicator_sizes)
    remark = f"without {alone} of a single rank: unknown" if alone else ""
    return DeviceMemory(
        framework_bytes=framework_bytes, communicator_bytes=modelled_bytes, basis="modelled", remark=remark
    )


def card_bytes(text: str | None) -> int | None:
    """Memory of a card: a size such as `80GiB`, or that of a device profile; nothing for nothing."""
    if text is None:
        return None
    if text[:1].isdigit():
        return round(byte_count(text, "--card"))
    size = device_entry(read_profile(text), "memory_bytes")
    if size is None:
        raise ConfigError(f"the profile {text} does not say device.memory_bytes")
    return size
