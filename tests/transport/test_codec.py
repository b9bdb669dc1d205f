from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import inspect as mi

from omnistage.errors import TransportError
from omnistage.transport.codec import INLINE_BYTES, ITEM_BYTES, Codec, SlotReference, TensorReference
from omnistage.transport.exchange import tensors_of
from omnistage.transport.messages import (
    Abort,
    AnyMessage,
    Chunk,
    Chunks,
    Configure,
    RequestKey,
    StepReport,
    Submit,
)
from omnistage.types import HostTensor, Media, Payload, PortType

MESSAGE_TYPES = get_args(AnyMessage)


@st.composite
def tensors(draw: st.DrawFn) -> HostTensor:
    dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    if draw(st.booleans()):
        shape = (*shape, INLINE_BYTES)  # too large to travel inline, unless another size is 0
    nbytes = ITEM_BYTES[dtype] * int(np.prod(shape, dtype=int))
    seed = draw(st.integers(0, 255))
    data = bytes((seed + index) % 256 for index in range(min(nbytes, 256))) * (nbytes // 256 + 1)
    return HostTensor(dtype, shape, data[:nbytes])


def strategy(kind: mi.Type) -> st.SearchStrategy[Any]:
    """Values of any type that a message may contain, from msgspec's own view of it."""
    match kind:
        case mi.BoolType():
            return st.booleans()
        case mi.IntType():
            return st.integers(-(2**63), 2**63 - 1)
        case mi.FloatType():
            return st.floats(allow_nan=False)
        case mi.StrType():
            return st.text(max_size=8)
        case mi.BytesType():
            return st.binary(max_size=64)
        case mi.NoneType():
            return st.none()
        case mi.EnumType():
            return st.sampled_from(list(kind.cls))
        case mi.CustomType():
            assert kind.cls is HostTensor
            return tensors()
        case mi.ListType():
            return st.lists(strategy(kind.item_type), max_size=3)
        case mi.VarTupleType():
            return st.lists(strategy(kind.item_type), max_size=3).map(tuple)
        case mi.TupleType():
            return st.tuples(*map(strategy, kind.item_types))
        case mi.DictType():
            return st.dictionaries(strategy(kind.key_type), strategy(kind.value_type), max_size=3)
        case mi.UnionType():
            return st.one_of(*map(strategy, kind.types))
        case mi.StructType():
            fields = {field.name: strategy(field.type) for field in kind.fields}
            return st.builds(kind.cls, **fields)
    raise AssertionError(f"a message field has the unknown type {kind}")


messages = st.one_of(*(strategy(mi.type_info(kind)) for kind in MESSAGE_TYPES))


def plain(message: AnyMessage) -> Any:
    """A form that compares tensors by content."""
    return type(message), msgspec.to_builtins(
        message, enc_hook=lambda tensor: [tensor.dtype, list(tensor.shape), bytes(tensor.data).hex()]
    )


slow = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@slow
@given(messages)
def test_every_message_survives_the_wire(message):
    frames = [bytes(frame) for frame in Codec().encode(message)]
    assert plain(Codec().decode(frames)) == plain(message)


def test_only_chunks_and_reports_carry_tensors():
    def holds_tensor(kind: mi.Type) -> bool:
        if isinstance(kind, mi.CustomType):
            return True
        inner = [field.type for field in getattr(kind, "fields", ())]
        for name in ("item_type", "key_type", "value_type"):
            inner += [getattr(kind, name)] if hasattr(kind, name) else []
        inner += [*getattr(kind, "types", ()), *getattr(kind, "item_types", ())]
        return any(map(holds_tensor, inner))

    assert {kind for kind in MESSAGE_TYPES if holds_tensor(mi.type_info(kind))} == {
        Chunk,
        Chunks,
        StepReport,
    }


def test_tensors_of_finds_them_all(make_chunk):
    chunks = tuple(make_chunk(sequence, nbytes=10) for sequence in range(3))
    report = StepReport(worker="w", chunks=chunks)
    assert len(list(tensors_of(report))) == 3
    assert list(tensors_of(chunks[1])) == [chunks[1].payload.tensors["pcm"]]
    assert not list(tensors_of(Abort(keys=())))


def test_large_tensors_become_frames_without_a_copy(make_chunk):
    array = np.arange(INLINE_BYTES, dtype=np.float32)
    frames = Codec().encode(make_chunk(tensor=HostTensor.from_numpy(array)))
    assert len(frames) == 2
    assert np.shares_memory(np.frombuffer(frames[1], np.float32), array)
    received = Codec().decode(frames).payload.tensors["pcm"].numpy()
    assert np.shares_memory(received, array)
    np.testing.assert_array_equal(received, array)


def test_small_tensors_travel_inline(make_chunk):
    assert len(Codec().encode(make_chunk(nbytes=INLINE_BYTES))) == 1
    assert len(Codec().encode(make_chunk(nbytes=INLINE_BYTES + 1))) == 2


def test_media_of_megabytes_survive():
    media = Media(key="k", data=bytes(range(256)) * 8192, mime="image/png")
    message = Submit(key=RequestKey("r"), seed=1, media=(media,))
    assert Codec().decode(Codec().encode(message)) == message


def test_placed_tensors_are_resolved_and_keep_their_handle(make_chunk):
    message = make_chunk(nbytes=50_000)
    tensor = message.payload.tensors["pcm"]
    reference = SlotReference("owner", "segment", 7, 64, 50_000)
    frames = Codec().encode(message, place=lambda given: reference if given is tensor else None)
    assert len(frames) == 1
    decoded = Codec(resolve=lambda given: (memoryview(tensor.data), given)).decode(frames)
    received = decoded.payload.tensors["pcm"]
    assert received.handle == reference
    assert bytes(received.data) == bytes(tensor.data)
    with pytest.raises(TransportError, match="does not share"):
        Codec().decode(frames)


# --- malformed input ------------------------------------------------------------------------------


def decode_or_refuse(frames: list[bytes]) -> None:
    """Anything but a message or a TransportError fails the test."""
    try:
        message = Codec(resolve=lambda reference: (memoryview(bytes(8)), None)).decode(frames)
    except TransportError:
        return
    assert isinstance(message, MESSAGE_TYPES)


@slow
@given(st.lists(st.binary(max_size=200), max_size=4))
def test_noise_is_refused(frames):
    decode_or_refuse(frames)


@slow
@given(messages, st.data())
def test_damaged_messages_are_refused_or_harmless(message, data):
    frames = [bytes(frame) for frame in Codec().encode(message)]
    index = data.draw(st.integers(0, len(frames) - 1))
    frame = bytearray(frames[index])
    for _ in range(data.draw(st.integers(0, 3))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    frames[index] = bytes(frame[: data.draw(st.integers(0, len(frame)))])
    if data.draw(st.booleans()):
        del frames[data.draw(st.integers(0, len(frames) - 1))]
    decode_or_refuse(frames)


nested = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-10, 10)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
lookalikes = st.tuples(
    st.sampled_from([*ITEM_BYTES, "object"]) | nested,
    st.lists(st.integers(-2, 2**62), max_size=3) | nested,
    st.binary(max_size=16)
    | st.integers()
    | st.tuples(st.text(), st.text(), st.integers(0, 9), nested, nested),
)


@slow
@given(nested | lookalikes, st.lists(st.binary(max_size=16), max_size=2))
def test_false_tensor_references_are_refused(reference, extra):
    payload = {"type": "pcm", "tensors": {"pcm": reference}}
    chunk = {"type": "Chunk", "key": ["r", 0], "edge": "e", "sequence": 0, "payload": payload}
    try:
        raw = msgspec.msgpack.encode(chunk)
    except OverflowError:
        return
    decode_or_refuse([raw, *extra])


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"\x81\xa4type\xa7Unknown"],
        [b"\x82\xa4type\xa5Abort\xa4keys" + b"\x91" * 100_000],  # nested too deeply
        [b"\x83\xa4type\xa5Abort\xa3foo" + b"\x91" * 100_000],  # in a field nobody knows
        [b"\x82\xa4type\xa5Abort\xa4keys\xdd\xff\xff\xff\xff"],  # claims four billion items
        [msgspec.msgpack.encode(Abort(keys=())), b"a frame that no tensor names"],
    ],
    ids=["nothing", "empty", "tag", "deep", "deep unknown", "long", "extra frame"],
)
def test_malformed_messages_raise_transport_errors(frames):
    with pytest.raises(TransportError):
        Codec().decode(frames)


