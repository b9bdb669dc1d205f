"""The transport inside one process: workers are threads, the orchestrator an event loop.

Messages still pass the codec, and large tensors still travel as slots that must be released, so
that serialisation and leaks are tested without sockets or files.  Tests may also drop, repeat or
hold back messages through MemoryNetwork.intercept.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from omnistage.errors import TransportError
from omnistage.transport.codec import Frame
from omnistage.transport.exchange import Exchange
from omnistage.transport.messages import ORCHESTRATOR, AnyMessage, Message, Release
from omnistage.transport.shared_memory import AnonymousSegments
from omnistage.transport.slots import MAX_POOL_BYTES, SlotPool
from omnistage.types import HostTensor

# (source address, destination address, message) -> what is delivered in its place, in order
Intercept = Callable[[str, str, Message], Iterable[Message]]


class MemoryNetwork:
    """Endpoints that can reach each other.

    intercept: sees every message but Release, in the sender's thread; [] drops it, [m, m] repeats
    it, keeping it and returning it with a later one reorders.
    """

    def __init__(self, *, intercept: Intercept | None = None) -> None:
        self.intercept = intercept
        self.store = AnonymousSegments()
        self._numbers = itertools.count()
        self._inboxes: dict[str, Callable[[str, list[Frame]], None]] = {}
        self._lock = threading.Lock()

    def endpoint(self, name: str, *, max_shared_bytes: int = MAX_POOL_BYTES) -> MemoryEndpoint:
        """A new worker's endpoint; the same name twice gives different addresses."""
        return MemoryEndpoint(self, f"{name}.{next(self._numbers)}@memory", max_shared_bytes)

    def hub(self) -> MemoryHub:
        return MemoryHub(self)

    def register(self, address: str, deliver: Callable[[str, list[Frame]], None]) -> None:
        with self._lock:
            if address in self._inboxes:
                raise TransportError(f"{address} exists already in this network")
            self._inboxes[address] = deliver

    def unregister(self, address: str) -> None:
        with self._lock:
            self._inboxes.pop(address, None)

    def is_registered(self, address: str) -> bool:
        with self._lock:
            return address in self._inboxes

    def intercepted(self, source: str, to: str, message: Message) -> Iterable[Message]:
        if self.intercept is None or isinstance(message, Release):
            return (message,)
        return self.intercept(source, to, message)

    def deliver(self, source: str, to: str, frames: list[Frame]) -> bool:
        """False if nobody is there."""
        with self._lock:
            inbox = self._inboxes.get(to)
            if inbox is not None:
                inbox(source, [bytes(frame) for frame in frames])
        return inbox is not None


