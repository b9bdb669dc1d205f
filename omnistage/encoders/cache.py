"""The encoder cache: outputs by media key, least recently used first out.

Knows neither models nor requests.  The bytes live in the encoder's replica; consumers that still
read an evicted tensor keep it alive through the transport's reference counts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import msgspec

from omnistage.types import HostTensor, Payload


class EncoderCache:
    """Bounded by bytes.  share pins a tensor for reading by others, unshare drops our own pin."""

    def __init__(
        self,
        *,
        max_bytes: int,
        share: Callable[[HostTensor], HostTensor],
        unshare: Callable[[HostTensor], None],
    ) -> None:
        self._max_bytes = max_bytes
        self._share = share
        self._unshare = unshare
        self._entries: OrderedDict[str, Payload] = OrderedDict()
        self._bytes = 0
        self.hits = 0
        self.misses = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        return self._bytes

    def get(self, key: str) -> Payload | None:
        """The cached output, now the most recently used; counts a hit or a miss."""
        payload = self._entries.get(key)
        if payload is None:
            self.misses += 1
            return None
        self.hits += 1
        self._entries.move_to_end(key)
        return payload

    def put(self, key: str, payload: Payload) -> tuple[Payload, list[str]]:
        """Store an output.  Returns it in its shared form, and the keys evicted to make room.

        An output larger than the whole cache is returned as it is and not kept.
        """
        size = _num_bytes(payload)
        if size > self._max_bytes:
            return payload, [key]
        evicted = []
        while self._entries and self._bytes + size > self._max_bytes:
            oldest, dropped = self._entries.popitem(last=False)
            self._drop(dropped)
            evicted.append(oldest)
        shared = msgspec.structs.replace(
            payload, tensors={name: self._share(tensor) for name, tensor in payload.tensors.items()}
        )
        self._entries[key] = shared
        self._bytes += size
        return shared, evicted

    def clear(self) -> None:
        for payload in self._entries.values():
            self._drop(payload)
        self._entries.clear()

    def _drop(self, payload: Payload) -> None:
        self._bytes -= _num_bytes(payload)
        for tensor in payload.tensors.values():
            self._unshare(tensor)


def _num_bytes(payload: Payload) -> int:
    return len(payload.text.encode()) + 64 + sum(tensor.nbytes for tensor in payload.tensors.values())
