"""The right to compute on a device that several stages share.  Knows no torch and no stage kind.

A worker holds the lease while it has work, asks `should_yield` after each step (at most about
20 ms), and releases when idle or asked.  A stage that runs alone thus pays less than a microsecond
per step.  The one with the earliest playback deadline goes first (omnistage.stages.lease_broker
has the rule); a stage without one passes math.inf.

Deadlines are seconds of time.monotonic().  A lease belongs to one thread.
"""

from __future__ import annotations

import contextlib
import logging
import math
import select
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Protocol

from omnistage.stages import lease_broker
from omnistage.stages.lease_broker import TurnQueue, Waiting, decode_waiting

_logger = logging.getLogger(__name__)

RECONNECT_SECONDS = 1.0  # how often a lone stage that never idles looks for the broker again


class DeviceLease(Protocol):
    """A turn on one device."""

    @property
    def is_held(self) -> bool: ...

    def acquire(self, deadline: float) -> None:
        """Block until the device is this stage's.  Raises ValueError if it is already, or for nan."""

    def should_yield(self, deadline: float) -> bool:
        """Whether to release now: one waits with a deadline no later than mine, or for too long.

        Does not block and costs less than a microsecond.  False while the lease is not held.
        """

    def release(self) -> None:
        """Let the next one run; nothing if the lease is not held."""

    def close(self) -> None:
        """Release for good.  May be called twice."""


