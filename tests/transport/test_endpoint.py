"""What every implementation of Endpoint and Hub does: run over ZeroMQ and in memory."""

import asyncio
import itertools
import os
import time
from collections import Counter

import numpy as np
import pytest

from omnistage.errors import TransportError
from omnistage.transport import ORCHESTRATOR, MemoryNetwork, ZmqEndpoint, ZmqHub
from omnistage.transport.exchange import RELEASE_BATCH, SHARE_BYTES
from omnistage.transport.messages import Abort, Credit, Heartbeat, Hello, RequestKey, StepReport
from omnistage.transport.sockets import DRAIN_MESSAGES
from omnistage.types import HostTensor

SECONDS = 10.0  # far more than any receive here needs
LARGE = SHARE_BYTES * 2
KEY = RequestKey("r")


class Network:
    """One hub and any number of endpoints, closed together."""

    def __init__(self, kind, directory):
        self.memory = MemoryNetwork() if kind == "memory" else None
        self.directory = directory
        self.hub = self.memory.hub() if self.memory else ZmqHub(run_id=f"t{os.getpid()}", run_dir=directory)
        self.opened = [self.hub]

    def endpoint(self, name="w", shared_memory=1 << 26):
        if self.memory:
            endpoint = self.memory.endpoint(name, max_shared_bytes=shared_memory)
        else:
            endpoint = ZmqEndpoint(
                name=f"{name}{len(self.opened)}",
                run_id=f"t{os.getpid()}",
                control=self.hub.address,
                bind=f"ipc://{self.directory}",
                shared_memory=shared_memory,
            )
        self.opened.append(endpoint)
        return endpoint

    async def hello(self, endpoint):
        endpoint.send(ORCHESTRATOR, Heartbeat(worker="w"))
        sender, _ = await asyncio.wait_for(self.hub.receive(), SECONDS)
        assert sender == endpoint.address

    def close(self):
        for each in reversed(self.opened):
            each.close()
            each.close()  # idempotent


@pytest.fixture(params=["memory", "zmq"])
def network(request, tmp_path, no_leaks):
    network = Network(request.param, tmp_path)
    yield network
    network.close()


def take(endpoint):
    message = endpoint.receive(SECONDS)
    assert message is not None
    return message


def settle(producer, consumer):
    """Let the consumer's releases arrive: it receives nothing more, then a message follows them."""
    assert consumer.receive(0) is None
    consumer.send(producer.address, Abort(keys=()))
    assert isinstance(take(producer), Abort)


# --- worker to worker -----------------------------------------------------------------------------


def test_messages_arrive_in_order(network, make_chunk):
    producer, consumer = network.endpoint(), network.endpoint()
    sizes = itertools.cycle([0, 100, 5000, LARGE])  # inline, frames and shared memory interleaved
    sent = [make_chunk(sequence, nbytes=next(sizes)) for sequence in range(1000)]
    for chunk in sent:
        producer.send(consumer.address, chunk)
    for chunk in sent:
        received = take(consumer)
        assert received.sequence == chunk.sequence
        for name, tensor in chunk.payload.tensors.items():
            assert bytes(received.payload.tensors[name].data) == bytes(tensor.data)
        consumer.release(received)
    settle(producer, consumer)
    assert producer.stats()["slots_in_use"] == 0
    assert consumer.stats()["tensors_held"] == 0
    assert consumer.stats()["messages_received"] == 1000


def test_large_tensors_are_slots_until_they_are_released(network, make_chunk):
    producer, consumer = network.endpoint(), network.endpoint()
    for sequence in range(3):
        producer.send(consumer.address, make_chunk(sequence, nbytes=LARGE))
    assert producer.stats()["slots_in_use"] == 3
    received = [take(consumer) for _ in range(3)]
    for _ in range(2):  # the second time does nothing
        consumer.release(received[1])
    settle(producer, consumer)
    assert producer.stats()["slots_in_use"] == 2
    assert consumer.stats()["tensors_held"] == 2
    for chunk in received:
        consumer.release(chunk)
    settle(producer, consumer)
    assert producer.stats()["slots_in_use"] == 0
    assert producer.stats()["shared_bytes_in_use"] == 0


