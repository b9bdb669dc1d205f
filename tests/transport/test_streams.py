import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnistage.errors import StreamError
from omnistage.transport.messages import Credit, RequestKey
from omnistage.transport.streams import Arrival, StreamReceiver, StreamSender, StreamTable

KEY = RequestKey("r", 0)
EDGE = "a->b"


def test_a_stream_in_order_is_accepted(make_chunk):
    receiver = StreamReceiver(EDGE)
    for sequence in range(3):
        receiver.accept(make_chunk(sequence, is_last=sequence == 2))
    assert receiver.is_finished
    assert receiver.num_received == 3


@pytest.mark.parametrize(
    ("sequences", "last", "fault"),
    [
        ([1], None, "skips to chunk 1"),
        ([0, 2], None, "skips"),
        ([0, 0], None, "repeats"),
        ([0, 1], 0, "after"),
    ],
)
def test_a_broken_stream_is_loud(make_chunk, sequences, last, fault):
    receiver = StreamReceiver(EDGE)
    for sequence in sequences[:-1]:
        receiver.accept(make_chunk(sequence, is_last=sequence == last))
    with pytest.raises(StreamError, match=fault):
        receiver.accept(make_chunk(sequences[-1]))


def test_another_edges_chunk_is_loud(make_chunk):
    with pytest.raises(StreamError, match="of c->d"):
        StreamReceiver(EDGE).accept(make_chunk(0, edge="c->d"))


@given(st.permutations(range(5)))
def test_exactly_the_sent_order_passes(sequences):
    from omnistage.transport.messages import Chunk
    from omnistage.types import Payload, PortType

    def receive_all():
        receiver = StreamReceiver(EDGE)
        for sequence in sequences:
            payload = Payload(PortType.TEXT)
            receiver.accept(Chunk(key=KEY, edge=EDGE, sequence=sequence, payload=payload))

    if sequences == sorted(sequences):
        receive_all()
    else:
        with pytest.raises(StreamError):
            receive_all()


def test_credits_bound_a_sender():
    sender = StreamSender(2)
    assert [sender.next_sequence(), sender.next_sequence()] == [0, 1]
    assert not sender.can_send()
    with pytest.raises(StreamError, match="credits"):
        sender.next_sequence()
    sender.grant(1)
    assert sender.next_sequence(is_last=True) == 2
    sender.grant(1)
    assert not sender.can_send()
    with pytest.raises(StreamError, match="last"):
        sender.next_sequence()


def test_without_credits_a_sender_is_unbounded():
    sender = StreamSender()
    sender.grant(5)
    assert [sender.next_sequence() for _ in range(100)] == list(range(100))
    assert sender.credits is None


def test_chunks_that_overtook_the_submit_wait_for_it(make_chunk):
    table = StreamTable()
    chunks = [make_chunk(sequence) for sequence in range(3)]
    assert [table.accept(chunk) for chunk in chunks[:2]] == [Arrival.EARLY] * 2
    assert table.open(KEY, inbound=[EDGE]) == chunks[:2]
    assert table.num_early == 0
    assert [table.accept(chunk) for chunk in chunks] == [Arrival.IN_ORDER] * 3
    with pytest.raises(StreamError):
        table.accept(chunks[0])


def test_late_messages_are_counted_and_silent(make_chunk):
    table = StreamTable()
    table.open(KEY, inbound=[EDGE], outbound={"b->c": 1})
    table.end(KEY)
    table.end(KEY)
    assert table.accept(make_chunk(7)) is Arrival.LATE
    assert not table.grant(Credit(key=KEY, edge="b->c", count=1))
    assert table.discarded == 2
    assert len(table) == 0
    with pytest.raises(StreamError, match="stale"):
        table.open(KEY)


def test_an_abort_before_the_submit_gives_back_early_chunks(make_chunk):
    table = StreamTable()
    chunk = make_chunk(0)
    table.accept(chunk)
    assert table.end(KEY) == [chunk]
    assert table.accept(make_chunk(1)) is Arrival.LATE


def test_older_attempts_are_stale(make_chunk):
    table = StreamTable()
    table.open(KEY, inbound=[EDGE])
    newer = make_chunk(0, attempt=1)
    assert table.accept(newer) is Arrival.EARLY
    with pytest.raises(StreamError, match="open"):
        table.open(RequestKey("r", 1))
    assert table.end(KEY) == []
    assert table.open(RequestKey("r", 1), inbound=[EDGE]) == [newer]
    assert table.accept(make_chunk(0)) is Arrival.LATE
    assert table.accept(newer) is Arrival.IN_ORDER
    table.end(KEY)  # a late abort of the old attempt
    assert table.is_open(RequestKey("r", 1))


def test_ending_a_newer_attempt_ends_the_older(make_chunk):
    table = StreamTable()
    table.open(KEY, inbound=[EDGE], outbound={"b->c": None})
    table.end(RequestKey("r", 3))
    assert not table.is_open(KEY)
    assert table.is_stale(RequestKey("r", 2))
    assert not table.is_stale(RequestKey("r", 4))
    with pytest.raises(KeyError):
        table.sender(KEY, "b->c")


def test_grants_reach_their_sender():
    table = StreamTable()
    table.open(KEY, outbound={"b->c": 0, "b->d": 0})
    assert table.grant(Credit(key=KEY, edge="b->d", count=2))
    assert not table.sender(KEY, "b->c").can_send()
    assert table.sender(KEY, "b->d").credits == 2


def test_unknown_edges_and_too_many_early_chunks_are_loud(make_chunk):
    table = StreamTable(max_early_chunks=2)
    table.open(KEY, inbound=[EDGE])
    with pytest.raises(StreamError, match="no inbound edge"):
        table.accept(make_chunk(0, edge="x->b"))
    for sequence in range(2):
        table.accept(make_chunk(sequence, request="other"))
    with pytest.raises(StreamError, match="2 such chunks"):
        table.accept(make_chunk(2, request="other"))


def test_tombstones_are_bounded(make_chunk):
    table = StreamTable(max_tombstones=2)
    for request in ("a", "b", "c"):
        table.end(RequestKey(request))
    assert table.accept(make_chunk(0, request="a")) is Arrival.EARLY
    assert table.accept(make_chunk(0, request="b")) is Arrival.LATE
