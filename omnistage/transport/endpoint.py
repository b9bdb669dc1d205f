"""The two sides of the transport as the rest of the code sees them.

A worker has an Endpoint (synchronous, one thread), the orchestrator a Hub (asyncio).  Neither
Protocol says how bytes move; omnistage.transport.zmq_endpoint and hub use ZeroMQ and shared memory,
omnistage.transport.memory stays inside one process.

Rules common to all implementations:
- messages to one destination arrive in the order they were sent, or not at all; nothing is ordered
  between two senders, so a first Chunk may arrive before the Submit it belongs to;
- a sent tensor's memory must not be written again;
- tensors of a received message are valid until release(message), which is due for every received
  message that can carry tensors (Chunk, Chunks, StepReport), also for one that is thrown away.
"""

from __future__ import annotations

from typing import Protocol

from omnistage.transport.messages import AnyMessage, Message
from omnistage.types import HostTensor


class Endpoint(Protocol):
    """A worker's side.  All calls come from one thread."""

    @property
    def address(self) -> str: ...

    def send(self, to: str, message: Message) -> None:
        """Queue a message; never blocks.  `to`: an address, or ORCHESTRATOR.

        To a forgotten address it is discarded and counted.  Raises TransportError if the message
        cannot be encoded or the address cannot be reached from this host.
        """

    def receive(self, timeout: float | None = None) -> AnyMessage | None:
        """The next message.  timeout: seconds; None waits for ever, 0 polls.

        None after the timeout, or earlier once a wakeup descriptor is readable and no message waits.
        Raises TransportError for a malformed message; the next call goes on with the one after it.
        """

    def release(self, message: Message) -> None:
        """The tensors of a received message are no longer read.  Idempotent.

        The producer learns of it with the next receive(), or after a batch.
        """

    def share(self, tensor: HostTensor) -> HostTensor:
        """Pin a tensor that will be sent several times; returns the one to send.

        It is the same tensor if it is small or there is no room: sending that works too.
        """

    def unshare(self, tensor: HostTensor) -> None:
        """End share(); do not send or read the tensor afterwards.  Idempotent."""

    def forget(self, address: str) -> None:
        """A peer died: free what it held, drop what waits for it, discard what is sent to it later."""

    def add_wakeup(self, descriptor: int) -> None:
        """Watch a file descriptor in receive(): level-triggered, read by the caller."""

    def remove_wakeup(self, descriptor: int) -> None: ...

    def close(self) -> None:
        """Flush for a bounded time, then free sockets, files and shared memory.  Idempotent."""

    def stats(self) -> dict[str, float]:
        """Gauges by name, see Exchange.stats()."""


class Hub(Protocol):
    """The orchestrator's side.  All calls come from one event loop."""

    @property
    def address(self) -> str:
        """What a worker needs to reach the hub."""

    async def receive(self) -> tuple[str, AnyMessage]:
        """The sender's address and its message.  One caller at a time; cancelling loses nothing.

        Raises TransportError for a malformed message; the next call goes on with the one after it.
        """

    def send(self, to: str, message: Message) -> None:
        """Never blocks.  Raises TransportError if `to` has not written yet, is gone or was forgotten."""

    def release(self, message: Message) -> None:
        """As Endpoint.release()."""

    def forget(self, address: str) -> None:
        """A worker died: later messages of it are discarded."""

    def close(self) -> None:
        """As Endpoint.close()."""

    def stats(self) -> dict[str, float]:
        """Gauges by name, see Exchange.stats()."""