def test_many_releases_do_not_wait_for_receive(network, make_chunk):
    producer, consumer = network.endpoint(), network.endpoint()
    for sequence in range(RELEASE_BATCH):
        producer.send(consumer.address, make_chunk(sequence, nbytes=LARGE))
    received = [take(consumer) for _ in range(RELEASE_BATCH)]
    for chunk in received:
        consumer.release(chunk)
    # The consumer does not call receive() or send() again: the Release is on its way by itself.
    deadline = time.monotonic() + SECONDS
    while producer.stats()["slots_in_use"] and time.monotonic() < deadline:
        assert producer.receive(0.01) is None
    assert producer.stats()["slots_in_use"] == 0


def test_a_shared_tensor_is_copied_once_for_all_its_readers(network, make_chunk):
    producer, *consumers = (network.endpoint() for _ in range(4))
    array = np.arange(LARGE, dtype=np.float32)
    tensor = producer.share(HostTensor.from_numpy(array))
    for consumer in consumers:
        for sequence in range(2):
            producer.send(consumer.address, make_chunk(sequence, tensor=tensor))
    assert producer.stats()["slots_in_use"] == 1
    for _ in range(2):
        producer.unshare(tensor)
    received = [take(consumer) for consumer in consumers for _ in range(2)]
    for consumer, chunk in zip([each for each in consumers for _ in range(2)], received, strict=True):
        np.testing.assert_array_equal(chunk.payload.tensors["pcm"].numpy(), array)
        assert producer.stats()["slots_in_use"] == 1
        consumer.release(chunk)
    for consumer in consumers:
        settle(producer, consumer)
    assert producer.stats()["slots_in_use"] == 0
    with pytest.raises(TransportError, match="unshared"):
        producer.send(consumers[0].address, make_chunk(9, tensor=tensor))


def test_a_pinned_tensor_stays_without_readers(network, make_chunk):
    producer, consumer = network.endpoint(), network.endpoint()
    tensor = producer.share(HostTensor.from_numpy(np.ones(LARGE, np.uint8)))
    for sequence in range(3):
        producer.send(consumer.address, make_chunk(sequence, tensor=tensor))
        consumer.release(take(consumer))
        settle(producer, consumer)
        assert producer.stats()["slots_in_use"] == 1
    producer.unshare(tensor)
    assert producer.stats()["slots_in_use"] == 0


def test_small_tensors_are_not_pinned(network):
    producer = network.endpoint()
    tensor = HostTensor("uint8", (8,), bytes(8))
    assert producer.share(tensor) is tensor
    producer.unshare(tensor)


def test_a_full_pool_sends_frames_instead(network, make_chunk):
    producer, consumer = network.endpoint(shared_memory=LARGE), network.endpoint()  # no room for a header
    tensor = HostTensor.from_numpy(np.arange(LARGE, dtype=np.uint8))
    assert producer.share(tensor) is tensor
    producer.send(consumer.address, make_chunk(0, tensor=tensor))
    assert producer.stats()["slots_in_use"] == 0
    assert producer.stats()["tensors_in_frames"] == 1
    received = take(consumer)
    np.testing.assert_array_equal(received.payload.tensors["pcm"].numpy(), tensor.numpy())
    consumer.release(received)


def test_a_message_that_cannot_be_encoded_takes_no_slot(network, make_chunk):
    producer, consumer = network.endpoint(), network.endpoint()
    good = make_chunk(0, nbytes=LARGE)
    bad = make_chunk(1, tensor=HostTensor("float32", (3,), bytes(8)))
    with pytest.raises(TransportError):
        producer.send(consumer.address, StepReport(worker="w", chunks=(good, bad)))
    assert producer.stats()["slots_in_use"] == 0
    producer.send(consumer.address, good)
    consumer.release(take(consumer))


