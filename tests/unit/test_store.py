"""The rendezvous store, asked by a client of our own and by PyTorch's."""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator

import pytest
from prism_core.store import VALIDATION_MAGIC, Command, RendezvousServer
from prism_core.store_state import StoreState, is_nccl_id_key


class FakeAuthority:
    """Answers for NCCL ids as a session does: the id follows from the key alone."""

    def __init__(self) -> None:
        self.seen: list[tuple[bytes, bytes]] = []

    def store_set(self, key: bytes, value: bytes) -> bytes:
        self.seen.append((key, value))
        return b"id of " + key if is_nccl_id_key(key) else value

    def absent_value(self, key: bytes) -> bytes | None:
        return b"id of " + key if is_nccl_id_key(key) else None


class Client:
    """A store client that sends requests byte by byte as the protocol says."""

    def __init__(self, port: int) -> None:
        self.connection = socket.create_connection(("127.0.0.1", port), timeout=60)
        self.connection.sendall(struct.pack("<BI", Command.VALIDATE, VALIDATION_MAGIC))
        OPEN_CLIENTS.append(self)

    def send(self, command: int, *parts: bytes | int) -> None:
        request = bytes([command])
        for part in parts:
            request += struct.pack("<Q", len(part)) + part if isinstance(part, bytes) else struct.pack("<q", part)
        self.connection.sendall(request)

    def receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = self.connection.recv(size - len(data))
            assert piece, "the server closed the connection"
            data += piece
        return data

    def value(self) -> bytes:
        (size,) = struct.unpack("<Q", self.receive(8))
        return self.receive(size)

    def number(self) -> int:
        return int(struct.unpack("<q", self.receive(8))[0])

    def get(self, key: bytes) -> bytes:
        self.send(Command.GET, key)
        return self.value()

    def add(self, key: bytes, amount: int) -> int:
        self.send(Command.ADD, key, amount)
        return self.number()


OPEN_CLIENTS: list[Client] = []


@pytest.fixture(autouse=True)
def close_clients() -> Iterator[None]:
    yield
    while OPEN_CLIENTS:
        OPEN_CLIENTS.pop().connection.close()


@pytest.fixture
def authority() -> FakeAuthority:
    return FakeAuthority()


@pytest.fixture
def server(authority: FakeAuthority) -> Iterator[RendezvousServer]:
    with RendezvousServer(authority, world_size=8192, num_live=2) as running:
        yield running


@pytest.fixture
def client(server: RendezvousServer) -> Client:
    return Client(server.port)


@pytest.mark.parametrize(
    "key",
    [
        b"default_pg/0//cuda//0",
        b"default_pg/0//17//cuda//3",
        b"default_pg/0//4//cuda//2:3",
        b"default_pg/0//cuda//UniqueNCCLID:63",
    ],
)
def test_id_keys_of_absent_ranks_are_answered_at_once(client: Client, key: bytes) -> None:
    client.send(Command.WAIT, 1, b"/" + key)
    assert client.receive(1) == b"\x00"
    assert client.get(b"/" + key) == b"id of " + key


@pytest.mark.parametrize("key", [b"default_pg/0//cuda//timeout_dump", b"default_pg/0//cpu//0", b"cuda_7", b"0"])
def test_other_keys_are_not_ids(key: bytes) -> None:
    assert not is_nccl_id_key(key)


def test_id_of_a_running_root_is_replaced_by_the_canonical_one(client: Client, authority: FakeAuthority) -> None:
    client.send(Command.SET, b"/default_pg/0//cuda//0", b"made by rank 0")
    assert client.get(b"/default_pg/0//cuda//0") == b"id of default_pg/0//cuda//0"
    assert authority.seen == [(b"default_pg/0//cuda//0", b"made by rank 0")]


def test_ping_set_get_and_number_of_keys(client: Client) -> None:
    client.connection.sendall(struct.pack("<BI", Command.PING, 77))
    assert struct.unpack("<I", client.receive(4)) == (77,)
    client.send(Command.SET, b"/a", b"x")
    client.send(Command.GETNUMKEYS)
    assert client.number() == 1
    client.send(Command.DELETE_KEY, b"/a")
    client.send(Command.DELETE_KEY, b"/a")
    assert (client.number(), client.number()) == (1, 0)


