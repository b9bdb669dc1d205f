"""Turns on a shared device: who runs next, and the small process that decides it for one host.

Knows deadlines and connections; knows no models, no requests and no ZeroMQ.  Imports the standard
library alone, so that the process is up in a few hundredths of a second:

    python -m omnistage.stages.lease_broker --socket PATH

It prints "ready" once it listens and ends when its standard input does, which is a pipe that its
parent holds open.  It blocks in one selector; nothing is polled.  Every client sends and receives
lines over a Unix stream socket (of the same form on Linux and macOS):

    client to broker    hello DEVICE NAME        once, first
                        acquire DEADLINE         answered by `grant` when its turn comes
                        release
    broker to client    grant [DEADLINE SINCE]   with the numbers if others wait already
                        waiting [DEADLINE SINCE] to the holder, when those who wait change

All times are seconds of time.monotonic(), which the processes of one host share.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import selectors
import signal
import socket
import sys
import time
from typing import Generic, NamedTuple, TypeVar

STARVATION_SECONDS = 0.25  # a waiter older than this goes first, whatever its deadline

_MAX_LINE = 1024  # bytes
_BACKLOG = 128  # connections
_GOODBYE = (ConnectionError, BlockingIOError)

Member = TypeVar("Member")


class Waiting(NamedTuple):
    """What a holder needs to know of those who wait for its device."""

    deadline: float  # the earliest among them
    since: float  # when the one that has waited longest began

    def outranks(self, deadline: float, now: float) -> bool:
        """Whether a holder with this deadline should let go at its next step."""
        return self.deadline <= deadline or now - self.since > STARVATION_SECONDS


class _Waiter(NamedTuple, Generic[Member]):
    member: Member
    deadline: float
    since: float


class TurnQueue(Generic[Member]):
    """One device: at most one holder, and the others ordered by deadline, first come first on ties.

    A waiter past STARVATION_SECONDS overtakes all younger ones, so under overload the order becomes
    first come, first served.  Does no locking; `waiting` is replaced and never changed in place, so a
    thread may read it at any time.
    """

    def __init__(self) -> None:
        self.holder: Member | None = None
        self.waiting: Waiting | None = None
        self._waiters: list[_Waiter[Member]] = []  # by time of arrival

    def request(self, member: Member, deadline: float, now: float) -> None:
        """Queue for a turn; `grant` says whose it is.

        Raises ValueError if the member holds or waits already, or the deadline is not a number.
        """
        if math.isnan(deadline):
            raise ValueError("deadline nan: give a time.monotonic(), or inf for none")
        if member == self.holder or any(waiter.member == member for waiter in self._waiters):
            raise ValueError("acquire on a lease that is held or waited for already: release it first")
        self._waiters.append(_Waiter(member, deadline, now))
        self._update()

    def leave(self, member: Member) -> None:
        """Give up the turn or the place in the queue; nothing if the member has neither."""
        if member == self.holder:
            self.holder = None
        else:
            self._waiters = [waiter for waiter in self._waiters if waiter.member != member]
            self._update()

    def grant(self, now: float) -> Member | None:
        """Give a free device to the next waiter.  Returns the new holder, None if nothing changed."""
        if self.holder is not None or not self._waiters:
            return None
        chosen = self._waiters[0]
        if now - chosen.since <= STARVATION_SECONDS:
            chosen = min(self._waiters, key=lambda waiter: waiter.deadline)
        self._waiters.remove(chosen)
        self._update()
        self.holder = chosen.member
        return chosen.member

    def _update(self) -> None:
        if self._waiters:
            earliest = min(waiter.deadline for waiter in self._waiters)
            self.waiting = Waiting(earliest, self._waiters[0].since)
        else:
            self.waiting = None


def encode_line(verb: str, waiting: Waiting | None) -> bytes:
    numbers = f" {waiting.deadline!r} {waiting.since!r}" if waiting else ""
    return f"{verb}{numbers}\n".encode()


def decode_waiting(words: list[bytes]) -> Waiting | None:
    """The numbers after the verb of a broker's line."""
    return Waiting(float(words[0]), float(words[1])) if words else None