def test_a_received_tensor_may_be_passed_on(network, make_chunk):
    first, second, third = (network.endpoint() for _ in range(3))
    original = make_chunk(0, nbytes=LARGE)
    first.send(second.address, original)
    received = take(second)
    second.send(third.address, received)
    second.release(received)
    settle(first, second)
    assert first.stats()["slots_in_use"] == 0
    passed_on = take(third)
    assert bytes(passed_on.payload.tensors["pcm"].data) == bytes(original.payload.tensors["pcm"].data)
    third.release(passed_on)
    settle(second, third)
    assert second.stats()["slots_in_use"] == 0


def test_forget_frees_what_a_dead_peer_held(network, make_chunk):
    producer, consumer, other = (network.endpoint() for _ in range(3))
    for sequence in range(3):
        producer.send(consumer.address, make_chunk(sequence, nbytes=LARGE))
        producer.send(other.address, make_chunk(sequence, nbytes=LARGE))
    producer.forget(consumer.address)
    assert producer.stats()["slots_in_use"] == 3
    producer.send(consumer.address, make_chunk(3, nbytes=LARGE))
    assert producer.stats()["slots_in_use"] == 3
    assert producer.stats()["messages_discarded"] == 1
    for _ in range(3):
        other.release(take(other))
    settle(producer, other)
    assert producer.stats()["slots_in_use"] == 0


def test_release_after_the_producer_is_gone_is_harmless(network, make_chunk):
    producer, consumer = network.endpoint(), network.endpoint()
    for sequence in range(2):
        producer.send(consumer.address, make_chunk(sequence, nbytes=LARGE))
    received = [take(consumer) for _ in range(2)]
    content = bytes(received[0].payload.tensors["pcm"].data)
    consumer.release(received[1])
    producer.close()
    consumer.forget(producer.address)
    assert bytes(received[0].payload.tensors["pcm"].data) == content
    consumer.release(received[0])
    assert consumer.receive(0) is None
    assert consumer.stats()["tensors_held"] == 0
    del received


# --- waiting --------------------------------------------------------------------------------------


def test_receive_returns_none_after_its_timeout(network):
    endpoint = network.endpoint()
    assert endpoint.receive(0) is None
    assert endpoint.receive(0.01) is None


def test_a_wakeup_ends_receive_early_and_messages_come_first(network):
    endpoint, peer = network.endpoint(), network.endpoint()
    readable, writable = os.pipe()
    endpoint.add_wakeup(readable)
    os.write(writable, b"x")
    assert endpoint.receive(None) is None  # would block for ever
    peer.send(endpoint.address, Credit(key=KEY, edge="e", count=1))
    received = None
    while received is None:  # the wakeup is still readable, so this may see it first
        received = endpoint.receive(SECONDS)
    assert isinstance(received, Credit)
    os.read(readable, 1)
    assert endpoint.receive(0) is None
    os.close(writable)
    assert endpoint.receive(None) is None  # end of file: how a parent's death shows
    endpoint.remove_wakeup(readable)
    assert endpoint.receive(0.01) is None
    os.close(readable)


# --- orchestrator ---------------------------------------------------------------------------------


async def test_the_hub_knows_workers_by_their_address(network):
    first, second = network.endpoint(), network.endpoint()
    hello = Hello(worker="w", stage="s", address=first.address, pid=1, host="h")
    first.send(ORCHESTRATOR, hello)
    assert await asyncio.wait_for(network.hub.receive(), SECONDS) == (first.address, hello)
    await network.hello(second)
    network.hub.send(second.address, Abort(keys=(KEY,)))
    network.hub.send(first.address, Heartbeat(worker="h"))
    assert take(first) == Heartbeat(worker="h")
    assert take(second) == Abort(keys=(KEY,))