def test_compare_set_changes_only_the_expected_value(client: Client) -> None:
    client.send(Command.COMPARE_SET, b"/a", b"nothing yet", b"1")
    assert client.value() == b"nothing yet"
    client.send(Command.COMPARE_SET, b"/a", b"", b"1")
    assert client.value() == b"1"
    client.send(Command.COMPARE_SET, b"/a", b"0", b"2")
    assert client.value() == b"1"
    client.send(Command.COMPARE_SET, b"/a", b"1", b"2")
    assert client.value() == b"2"


def test_append_and_several_keys(client: Client) -> None:
    client.send(Command.APPEND, b"/a", b"x")
    client.send(Command.APPEND, b"/a", b"y")
    client.send(Command.MULTI_SET, 2, b"/b", b"1", b"/c", b"2")
    client.send(Command.MULTI_GET, 3, b"/c", b"/a", b"/b")
    assert [client.value() for _ in range(3)] == [b"2", b"xy", b"1"]
    client.send(Command.LIST_KEYS)
    assert [client.value() for _ in range(client.number())] == [b"/a", b"/b", b"/c"]


def test_queue_keeps_order_and_wakes_a_waiter(client: Client, server: RendezvousServer) -> None:
    other = Client(server.port)
    other.send(Command.WAIT, 1, b"/q")
    client.send(Command.QUEUE_PUSH, b"/q", b"first")
    client.send(Command.QUEUE_PUSH, b"/q", b"second")
    assert other.receive(1) == b"\x00"
    client.send(Command.QUEUE_LEN, b"/q")
    assert client.number() == 2
    client.send(Command.QUEUE_POP, b"/q")
    assert (client.number(), client.value()) == (2, b"first")


def test_wait_ends_when_all_keys_are_set(client: Client, server: RendezvousServer) -> None:
    other = Client(server.port)
    client.send(Command.WAIT, 2, b"/a", b"/b")
    other.send(Command.SET, b"/a", b"1")
    other.send(Command.CHECK, 2, b"/a", b"/b")
    assert other.receive(1) == b"\x01"
    other.send(Command.SET, b"/b", b"1")
    assert client.receive(1) == b"\x00"


def test_a_wait_that_times_out_is_named(client: Client, server: RendezvousServer) -> None:
    client.send(Command.WAIT, 1, b"/only rank 77 sets this")
    client.send(Command.CANCEL_WAIT)
    assert client.receive(1) == b"\x01"
    assert server.notes() == [{"rule": "unanswered", "key": "only rank 77 sets this"}]


def test_store_based_barrier_counts_absent_ranks_as_arrived(client: Client, server: RendezvousServer) -> None:
    key = b"/default_pg/0//store_based_barrier_key:0"
    assert client.add(key, 1) == 1
    client.send(Command.WAIT, 1, key + b":last_worker")
    assert client.receive(1) == b"\x00"
    assert {"rule": "barrier", "key": key[1:].decode() + ":last_worker"} in server.notes()


def test_barrier_command_waits_only_for_running_ranks(client: Client, authority: FakeAuthority) -> None:
    client.send(Command.BARRIER, b"/b", 8192)
    assert client.receive(1) == b"\x00"
    with RendezvousServer(authority, world_size=2, num_live=2) as all_running:
        first, second = Client(all_running.port), Client(all_running.port)
        first.send(Command.BARRIER, b"/b", 2)
        first.connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            first.receive(1)
        first.connection.settimeout(10)
        second.send(Command.BARRIER, b"/b", 2)
        assert first.receive(1) == second.receive(1) == b"\x00"
        assert all_running.notes() == []


def test_polled_counter_reaches_the_world_size(client: Client, server: RendezvousServer) -> None:
    client.add(b"/arrived", 1)
    counts = [client.add(b"/arrived", 0) for _ in range(40)]
    assert counts[0] == 1
    assert counts[-1] == 8192
    assert server.notes() == [{"rule": "polled counter", "key": "arrived"}]


def test_a_value_that_is_no_arrival_counter_never_changes_by_itself(client: Client) -> None:
    client.send(Command.SET, b"/epoch", b"3")
    client.add(b"/tickets", 5)
    assert {client.get(b"/epoch") for _ in range(40)} == {b"3"}
    assert {client.add(b"/tickets", 0) for _ in range(40)} == {5}


