"""Rendezvous for a job most of whose ranks are not running: a server that speaks the protocol of PyTorch's TCPStore.

A program waits in the store for what its peers put there. Peers that are absent put nothing, so the server answers in
their place where the answer follows from the key alone:

* NCCL unique ids (`default_pg/0//cuda//0`, `.../UniqueNCCLID:3`, `.../2:3`) come from the session, which derives them
  from the key; an id set by a running rank is replaced by the same canonical id;
* barriers (`...:last_worker`, `.../last_member`, the BARRIER command, polled counters) count absent ranks as arrived.

Everything else waits as in the original, until the client's own timeout, and is reported by name.

Wire format (little endian; torch/csrc/distributed/c10d/store): one byte of command, then its arguments; a string or a
value is `u64 length` and the bytes, a list is `u64 count` and its items.
"""

from __future__ import annotations

import logging
import selectors
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Self

from prism_core.errors import PrismError
from prism_core.published import PublishedValues
from prism_core.store_state import KeyAuthority, StoreState, key_name

logger = logging.getLogger(__name__)

VALIDATION_MAGIC = 0x3C85F7CE
MAX_KEY_BYTES = 8 * 1024
MAX_VALUE_BYTES = 8 * 1024 * 1024
MAX_KEYS = 128 * 1024
STOP_WAITING = b"\x00"
WAIT_CANCELED = b"\x01"
READY = b"\x00"
NOT_READY = b"\x01"

#: How often to look for values from the stores of other ranks, while somebody waits.
POLL_S = 0.02
#: A wait that is still unanswered after this time is worth a line in the log.
SLOW_WAIT_S = 10.0
#: A counter that is read this often without changing is a barrier somebody polls.
POLLS_THAT_MEAN_BARRIER = 16


class Command(IntEnum):
    """Requests of a store client."""

    VALIDATE = 0
    SET = 1
    COMPARE_SET = 2
    GET = 3
    ADD = 4
    CHECK = 5
    WAIT = 6
    GETNUMKEYS = 7
    DELETE_KEY = 8
    APPEND = 9
    MULTI_GET = 10
    MULTI_SET = 11
    CANCEL_WAIT = 12
    PING = 13
    QUEUE_PUSH = 14
    QUEUE_POP = 15
    QUEUE_LEN = 16
    LIST_KEYS = 17
    BARRIER = 18


class StoreProtocolError(Exception):
    """A client broke the protocol; it is disconnected."""


class _IncompleteError(Exception):
    """The request has not arrived completely."""


class _Reader:
    """Takes arguments off the front of a buffer."""

    def __init__(self, buffer: bytearray) -> None:
        self._buffer = buffer
        self.position = 0

    def _take(self, size: int) -> bytes:
        end = self.position + size
        if end > len(self._buffer):
            raise _IncompleteError
        piece = bytes(self._buffer[self.position : end])
        self.position = end
        return piece

    def u8(self) -> int:
        return self._take(1)[0]

    def u32(self) -> int:
        return int(struct.unpack("<I", self._take(4))[0])

    def u64(self) -> int:
        return int(struct.unpack("<Q", self._take(8))[0])

    def i64(self) -> int:
        return int(struct.unpack("<q", self._take(8))[0])

    def _sized(self, limit: int, what: str) -> bytes:
        size = self.u64()
        if size > limit:
            raise StoreProtocolError(f"a {what} of {size} bytes is longer than {limit}")
        return self._take(size)

    def key(self) -> bytes:
        return self._sized(MAX_KEY_BYTES, "key")

    def value(self) -> bytes:
        return self._sized(MAX_VALUE_BYTES, "value")

    def count(self) -> int:
        count = self.u64()
        if count > MAX_KEYS:
            raise StoreProtocolError(f"a request of {count} keys is longer than {MAX_KEYS}")
        return count

    def key_list(self) -> list[bytes]:
        return [self.key() for _ in range(self.count())]