async def test_the_hub_refuses_addresses_that_have_not_written(network):
    endpoint = network.endpoint()
    for address in (endpoint.address, "nobody"):
        with pytest.raises(TransportError, match="not connected"):
            network.hub.send(address, Heartbeat(worker="h"))


async def test_the_hub_takes_bursts_in_order_and_lets_others_run(network, make_chunk):
    endpoint = network.endpoint()
    turns = 0

    async def count_turns():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    for sequence in range(2000):
        endpoint.send(ORCHESTRATOR, StepReport(worker="w", chunks=(make_chunk(sequence),)))
    taken = Counter()  # messages per turn of the loop
    for sequence in range(2000):
        _, report = await network.hub.receive()
        assert report.chunks[0].sequence == sequence
        taken[turns] += 1
    counting.cancel()
    assert max(taken.values()) <= DRAIN_MESSAGES


async def test_tensors_of_reports_are_released_to_the_worker(network, make_chunk):
    endpoint = network.endpoint()
    chunks = tuple(make_chunk(sequence, nbytes=LARGE) for sequence in range(2))
    endpoint.send(ORCHESTRATOR, StepReport(worker="w", chunks=chunks))
    assert endpoint.stats()["slots_in_use"] == 2
    _, report = await asyncio.wait_for(network.hub.receive(), SECONDS)
    for sent, received in zip(chunks, report.chunks, strict=True):
        assert bytes(received.payload.tensors["pcm"].data) == bytes(sent.payload.tensors["pcm"].data)
    for _ in range(2):
        network.hub.release(report)
    await asyncio.sleep(0)  # one turn of the loop: releases go out together
    network.hub.send(endpoint.address, Heartbeat(worker="h"))
    assert isinstance(take(endpoint), Heartbeat)
    assert endpoint.stats()["slots_in_use"] == 0
    assert network.hub.stats()["tensors_held"] == 0


async def test_a_cancelled_receive_loses_nothing(network):
    endpoint = network.endpoint()
    receiving = asyncio.create_task(network.hub.receive())
    await asyncio.sleep(0)
    endpoint.send(ORCHESTRATOR, Heartbeat(worker="w"))
    receiving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await receiving
    assert await asyncio.wait_for(network.hub.receive(), SECONDS) == (endpoint.address, Heartbeat(worker="w"))


async def test_a_forgotten_worker_is_not_heard_again(network):
    dead, alive = network.endpoint(), network.endpoint()
    await network.hello(dead)
    dead.send(ORCHESTRATOR, StepReport(worker="w"))
    network.hub.forget(dead.address)
    with pytest.raises(TransportError):
        network.hub.send(dead.address, Heartbeat(worker="h"))
    await network.hello(alive)  # asserts that the next message is not the dead one's
    assert network.hub.stats()["messages_discarded"] <= 1


async def test_sending_to_a_closed_worker_is_an_error(network):
    endpoint = network.endpoint()
    await network.hello(endpoint)
    endpoint.close()
    with pytest.raises(TransportError):  # noqa: PT012
        async with asyncio.timeout(SECONDS):
            while True:  # until the disconnection has been noticed
                network.hub.send(endpoint.address, Heartbeat(worker="h"))
                await asyncio.sleep(0)


async def test_the_last_words_of_a_closing_endpoint_arrive(network, make_chunk):
    producer, consumer = network.endpoint(), network.endpoint()
    await network.hello(producer)
    for sequence in range(100):
        producer.send(consumer.address, make_chunk(sequence, nbytes=10_000))
        producer.send(ORCHESTRATOR, Heartbeat(worker="w"))
    producer.close()
    assert [take(consumer).sequence for _ in range(100)] == list(range(100))
    for _ in range(100):
        await asyncio.wait_for(network.hub.receive(), SECONDS)
