"""Values that ranks tell each other and that steer a program: flags, sizes, pickled objects.

The emulated device moves no data between ranks, and most peers do not run. A rank that broadcasts or sends a small
integer tensor therefore also publishes its bytes in the launcher's store; a rank that is to receive one asks there and
gets the bytes of that very rank, or of one with the same place in a group made at the same point of the program, or,
where nobody knows them, an error: a program that goes on with stale bytes may well end at once and report success.

Collectives of CPU tensors (gloo) with members that do not run are answered here altogether, as gloo would wait for
them: sums are those of equal contributions, gathered values one's own.

Runs inside the training program and imports nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import functools
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from urllib.parse import quote

#: `host:port` of the launcher's store.
ENV_STORE = "PRISM_STORE"
#: Ranks that run in this session, separated by commas.
ENV_LIVE = "PRISM_LIVE_RANKS"
#: Tensors up to this size steer a program; larger ones are data.
MAX_CONTROL_BYTES = 4096
#: Pickled objects may be larger than that.
MAX_OBJECT_BYTES = 1 << 22
#: All keys of published values begin so (`prism_core.published` reads them).
KEY_PREFIX = "prism/value/"

_SET, _GET, _VALIDATE, _WAIT = 1, 3, 0, 6
_MAGIC = 0x3C85F7CE


class ControlValueError(RuntimeError):
    """A value that another rank should have told is not known."""


class StoreClient:
    """One connection to the launcher's store. Blocks without a timeout: the launcher watches over the run.

    Args:
        address: `host:port`.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)))
        self._socket.settimeout(None)
        self._socket.sendall(struct.pack("<BI", _VALIDATE, _MAGIC))

    def set(self, key: str, value: bytes) -> None:
        """Publishes a value."""
        self._socket.sendall(bytes([_SET]) + _sized(key.encode()) + _sized(value))

    def get(self, key: str) -> bytes:
        """Waits for a value, or for the reason why there is none."""
        name = _sized(key.encode())
        self._socket.sendall(bytes([_WAIT]) + struct.pack("<Q", 1) + name)
        self._receive(1)
        self._socket.sendall(bytes([_GET]) + name)
        (size,) = struct.unpack("<Q", self._receive(8))
        return self._receive(size)

    def _receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = self._socket.recv(size - len(data))
            if not piece:
                raise ControlValueError("prism: the launcher's store is gone")
            data += piece
        return data