def _sized(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


@dataclass(slots=True, eq=False)
class _Client:
    connection: socket.socket
    buffer: bytearray = field(default_factory=bytearray)
    validated: bool = False
    awaited: set[bytes] = field(default_factory=set)
    waiting_since: float | None = None
    warned: bool = False
    polled: tuple[bytes, bytes] | None = None
    polls: int = 0


class RendezvousServer:
    """Serves the store on a port of this host from a thread of its own, until `close`.

    Args:
        authority: Gives and replaces NCCL unique ids (a session).
        world_size: Ranks of the target job.
        num_live: How many of them run.
        published: What running ranks set with plain SETs; shared between the stores of ranks that run apart.
        told: Values that ranks told others; shared likewise.
        host: Address to listen on.
    """

    def __init__(
        self,
        authority: KeyAuthority,
        world_size: int,
        num_live: int,
        *,
        published: dict[bytes, bytes] | None = None,
        told: PublishedValues | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self.state = StoreState(authority, world_size, num_live, published, told)
        self._clients: dict[socket.socket, _Client] = {}
        self._waiters: dict[bytes, list[_Client]] = {}
        self._timed_out: Counter[str] = Counter()
        self._listener = socket.create_server((host, 0), backlog=1024)
        self.host = host
        self.port: int = self._listener.getsockname()[1]
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="prism-store", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the thread and every connection. May be called twice."""
        if self._thread.is_alive():
            self._wake_sender.send(b"x")
            self._thread.join()
        self._listener.close()
        self._wake_sender.close()
        self._wake_receiver.close()

    def notes(self) -> list[dict[str, str]]:
        """What the server decided in place of absent ranks, and what it could not: for the summary of a run."""
        made_up = [{"rule": rule, "key": key} for rule, key in sorted(self.state.rules_used)]
        missing = [{"rule": "unanswered", "key": key} for key in sorted({*self._timed_out, *self.unanswered()})]
        return [*made_up, *missing]

    def unanswered(self) -> list[str]:
        """Keys somebody waits for right now."""
        clients = list(self._clients.values())
        return sorted({key_name(key).decode(errors="replace") for client in clients for key in client.awaited.copy()})

    # The thread

    def _serve(self) -> None:
        while True:
            # What is waited for may come from the store of another rank.
            for selected, _ in self._selector.select(timeout=POLL_S if self._waiters else 1.0):
                if selected.fileobj is self._wake_receiver:
                    self._close_all()
                    return
                if selected.fileobj is self._listener:
                    self._accept()
                else:
                    self._receive(self._clients[selected.fileobj])  # type: ignore[index]
            self._look_at_waits()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(30.0)
        self._clients[connection] = _Client(connection)
        self._selector.register(connection, selectors.EVENT_READ)

    def _close_all(self) -> None:
        for client in list(self._clients.values()):
            self._disconnect(client)
        self._selector.close()

    def _disconnect(self, client: _Client) -> None:
        self._timed_out.update(key_name(key).decode(errors="replace") for key in client.awaited)
        self._stop_waiting(client)
        self._selector.unregister(client.connection)
        del self._clients[client.connection]
        client.connection.close()

    def _receive(self, client: _Client) -> None:
        try:
            piece = client.connection.recv(1 << 18)
            if not piece:
                self._disconnect(client)
                return
            client.buffer += piece
            self._handle_requests(client)
        except StoreProtocolError as error:
            logger.warning("rendezvous store: dropped a client: %s", error)
            self._disconnect(client)
        except OSError as error:
            logger.debug("rendezvous store: connection lost: %s", error)
            self._disconnect(client)
        except (PrismError, ValueError) as error:
            logger.error("rendezvous store: a request failed: %s", error)
            self._disconnect(client)

    def _handle_requests(self, client: _Client) -> None:
        while client.buffer:
            reader = _Reader(client.buffer)
            try:
                answer = self._handle(client, reader)
            except _IncompleteError:
                return
            del client.buffer[: reader.position]
            if answer:
                client.connection.sendall(answer)

    def _handle(self, client: _Client, reader: _Reader) -> bytes:
        """Runs one request; the answer is empty where the protocol has none or it comes later."""
        number = reader.u8()
        if not client.validated:
            if number != Command.VALIDATE or reader.u32() != VALIDATION_MAGIC:
                raise StoreProtocolError("it did not introduce itself as a store client")
            client.validated = True
            return b""
        handler = _HANDLERS.get(number)
        if handler is None:
            raise StoreProtocolError(f"request {number} is unknown")
        return handler(self, client, reader)

    # Requests. Each reads all its arguments before it changes anything: an incomplete request is tried again.

    def _ping(self, _client: _Client, reader: _Reader) -> bytes:
        return struct.pack("<I", reader.u32())

    def _set(self, _client: _Client, reader: _Reader) -> bytes:
        self._store(reader.key(), reader.value())
        return b""

    def _compare_set(self, _client: _Client, reader: _Reader) -> bytes:
        key, expected, desired = reader.key(), reader.value(), reader.value()
        result = self.state.compare_set(key, expected, desired)
        self._notify(key)
        return _sized(result)

    def _get(self, client: _Client, reader: _Reader) -> bytes:
        key = reader.key()
        value = self.state.lookup(key) or b""
        if self._is_polled(client, key, value):
            value = str(self.state.complete_counter(key)).encode()
        return _sized(value)

    def _add(self, client: _Client, reader: _Reader) -> bytes:
        key, amount = reader.key(), reader.i64()
        total = self.state.add(key, amount)
        if amount == 0 and self._is_polled(client, key, str(total).encode()):
            total = self.state.complete_counter(key)
        self._notify(key)
        return struct.pack("<q", total)

    def _check(self, _client: _Client, reader: _Reader) -> bytes:
        keys = reader.key_list()
        return READY if all(self.state.is_available(key) for key in keys) else NOT_READY

    def _wait(self, client: _Client, reader: _Reader) -> bytes:
        missing = {key for key in reader.key_list() if not self.state.is_available(key)}
        if not missing:
            return STOP_WAITING
        self._start_waiting(client, missing)
        return b""

    def _num_keys(self, _client: _Client, _reader: _Reader) -> bytes:
        return struct.pack("<q", len(self.state.values))

    def _delete_key(self, _client: _Client, reader: _Reader) -> bytes:
        return struct.pack("<q", int(self.state.delete(reader.key())))

    def _append(self, _client: _Client, reader: _Reader) -> bytes:
        key, value = reader.key(), reader.value()
        self.state.append(key, value)
        self._notify(key)
        return b""

    def _multi_get(self, _client: _Client, reader: _Reader) -> bytes:
        return b"".join(_sized(self.state.lookup(key) or b"") for key in reader.key_list())

    def _multi_set(self, _client: _Client, reader: _Reader) -> bytes:
        for key, value in [(reader.key(), reader.value()) for _ in range(reader.count())]:
            self._store(key, value)
        return b""

    def _cancel_wait(self, client: _Client, _reader: _Reader) -> bytes:
        for key in sorted(client.awaited):
            name = key_name(key).decode(errors="replace")
            self._timed_out[name] += 1
            logger.error("rendezvous store: no running rank set '%s' before the client's timeout", name)
        self._stop_waiting(client)
        return WAIT_CANCELED

    def _queue_push(self, _client: _Client, reader: _Reader) -> bytes:
        key, value = reader.key(), reader.value()
        self.state.queues.setdefault(key, deque()).append(value)
        for client in self._waiters.get(key, [])[:1]:
            self._arrived(client, key)
        return b""

    def _queue_pop(self, _client: _Client, reader: _Reader) -> bytes:
        queue = self.state.queues.setdefault(reader.key(), deque())
        length = struct.pack("<q", len(queue))
        return length + _sized(queue.popleft()) if queue else length

    def _queue_len(self, _client: _Client, reader: _Reader) -> bytes:
        return struct.pack("<q", len(self.state.queues.get(reader.key(), ())))

    def _list_keys(self, _client: _Client, _reader: _Reader) -> bytes:
        keys = sorted(self.state.values)
        return struct.pack("<q", len(keys)) + b"".join(map(_sized, keys))

    def _barrier(self, client: _Client, reader: _Reader) -> bytes:
        key, group_size = reader.key(), reader.i64()
        if self.state.arrive(key, group_size):
            self._notify(key)
            return STOP_WAITING
        self._start_waiting(client, {key})
        return b""

    # Waiting

    def _store(self, key: bytes, value: bytes) -> None:
        self.state.set(key, value)
        self._notify(key)

    def _is_polled(self, client: _Client, key: bytes, value: bytes) -> bool:
        """Tells whether the client reads the same counter over and over."""
        if not self.state.is_arrival_counter(key) or client.polled != (key, value):
            client.polled, client.polls = (key, value), 1
            return False
        client.polls += 1
        return client.polls >= POLLS_THAT_MEAN_BARRIER

    def _start_waiting(self, client: _Client, keys: Iterable[bytes]) -> None:
        client.awaited = set(keys)
        client.waiting_since, client.warned = time.monotonic(), False
        for key in client.awaited:
            self._waiters.setdefault(key, []).append(client)

    def _stop_waiting(self, client: _Client) -> None:
        for key in client.awaited:
            self._waiters[key].remove(client)
            if not self._waiters[key]:
                del self._waiters[key]
        client.awaited, client.waiting_since = set(), None

    def _notify(self, key: bytes) -> None:
        for client in list(self._waiters.get(key, ())):
            self._arrived(client, key)

    def _arrived(self, client: _Client, key: bytes) -> None:
        remaining = client.awaited - {key}
        since, warned = client.waiting_since, client.warned
        self._stop_waiting(client)
        if remaining:
            self._start_waiting(client, remaining)
            client.waiting_since, client.warned = since, warned
            return
        try:
            client.connection.sendall(STOP_WAITING)
        except OSError as error:
            logger.debug("rendezvous store: a waiting client is gone: %s", error)

    def _look_at_waits(self) -> None:
        """Ends waits for what a rank with another store has published, and warns of those that take long."""
        for key in [key for key in self._waiters if self.state.is_published(key)]:
            self._notify(key)
        now = time.monotonic()
        for client in self._clients.values():
            if client.waiting_since is None or client.warned or now - client.waiting_since < SLOW_WAIT_S:
                continue
            client.warned = True
            names = ", ".join(key_name(key).decode(errors="replace") for key in sorted(client.awaited))
            logger.warning("rendezvous store: no running rank set %s within %.0f s", names, SLOW_WAIT_S)


_Handler = Callable[[RendezvousServer, _Client, _Reader], bytes]
_HANDLERS: dict[int, _Handler] = {
    Command.PING: RendezvousServer._ping,
    Command.SET: RendezvousServer._set,
    Command.COMPARE_SET: RendezvousServer._compare_set,
    Command.GET: RendezvousServer._get,
    Command.ADD: RendezvousServer._add,
    Command.CHECK: RendezvousServer._check,
    Command.WAIT: RendezvousServer._wait,
    Command.GETNUMKEYS: RendezvousServer._num_keys,
    Command.DELETE_KEY: RendezvousServer._delete_key,
    Command.APPEND: RendezvousServer._append,
    Command.MULTI_GET: RendezvousServer._multi_get,
    Command.MULTI_SET: RendezvousServer._multi_set,
    Command.CANCEL_WAIT: RendezvousServer._cancel_wait,
    Command.QUEUE_PUSH: RendezvousServer._queue_push,
    Command.QUEUE_POP: RendezvousServer._queue_pop,
    Command.QUEUE_LEN: RendezvousServer._queue_len,
    Command.LIST_KEYS: RendezvousServer._list_keys,
    Command.BARRIER: RendezvousServer._barrier,
}
