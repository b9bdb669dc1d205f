"""A worker's endpoint over ZeroMQ and shared memory.

Control: a DEALER connected to the orchestrator, its routing id being this endpoint's address.
Data: a PULL bound on ipc and, if asked, another on tcp; a PUSH to every peer that is written to.
receive() blocks in one poller over these sockets and the caller's own descriptors.  Knows what a
message weighs, never what it means, apart from Release.
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import replace
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator

from omnistage.errors import TransportError
from omnistage.transport.addresses import Address, check_address, host_id, unique_name
from omnistage.transport.codec import Frame
from omnistage.transport.exchange import Exchange
from omnistage.transport.keys import ClusterKeys, start_authenticator
from omnistage.transport.messages import ORCHESTRATOR, AnyMessage, Message
from omnistage.transport.shared_memory import FileSegments
from omnistage.transport.slots import MAX_POOL_BYTES, SlotPool
from omnistage.transport.sockets import (
    DRAIN_MESSAGES,
    FLUSH_SECONDS,
    bind_ipc,
    bind_tcp,
    connect,
    open_socket,
    receive_frames,
    send_frames,
    unlink_ipc,
)
from omnistage.types import HostTensor

_MAX_FORGOTTEN = 1024  # addresses are never used again, so old ones may be dropped from memory


class _Peer:
    """A destination.  shares_memory: whether it can open this endpoint's segments."""

    __slots__ = ("shares_memory", "socket")

    def __init__(self, socket: zmq.Socket[bytes], shares_memory: bool) -> None:
        self.socket = socket
        self.shares_memory = shares_memory


