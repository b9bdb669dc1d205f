"""How this package sets up ZeroMQ sockets.  Knows no message.

No socket has a high-water mark: credits and admission bound what waits, and send never blocks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import zmq

from omnistage.errors import TransportError
from omnistage.transport.codec import Frame
from omnistage.transport.keys import ClusterKeys, check_listen_url

FLUSH_SECONDS = 1.0  # how long an orderly close() waits for peers to take what was sent
DRAIN_MESSAGES = 256  # taken from a socket before anything else gets its turn
_COPY_BYTES = 16384  # received frames up to this are copied: small ones may lie unaligned in a buffer


def open_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.set_hwm(0)
    socket.linger = 0
    return socket


def connect(socket: zmq.Socket[bytes], url: str, keys: ClusterKeys | None) -> None:
    """Raises TransportError if the URL cannot be parsed."""
    if keys is not None and url.startswith("tcp://"):
        keys.use_as_client(socket)
    try:
        socket.connect(url)
    except zmq.ZMQError as error:
        raise TransportError(f"cannot connect to {url}: {error}") from error


def bind_ipc(socket: zmq.Socket[bytes], url: str) -> None:
    """Raises TransportError if the path cannot be bound."""
    try:
        socket.bind(url)
    except zmq.ZMQError as error:
        raise TransportError(
            f"cannot listen on {url}: {error}; the run directory must exist and its path be short"
        ) from error


def unlink_ipc(url: str | None) -> None:
    """ZeroMQ leaves the socket's file behind."""
    if url is not None:
        Path(url.removeprefix("ipc://")).unlink(missing_ok=True)


def bind_tcp(socket: zmq.Socket[bytes], url: str, *, advertise: str | None, keys: ClusterKeys | None) -> str:
    """Bind "tcp://host:port" (port 0: any free one).  Returns the URL for peers.

    advertise: the host name peers shall use; needed if the socket listens on every interface.
    Raises TransportError.
    """
    check_listen_url(url, keys)
    if keys is not None:
        keys.use_as_server(socket)
    try:
        socket.bind(url)
    except zmq.ZMQError as error:
        raise TransportError(f"cannot listen on {url}: {error}; choose a free port of this host") from error
    bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    host, _, port = bound.removeprefix("tcp://").rpartition(":")
    if advertise is None and host in ("0.0.0.0", "[::]", "*"):
        socket.close()
        raise TransportError(f"{url} listens on every interface; say which host name peers shall use")
    return f"tcp://{advertise or host}:{port}"


def send_frames(socket: zmq.Socket[bytes], frames: list[Frame]) -> None:
    """Never blocks; large frames are not copied.  Raises zmq.ZMQError if there is no such peer."""
    if len(frames) == 1:
        socket.send(frames[0], zmq.NOBLOCK)
    else:
        socket.send_multipart(frames, zmq.NOBLOCK, copy=False)


def receive_frames(socket: zmq.Socket[bytes]) -> list[Frame] | None:
    """The frames of one message, or None if none waits.  Large frames are not copied."""
    try:
        frames: list[Any] = socket.recv_multipart(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return None
    return [frame.bytes if len(frame) <= _COPY_BYTES else frame.buffer for frame in frames]


def descriptor_of(socket: zmq.Socket[bytes]) -> int:
    """Readable after a change of has_input(), until any call on the socket has noticed it."""
    return int(socket.getsockopt(zmq.FD))


def has_input(socket: zmq.Socket[bytes]) -> bool:
    events: int = socket.getsockopt(zmq.EVENTS)  # type: ignore[assignment]
    return bool(events & zmq.POLLIN)