def _sized(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


class ControlHook:
    """Wraps the functions of `torch.distributed.distributed_c10d` by which ranks tell each other values.

    Args:
        provide: Writes bytes to an address of the emulated device.
        on_activation: Called before a stage of a pipeline receives what another one computed.
        connect: Makes the connection to the store.
    """

    def __init__(
        self,
        provide: Callable[[int, bytes], None],
        on_activation: Callable[[], object] = lambda: None,
        connect: Callable[[], StoreClient] = lambda: StoreClient(os.environ[ENV_STORE]),
    ) -> None:
        self._provide = provide
        self._on_activation = on_activation
        self._connect = connect
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, ...], int] = {}
        self._local = threading.local()
        self.take_rank()
        self._c10d: Any = None

    def take_rank(self) -> None:
        """Reads from the environment which rank this is, and which others run."""
        self._rank = int(os.environ.get("PRISM_RANK", "0"))
        self._live = {int(rank) for rank in os.environ.get(ENV_LIVE, str(self._rank)).split(",")}

    def install(self, c10d: ModuleType) -> None:
        """Wraps what is there; a program that calls a process group's methods itself goes past this."""
        self._c10d = c10d
        rules: dict[str, Callable[..., Any]] = {
            "broadcast": self._broadcast,
            "scatter": self._scatter,
            "gather": self._gather,
            "send": self._send,
            "isend": self._send,
            "recv": self._recv,
            "irecv": self._recv,
            "all_reduce": self._all_reduce,
            "reduce": self._all_reduce,
            "all_gather": self._all_gather,
            "all_gather_into_tensor": self._all_gather_into_tensor,
            "all_gather_single": self._all_gather_into_tensor,
            "barrier": self._barrier,
        }
        for name, rule in rules.items():
            original = getattr(c10d, name, None)
            if original is not None:
                setattr(c10d, name, self._wrapped(original, rule))
        objects: dict[str, Callable[..., Any]] = {
            "broadcast_object_list": self._broadcast_objects,
            "send_object_list": self._send_objects,
            "recv_object_list": self._recv_objects,
        }
        for name, rule in objects.items():
            original = getattr(c10d, name, None)
            if original is not None:
                setattr(c10d, name, self._wrapped(original, rule))
        batch = getattr(c10d, "batch_isend_irecv", None)
        if batch is not None:
            c10d.batch_isend_irecv = self._as_batch(batch)  # type: ignore[attr-defined]

    def _wrapped(self, original: Callable[..., Any], rule: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return rule(original, args, kwargs)

        return call

    def _as_batch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The messages of a batch go out together: what is received is asked for after all is sent."""

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._local.waiting = []
            try:
                result = original(*args, **kwargs)
                for receive in self._local.waiting:
                    receive()
            finally:
                self._local.waiting = None
            return result

        return call

    # The calls

    def _broadcast(self, original: Any, args: Any, kwargs: Any) -> Any:
        call = _Arguments(args, kwargs, ("tensor", "src", "group", "async_op", "group_src"))
        place = self._place(call["group"])
        tensor = call["tensor"]
        if place is None or not self._is_told(place, tensor):
            return original(*args, **kwargs)
        source = place.global_rank(call["src"], call["group_src"])
        result = self._unless_absent(place, tensor, call["async_op"], lambda: original(*args, **kwargs))
        if not self._tells(tensor):
            return result
        key = self._key(place, "broadcast", source, None)
        if source == self._rank:
            self._publish(key, tensor)
        else:
            self._receive(key, tensor, f"broadcast from rank {source}")
        return result

    def _scatter(self, original: Any, args: Any, kwargs: Any) -> Any:
        call = _Arguments(args, kwargs, ("tensor", "scatter_list", "src", "group", "async_op", "group_src"))
        place = self._place(call["group"])
        tensor = call["tensor"]
        if place is None or not self._is_told(place, tensor):
            return original(*args, **kwargs)
        source = 0 if call["src"] is None and call["group_src"] is None else None
        source = place.global_rank(call["src"] if source is None else source, call["group_src"])
        result = self._unless_absent(place, tensor, call["async_op"], lambda: original(*args, **kwargs))
        if not self._tells(tensor):
            return result
        key = self._key(place, "scatter", source, None)
        if source == self._rank:
            pieces = [self._bytes(piece) for piece in call["scatter_list"]]
            self._store().set(self._requested(key), b"V" + b"".join(pieces))
            self._write(tensor, pieces[place.group_rank])
        else:
            own = place.group_rank * _size(tensor)
            self._receive(key, tensor, f"scatter from rank {source}", offset=own)
        return result

    def _gather(self, original: Any, args: Any, kwargs: Any) -> Any:
        call = _Arguments(args, kwargs, ("tensor", "gather_list", "dst", "group", "async_op", "group_dst"))
        place = self._place(call["group"])
        tensor = call["tensor"]
        if place is None or not (self._is_control(tensor) or _is_integral(tensor)):
            return original(*args, **kwargs)
        result = self._unless_absent(place, tensor, call["async_op"], lambda: original(*args, **kwargs))
        data = self._bytes(tensor)
        for piece in call["gather_list"] or ():
            self._write(piece, data)
        return result

    def _send(self, original: Any, args: Any, kwargs: Any) -> Any:
        call = _Arguments(args, kwargs, ("tensor", "dst", "group", "tag", "group_dst"))
        place = self._place(call["group"])
        tensor = call["tensor"]
        if place is None or not self._is_told(place, tensor):
            return original(*args, **kwargs)
        destination = place.global_rank(call["dst"], call["group_dst"])
        is_async = original.__name__ == "isend"
        result = self._unless_absent(place, tensor, is_async, lambda: original(*args, **kwargs))
        if self._tells(tensor):
            self._publish(self._key(place, "send", self._rank, destination), tensor)
        return result

    def _recv(self, original: Any, args: Any, kwargs: Any) -> Any:
        call = _Arguments(args, kwargs, ("tensor", "src", "group", "tag", "group_src"))
        place = self._place(call["group"])
        tensor = call["tensor"]
        if getattr(tensor, "is_cuda", False) and not _is_integral(tensor):
            self._on_activation()
        if call["src"] is None and call["group_src"] is None:
            return original(*args, **kwargs)
        if place is None or not self._is_told(place, tensor):
            return original(*args, **kwargs)
        source = place.global_rank(call["src"], call["group_src"])
        is_async = original.__name__ == "irecv"
        result = self._unless_absent(place, tensor, is_async, lambda: original(*args, **kwargs), source)
        if not self._tells(tensor):
            return result
        key = self._key(place, "send", source, self._rank)

        def receive() -> None:
            self._receive(key, tensor, f"message from rank {source}")

        waiting = getattr(self._local, "waiting", None)
        if waiting is None:
            receive()
        else:
            waiting.append(receive)
        return result

    # Pickled objects: told as a whole, because their sizes go through kernels that are not run.

    def _broadcast_objects(self, original: Any, args: Any, kwargs: Any) -> Any:
        names = ("object_list", "src", "group", "device", "group_src", "weights_only")
        call = _Arguments(args, kwargs, names)
        place = self._place(call["group"])
        if place is None:
            return original(*args, **kwargs)
        is_default = call["src"] is None and call["group_src"] is None
        source = place.global_rank(0 if is_default else call["src"], call["group_src"])
        key = self._key(place, "objects", source, None)
        if source == self._rank:
            self._tell(key, self._pickled(call))
            with self._inside():
                return original(*args, **kwargs)

        def exchange(tensor: Any) -> None:
            self._c10d.broadcast(tensor, src=source, group=call["group"])

        self._receive_objects(call, key, f"object broadcast from rank {source}", exchange)
        return None

    def _send_objects(self, original: Any, args: Any, kwargs: Any) -> Any:
        call = _Arguments(args, kwargs, ("object_list", "dst", "group", "device", "group_dst"))
        place = self._place(call["group"])
        if place is None:
            return original(*args, **kwargs)
        destination = place.global_rank(call["dst"], call["group_dst"])
        self._tell(self._key(place, "objects-sent", self._rank, destination), self._pickled(call))
        with self._inside():
            return original(*args, **kwargs)

    def _recv_objects(self, original: Any, args: Any, kwargs: Any) -> Any:
        call = _Arguments(args, kwargs, ("object_list", "src", "group", "device", "group_src"))
        place = self._place(call["group"])
        if place is None or (call["src"] is None and call["group_src"] is None):
            return original(*args, **kwargs)
        source = place.global_rank(call["src"], call["group_src"])
        key = self._key(place, "objects-sent", source, self._rank)

        def exchange(tensor: Any) -> None:
            if call["use_batch"]:
                receive = self._c10d.P2POp(self._c10d.irecv, tensor, source, call["group"])
                self._c10d.batch_isend_irecv([receive]).pop().wait()
            else:
                self._c10d.recv(tensor, src=source, group=call["group"])

        self._receive_objects(call, key, f"objects from rank {source}", exchange)
        return source

    def _pickled(self, call: _Arguments) -> list[bytes]:
        """The objects as PyTorch would send them."""
        convert, more = self._c10d._object_to_tensor, [call["weights_only"]] if call["weights_only"] else []
        tensors = [convert(item, "cpu", call["group"], *more)[0] for item in call["object_list"]]
        return [self._bytes(tensor) for tensor in tensors]

    def _tell(self, key: tuple[str, ...], parts: list[bytes]) -> None:
        sizes = struct.pack(f"<{len(parts) + 1}Q", len(parts), *map(len, parts))
        if sum(map(len, parts)) > MAX_OBJECT_BYTES:
            self._store().set(self._requested(key), b"Ethe pickled objects are larger than 4 MiB")
            return
        self._store().set(self._requested(key), b"V" + sizes + b"".join(parts))

    def _receive_objects(
        self, call: _Arguments, key: tuple[str, ...], what: str, exchange: Callable[[Any], None]
    ) -> None:
        """What PyTorch does on the receiving side, with the sizes and bytes that were told."""
        torch = sys.modules["torch"]
        objects = call["object_list"]
        group = self._c10d._get_default_group() if call["group"] is None else call["group"]
        device = call["device"] or self._c10d._get_object_coll_device(group)
        with self._inside():
            sizes_tensor = torch.empty(len(objects), dtype=torch.long, device=device)
            exchange(sizes_tensor)
            torch.sum(sizes_tensor).item()
            data = self._ask(key, what)
            (count,) = struct.unpack_from("<Q", data)
            if count != len(objects):
                raise ControlValueError(f"prism: the {what} has {count} objects, {len(objects)} were expected")
            sizes = struct.unpack_from(f"<{count}Q", data, 8)
            start = 8 + 8 * count
            bytes_tensor = torch.empty(len(data) - start, dtype=torch.uint8, device=device)
            exchange(bytes_tensor)
        self._write(sizes_tensor, struct.pack(f"<{count}q", *sizes))
        self._write(bytes_tensor, data[start:])
        more = [call["weights_only"]] if call["weights_only"] else []
        offset = 0
        for index, size in enumerate(sizes):
            view = bytes_tensor[offset : offset + size]
            objects[index] = self._c10d._tensor_to_object(view, size, group, *more)
            offset += size

    def _tells(self, tensor: Any) -> bool:
        """Tells whether the value of the tensor is told by itself."""
        return self._is_control(tensor) and not getattr(self._local, "inside", False)

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """The calls inside are told already."""
        self._local.inside = True
        try:
            yield
        finally:
            self._local.inside = False

    # CPU tensors with members that do not run. Sums of equal contributions, one's own value from every peer.

    def _all_reduce(self, original: Any, args: Any, kwargs: Any) -> Any:
        names: tuple[str, ...] = ("tensor", "op", "group", "async_op")
        if original.__name__ == "reduce":
            names = ("tensor", "dst", "op", "group", "async_op")
        call = _Arguments(args, kwargs, names)
        tensor = call["tensor"]
        place = self._place(call["group"])
        if place is None or not self._is_absent(place, tensor):
            return original(*args, **kwargs)
        operators = self._c10d.ReduceOp
        operator = operators.SUM if call["op"] is None else call["op"]
        if operator == operators.SUM:
            tensor.mul_(len(place.members))
        elif operator == operators.PRODUCT:
            tensor.pow_(len(place.members))
        return self._done(call["async_op"], tensor)

    def _all_gather(self, original: Any, args: Any, kwargs: Any) -> Any:
        call = _Arguments(args, kwargs, ("tensor_list", "tensor", "group", "async_op"))
        tensor = call["tensor"]
        place = self._place(call["group"])
        if place is None or not self._is_absent(place, tensor):
            return original(*args, **kwargs)
        for piece in call["tensor_list"]:
            piece.copy_(tensor)
        return self._done(call["async_op"], tensor)

    def _all_gather_into_tensor(self, original: Any, args: Any, kwargs: Any) -> Any:
        call = _Arguments(args, kwargs, ("output_tensor", "input_tensor", "group", "async_op"))
        tensor = call["input_tensor"]
        place = self._place(call["group"])
        if place is None or tensor is None or not self._is_absent(place, tensor):
            return original(*args, **kwargs)
        call["output_tensor"].view(-1).view(len(place.members), -1).copy_(tensor.reshape(1, -1))
        return self._done(call["async_op"], tensor)

    def _barrier(self, original: Any, args: Any, kwargs: Any) -> Any:
        call = _Arguments(args, kwargs, ("group", "async_op", "device_ids"))
        place = self._place(call["group"])
        if place is None or place.backends != "gloo" or self._live.issuperset(place.members):
            return original(*args, **kwargs)
        return self._done(call["async_op"], None)

    def _unless_absent(
        self, place: _Place, tensor: Any, is_async: Any, run: Callable[[], Any], answer: Any = None
    ) -> Any:
        """Runs the real call, unless it would wait for ranks that do not run."""
        if self._is_absent(place, tensor):
            return self._done(is_async, tensor) if is_async else answer
        return run()

    def _is_absent(self, place: _Place, tensor: Any) -> bool:
        return tensor.device.type == "cpu" and not self._live.issuperset(place.members)

    def _done(self, is_async: Any, tensor: Any) -> Any:
        if not is_async:
            return None
        torch = sys.modules["torch"]
        future: Any = torch.futures.Future()
        future.set_result([tensor])
        return torch._C._distributed_c10d._create_work_from_future(future)

    # Who and what

    def _place(self, group: Any) -> _Place | None:
        """The group as this rank sees it; `None` if it is not a member, or the call will fail by itself."""
        c10d = self._c10d
        if not c10d.is_initialized():
            return None
        if group is None:
            group = c10d._get_default_group()
        ranks = c10d._world.pg_group_ranks.get(group)
        if ranks is None or self._rank_in(ranks) is None:
            return None
        ordinal = list(c10d._world.pg_map).index(group)
        backends = str(c10d._world.pg_backend_config.get(group, ""))
        kinds = {part.rpartition(":")[2] for part in backends.split(",")}
        name = str(c10d._world.pg_names.get(group, ""))
        return _Place(name, ordinal, ranks, ranks[c10d.get_rank()], kinds.pop() if len(kinds) == 1 else "")

    def _rank_in(self, ranks: dict[int, int]) -> int | None:
        return ranks.get(self._c10d.get_rank())

    def _is_told(self, place: _Place, tensor: Any) -> bool:
        """Tells whether the call is about a value that is told, or needs an answer in place of gloo."""
        return self._is_control(tensor) or self._is_absent(place, tensor)

    def _is_control(self, tensor: Any) -> bool:
        """Small integers and flags steer programs; floating-point numbers do not, as their kernels were not run."""
        return bool(_is_integral(tensor) and tensor.is_contiguous() and 0 < _size(tensor) <= MAX_CONTROL_BYTES)

    def _key(self, place: _Place, kind: str, source: int, destination: int | None) -> tuple[str, ...]:
        """What a value is called: source, group, kind, number among those of its kind, and the place of its source."""
        count = (place.name, kind, str(source), str(destination))
        with self._lock:
            number = self._counts[count] = self._counts.get(count, -1) + 1
        role = [str(place.ordinal), str(len(place.members)), str(place.members[source])]
        if destination is not None:
            role.append(str(place.members[destination]))
        ends = kind if destination is None else f"{kind}-to-{destination}"
        return str(source), quote(place.name, safe=""), ends, str(number), f"{kind}:{':'.join(role)}"

    def _requested(self, key: tuple[str, ...]) -> str:
        return KEY_PREFIX + "/".join((str(self._rank), *key))

    def _store(self) -> StoreClient:
        """A connection of this thread's own: one that waits keeps no other from publishing."""
        client: StoreClient | None = getattr(self._local, "client", None)
        if client is None:
            client = self._local.client = self._connect()
        return client

    def _publish(self, key: tuple[str, ...], tensor: Any) -> None:
        self._store().set(self._requested(key), b"V" + self._bytes(tensor))

    def _ask(self, key: tuple[str, ...], what: str) -> bytes:
        """Waits for what another rank tells."""
        answer = self._store().get(self._requested(key))
        if not answer.startswith(b"V"):
            text = f"prism: the value of the {what} is not known: {answer[1:].decode(errors='replace')}"
            sys.stderr.write(text + "\n")
            raise ControlValueError(text)
        return answer[1:]

    def _receive(self, key: tuple[str, ...], tensor: Any, what: str, offset: int = 0) -> None:
        data = self._ask(key, what)[offset:]
        if len(data) < _size(tensor):
            raise ControlValueError(f"prism: the {what} has {len(data)} bytes, {_size(tensor)} were expected")
        self._write(tensor, data)

    def _bytes(self, tensor: Any) -> bytes:
        """The bytes of a tensor, without a call that takes emulated time: device memory is memory of this process."""
        return ctypes.string_at(tensor.data_ptr(), _size(tensor))

    def _write(self, tensor: Any, data: bytes) -> None:
        data = data[: _size(tensor)]
        if tensor.device.type == "cpu":
            ctypes.memmove(tensor.data_ptr(), data, len(data))
        else:
            self._provide(tensor.data_ptr(), data)


class _Place:
    """A process group and this rank's place in it."""

    def __init__(self, name: str, ordinal: int, members: dict[int, int], group_rank: int, backends: str) -> None:
        self.name = name
        #: Among the groups of this rank, in order of creation.
        self.ordinal = ordinal
        #: Group rank by global rank.
        self.members = members
        self.group_rank = group_rank
        #: The one back end it has, or nothing.
        self.backends = backends

    def global_rank(self, rank: int | None, group_rank: int | None) -> int:
        """The global rank that is meant by one of the two."""
        if rank is not None:
            return rank
        return next(member for member, place in self.members.items() if place == group_rank)


class _Arguments:
    """Arguments of a call by name; those left out are `None`."""

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any], names: Sequence[str]) -> None:
        self._values = dict(zip(names, args, strict=False)) | kwargs

    def __getitem__(self, name: str) -> Any:
        return self._values.get(name)


def _is_integral(tensor: Any) -> bool:
    dtype = getattr(tensor, "dtype", None)
    return dtype is not None and not dtype.is_floating_point and not dtype.is_complex


def _size(tensor: Any) -> int:
    size: int = tensor.numel() * tensor.element_size()
    return size