class ZmqEndpoint:
    """Implements omnistage.transport.endpoint.Endpoint.

    run_id, name: unique together on a host; they name the shared-memory files.
    control: the hub's address.
    bind: "ipc://DIRECTORY" (the socket is made inside), "tcp://HOST:PORT" (0: any free port), or
    both with a comma between, the first for peers on this host and the second for others.
    advertise: the host name others reach the tcp port by, where it differs.
    key_file: of ClusterKeys, for everything tcp.
    shared_memory: bytes of the pool; 0: tensors go and come as frames.
    host: overrides host_id(), to be treated as another host.
    Raises TransportError if a socket cannot be bound or an address is too long.
    """

    def __init__(
        self,
        *,
        name: str,
        run_id: str,
        control: str,
        bind: str,
        advertise: str | None = None,
        key_file: str | Path | None = None,
        shared_memory: int = MAX_POOL_BYTES,
        host: str | None = None,
    ) -> None:
        store = FileSegments(run_id=run_id, worker=name)
        self._keys = None if key_file is None else ClusterKeys.load(Path(key_file))
        self._host = host_id() if host is None else host
        self._has_shared_memory = shared_memory > 0
        self._sources: list[zmq.Socket[bytes]] = []  # control first
        self._peers: dict[str, _Peer] = {}
        self._forgotten: dict[str, None] = {}  # in order of death
        self._inbox: deque[list[Frame]] = deque()
        self._poller = zmq.Poller()
        self._authenticator: ThreadAuthenticator | None = None
        self._ipc: str | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._address = self._listen(unique_name(name), bind, advertise)
            self._connect_control(control)
        except BaseException:
            self._close_sockets(linger=0.0)
            raise
        pool = SlotPool(store, max_bytes=shared_memory) if self._has_shared_memory else None
        self._exchange = Exchange(self._address, store=store, pool=pool)

    def _listen(self, name: str, bind: str, advertise: str | None) -> str:
        address = Address(name=name, host=self._host, shares_memory=self._has_shared_memory)
        for url in bind.split(","):
            if url.startswith("ipc:///") and address.ipc is None:
                address = check_address(replace(address, ipc=f"{url.rstrip('/')}/{name}.sock"))
                self._ipc = address.ipc
                bind_ipc(self._add_source(), str(address.ipc))
            elif url.startswith("tcp://") and address.tcp is None:
                if self._keys is not None:
                    self._authenticator = start_authenticator(self._context, self._keys)
                tcp = bind_tcp(self._add_source(), url, advertise=advertise, keys=self._keys)
                address = check_address(replace(address, tcp=tcp))
            else:
                raise TransportError(f"cannot listen on {bind!r}; write ipc:///DIRECTORY or tcp://HOST:PORT")
        return str(address)

    def _connect_control(self, control: str) -> None:
        hub = Address.parse(control)
        socket = open_socket(self._context, zmq.DEALER)
        self._sources.insert(0, socket)
        socket.routing_id = self._address.encode()
        connect(socket, hub.url_from(self._host), self._keys)
        self._poller.register(socket, zmq.POLLIN)
        self._peers[ORCHESTRATOR] = _Peer(socket, self._shares_memory(hub))

    def _add_source(self) -> zmq.Socket[bytes]:
        socket = open_socket(self._context, zmq.PULL)
        self._sources.append(socket)
        self._poller.register(socket, zmq.POLLIN)
        return socket

    def _shares_memory(self, address: Address) -> bool:
        return self._has_shared_memory and address.shares_memory and address.host == self._host

    @property
    def address(self) -> str:
        return self._address

    # --- sending ------------------------------------------------------------------------------

    def send(self, to: str, message: Message) -> None:
        peer = self._peers.get(to)
        if peer is None:
            if to in self._forgotten:
                self._exchange.count_discarded()
                return
            peer = self._open_peer(to)
        frames = self._exchange.encode(message, holder=to, shares_memory=peer.shares_memory)
        try:
            send_frames(peer.socket, frames)
        except zmq.ZMQError as error:
            self._exchange.undo(to)
            raise TransportError(f"cannot send {type(message).__name__} to {to}: {error}") from error

    def _open_peer(self, to: str) -> _Peer:
        address = Address.parse(to)
        url = address.url_from(self._host)
        socket = open_socket(self._context, zmq.PUSH)
        try:
            connect(socket, url, self._keys)
        except TransportError:
            socket.close()
            raise
        peer = self._peers[to] = _Peer(socket, self._shares_memory(address))
        return peer

    def share(self, tensor: HostTensor) -> HostTensor:
        return self._exchange.share(tensor)

    def unshare(self, tensor: HostTensor) -> None:
        self._exchange.unshare(tensor)

    # --- receiving ----------------------------------------------------------------------------

    def receive(self, timeout: float | None = None) -> AnyMessage | None:
        self._send_releases()
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            while self._inbox or self._drain():
                message = self._exchange.decode(self._inbox.popleft())
                if message is not None:
                    return message
            wait = None if deadline is None else max(0.0, deadline - time.monotonic())
            events = self._poller.poll(None if wait is None else math.ceil(wait * 1000))
            if not any(source in self._sources for source, _ in events):
                return None

    def _drain(self) -> bool:
        """Fetch what waits on every socket, the orchestrator's first; False if nothing does."""
        for socket in self._sources:
            for _ in range(DRAIN_MESSAGES):
                frames = receive_frames(socket)
                if frames is None:
                    break
                self._inbox.append(frames)
        return bool(self._inbox)

    def release(self, message: Message) -> None:
        if self._exchange.release(message):
            self._send_releases()

    def _send_releases(self) -> None:
        for owner, release in self._exchange.take_releases().items():
            self.send(owner, release)

    def add_wakeup(self, descriptor: int) -> None:
        self._poller.register(descriptor, zmq.POLLIN | zmq.POLLERR)

    def remove_wakeup(self, descriptor: int) -> None:
        self._poller.unregister(descriptor)

    # --- peers and end ------------------------------------------------------------------------

    def forget(self, address: str) -> None:
        peer = self._peers.pop(address, None)
        if peer is not None:
            peer.socket.close(linger=0)
        self._exchange.forget(address)
        self._forgotten[address] = None
        while len(self._forgotten) > _MAX_FORGOTTEN:
            del self._forgotten[next(iter(self._forgotten))]

    def close(self) -> None:
        if self._context.closed:
            return
        self._send_releases()
        self._inbox.clear()
        self._close_sockets(linger=FLUSH_SECONDS)
        self._exchange.close()

    def _close_sockets(self, linger: float) -> None:
        for socket in [*self._sources, *(peer.socket for peer in self._peers.values())]:
            socket.close(linger=int(linger * 1000))
        self._sources.clear()
        self._peers.clear()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
        unlink_ipc(self._ipc)

    def stats(self) -> dict[str, float]:
        return self._exchange.stats()