@pytest.mark.parametrize("place", [1, -1, 2**40, b"123", SlotReference("o", "s", 1, 64, 3)])
def test_wrong_places_are_refused(place):
    tensor = TensorReference("float32", (1,), place)
    payload = {"type": "pcm", "tensors": {"pcm": tensor}}
    raw = {"type": "Chunk", "key": ["r", 0], "edge": "e", "sequence": 0, "payload": payload}
    with pytest.raises(TransportError):
        Codec(resolve=lambda reference: (memoryview(b"1234"), None)).decode(
            [msgspec.msgpack.encode(raw), b"1234"]
        )


@pytest.mark.parametrize(
    "message",
    [
        Abort(keys=(RequestKey("r", 2**70),)),
        Abort(keys=(RequestKey("\ud800"),)),
        Configure(pipeline=object(), stage="s", replica=0),
    ],
    ids=["integer", "surrogate", "type"],
)
def test_what_cannot_travel_is_refused_by_the_sender(message):
    with pytest.raises(TransportError, match="cannot encode"):
        Codec().encode(message)


@pytest.mark.parametrize(
    ("dtype", "shape"), [("float128", (1,)), ("float32", (3,)), ("float32", (-1, -2)), (">f4", (2,))]
)
def test_tensors_whose_size_is_wrong_are_refused_by_the_sender(dtype, shape):
    tensor = HostTensor(dtype, shape, bytes(8))
    message = Chunk(
        key=RequestKey("r"), edge="e", sequence=0, payload=Payload(PortType.PCM, tensors={"pcm": tensor})
    )
    with pytest.raises(TransportError, match="tensor"):
        Codec().encode(message)


def test_the_codec_is_usable_after_an_error(make_chunk):
    codec = Codec()
    good = make_chunk(nbytes=INLINE_BYTES * 2)
    with pytest.raises(TransportError):
        codec.encode(make_chunk(tensor=HostTensor("float32", (9,), bytes(8))))
    frames = codec.encode(good)
    with pytest.raises(TransportError):
        codec.decode(frames[:1])
    assert plain(codec.decode(frames)) == plain(good)