def test_requests_may_arrive_in_pieces(client: Client) -> None:
    request = bytes([Command.SET]) + struct.pack("<Q", 2) + b"/k" + struct.pack("<Q", 3) + b"abc"
    for byte in request:
        client.connection.sendall(bytes([byte]))
    assert client.get(b"/k") == b"abc"


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\n\r\n", struct.pack("<BI", 0, 1), struct.pack("<BIB", 0, VALIDATION_MAGIC, 99)],
    ids=["http", "wrong magic", "unknown request"],
)
def test_foreign_clients_are_dropped(server: RendezvousServer, garbage: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(garbage)
        assert connection.recv(1) == b""


def test_an_oversized_key_is_refused(client: Client) -> None:
    client.connection.sendall(bytes([Command.GET]) + struct.pack("<Q", 1 << 40))
    assert client.connection.recv(1) == b""


def test_many_clients_at_once(server: RendezvousServer) -> None:
    def work(index: int) -> None:
        own = Client(server.port)
        for _ in range(50):
            own.add(b"/total", 2)
        own.send(Command.SET, b"/done%d" % index, b"1")
        own.get(b"/done%d" % index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Client(server.port).add(b"/total", 0) == 32 * 50 * 2


def test_ranks_that_run_apart_see_what_others_published(authority: FakeAuthority) -> None:
    published: dict[bytes, bytes] = {}
    with (
        RendezvousServer(authority, 8192, 1, published=published) as first,
        RendezvousServer(authority, 8192, 1, published=published) as second,
    ):
        reader, writer = Client(first.port), Client(second.port)
        reader.send(Command.WAIT, 1, b"/made by rank 0")
        writer.send(Command.SET, b"/made by rank 0", b"bytes")
        assert reader.receive(1) == b"\x00"
        assert reader.get(b"/made by rank 0") == b"bytes"
        writer.add(b"/counter", 1)
        assert reader.add(b"/counter", 1) == 1, "counters are each rank's own"


def test_state_keeps_a_barrier_real_when_all_ranks_run(authority: FakeAuthority) -> None:
    state = StoreState(authority, world_size=2, num_live=2)
    assert state.lookup(b"/store_based_barrier_key:0:last_worker") is None
    assert not state.arrive(b"/b", 2)
    assert state.arrive(b"/b", 2)


TORCH_CLIENT = """
import datetime, sys
from torch.distributed import PrefixStore, TCPStore
timeout = datetime.timedelta(seconds=5)
store = TCPStore("127.0.0.1", int(sys.argv[1]), 8192, is_master=False, timeout=timeout, use_libuv=sys.argv[2] == "uv")
pg = PrefixStore("cuda/", PrefixStore("0/", PrefixStore("default_pg", store)))
assert pg.get("0") == b"id of default_pg/0//cuda//0", pg.get("0")
keys = [f"UniqueNCCLID:{root}" for root in range(64)]
assert pg.multi_get(keys)[63] == b"id of default_pg/0//cuda//UniqueNCCLID:63"
pg.set("7", "made here")
assert pg.get("7") == b"id of default_pg/0//cuda//7"
store.set("plain", "value")
assert store.get("plain") == b"value" and store.check(["plain"]) and not store.check(["other"])
assert store.compare_set("plain", "value", "new") == b"new"
assert store.add("n", 3) == 3 and store.add("n", -1) == 2
store.append("plain", "er"); assert store.get("plain") == b"newer"
store.multi_set(["x", "y"], ["1", "2"]); assert store.multi_get(["y", "x"]) == [b"2", b"1"]
assert store.delete_key("x") and not store.delete_key("x")
assert store.num_keys() > 3
copy = store.clone(); assert copy.get("y") == b"2"
try:
    store.wait(["never"], datetime.timedelta(milliseconds=300))
except Exception as error:
    assert "never" in str(error), error
else:
    raise AssertionError("a key nobody sets was waited for with success")
print("all right")
"""


@pytest.mark.torch
@pytest.mark.parametrize("backend", ["uv", "legacy"])
def test_pytorch_clients_understand_us(server: RendezvousServer, backend: str) -> None:
    if subprocess.run([sys.executable, "-c", "import torch"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this interpreter cannot import torch")
    script = textwrap.dedent(TORCH_CLIENT)
    command = [sys.executable, "-c", script, str(server.port), backend]
    child = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert child.stdout.strip().endswith("all right"), child.stderr
    assert {"rule": "unanswered", "key": "never"} in server.notes()


SIDE_BY_SIDE = """
import datetime, json, sys
import torch.distributed as dist

def attempt(store, name, *arguments):
    try:
        result = getattr(store, name)(*arguments)
    except Exception as error:
        return f"raises {type(error).__name__}"
    return sorted(result) if name == "list_keys" else repr(result)

def play(store):
    short = datetime.timedelta(milliseconds=150)
    queue = [("queue_push", "q", "p1"), ("queue_push", "q", "p2"), ("queue_len", "q"), ("queue_pop", "q", False),
             ("queue_pop", "q"), ("queue_len", "q"), ("queue_pop", "q", False), ("queue_len", "q")]
    calls = [
        ("set", "a", "1"), ("get", "a"), ("set", "a", ""), ("get", "a"), ("set", "a", "xyz"), ("num_keys",),
        ("check", ["a"]), ("check", ["a", "b"]), ("check", []), ("add", "n", 5), ("add", "n", -7), ("add", "n", 0),
        ("get", "n"), ("set", "n", "40"), ("add", "n", 2), ("compare_set", "c", "no", "x"), ("check", ["c"]),
        ("compare_set", "c", "", "first"), ("compare_set", "c", "no", "y"), ("compare_set", "c", "first", "second"),
        ("compare_set", "c", "", "z"), ("get", "c"), ("append", "l", "ab"), ("append", "l", "cd"), ("get", "l"),
        ("append", "c", "!"), ("get", "c"), ("multi_set", ["m1", "m2"], ["one", "two"]), ("multi_get", ["m2", "m1"]),
        ("multi_get", []), ("delete_key", "m1"), ("delete_key", "m1"), ("check", ["m1"]), ("num_keys",),
        ("wait", ["a", "l"]), ("wait", ["nobody"], short), ("check", ["a"]), *queue, *queue, ("queue_len", "none"),
        ("queue_pop", "none", False), ("set_timeout", short), ("queue_pop", "none", True), ("get", "absent"),
        ("multi_get", ["a", "absent"]), ("check", ["q"]), ("queue_push", "q", "again"), ("wait", ["q"], short),
        ("check", ["q"]), ("num_keys",), ("list_keys",), ("barrier", "b", 1), ("set", "k" * 5000, "v" * 300000),
        ("get", "k" * 5000), ("set", "bin", "\\0\\1"), ("get", "bin"), ("delete_key", "q"), ("queue_len", "q"),
    ]
    return [[call[0], attempt(store, *call)] for call in calls] + [["clone", attempt(store.clone(), "get", "bin")]]

minute = datetime.timedelta(seconds=60)
ours = dist.TCPStore("127.0.0.1", int(sys.argv[1]), None, False, minute, wait_for_workers=False)
theirs = dist.TCPStore("127.0.0.1", 0, None, True, minute, wait_for_workers=False)
print(json.dumps([play(ours), play(theirs)]))
"""


@pytest.mark.torch
def test_pytorch_s_own_server_answers_alike(authority: FakeAuthority) -> None:
    """Every operation of PyTorch's client, on this server and on PyTorch's."""
    if subprocess.run([sys.executable, "-c", "import torch"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this interpreter cannot import torch")
    with RendezvousServer(authority, world_size=1, num_live=1) as server:
        command = [sys.executable, "-c", SIDE_BY_SIDE, str(server.port)]
        child = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert child.returncode == 0, child.stderr
    ours, theirs = json.loads(child.stdout.splitlines()[-1])
    assert len(ours) == 73 and ours == theirs
    assert not [answer for _, answer in ours if answer == "raises DistNetworkError"]


def test_a_deleted_key_is_gone_for_other_ranks_too(authority: FakeAuthority) -> None:
    published: dict[bytes, bytes] = {}
    with (
        RendezvousServer(authority, 8, 1, published=published) as first,
        RendezvousServer(authority, 8, 1, published=published) as second,
    ):
        setter, reader = Client(first.port), Client(second.port)
        setter.send(Command.SET, b"k", b"v")
        setter.send(Command.DELETE_KEY, b"k")
        assert setter.number() == 1 and published == {}
        reader.send(Command.CHECK, 1, b"k")
        assert reader.receive(1) == b"\x01"
