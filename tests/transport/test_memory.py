import asyncio
import threading

import pytest

from omnistage.errors import StreamError, TransportError
from omnistage.transport import ORCHESTRATOR, MemoryNetwork, StreamReceiver
from omnistage.transport.messages import Chunk, Heartbeat, StepReport

SECONDS = 10.0


def send_all(intercept, make_chunk, count=4):
    """What arrives of `count` chunks; the end mark tells that nothing more will."""
    network = MemoryNetwork(intercept=intercept)
    producer, consumer = network.endpoint("a"), network.endpoint("b")
    for sequence in range(count):
        producer.send(consumer.address, make_chunk(sequence))
    arrived = []
    while (message := consumer.receive(0)) is not None:
        arrived.append(message)
    producer.close()
    consumer.close()
    return arrived


def drop_second(source, to, message):
    return [] if message.sequence == 1 else [message]


def repeat_second(source, to, message):
    return [message] * (2 if message.sequence == 1 else 1)


class SwapSecondAndThird:
    def __init__(self):
        self.kept = []

    def __call__(self, source, to, message):
        if message.sequence == 1:
            self.kept = [message]
            return []
        kept, self.kept = self.kept, []
        return [message, *kept]


@pytest.mark.parametrize(
    ("intercept", "arrived"),
    [
        (None, [0, 1, 2, 3]),
        (drop_second, [0, 2, 3]),
        (repeat_second, [0, 1, 1, 2, 3]),
        (SwapSecondAndThird(), [0, 2, 1, 3]),
    ],
    ids=["none", "drop", "repeat", "reorder"],
)
def test_faults_happen_as_told_and_are_noticed(make_chunk, intercept, arrived):
    chunks = send_all(intercept, make_chunk)
    assert [chunk.sequence for chunk in chunks] == arrived
    receiver = StreamReceiver("a->b")

    def receive():
        for chunk in chunks:
            receiver.accept(chunk)

    if intercept is None:
        receive()
    else:
        with pytest.raises(StreamError):
            receive()


def test_intercept_sees_both_ends(make_chunk):
    seen = []

    def note(source, to, message):
        seen.append((source, to, type(message)))
        return [message]

    network = MemoryNetwork(intercept=note)
    producer, consumer = network.endpoint("a"), network.endpoint("b")
    producer.send(consumer.address, make_chunk(nbytes=100_000))
    consumer.release(consumer.receive(0))
    assert consumer.receive(0) is None  # sends the Release, which is not shown
    assert seen == [(producer.address, consumer.address, Chunk)]


def test_dropped_messages_hold_no_slots(make_chunk):
    network = MemoryNetwork(intercept=lambda source, to, message: [])
    producer, consumer = network.endpoint("a"), network.endpoint("b")
    producer.send(consumer.address, make_chunk(nbytes=100_000))
    assert producer.stats()["slots_in_use"] == 0


def test_addresses_are_never_used_twice():
    network = MemoryNetwork()
    first = network.endpoint("a")
    first.close()
    assert network.endpoint("a").address != first.address
    network.hub()
    with pytest.raises(TransportError, match="exists already"):
        network.hub()


def test_sending_to_a_closed_endpoint_is_counted(make_chunk):
    network = MemoryNetwork()
    producer, consumer = network.endpoint("a"), network.endpoint("b")
    consumer.close()
    producer.send(consumer.address, make_chunk(nbytes=100_000))
    assert producer.stats()["messages_discarded"] == 1
    assert producer.stats()["slots_in_use"] == 0


async def test_threads_wake_the_hub_and_each_other(make_chunk):
    network = MemoryNetwork()
    hub = network.hub()
    relay, source = network.endpoint("relay"), network.endpoint("source")
    count = 200

    def run_source():
        source.send(ORCHESTRATOR, Heartbeat(worker="source"))
        for sequence in range(count):
            source.send(relay.address, make_chunk(sequence, nbytes=20_000))

    def run_relay():
        for _ in range(count):
            chunk = relay.receive(SECONDS)
            relay.send(ORCHESTRATOR, StepReport(worker="relay", chunks=(chunk,)))
            relay.release(chunk)

    threads = [threading.Thread(target=run) for run in (run_relay, run_source)]
    for thread in threads:
        thread.start()
    sequences = []
    while len(sequences) < count:
        address, message = await asyncio.wait_for(hub.receive(), SECONDS)
        if isinstance(message, StepReport):
            assert address == relay.address
            sequences.append(message.chunks[0].sequence)
            hub.release(message)
    for thread in threads:
        thread.join()
    assert sequences == list(range(count))
    for endpoint in (relay, source):
        assert endpoint.receive(0) is None
        assert endpoint.receive(0) is None
    assert source.stats()["slots_in_use"] == relay.stats()["slots_in_use"] == 0
    for each in (relay, source, hub):
        each.close()
