"""What finished ranks leave behind: their recordings, in memory and on disk, so that a collection can be resumed.

Every rank that ends well is written at once to a file of its own in `JOB.prism.parts`: its recording, what it told
others and what its store noted. A collection that was cut short goes on from there if it is the same collection:
program, device, rules and versions are compared. Recordings stay in memory as well, up to a limit; beyond it the files
are read.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import logging
import os
import shutil
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prism_core.errors import ConfigError, SessionError

logger = logging.getLogger(__name__)

MAGIC = b"prism-part-1"
#: What the collection in a folder is.
KEY_NAME = "collection.json"
#: Bytes that an op of a recording takes in memory, about.
OP_BYTES = 96
DEFAULT_MEMORY_BYTES = 1 << 30
#: Peaks that a recording's facts tell.
PEAK_KEYS = ("peak_allocated_bytes", "peak_reserved_bytes", "peak_device_bytes")


@dataclass(frozen=True, slots=True)
class Part:
    """One finished rank.

    Attributes:
        rank: Which.
        batch: Which round of ranks it ran in.
        summoned: Was it run only because others waited for a value of it?
        info: Facts about the recording, as JSON.
        said: What it set in the store for others to see.
        store: What its store decided or missed.
        recording: The stored form of its recording.
    """

    rank: int
    batch: int
    summoned: bool
    info: str
    said: Mapping[bytes, bytes]
    store: list[dict[str, str]]
    recording: bytes

    def to_bytes(self) -> bytes:
        """The file's contents."""
        said = {_text(key): _text(value) for key, value in self.said.items()}
        head = {
            "rank": self.rank, "batch": self.batch, "summoned": self.summoned, "info": self.info, "said": said,
            "store": self.store,
        }  # fmt: skip
        body = json.dumps(head).encode() + b"\n" + self.recording
        return b"%s %08x\n%s" % (MAGIC, zlib.crc32(body), body)

    @classmethod
    def from_bytes(cls, data: bytes) -> Part:
        """Reads a file's contents.

        Raises:
            ValueError: They are damaged, or of another version.
        """
        first, _, body = data.partition(b"\n")
        if not first.startswith(MAGIC + b" "):
            raise ValueError("it is not a rank's part of this version")
        if first != b"%s %08x" % (MAGIC, zlib.crc32(body)):
            raise ValueError("its checksum differs")
        head, _, recording = body.partition(b"\n")
        try:
            fields = json.loads(head)
            fields["said"] = {_bytes(key): _bytes(value) for key, value in fields["said"].items()}
            return cls(recording=recording, **fields)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"its head is damaged: {error}") from error


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


class PartFolder:
    """The files of finished ranks.

    Args:
        path: The folder.
        key: What must be the same for ranks to be of one collection, by name.
        fresh: Forget what is there.

    Raises:
        ConfigError: The folder holds ranks of another collection.
    """

    def __init__(self, path: Path, key: Mapping[str, str], *, fresh: bool = False) -> None:
        self.path = path
        self._key = dict(key)
        if fresh and path.exists():
            shutil.rmtree(path)
        self._check_key()

    def _check_key(self) -> None:
        file = self.path / KEY_NAME
        try:
            known = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return
        except ValueError as error:
            raise ConfigError(f"{file} is damaged ({error}): start over with --fresh") from error
        names = [name for name in sorted({*known, *self._key}) if known.get(name) != self._key.get(name)]
        if names:
            what = ", ".join(f"{name} ({_short(known.get(name))}, now {_short(self._key.get(name))})" for name in names)
            raise ConfigError(
                f"{self.path} holds finished ranks of another collection: {what} differs; start over with --fresh"
            )

    def _file(self, rank: int) -> Path:
        return self.path / f"rank-{rank:06d}.part"

    def write(self, rank: int, data: bytes) -> None:
        """Keeps a finished rank.

        Raises:
            SessionError: It cannot be written; what was written before stays.
        """
        try:
            self.path.mkdir(exist_ok=True)
            if not (self.path / KEY_NAME).exists():
                self._replace(self.path / KEY_NAME, json.dumps(self._key, indent=1).encode())
            self._replace(self._file(rank), data)
        except OSError as error:
            hint = ": make room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
            raise SessionError(
                f"cannot keep the recording of rank {rank} in {self.path}: {error.strerror}{hint}; "
                "finished ranks are kept, and the same command goes on from there"
            ) from error

    def _replace(self, path: Path, data: bytes) -> None:
        draft = path.with_suffix(f".{os.getpid()}.draft")
        try:
            with draft.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)

    def ranks(self) -> list[int]:
        """Finished ranks, ascending."""
        return sorted(int(path.stem.removeprefix("rank-")) for path in self.path.glob("rank-*.part"))

    def read(self, rank: int) -> Part | None:
        """A finished rank; nothing if it has not been finished, or its file is damaged (said in the log)."""
        try:
            part = Part.from_bytes(self._file(rank).read_bytes())
        except FileNotFoundError:
            return None
        except ValueError as error:
            logger.warning("%s is run again: %s", self._file(rank), error)
            return None
        if part.rank != rank:
            logger.warning("%s is run again: it is of rank %d", self._file(rank), part.rank)
            return None
        return part

    def remove(self) -> None:
        """Forgets everything."""
        shutil.rmtree(self.path, ignore_errors=True)


