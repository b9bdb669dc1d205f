"""Builders and leak checks for the transport's tests.  No test here imports torch."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq

from omnistage.transport.addresses import shared_directory
from omnistage.transport.messages import Chunk, RequestKey
from omnistage.types import HostTensor, Payload, PortType


def descriptors() -> set[str]:
    """What this process has open, without the descriptor that lists it."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
        except FileNotFoundError:
            continue
    return found


def segments() -> set[str]:
    return {path.name for path in shared_directory().glob(f"omnistage-t{os.getpid()}-*")}


@pytest.fixture(scope="session")
def zero_copy() -> None:
    """pyzmq frees the buffers of zero-copy sends through one context of its own, kept for ever."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as sender, context.socket(zmq.PAIR) as receiver:
        sender.bind("inproc://first")
        receiver.connect("inproc://first")
        sender.send(bytes(1 << 20), copy=False)
        receiver.recv()


@pytest.fixture
def no_leaks(tmp_path: Path, zero_copy: None) -> Iterator[None]:
    """Everything opened during the test is closed and unlinked at its end."""
    before = descriptors(), segments(), set(tmp_path.iterdir())
    yield
    assert descriptors() == before[0]
    assert segments() == before[1]
    assert set(tmp_path.iterdir()) == before[2]


@pytest.fixture
def make_chunk() -> Callable[..., Chunk]:
    def make(
        sequence: int = 0,
        *,
        nbytes: int = 0,
        request: str = "r",
        attempt: int = 0,
        edge: str = "a->b",
        is_last: bool = False,
        tensor: HostTensor | None = None,
    ) -> Chunk:
        if tensor is None and nbytes:
            content = np.random.default_rng(sequence).integers(0, 256, nbytes, dtype=np.uint8)
            tensor = HostTensor.from_numpy(content)
        tensors = {} if tensor is None else {"pcm": tensor}
        return Chunk(
            key=RequestKey(request, attempt),
            edge=edge,
            sequence=sequence,
            payload=Payload(PortType.PCM, tensors=tensors),
            is_last=is_last,
        )

    return make
