"""Messages to frames and back: one msgpack frame, then the bytes of larger tensors.

A tensor becomes a reference: its bytes inline (up to INLINE_BYTES), the index of an extra frame
(not copied), or a slot of shared memory.  Media bytes stay inline: they cross one hop per request
and two copies of a few megabytes cost less than a second kind of reference.  Knows neither sockets
nor how shared memory is managed.  No pickle: what does not match the message types is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from omnistage.errors import TransportError
from omnistage.transport.messages import AnyMessage, Message
from omnistage.types import HostTensor

Frame = bytes | memoryview

INLINE_BYTES = 4096  # a frame of its own costs more than copying this much

ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}


class SlotReference(msgspec.Struct, frozen=True, array_like=True):
    """Where in shared memory a tensor's bytes are.

    owner: address of the producer, which gets the Release.  slot: never used twice by one owner, so
    it also tells a slot's generations apart.  offset, nbytes: bytes within the segment.
    """

    owner: str
    segment: str
    slot: int
    offset: int
    nbytes: int


class TensorReference(msgspec.Struct, frozen=True, array_like=True):
    """A HostTensor on the wire.  place: inline bytes, index of a frame (0: the first extra), or slot."""

    dtype: str
    shape: tuple[int, ...]
    place: bytes | int | SlotReference


Place = Callable[[HostTensor], SlotReference | None]
Resolve = Callable[[SlotReference], tuple[memoryview, Any]]  # the bytes, and HostTensor.handle


class Codec:
    """Encodes and decodes for one endpoint; not thread-safe.

    place: puts a tensor into shared memory, or returns None to have it sent in a frame.
    resolve: the reader's side of it.  Without it slot references are refused.
    """

    def __init__(self, *, resolve: Resolve | None = None) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._encode_tensor)
        self._decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(
            AnyMessage, dec_hook=self._decode_tensor
        )
        self._resolve = resolve
        self._place: Place | None = None
        self._extra: list[Frame] = []
        self._num_taken = 0

    def encode(self, message: Message, *, place: Place | None = None) -> list[Frame]:
        """Frames to send in order.  Tensor frames are views of the tensors' own memory.

        Raises TransportError if a field has a value that cannot travel.
        """
        self._place, self._extra = place, []
        try:
            return [self._encoder.encode(message), *self._extra]
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise TransportError(f"cannot encode {type(message).__name__}: {error}") from error
        finally:
            self._place, self._extra = None, []

    def decode(self, frames: Sequence[Frame]) -> AnyMessage:
        """The inverse.  Tensors are views of the given frames or of shared memory.

        Raises TransportError for anything that encode() cannot have made.
        """
        if not frames:
            raise TransportError("received a message of 0 frames; at least 1 is needed")
        self._extra, self._num_taken = list(frames[1:]), 0
        try:
            message = self._decoder.decode(frames[0])
            if self._num_taken != len(self._extra):
                raise ValueError(f"{len(self._extra)} tensor frames, {self._num_taken} tensors name one")
            return message
        except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError, MemoryError) as error:
            raise TransportError(
                f"malformed message of {len(frames)} frames: {error}; do both sides run the same version?"
            ) from error
        finally:
            self._extra = []

    def _encode_tensor(self, value: Any) -> TensorReference:
        if not isinstance(value, HostTensor):
            raise TypeError(f"{type(value).__name__} has no place in a message")
        check_size(dtype=value.dtype, shape=value.shape, nbytes=value.nbytes)
        place: bytes | int | SlotReference | None
        if value.nbytes <= INLINE_BYTES:
            place = bytes(value.data)
        else:
            place = self._place(value) if self._place is not None else None
            if place is None:
                place = len(self._extra)
                self._extra.append(memoryview(value.data).cast("B"))
        return TensorReference(value.dtype, tuple(value.shape), place)

    def _decode_tensor(self, kind: type, value: Any) -> HostTensor:
        if kind is not HostTensor:
            raise ValueError(f"{kind.__name__} has no place in a message")
        reference = msgspec.convert(value, TensorReference)
        data: Frame
        handle: Any = None
        match reference.place:
            case bytes():
                data = reference.place
            case int():
                if reference.place != self._num_taken or reference.place >= len(self._extra):
                    raise ValueError(f"a tensor names frame {reference.place} of {len(self._extra)}")
                data = self._extra[reference.place]
                self._num_taken += 1
            case SlotReference():
                if self._resolve is None:
                    raise ValueError("a tensor in shared memory, which this endpoint does not share")
                check_size(dtype=reference.dtype, shape=reference.shape, nbytes=reference.place.nbytes)
                data, handle = self._resolve(reference.place)
        nbytes = data.nbytes if isinstance(data, memoryview) else len(data)
        check_size(dtype=reference.dtype, shape=reference.shape, nbytes=nbytes)
        return HostTensor(reference.dtype, reference.shape, data, handle)


def check_size(*, dtype: str, shape: Sequence[int], nbytes: int) -> None:
    """Raises ValueError unless `nbytes` is what dtype and shape need."""
    item_bytes = ITEM_BYTES.get(dtype)
    if item_bytes is None:
        raise ValueError(f"tensor dtype {dtype!r} is not one of {', '.join(ITEM_BYTES)}")
    if any(size < 0 for size in shape) or math.prod(shape) * item_bytes != nbytes:
        raise ValueError(f"tensor {dtype}{list(shape)} with {nbytes} bytes of data")
