"""The orchestrator's hub over ZeroMQ: one ROUTER on ipc, another on tcp if workers join by it.

Workers are known by their address, which is their routing id.  Works in the running asyncio loop
through the sockets' own descriptors, many messages per wake-up.  Knows no torch and no message
apart from Release.
"""

from __future__ import annotations

import asyncio
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
from omnistage.transport.sockets import (
    DRAIN_MESSAGES,
    FLUSH_SECONDS,
    bind_ipc,
    bind_tcp,
    descriptor_of,
    has_input,
    open_socket,
    receive_frames,
    send_frames,
    unlink_ipc,
)


class ZmqHub:
    """Implements omnistage.transport.endpoint.Hub.

    run_id: the server's name on this host, without '-'.
    run_dir: an existing directory for the ipc socket; its permissions are the only guard.
    listen_tcp: "tcp://HOST:PORT" for workers on other hosts.  advertise: the host name they use.
    key_file: of ClusterKeys, for tcp.  host: overrides host_id().
    Raises TransportError if a socket cannot be bound.
    """

    def __init__(
        self,
        *,
        run_id: str,
        run_dir: Path,
        listen_tcp: str | None = None,
        advertise: str | None = None,
        key_file: str | Path | None = None,
        host: str | None = None,
    ) -> None:
        store = FileSegments(run_id=run_id, worker="orchestrator")
        self._exchange = Exchange(ORCHESTRATOR, store=store, pool=None)
        keys = None if key_file is None else ClusterKeys.load(Path(key_file))
        self._host = host_id() if host is None else host
        self._sockets: list[zmq.Socket[bytes]] = []
        self._workers: dict[str, zmq.Socket[bytes]] = {}  # address -> the socket it writes to
        self._forgotten: set[str] = set()
        self._inbox: deque[tuple[zmq.Socket[bytes], list[Frame]]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._readable = asyncio.Event()
        self._release_is_planned = False
        self._authenticator: ThreadAuthenticator | None = None
        self._ipc: str | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._address = self._listen(run_dir, listen_tcp, advertise, keys)
        except BaseException:
            self._close_sockets(linger=0.0)
            raise

    def _listen(
        self, run_dir: Path, listen_tcp: str | None, advertise: str | None, keys: ClusterKeys | None
    ) -> str:
        name = unique_name("orchestrator")
        url = f"ipc://{run_dir.resolve()}/{name}.sock"
        address = check_address(Address(name=name, host=self._host, ipc=url))
        self._ipc = url
        bind_ipc(self._open_router(), url)
        if listen_tcp is not None:
            if keys is not None:
                self._authenticator = start_authenticator(self._context, keys)
            tcp = bind_tcp(self._open_router(), listen_tcp, advertise=advertise, keys=keys)
            address = check_address(replace(address, tcp=tcp))
        return str(address)

    def _open_router(self) -> zmq.Socket[bytes]:
        socket = open_socket(self._context, zmq.ROUTER)
        socket.router_mandatory = True
        socket.router_handover = True  # a worker that reconnects replaces its broken connection
        self._sockets.append(socket)
        return socket

    @property
    def address(self) -> str:
        return self._address

    # --- receiving ----------------------------------------------------------------------------

    async def receive(self) -> tuple[str, AnyMessage]:
        self._watch()
        while True:
            while self._inbox:
                received = self._take(*self._inbox.popleft())
                if received is not None:
                    return received
            if self._drain():
                await asyncio.sleep(0)  # under load, let other tasks run between batches
                continue
            self._readable.clear()
            if not self._has_input():
                await self._readable.wait()

    def _take(self, socket: zmq.Socket[bytes], frames: list[Frame]) -> tuple[str, AnyMessage] | None:
        sender = bytes(frames[0]).decode(errors="backslashreplace")
        if sender in self._forgotten:
            self._exchange.count_discarded()
            return None
        if sender not in self._workers:
            Address.parse(sender)
        self._workers[sender] = socket
        message = self._exchange.decode(frames[1:])
        return None if message is None else (sender, message)

    def _drain(self) -> bool:
        for socket in self._sockets:
            for _ in range(DRAIN_MESSAGES):
                frames = receive_frames(socket)
                if frames is None:
                    break
                self._inbox.append((socket, frames))
        return bool(self._inbox)

    def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            for socket in self._sockets:
                loop.add_reader(descriptor_of(socket), self._notice)
        elif self._loop is not loop:
            raise TransportError("a hub belongs to the event loop that first received from it")

    def _has_input(self) -> bool:
        return any(has_input(socket) for socket in self._sockets)

    def _notice(self) -> None:
        # A ZeroMQ descriptor signals a change, not a state: any call on the socket may consume the
        # signal, so the state is asked for here and after every send.
        if self._has_input():
            self._readable.set()

    # --- sending ------------------------------------------------------------------------------

    def send(self, to: str, message: Message) -> None:
        socket = self._workers.get(to)
        if socket is None:
            raise TransportError(f"{to} is not connected to the orchestrator; wait for its first message")
        frames = self._exchange.encode(message, holder=to, shares_memory=False)
        try:
            send_frames(socket, [to.encode(), *frames])
        except zmq.ZMQError as error:
            raise TransportError(f"cannot send {type(message).__name__} to {to}: {error}") from error
        finally:
            self._notice()

    def release(self, message: Message) -> None:
        is_due = self._exchange.release(message)
        if is_due or self._loop is None:
            self._send_releases()
        elif not self._release_is_planned:
            self._release_is_planned = True
            self._loop.call_soon(self._send_releases)

    def _send_releases(self) -> None:
        self._release_is_planned = False
        if self._context.closed:
            return
        for owner, release in self._exchange.take_releases().items():
            try:
                self.send(owner, release)
            except TransportError:  # the producer is gone, and its slots with it
                self._exchange.count_discarded()

    # --- peers and end ------------------------------------------------------------------------

    def forget(self, address: str) -> None:
        self._workers.pop(address, None)
        self._forgotten.add(address)
        self._exchange.forget(address)
        known = Address.parse(address)
        if known.host == self._host:
            unlink_ipc(known.ipc)

    def close(self) -> None:
        if self._context.closed:
            return
        self._send_releases()
        if self._loop is not None and not self._loop.is_closed():
            for socket in self._sockets:
                self._loop.remove_reader(descriptor_of(socket))
        self._inbox.clear()
        self._close_sockets(linger=FLUSH_SECONDS)
        self._exchange.close()

    def _close_sockets(self, linger: float) -> None:
        for socket in self._sockets:
            socket.close(linger=int(linger * 1000))
        self._sockets.clear()
        self._workers.clear()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
        unlink_ipc(self._ipc)

    def stats(self) -> dict[str, float]:
        return self._exchange.stats()