class MemoryEndpoint:
    """Implements omnistage.transport.endpoint.Endpoint; made by MemoryNetwork.endpoint()."""

    def __init__(self, network: MemoryNetwork, address: str, max_shared_bytes: int) -> None:
        self._network = network
        self._address = address
        self._exchange = Exchange(
            address, store=network.store, pool=SlotPool(network.store, max_bytes=max_shared_bytes)
        )
        self._forgotten: set[str] = set()
        self._inbox: deque[list[Frame]] = deque()  # filled by other threads
        self._bell, self._bell_button = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poller = select.poll()
        self._poller.register(self._bell, select.POLLIN)
        self._is_closed = False
        network.register(address, self._deliver)

    @property
    def address(self) -> str:
        return self._address

    def _deliver(self, source: str, frames: list[Frame]) -> None:
        """Called by senders, under the network's lock."""
        self._inbox.append(frames)
        with contextlib.suppress(BlockingIOError):  # a full pipe rings as well
            os.write(self._bell_button, b"\0")

    def send(self, to: str, message: Message) -> None:
        for each in self._network.intercepted(self._address, to, message):
            self._send(to, each)

    def _send(self, to: str, message: Message) -> None:
        if to in self._forgotten or not self._network.is_registered(to):
            self._exchange.count_discarded()
            return
        frames = self._exchange.encode(message, holder=to, shares_memory=True)
        if not self._network.deliver(self._address, to, frames):
            self._exchange.undo(to)

    def receive(self, timeout: float | None = None) -> AnyMessage | None:
        self._send_releases()
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            while self._inbox:
                message = self._exchange.decode(self._inbox.popleft())
                if message is not None:
                    return message
            wait = None if deadline is None else max(0.0, deadline - time.monotonic())
            events = self._poller.poll(None if wait is None else wait * 1000)
            if not any(descriptor == self._bell for descriptor, _ in events):
                return None
            with contextlib.suppress(BlockingIOError):
                os.read(self._bell, 65536)

    def release(self, message: Message) -> None:
        if self._exchange.release(message):
            self._send_releases()

    def _send_releases(self) -> None:
        for owner, release in self._exchange.take_releases().items():
            self._send(owner, release)

    def share(self, tensor: HostTensor) -> HostTensor:
        return self._exchange.share(tensor)

    def unshare(self, tensor: HostTensor) -> None:
        self._exchange.unshare(tensor)

    def forget(self, address: str) -> None:
        self._forgotten.add(address)
        self._exchange.forget(address)

    def add_wakeup(self, descriptor: int) -> None:
        self._poller.register(descriptor, select.POLLIN)

    def remove_wakeup(self, descriptor: int) -> None:
        self._poller.unregister(descriptor)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._send_releases()
        self._network.unregister(self._address)
        self._exchange.close()
        os.close(self._bell)
        os.close(self._bell_button)

    def stats(self) -> dict[str, float]:
        return self._exchange.stats()


class MemoryHub:
    """Implements omnistage.transport.endpoint.Hub; made by MemoryNetwork.hub()."""

    def __init__(self, network: MemoryNetwork) -> None:
        self._network = network
        self._exchange = Exchange(ORCHESTRATOR, store=network.store, pool=None)
        self._workers: set[str] = set()
        self._forgotten: set[str] = set()
        self._inbox: deque[tuple[str, list[Frame]]] = deque()  # filled by other threads
        self._readable = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False
        network.register(ORCHESTRATOR, self._deliver)

    @property
    def address(self) -> str:
        return ORCHESTRATOR

    def _deliver(self, source: str, frames: list[Frame]) -> None:
        """Called by senders, under the network's lock."""
        self._inbox.append((source, frames))
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._readable.set)

    async def receive(self) -> tuple[str, AnyMessage]:
        self._loop = asyncio.get_running_loop()
        while True:
            self._readable.clear()
            await asyncio.sleep(0)  # under load, let other tasks run between messages
            while self._inbox:
                source, frames = self._inbox.popleft()
                if source in self._forgotten:
                    self._exchange.count_discarded()
                    continue
                self._workers.add(source)
                message = self._exchange.decode(frames)
                if message is not None:
                    return source, message
            await self._readable.wait()

    def send(self, to: str, message: Message) -> None:
        for each in self._network.intercepted(ORCHESTRATOR, to, message):
            self._send(to, each)

    def _send(self, to: str, message: Message) -> None:
        if to not in self._workers:
            raise TransportError(f"{to} is not connected to the orchestrator; wait for its first message")
        frames = self._exchange.encode(message, holder=to, shares_memory=False)
        if not self._network.deliver(ORCHESTRATOR, to, frames):
            raise TransportError(f"cannot send {type(message).__name__} to {to}: it has closed")

    def release(self, message: Message) -> None:
        self._exchange.release(message)
        for owner, release in self._exchange.take_releases().items():
            if not self._network.deliver(
                ORCHESTRATOR, owner, self._exchange.encode(release, holder=owner, shares_memory=False)
            ):
                self._exchange.count_discarded()

    def forget(self, address: str) -> None:
        self._workers.discard(address)
        self._forgotten.add(address)
        self._exchange.forget(address)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._network.unregister(ORCHESTRATOR)
        self._exchange.close()

    def stats(self) -> dict[str, float]:
        return self._exchange.stats()