class _Client:
    """One connection.  `told` is what it last heard of those who wait, while it holds its device."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.name = ""
        self.queue: TurnQueue[_Client] | None = None
        self.unread = b""
        self.told: Waiting | None = None

    def tell(self, verb: str, waiting: Waiting | None) -> bool:
        """False if the client is gone, or hangs with thousands of lines unread."""
        line = encode_line(verb, waiting)
        try:
            is_sent = self.connection.send(line) == len(line)
        except _GOODBYE:
            return False
        self.told = waiting
        return is_sent


class Broker:
    """Serves turns on every device of a host.

    path: where the socket appears (in a folder that only its owner may enter); a socket file left
    by a dead broker is replaced.  lifeline: a file descriptor whose end of file ends the broker.
    Clients may connect as soon as the constructor returns.
    """

    def __init__(self, path: str, *, lifeline: int) -> None:
        self._path = path
        self._lifeline = lifeline
        self._queues: dict[str, TurnQueue[_Client]] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(lifeline, selectors.EVENT_READ)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        os.chmod(path, 0o600)
        self._listener.listen(_BACKLOG)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)

    def serve(self) -> None:
        """Grant turns until the lifeline ends, then close everything."""
        try:
            while self._serve_events():
                pass
        finally:
            self._listener.close()  # first: a client that loses its connection must not find it again
            for key in list(self._selector.get_map().values()):
                if isinstance(key.data, _Client):
                    key.data.connection.close()
            self._selector.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)

    def _serve_events(self) -> bool:
        for key, _ in self._selector.select():
            if key.fileobj == self._lifeline:
                if not os.read(self._lifeline, 4096):
                    return False
            elif isinstance(key.data, _Client):
                # An earlier event of this round may have found the client dead already.
                if key.data.connection.fileno() >= 0:
                    self._read(key.data)
            else:
                self._accept()
        return True

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except _GOODBYE:
            return  # it went away before its turn to be accepted
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ, _Client(connection))

    def _read(self, client: _Client) -> None:
        try:
            received = client.connection.recv(4096)
        except BlockingIOError:
            return
        except ConnectionError:
            received = b""
        *lines, client.unread = (client.unread + received).split(b"\n")
        is_valid = bool(received) and len(client.unread) <= _MAX_LINE
        is_valid = is_valid and all(self._obey(client, line.split()) for line in lines)
        if not is_valid:
            self._forget(client)
            if client.queue is not None:
                self._settle(client.queue)

    def _obey(self, client: _Client, words: list[bytes]) -> bool:
        """Act on one line.  False if it makes no sense: such a client is disconnected."""
        match words:
            case [b"hello", device, name] if client.queue is None:
                client.name = name.decode(errors="replace")
                client.queue = self._queues.setdefault(device.decode(errors="replace"), TurnQueue())
            case [b"acquire", deadline] if client.queue is not None:
                try:
                    client.queue.request(client, float(deadline), time.monotonic())
                except ValueError:
                    return False
            case [b"release"] if client.queue is not None:
                client.queue.leave(client)
            case _:
                return False
        # A turn that came free between two lines of one packet goes to whoever waits for it.
        if client.queue is not None:
            self._settle(client.queue)
        return True

    def _settle(self, queue: TurnQueue[_Client]) -> None:
        """Tell the holder, old or new, what has changed; pass the turn on if it is found dead."""
        while True:
            granted = queue.grant(time.monotonic())
            holder = granted or queue.holder
            if holder is None or (granted is None and holder.told == queue.waiting):
                return
            if holder.tell("grant" if granted else "waiting", queue.waiting):
                return
            self._forget(holder)

    def _forget(self, client: _Client) -> None:
        if client.queue is not None:
            client.queue.leave(client)
        if client.connection.fileno() >= 0:
            self._selector.unregister(client.connection)
            client.connection.close()


def main() -> int:
    parser = argparse.ArgumentParser(description="Grants turns to stages that share a device.")
    parser.add_argument("--socket", required=True, help="path of the Unix socket to listen on")
    path: str = parser.parse_args().socket
    # Ctrl-C reaches the whole terminal group: stages still need turns to finish what they drain.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        broker = Broker(path, lifeline=sys.stdin.fileno())
    except OSError as error:
        sys.stderr.write(f"lease broker: cannot serve on {path!r} ({len(path)} bytes): {error}; ")
        sys.stderr.write("give a short path in a folder you own, and a pipe as standard input\n")
        return 2
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    broker.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
