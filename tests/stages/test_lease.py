"""Turns on a shared device: order, exclusion, and what happens when somebody dies."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnistage.stages import lease as lease_module
from omnistage.stages.lease import (
    BrokerLease,
    DeviceLease,
    LeaseGroup,
    ThreadLease,
    start_broker,
    stop_broker,
)
from omnistage.stages.lease_broker import STARVATION_SECONDS, Broker, TurnQueue, Waiting

PATIENCE = 30.0  # seconds until a test that hangs fails

MakeLease = Callable[[str], DeviceLease]


class BrokerThread:
    """A broker inside this process."""

    def __init__(self, path: str) -> None:
        lifeline, self._other_end = os.pipe()
        broker = Broker(path, lifeline=lifeline)

        def serve() -> None:
            broker.serve()
            os.close(lifeline)

        self._thread = threading.Thread(target=serve)
        self._thread.start()

    def stop(self) -> None:
        if self._other_end >= 0:
            os.close(self._other_end)
            self._other_end = -1
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


@pytest.fixture
def socket_path() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="omnistage-") as folder:  # short: Unix sockets allow 104 bytes
        yield f"{folder}/lease"


@pytest.fixture
def broker(socket_path: str) -> Iterator[BrokerThread]:
    thread = BrokerThread(socket_path)
    yield thread
    thread.stop()


@pytest.fixture(params=["threads", "broker"])
def make_lease(request: pytest.FixtureRequest, socket_path: str) -> Iterator[MakeLease]:
    with contextlib.ExitStack() as stack:
        if request.param == "threads":
            group = LeaseGroup()
            yield lambda name: stack.enter_context(contextlib.closing(ThreadLease(group)))
        else:
            stack.callback(BrokerThread(socket_path).stop)
            yield lambda name: stack.enter_context(contextlib.closing(BrokerLease(socket_path, "cpu", name)))


def wait_for(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < give_up_at, "waited in vain"
        time.sleep(0.001)


def in_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def join(thread: threading.Thread) -> None:
    thread.join(PATIENCE)
    assert not thread.is_alive(), "a stage waits forever for its turn"


# --- the rule -------------------------------------------------------------------------------------


def test_earliest_deadline_goes_first_and_ties_go_by_arrival() -> None:
    turns: TurnQueue[str] = TurnQueue()
    for member, deadline in [
        ("late", 9.0),
        ("tie 1", 3.0),
        ("tie 2", 3.0),
        ("none", math.inf),
        ("soon", 1.0),
    ]:
        turns.request(member, deadline, now=0.0)
    assert turns.waiting == Waiting(deadline=1.0, since=0.0)
    order = []
    while (member := turns.grant(now=0.1)) is not None:
        assert turns.grant(now=0.1) is None, "a second holder"
        order.append(member)
        turns.leave(member)
    assert order == ["soon", "tie 1", "tie 2", "late", "none"]
    assert turns.waiting is None


def test_two_urgent_stages_cannot_starve_a_third() -> None:
    turns: TurnQueue[str] = TurnQueue()
    turns.request("a", 1.0, now=0.0)
    turns.grant(now=0.0)
    turns.request("b", 1.0, now=0.0)
    turns.request("patient", math.inf, now=0.0)
    now, holders = 0.0, ["a"]
    while "patient" not in holders:
        now += 0.02
        assert turns.waiting is not None
        assert turns.waiting.outranks(1.0, now)
        holder = holders[-1]
        turns.leave(holder)
        granted = turns.grant(now)
        assert granted is not None
        turns.request(holder, 1.0, now)
        holders.append(granted)
    assert STARVATION_SECONDS < now < STARVATION_SECONDS + 0.03
    assert holders[:4] == ["a", "b", "a", "b"]


@given(
    st.lists(
        st.tuples(st.sampled_from(["request", "leave"]), st.integers(0, 4), st.integers(0, 3)), max_size=60
    )
)
def test_any_sequence_leaves_one_holder_and_loses_nobody(steps: list[tuple[str, int, int]]) -> None:
    turns: TurnQueue[int] = TurnQueue()
    waiting: dict[int, tuple[float, float]] = {}  # member: deadline, since
    holder: int | None = None
    for now, (action, member, deadline) in enumerate(steps):
        instant = now * STARVATION_SECONDS / 3
        if action == "leave":
            turns.leave(member)
            waiting.pop(member, None)
            holder = None if member == holder else holder
        elif member == holder or member in waiting:
            with pytest.raises(ValueError, match="release it first"):
                turns.request(member, float(deadline), instant)
        else:
            turns.request(member, float(deadline), instant)
            waiting[member] = (float(deadline), instant)
        granted = turns.grant(instant)
        if holder is None and waiting:
            assert granted is not None
            starved = [one for one, (_, since) in waiting.items() if instant - since > STARVATION_SECONDS]
            expected = starved[0] if starved else min(waiting, key=lambda one: waiting[one][0])
            assert granted == expected
            del waiting[granted]
            holder = granted
        else:
            assert granted is None
        assert turns.holder == holder
        if waiting:
            assert turns.waiting == Waiting(
                min(deadline for deadline, _ in waiting.values()), min(since for _, since in waiting.values())
            )
        else:
            assert turns.waiting is None


def test_a_deadline_that_is_not_a_number_is_refused(make_lease: MakeLease) -> None:
    lease = make_lease("a")
    with pytest.raises(ValueError, match="nan"):
        lease.acquire(math.nan)
    lease.acquire(1.0)
    with pytest.raises(ValueError, match="release"):
        lease.acquire(1.0)
    assert lease.is_held


# --- both kinds of lease --------------------------------------------------------------------------


def test_waiters_are_served_by_deadline(make_lease: MakeLease) -> None:
    holder = make_lease("holder")
    holder.acquire(1.0)
    served: list[float] = []
    threads = []
    for deadline in (40.0, 30.0, 20.0, 10.0):

        def work(lease: DeviceLease, deadline: float) -> None:
            lease.acquire(deadline)
            served.append(deadline)
            lease.release()

        lease = make_lease(f"waiter-{deadline:.0f}")
        threads.append(in_thread(lambda lease=lease, deadline=deadline: work(lease, deadline)))
        wait_for(lambda deadline=deadline: holder.should_yield(deadline))
        assert not holder.should_yield(deadline - 1.0), "yields to a later deadline"
    holder.release()
    for thread in threads:
        join(thread)
    assert served == [10.0, 20.0, 30.0, 40.0]
    assert not holder.should_yield(math.inf)


def test_a_patient_stage_gets_its_turn_within_the_starvation_bound(make_lease: MakeLease) -> None:
    busy, patient = make_lease("busy"), make_lease("patient")
    busy.acquire(1.0)
    assert not busy.should_yield(math.inf)
    waits_since = time.monotonic()
    thread = in_thread(lambda: patient.acquire(math.inf))
    wait_for(lambda: busy.should_yield(math.inf))  # a tie: it has arrived
    wait_for(lambda: busy.should_yield(1.0))
    assert time.monotonic() - waits_since >= STARVATION_SECONDS
    busy.release()
    join(thread)
    assert patient.is_held
    assert not busy.is_held


def test_threads_never_hold_the_device_together(make_lease: MakeLease) -> None:
    inside: list[int] = []
    turns_taken = [0] * 8
    errors: list[str] = []

    def work(number: int, lease: DeviceLease) -> None:
        rng = random.Random(number)
        while turns_taken[number] < 60:
            deadline = rng.choice([math.inf, time.monotonic() + rng.random()])
            lease.acquire(deadline)
            while True:  # steps, until asked to yield or idle
                inside.append(number)
                time.sleep(0)  # let others run here
                if inside != [number] or not lease.is_held:
                    errors.append(f"{number} is not alone: {inside}")
                inside.remove(number)
                if lease.should_yield(deadline) or rng.random() < 0.3:
                    break
            turns_taken[number] += 1
            lease.release()

    leases = [make_lease(f"stage-{number}") for number in range(8)]
    for thread in [in_thread(lambda n=n, lease=lease: work(n, lease)) for n, lease in enumerate(leases)]:
        join(thread)
    assert errors == []
    assert turns_taken == [60] * 8
    assert not any(lease.is_held for lease in leases)


def test_closing_a_held_lease_passes_it_on(make_lease: MakeLease) -> None:
    first, second = make_lease("first"), make_lease("second")
    first.acquire(1.0)
    first.close()
    first.close()
    assert not first.is_held
    second.acquire(2.0)
    assert second.is_held


# --- the broker -----------------------------------------------------------------------------------


def test_devices_are_independent(broker: BrokerThread, socket_path: str) -> None:
    cpu, gpu = BrokerLease(socket_path, "cpu", "a"), BrokerLease(socket_path, "cuda:0", "b")
    cpu.acquire(1.0)
    gpu.acquire(1.0)
    assert cpu.is_held
    assert gpu.is_held
    assert not cpu.should_yield(math.inf)
    cpu.close()
    gpu.close()


def test_a_waiter_that_goes_away_is_forgotten(broker: BrokerThread, socket_path: str) -> None:
    holder, other = BrokerLease(socket_path, "cpu", "holder"), BrokerLease(socket_path, "cpu", "other")
    holder.acquire(5.0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as waiter:
        waiter.connect(socket_path)
        waiter.sendall(b"hello cpu waiter\nacqu")
        waiter.sendall(b"ire 1.0\n")
        wait_for(lambda: holder.should_yield(5.0))
    wait_for(lambda: not holder.should_yield(5.0))
    holder.release()
    other.acquire(9.0)  # would hang if the dead waiter had been granted the turn for good
    holder.close()
    other.close()


@pytest.mark.parametrize(
    "nonsense",
    [
        b"acquire 1.0\n",
        b"hello cpu x\nacquire nan\n",
        b"hello cpu x\nacquire soon\n",
        b"hello cpu x\nacquire 1.0\nacquire 1.0\n",
        b"hello cpu x\nhello cpu y\n",
        b"\xff\xfe\n",
        b"x" * 5000,
    ],
)
def test_a_client_that_talks_nonsense_is_disconnected(
    broker: BrokerThread, socket_path: str, nonsense: bytes
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(PATIENCE)
        client.connect(socket_path)
        client.sendall(nonsense)
        with contextlib.suppress(ConnectionResetError):
            while client.recv(100):
                pass
    lease = BrokerLease(socket_path, "cpu", "sane")
    lease.acquire(1.0)
    assert lease.is_held
    lease.close()


def test_a_turn_released_and_wanted_again_in_one_packet_goes_to_the_waiter(
    broker: BrokerThread, socket_path: str
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(PATIENCE)
        client.connect(socket_path)
        client.sendall(b"hello cpu a\nacquire 1.0\n")
        assert client.recv(100) == b"grant\n"
        lease = BrokerLease(socket_path, "cpu", "b")
        thread = in_thread(lambda: lease.acquire(2.0))
        assert client.recv(100).startswith(b"waiting 2.0 ")
        client.sendall(b"release\nacquire 1.0\n")
        join(thread)
        wait_for(lambda: lease.should_yield(1.0))
        lease.close()
        assert client.recv(100) == b"grant\n"


@pytest.mark.parametrize("name", ["", "two words", "x" * 201])
def test_a_name_must_be_one_word(socket_path: str, name: str) -> None:
    with pytest.raises(ValueError, match="one word"):
        BrokerLease(socket_path, "cpu", name)


def test_without_a_broker_stages_work_on_and_find_the_next_one(
    socket_path: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, logger=lease_module.__name__)
    monkeypatch.setattr(lease_module, "RECONNECT_SECONDS", 0.05)
    first_broker = BrokerThread(socket_path)
    holder, waiter = BrokerLease(socket_path, "cpu", "holder"), BrokerLease(socket_path, "cpu", "waiter")
    holder.acquire(1.0)
    thread = in_thread(lambda: waiter.acquire(2.0))
    wait_for(lambda: holder.should_yield(2.0))

    first_broker.stop()
    join(thread)  # the one that waited works as if it were alone
    assert waiter.is_held
    assert holder.is_held
    waiter.release()
    for _ in range(3):
        waiter.acquire(2.0)
        waiter.release()
    wait_for(lambda: holder.should_yield(1.0))  # asks to look for the broker, though nobody waits
    assert holder.is_held
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2, "logged once by each"

    second_broker = BrokerThread(socket_path)
    holder.release()
    holder.acquire(1.0)
    thread = in_thread(lambda: waiter.acquire(2.0))
    wait_for(lambda: holder.should_yield(2.0))
    assert not waiter.is_held, "turns are taken again"
    holder.release()
    join(thread)
    waiter.release()

    second_broker.stop()
    third_broker = BrokerThread(socket_path)
    holder.acquire(1.0)  # an idle stage notices the restart only here
    thread = in_thread(lambda: waiter.acquire(2.0))
    wait_for(lambda: holder.should_yield(2.0))
    holder.close()
    join(thread)
    waiter.close()
    third_broker.stop()
    assert not Path(socket_path).exists()


@pytest.mark.processes
def test_a_killed_holder_releases_and_a_killed_broker_blocks_nobody(socket_path: str) -> None:
    broker = start_broker(socket_path)
    code = (
        "import sys, time\n"
        "from omnistage.stages.lease import BrokerLease\n"
        "lease = BrokerLease(sys.argv[1], 'cpu', 'doomed')\n"
        "lease.acquire(1.0)\n"
        "print('held', 'torch' in sys.modules, flush=True)\n"
        "sys.stdin.read()\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, socket_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held False\n"
        lease, other = BrokerLease(socket_path, "cpu", "heir"), BrokerLease(socket_path, "cpu", "other")
        thread = in_thread(lambda: lease.acquire(2.0))
        holder.kill()
        join(thread)
    assert lease.is_held

    thread = in_thread(lambda: other.acquire(1.0))
    wait_for(lambda: lease.should_yield(2.0))
    broker.kill()
    join(thread)
    assert lease.is_held
    assert other.is_held
    stop_broker(broker)

    # Its socket file is left over; the next one takes its place, and ends with its lifeline.
    assert Path(socket_path).exists()
    broker = start_broker(socket_path)
    for one in (lease, other):
        one.release()
        one.acquire(1.0)
        one.close()
    stop_broker(broker)
    assert broker.returncode == 0
    assert not Path(socket_path).exists()


def test_a_broker_that_cannot_listen_says_so(socket_path: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OSError, match="did not start"):
        start_broker(socket_path + "x" * 200)
    assert "give a short path" in capfd.readouterr().err