class LeaseGroup:
    """One device shared by threads of this process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # guards the queue's methods
        self.turns: TurnQueue[ThreadLease] = TurnQueue()


class ThreadLease:
    """A DeviceLease among the threads of one process."""

    def __init__(self, group: LeaseGroup) -> None:
        self._group = group
        self._turn = threading.Semaphore(0)

    @property
    def is_held(self) -> bool:
        return self._group.turns.holder is self

    def acquire(self, deadline: float) -> None:
        turns = self._group.turns
        with self._group.lock:
            now = time.monotonic()
            turns.request(self, deadline, now)
            turns.grant(now)  # a free device goes to this one: nobody else waits for it
        try:
            while not self.is_held:  # a permit may be left over from an interrupted wait
                self._turn.acquire()
        except BaseException:  # an interrupt: nobody would ever release a turn granted now
            self.release()
            raise

    def should_yield(self, deadline: float) -> bool:
        waiting = self._group.turns.waiting
        return waiting is not None and self.is_held and waiting.outranks(deadline, time.monotonic())

    def release(self) -> None:
        with self._group.lock:
            self._group.turns.leave(self)
            granted = self._group.turns.grant(time.monotonic())
        if granted is not None:
            granted._turn.release()

    def close(self) -> None:
        self.release()


class BrokerLease:
    """A DeviceLease among the processes of one host, granted by a broker process.

    device, name: words without white space, for instance "cuda:0" and "thinker"; leases with equal
    devices take turns.  Without a broker the stage works as if it were alone on the device, which is
    slow but never stuck; the loss is logged once, and every later `acquire` looks for the broker again.

    Create it in the process that uses it, and do not fork while it is open: a copy of the socket in
    a child would hide this process's death from the broker.
    """

    def __init__(self, socket_path: str, device: str, name: str) -> None:
        for word in (device, name):
            if len(word.split()) != 1 or len(word) > 200:
                raise ValueError(f"lease name {word!r}: give one word of 1 to 200 characters")
        self._socket_path = socket_path
        self._greeting = f"hello {device} {name}\n".encode()
        self._name = name
        self._connection: socket.socket | None = None
        self._readable = select.poll()
        self._unread = b""
        self._waiting: Waiting | None = None
        self._is_held = False
        self._is_loss_known = False
        self._reconnect_at = 0.0  # time.monotonic(), while held without a broker
        self._connect()

    @property
    def is_held(self) -> bool:
        return self._is_held

    def acquire(self, deadline: float) -> None:
        if self._is_held or math.isnan(deadline):
            raise ValueError(f"acquire({deadline}): release first, and give a time.monotonic() or inf")
        # Twice: the first try may only reveal that the broker was restarted since.
        for _ in range(2):
            if not self._connect():
                break
            if self._wait_for_turn(deadline):
                if self._is_loss_known:
                    self._is_loss_known = False
                    _logger.info("stage %s: the lease broker is back", self._name)
                return
        self._is_held = True
        self._reconnect_at = time.monotonic() + RECONNECT_SECONDS

    def should_yield(self, deadline: float) -> bool:
        """As DeviceLease; without a broker also True once a second, so that `acquire` finds a new one."""
        if self._connection is not None and self._readable.poll(0):
            self._receive()
        if self._connection is None:
            return self._is_held and time.monotonic() >= self._reconnect_at
        return self._waiting is not None and self._waiting.outranks(deadline, time.monotonic())

    def release(self) -> None:
        if self._is_held:
            self._is_held = False
            self._waiting = None
            self._send(b"release\n")

    def close(self) -> None:
        self._is_held = False
        self._disconnect()

    def _wait_for_turn(self, deadline: float) -> bool:
        """False if the broker died meanwhile."""
        try:
            self._send(f"acquire {deadline!r}\n".encode())
            while self._connection is not None and not self._is_held:
                self._receive()
        except BaseException:  # an interrupt: the broker must not grant a turn that nobody takes
            self._disconnect()
            raise
        return self._is_held

    def _connect(self) -> bool:
        if self._connection is not None:
            return True
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(self._socket_path)
            connection.sendall(self._greeting)
        except (FileNotFoundError, ConnectionError):
            connection.close()
            self._note_loss()
            return False
        except BaseException:
            connection.close()
            raise
        self._readable.register(connection, select.POLLIN)
        self._connection = connection
        return True

    def _disconnect(self) -> None:
        self._unread = b""
        self._waiting = None
        if self._connection is not None:
            self._readable.unregister(self._connection)
            self._connection.close()
            self._connection = None

    def _note_loss(self) -> None:
        self._reconnect_at = time.monotonic() + RECONNECT_SECONDS
        if not self._is_loss_known:
            self._is_loss_known = True
            _logger.warning(
                "stage %s: no lease broker at %s; working without turns until it is back",
                self._name,
                self._socket_path,
            )

    def _send(self, line: bytes) -> None:
        if self._connection is not None:
            try:
                self._connection.sendall(line)
            except ConnectionError:
                self._disconnect()
                self._note_loss()

    def _receive(self) -> None:
        """Take in what the broker says; blocks if it says nothing."""
        assert self._connection is not None
        try:
            received = self._connection.recv(4096)
        except ConnectionError:
            received = b""
        if not received:
            self._disconnect()
            self._note_loss()
            return
        *lines, self._unread = (self._unread + received).split(b"\n")
        for line in lines:
            verb, *numbers = line.split()
            self._is_held = self._is_held or verb == b"grant"
            # A line about waiters that crosses a release is about a turn that is over.
            self._waiting = decode_waiting(numbers) if self._is_held else None


def start_broker(socket_path: str) -> subprocess.Popen[bytes]:
    """Start the broker of this host and return once it listens.  It dies with this process.

    Raises OSError if it cannot serve on socket_path; its reason stands on standard error.
    """
    # By file and isolated: neither site-packages nor the package's own __init__ costs start-up time.
    program = str(Path(lease_broker.__file__))
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", program, "--socket", socket_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    is_ready = process.stdout.readline() == b"ready\n"
    process.stdout.close()
    if not is_ready:
        stop_broker(process)
        raise OSError(f"the lease broker did not start on {socket_path!r} (exit code {process.returncode})")
    return process


def stop_broker(process: subprocess.Popen[bytes]) -> None:
    """End the broker by closing its lifeline, and reap it."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    process.wait()