def _short(value: str | None) -> str:
    text = "nothing" if value is None else value
    return text if len(text) <= 60 else text[:57] + "..."


def digest_of(*texts: bytes) -> str:
    """A short name for long texts."""
    state = hashlib.sha256()
    for text in texts:
        state.update(len(text).to_bytes(8, "little") + text)
    return state.hexdigest()[:16]


@dataclass(slots=True)
class KeptRecording:
    """A recording that is in memory or on disk, with what is asked for often.

    Attributes:
        rank: Whose it is.
        num_ops: Ops of its program.
    """

    rank: int
    num_ops: int
    _digest: str
    _untimed_digest: str
    _info: str
    _shelf: RecordingShelf

    def digest(self, *, times: bool = True) -> str:
        """Hash of the program, with or without its durations and host time."""
        return self._digest if times else self._untimed_digest

    def info_json(self) -> str:
        """Facts about it."""
        return self._info

    def recording(self) -> Any:
        """The recording itself."""
        return self._shelf.fetch(self.rank)

    def difference(self, other: KeptRecording, *, times: bool = True) -> str | None:
        """The first difference to another one, in words; durations and host time count or not."""
        difference: str | None = self.recording().difference(other.recording(), times=times)
        return difference

    def distance_ppm(self, other: KeptRecording, *, times: bool = True) -> int | None:
        """How far apart two ranks are that communicate alike, in millionths; none if they do not.

        The larger of what lies between communications (`Recording.distance_ppm`) and of their peaks of memory.
        """
        distance: int | None = self.recording().distance_ppm(other.recording(), times=times)
        return None if distance is None else max(distance, self._peaks_apart_ppm(other))

    def _peaks_apart_ppm(self, other: KeptRecording) -> int:
        mine, theirs = json.loads(self._info), json.loads(other._info)
        peaks: list[tuple[int, int]] = [(mine.get(key) or 0, theirs.get(key) or 0) for key in PEAK_KEYS]
        return max(-(-abs(one - two) * 1_000_000 // max(one, two, 1)) for one, two in peaks)


@dataclass(slots=True)
class RecordingShelf:
    """Recordings in memory, the least used ones only on disk.

    Args:
        folder: Where they are on disk; without one all stay in memory.
        load: Makes a recording of its stored form and facts.
        memory_bytes: How much may be in memory, about.
    """

    folder: PartFolder | None
    load: Callable[[bytes, str], Any]
    memory_bytes: int = DEFAULT_MEMORY_BYTES
    disk_bytes: int = 0
    num_read_again: int = 0
    _in_memory: OrderedDict[int, Any] = field(default_factory=OrderedDict)
    _size: int = 0
    _num_kept: int = 0
    #: The most that was in memory.
    most_memory_bytes: int = 0

    def put(self, recording: Any, part: Callable[[], Part] | None) -> KeptRecording:
        """Keeps a new recording, and writes it where there is a folder and it is not there yet."""
        if self.folder is not None and part is not None:
            data = part().to_bytes()
            self.folder.write(recording.rank, data)
            self.disk_bytes += len(data)
        self._num_kept += 1
        self._remember(recording)
        digests = recording.digest(), recording.digest(times=False)
        return KeptRecording(recording.rank, recording.num_ops, *digests, recording.info_json(), self)

    def take(self, part: Part) -> KeptRecording:
        """Keeps a recording that is on disk."""
        recording = self.load(part.recording, part.info)
        self.disk_bytes += len(part.to_bytes())
        return self.put(recording, None)

    def _remember(self, recording: Any) -> None:
        self._in_memory[recording.rank] = recording
        self._size += recording.num_ops * OP_BYTES
        while self.folder is not None and self._size > self.memory_bytes and len(self._in_memory) > 1:
            _, dropped = self._in_memory.popitem(last=False)
            self._size -= dropped.num_ops * OP_BYTES
        self.most_memory_bytes = max(self.most_memory_bytes, self._size)

    def fetch(self, rank: int) -> Any:
        """A recording, from disk if need be.

        Raises:
            SessionError: It is gone from the disk.
        """
        if rank in self._in_memory:
            self._in_memory.move_to_end(rank)
            return self._in_memory[rank]
        part = None if self.folder is None else self.folder.read(rank)
        if part is None:
            raise SessionError(f"the recording of rank {rank} is gone: something else changed the parts of this job")
        self.num_read_again += 1
        recording = self.load(part.recording, part.info)
        self._remember(recording)
        return recording

    def figures(self) -> dict[str, int]:
        """Sizes, for a summary."""
        return {
            "recordings": self._num_kept,
            "memory_bytes": self.most_memory_bytes,
            "disk_bytes": self.disk_bytes,
            "read_again": self.num_read_again,
        }


def said_by(parts: Iterable[Part]) -> dict[bytes, bytes]:
    """What finished ranks set in the store, the lowest rank last: it prevails."""
    said: dict[bytes, bytes] = {}
    for part in sorted(parts, key=lambda part: -part.rank):
        said |= part.said
    return said
