"""What every endpoint does with tensors, whatever moves the bytes: place, resolve, release, count.

An Exchange belongs to one endpoint and one thread.  It encodes for a destination, decodes what
arrived, keeps Release messages away from the user, and collects the releases the endpoint owes to
producers.  Knows neither sockets nor threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from omnistage.errors import TransportError
from omnistage.transport.codec import Codec, Frame, SlotReference
from omnistage.transport.messages import AnyMessage, Chunk, Chunks, Message, Release, StepReport
from omnistage.transport.shared_memory import AttachedSegments, SegmentGone
from omnistage.transport.slots import SegmentStore, Slot, SlotPool
from omnistage.types import HostTensor

SHARE_BYTES = 16384  # smaller tensors travel inside the message
RELEASE_BATCH = 32  # slots owed to one producer before a Release goes out at once


class SharedSlot:
    """HostTensor.handle of a tensor that this endpoint has pinned with share()."""

    __slots__ = ("is_released", "pool", "slot")

    def __init__(self, pool: SlotPool, slot: Slot) -> None:
        self.pool = pool
        self.slot = slot
        self.is_released = False


class HeldSlot:
    """HostTensor.handle of a received tensor in a producer's shared memory."""

    __slots__ = ("is_released", "number", "owner")

    def __init__(self, owner: str, number: int) -> None:
        self.owner = owner
        self.number = number
        self.is_released = False


def tensors_of(message: Message) -> Iterator[HostTensor]:
    """Every tensor in a message; only chunks, alone or in a report, have any."""
    if isinstance(message, Chunk):
        yield from message.payload.tensors.values()
    elif isinstance(message, StepReport | Chunks):
        for chunk in message.chunks:
            yield from chunk.payload.tensors.values()


class Exchange:
    """name: what this endpoint is called as a holder.  pool: None if it never shares tensors."""

    def __init__(self, name: str, *, store: SegmentStore, pool: SlotPool | None) -> None:
        self.name = name
        self._pool = pool
        self._attached = AttachedSegments(store)
        self._codec = Codec(resolve=self._resolve)
        self._placed: list[Slot] = []  # by the last encode()
        self._owed: dict[str, list[int]] = {}  # producer's address -> slots released since
        self._num_sent = 0
        self._num_received = 0
        self._num_discarded = 0
        self._num_in_frames = 0
        self._num_held = 0

    # --- sending ------------------------------------------------------------------------------

    def encode(self, message: Message, *, holder: str, shares_memory: bool) -> list[Frame]:
        """Frames for one destination, which holds the slots they refer to.

        Call undo() with the same arguments if they were not sent.  Raises TransportError.
        """
        self._placed = []

        def place(tensor: HostTensor) -> SlotReference | None:
            slot = self._place(tensor, holder) if shares_memory else None
            if slot is None:
                self._num_in_frames += tensor.nbytes >= SHARE_BYTES
                return None
            self._placed.append(slot)
            return SlotReference(self.name, slot.segment.name, slot.number, slot.offset, slot.nbytes)

        try:
            frames = self._codec.encode(message, place=place)
        except TransportError:
            self.undo(holder)
            raise
        if len(frames) > 1 and any(tensor.handle is not None for tensor in tensors_of(message)):
            # Views of slots may be overwritten after their release, before the socket has sent them.
            frames = [frames[0], *(bytes(frame) for frame in frames[1:])]
        self._num_sent += 1
        return frames

    def undo(self, holder: str) -> None:
        """The message encoded last was not sent: its slots are free again."""
        for slot in self._placed:
            if self._pool is not None:
                self._pool.release(slot.number, holder)
        self._placed = []

    def _place(self, tensor: HostTensor, holder: str) -> Slot | None:
        if self._pool is None or tensor.nbytes < SHARE_BYTES:
            return None
        handle = tensor.handle
        if isinstance(handle, SharedSlot) and handle.pool is self._pool:
            self._pool.hold(handle.slot, holder)
            return handle.slot
        return self._pool.put(tensor.data, holder)

    def share(self, tensor: HostTensor) -> HostTensor:
        """A copy pinned in shared memory; the tensor itself if it is small or the pool is full."""
        if self._pool is None or tensor.nbytes < SHARE_BYTES:
            return tensor
        slot = self._pool.put(tensor.data, self.name)
        if slot is None:
            return tensor
        return HostTensor(tensor.dtype, tensor.shape, slot.data(), SharedSlot(self._pool, slot))

    def unshare(self, tensor: HostTensor) -> None:
        """Drop the pin of share(); idempotent.  The slot lives on until every reader released it."""
        handle = tensor.handle
        if isinstance(handle, SharedSlot) and not handle.is_released:
            handle.is_released = True
            handle.pool.release(handle.slot.number, self.name)

    # --- receiving ----------------------------------------------------------------------------

    def decode(self, frames: Sequence[Frame]) -> AnyMessage | None:
        """The message, or None if there is nothing for the user in it.  Raises TransportError."""
        try:
            message = self._codec.decode(frames)
        except SegmentGone:  # the producer is dead; its requests are replayed or failed
            self._num_discarded += 1
            return None
        if isinstance(message, Release):
            if self._pool is not None:
                for number in message.slots:
                    self._pool.release(number, message.holder)
            return None
        self._num_received += 1
        return message

    def _resolve(self, reference: SlotReference) -> tuple[memoryview, HeldSlot]:
        view = self._attached.view(reference)
        self._num_held += 1
        return view, HeldSlot(reference.owner, reference.slot)

    def release(self, message: Message) -> bool:
        """Note what is owed to producers; True if so much is owed that it should be sent now."""
        is_due = False
        for tensor in tensors_of(message):
            handle = tensor.handle
            if isinstance(handle, HeldSlot) and not handle.is_released:
                handle.is_released = True
                self._num_held -= 1
                owed = self._owed.setdefault(handle.owner, [])
                owed.append(handle.number)
                is_due = is_due or len(owed) >= RELEASE_BATCH
        return is_due

    def take_releases(self) -> dict[str, Release]:
        """The Release messages owed, by the producer's address; owed no longer."""
        if not self._owed:
            return {}
        owed, self._owed = self._owed, {}
        return {owner: Release(slots=tuple(numbers), holder=self.name) for owner, numbers in owed.items()}

    # --- peers and end ------------------------------------------------------------------------

    def forget(self, peer: str) -> None:
        """A peer died: free what it held, unmap what it owned, owe it nothing."""
        if self._pool is not None:
            self._pool.forget(peer)
        self._attached.forget(peer)
        self._owed.pop(peer, None)

    def count_discarded(self) -> None:
        self._num_discarded += 1

    def stats(self) -> dict[str, float]:
        """Gauges.  messages_*: counts since the start; discarded are those to or from peers that are
        gone.  tensors_in_frames: of SHARE_BYTES or more, yet not by shared memory.  slots_in_use,
        shared_bytes_in_use: of the own pool.  tensors_held: received in shared memory, not released.
        """
        return {
            "messages_sent": self._num_sent,
            "messages_received": self._num_received,
            "messages_discarded": self._num_discarded,
            "tensors_in_frames": self._num_in_frames,
            "tensors_held": self._num_held,
            "slots_in_use": self._pool.slots_in_use if self._pool is not None else 0,
            "shared_bytes_in_use": self._pool.bytes_in_use if self._pool is not None else 0,
        }

    def close(self) -> None:
        self._attached.close()
        if self._pool is not None:
            self._pool.close()
