"""The vocoder stage: streamed codec frames sound as the whole decode, in any company; latents as ever."""

from __future__ import annotations

import gc
import math
import random
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from omnistage import Graph
from omnistage.errors import StreamError
from omnistage.models.qwen3_code2wav import Qwen3Code2Wav
from omnistage.models.registry import find_part, load_vocoder
from omnistage.ops.tensors import to_host
from omnistage.stages import vocoder as vocoder_module
from omnistage.stages.stage import Outbox, StageContext
from omnistage.stages.vocoder import CPU_BATCH_FRAMES, VocoderStage
from omnistage.transport.messages import Chunk, RequestKey, Submit
from omnistage.types import Payload, PortType, Scalar
from tests.models.qwen_checkpoints import init_weights, save_shards, write_json
from tests.models.qwen_configs import CODE2WAV
from tests.serving.toy_models import CHANNELS, ToyThroat

EDGE = "talker->vocoder"
TOLERANCE = 1e-5
NUM_CODEBOOKS = CODE2WAV["num_quantizers"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of Qwen3-Omni that holds Code2Wav alone."""
    directory = tmp_path_factory.mktemp("code2wav")
    values = {name: value for name, value in CODE2WAV.items() if name != "model_type"}
    reference = Qwen3OmniMoeCode2Wav._from_config(Qwen3OmniMoeCode2WavConfig(**values))
    whole = nn.ModuleDict({"code2wav": reference}).eval()
    init_weights(whole)
    tensors = {name: tensor.contiguous() for name, tensor in whole.state_dict().items()}
    tensors["code2wav.decoder.6.conv.weight"] *= 0.5
    save_shards(tensors, directory)
    write_json(directory / "config.json", {"model_type": "qwen3_omni_moe", "code2wav_config": CODE2WAV})
    return directory


@pytest.fixture(scope="module")
def code2wav(model_dir: Path) -> Qwen3Code2Wav:
    model = load_vocoder(find_part(model_dir, "code2wav"))
    assert isinstance(model, Qwen3Code2Wav)
    return model


class Watched:
    """Code2Wav with a record of the batches it decoded and weak references to the states it gave out."""

    def __init__(self, model: Qwen3Code2Wav) -> None:
        self._model = model
        self.sample_rate, self.hop = model.sample_rate, model.hop
        self.weight_bytes = model.weight_bytes
        self.batches: list[list[int]] = []
        self._states: list[weakref.ref[Any]] = []

    @property
    def num_alive(self) -> int:
        gc.collect()
        return sum(state() is not None for state in self._states)

    def start(self) -> Any:
        state = self._model.start()
        self._states.append(weakref.ref(state))
        return state

    def decode(self, state: Any, frames: Tensor, *, is_last: bool) -> Any:
        self.batches.append([len(frames)])
        return self._model.decode(state, frames, is_last=is_last)

    def decode_batch(self, states: Any, frames_list: Any, is_last_list: Any) -> Any:
        self.batches.append([len(frames) for frames in frames_list])
        return self._model.decode_batch(states, frames_list, is_last_list)


class Vocoder:
    """A stage over a model, what it has said so far, and how far each request's stream has come."""

    def __init__(
        self,
        model: Any,
        *,
        credits_out: Callable[[RequestKey], int | None] | None = None,
        max_num_seqs: int = 32,
        **edge: Any,
    ) -> None:
        graph = Graph("one", model="starter")
        talker, vocoder = (
            graph.llm("talker", part="talker"),
            graph.vocoder("vocoder", part="code2wav", max_num_seqs=max_num_seqs),
        )
        graph.connect(talker, vocoder, stream=True, **edge)
        graph.output(text=talker, audio=vocoder)
        spec = graph.build()
        context = StageContext(
            pipeline=spec,
            spec=spec.stages["vocoder"],
            model_dir=Path(),
            credits=credits_out or (lambda key: None),
        )
        self.stage = VocoderStage(context, model)
        self.outbox = Outbox()
        self._sequence: dict[str, int] = {}

    def submit(self, *names: str) -> None:
        for name in names:
            self.stage.submit(Submit(key=RequestKey(name, 0), seed=0))
            self._sequence[name] = 0

    def send(
        self, name: str, frames: Tensor | None, *, is_last: bool = False, form: str = "codes", **info: Scalar
    ) -> None:
        kind = PortType.CODEC_FRAMES if form == "codes" else PortType.LATENTS
        tensors = {} if frames is None else {form: to_host(frames)}
        self.stage.receive(
            Chunk(
                key=RequestKey(name, 0),
                edge=EDGE,
                sequence=self._sequence[name],
                payload=Payload(type=kind, tensors=tensors, info=info),
                is_last=is_last,
            )
        )
        self._sequence[name] += 1

    def rest(self) -> None:
        while self.stage.deadline() is not None:
            self.stage.step(self.outbox)

    def abort(self, name: str) -> None:
        self.stage.abort(RequestKey(name, 0))

    def pieces(self, name: str) -> list[np.ndarray]:
        """What was sent for a request so far; nothing may follow the last piece."""
        sent = [one for one in self.outbox.emitted if one.key.request_id == name]
        assert all(one.payload.type is PortType.PCM for one in sent)
        assert not any(one.is_last for one in sent[:-1])
        return [one.payload.tensors["pcm"].numpy() for one in sent if one.payload.tensors]

    def sound(self, name: str) -> np.ndarray:
        """All samples of a request that has ended well."""
        ends = [ended for ended in self.outbox.ended if ended.key.request_id == name]
        assert [ended.error for ended in ends] == [None]
        assert [one.is_last for one in self.outbox.emitted if one.key.request_id == name][-1]
        return np.concatenate([np.zeros(0, np.float32), *self.pieces(name)])

    @property
    def num_consumed(self) -> int:
        return len(self.outbox.consumed)


def codes(num_frames: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, CODE2WAV["codebook_size"], (num_frames, NUM_CODEBOOKS), generator=generator)


def whole(model: Qwen3Code2Wav, frames: Tensor) -> np.ndarray:
    return model.decode(model.start(), frames, is_last=True)


def assert_same(own: np.ndarray, expected: np.ndarray) -> None:
    assert own.dtype == np.float32
    assert own.shape == expected.shape
    assert np.abs(own - expected).max(initial=0.0) < TOLERANCE


@pytest.mark.parametrize("per_chunk", [1, 3, 200])
@pytest.mark.parametrize(("first_chunk", "chunk"), [(1, 1), (4, 4), (25, 25), (4, 25)])
def test_streamed_frames_sound_as_the_whole(
    code2wav: Qwen3Code2Wav, first_chunk: int, chunk: int, per_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocoder_module, "IN_HAND_SECONDS", -math.inf)
    frames = codes(61)
    expected = whole(code2wav, frames)
    assert expected.std() > 0.02
    vocoder = Vocoder(code2wav, first_chunk=first_chunk, chunk=chunk)
    vocoder.submit("a")
    for start in range(0, 61, per_chunk):
        vocoder.send("a", frames[start : start + per_chunk], is_last=start + per_chunk >= 61)
        vocoder.rest()
    assert_same(vocoder.sound("a"), expected)
    assert len(vocoder.sound("a")) == 61 * code2wav.hop - code2wav.trim
    assert vocoder.num_consumed == -(-61 // per_chunk)
    sizes = [len(piece) for piece in vocoder.pieces("a")]
    assert sizes[0] == first_chunk * code2wav.hop - code2wav.trim
    assert set(sizes[1:-1]) <= {chunk * code2wav.hop}
    assert vocoder.stage.gauges()["requests"] == 0


def test_frames_wait_until_a_slice_is_full(code2wav: Qwen3Code2Wav, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocoder_module, "IN_HAND_SECONDS", -math.inf)
    vocoder = Vocoder(code2wav, first_chunk=2, chunk=5)
    vocoder.submit("a")
    emitted = []
    for index, frame in enumerate(codes(12).split(1)):
        vocoder.send("a", frame, is_last=index == 11)
        vocoder.rest()
        emitted.append(len(vocoder.pieces("a")))
    assert emitted == [0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 3]  # after 2, 7 and 12 frames


def test_with_little_sound_in_hand_a_slice_is_small(
    code2wav: Qwen3Code2Wav, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocoder_module, "IN_HAND_SECONDS", math.inf)
    vocoder = Vocoder(code2wav, first_chunk=2, chunk=50)
    vocoder.submit("a")
    emitted = []
    for index, frame in enumerate(codes(9).split(1)):
        vocoder.send("a", frame, is_last=index == 8)
        vocoder.rest()
        emitted.append(len(vocoder.pieces("a")))
    assert emitted == [0, 1, 1, 2, 2, 3, 3, 4, 5]
    assert_same(vocoder.sound("a"), whole(code2wav, codes(9)))


@pytest.mark.parametrize("chunk", [1, 4, 25])
@pytest.mark.parametrize("seed", range(4))
def test_several_requests_at_once(code2wav: Qwen3Code2Wav, chunk: int, seed: int) -> None:
    """Streams of all lengths that begin, pause, are aborted and end at random."""
    dice = random.Random(seed)
    model = Watched(code2wav)
    vocoder = Vocoder(model, first_chunk=min(chunk, 4), chunk=chunk)
    frames = {f"r{index}": codes(dice.randrange(1, 70), index) for index in range(7)}
    victim = dice.choice(list(frames))
    sent = dict.fromkeys(frames, 0)
    vocoder.submit(*frames)
    while open_names := [name for name in frames if sent[name] < len(frames[name])]:
        for name in open_names:
            count = dice.randrange(0, 9)
            if count:
                vocoder.send(
                    name,
                    frames[name][sent[name] : sent[name] + count],
                    is_last=sent[name] + count >= len(frames[name]),
                )
                sent[name] += count
        for _ in range(dice.randrange(0, 3)):
            vocoder.stage.step(vocoder.outbox)
        if victim in open_names and sent[victim] > len(frames[victim]) // 2:
            vocoder.abort(victim)
            sent[victim] = len(frames.pop(victim))
    vocoder.rest()
    for name in frames:
        assert_same(vocoder.sound(name), whole(code2wav, frames[name]))
    assert any(len(batch) > 1 for batch in model.batches)
    assert model.num_alive == 0


def test_batches_are_bounded_and_the_most_urgent_come_first(code2wav: Qwen3Code2Wav) -> None:
    model = Watched(code2wav)
    vocoder = Vocoder(model, first_chunk=4, chunk=25)
    names = [f"r{index}" for index in range(6)]
    vocoder.submit(*names)
    for name in names:
        vocoder.send(name, codes(60))
    vocoder.stage.step(vocoder.outbox)
    assert model.batches == [[4] * 6]
    assert vocoder.outbox.worked == [RequestKey(name, 0) for name in names]
    vocoder.rest()
    # Rounds of 25 frames each, two at a time; those with the least sound in hand are next.
    assert model.batches[1:] == [[25, 25]] * 6
    assert 3 * 25 > CPU_BATCH_FRAMES >= 2 * 25
    assert vocoder.outbox.worked[6:12] == vocoder.outbox.worked[12:18] == vocoder.outbox.worked[:6]


def test_no_more_requests_at_once_than_the_stage_allows(code2wav: Qwen3Code2Wav) -> None:
    model = Watched(code2wav)
    vocoder = Vocoder(model, chunk=4, max_num_seqs=2)
    vocoder.submit("a", "b", "c")
    for name in ("a", "b", "c"):
        vocoder.send(name, codes(4), is_last=True)
    vocoder.rest()
    assert model.batches == [[4, 4], [4]]


def test_a_single_slice_may_exceed_a_batch(code2wav: Qwen3Code2Wav) -> None:
    model = Watched(code2wav)
    vocoder = Vocoder(model, chunk=100)
    vocoder.submit("a", "b")
    for name in ("a", "b"):
        vocoder.send(name, codes(100), is_last=True)
    vocoder.rest()
    assert model.batches == [[100], [100]]
    assert_same(vocoder.sound("b"), whole(code2wav, codes(100)))


def test_an_abort_midway_releases(code2wav: Qwen3Code2Wav) -> None:
    model = Watched(code2wav)
    vocoder = Vocoder(model, chunk=4)
    vocoder.submit("gone", "stays")
    frames = codes(30)
    for name in ("gone", "stays"):
        vocoder.send(name, frames[:10])
    vocoder.rest()
    assert model.num_alive == 2
    vocoder.abort("gone")
    vocoder.abort("gone")
    assert model.num_alive == 1
    assert vocoder.stage.gauges()["requests"] == 1
    vocoder.send("stays", frames[10:], is_last=True)
    vocoder.rest()
    assert_same(vocoder.sound("stays"), whole(code2wav, frames))
    assert not [ended for ended in vocoder.outbox.ended if ended.key.request_id == "gone"]
    assert model.num_alive == 0


@pytest.mark.parametrize("final", [None, codes(0)])
@pytest.mark.parametrize("num_frames", [0, 8, 10])
def test_the_last_chunk_may_be_empty(code2wav: Qwen3Code2Wav, num_frames: int, final: Tensor | None) -> None:
    model = Watched(code2wav)
    vocoder = Vocoder(model, chunk=4)
    vocoder.submit("a")
    if num_frames:
        vocoder.send("a", codes(num_frames))
        vocoder.rest()
    vocoder.send("a", final, is_last=True)
    vocoder.rest()
    expected = whole(code2wav, codes(num_frames)) if num_frames else np.zeros(0, np.float32)
    assert_same(vocoder.sound("a"), expected)
    assert model.num_alive == 0


def test_a_producer_without_credits_is_not_waited_for(code2wav: Qwen3Code2Wav) -> None:
    """Two chunks may be under way: the stage decodes them, though its slice has 25 frames."""
    vocoder = Vocoder(code2wav, chunk=25, credits=2)
    vocoder.submit("a")
    frames = codes(9)
    for index, piece in enumerate(frames.split(3)):
        assert index - vocoder.num_consumed < 2
        vocoder.send("a", piece, is_last=index == 2)
        vocoder.rest()
    assert_same(vocoder.sound("a"), whole(code2wav, frames))
    assert vocoder.outbox.consumed == [(RequestKey("a", 0), EDGE)] * 3


def test_a_slow_listener_holds_up_nobody_else(code2wav: Qwen3Code2Wav) -> None:
    slow = RequestKey("slow", 0)
    allowed: dict[RequestKey, int] = {slow: 0}
    vocoder = Vocoder(code2wav, chunk=4, credits_out=lambda key: allowed.get(key))
    vocoder.submit("slow", "quick")
    for name in ("slow", "quick"):
        vocoder.send(name, codes(6), is_last=True)
    vocoder.rest()
    assert vocoder.pieces("slow") == []
    assert_same(vocoder.sound("quick"), whole(code2wav, codes(6)))
    del allowed[slow]
    vocoder.rest()
    assert_same(vocoder.sound("slow"), whole(code2wav, codes(6)))


def test_each_sentence_is_an_utterance(code2wav: Qwen3Code2Wav) -> None:
    vocoder = Vocoder(code2wav, chunk=4)
    vocoder.submit("a")
    for sentence, seed in enumerate((1, 2)):
        for piece in codes(10, seed).split(3):
            vocoder.send("a", piece, sentence=sentence)
            vocoder.rest()
    vocoder.send("a", None, is_last=True)
    vocoder.rest()
    expected = [whole(code2wav, codes(10, seed)) for seed in (1, 2)]
    assert_same(vocoder.sound("a"), np.concatenate(expected))


def test_bad_codes_end_their_own_request(code2wav: Qwen3Code2Wav) -> None:
    model = Watched(code2wav)
    vocoder = Vocoder(model, chunk=4)
    vocoder.submit("bad", "good")
    bad = codes(4)
    bad[2, 1] = CODE2WAV["codebook_size"]
    vocoder.send("bad", bad)
    vocoder.send("good", codes(4), is_last=True)
    vocoder.rest()
    assert_same(vocoder.sound("good"), whole(code2wav, codes(4)))
    (ended,) = [ended for ended in vocoder.outbox.ended if ended.key.request_id == "bad"]
    assert isinstance(ended.error, StreamError)
    assert model.num_alive == 0


def test_malformed_chunks(code2wav: Qwen3Code2Wav) -> None:
    vocoder = Vocoder(code2wav, chunk=4)
    vocoder.submit("a")
    with pytest.raises(StreamError, match="without frames"):
        vocoder.send("a", None)
    with pytest.raises(StreamError, match=r"frames of shape \[4\]"):
        vocoder.send("a", torch.zeros(4, dtype=torch.int64))
    vocoder.send("a", codes(1))
    with pytest.raises(StreamError, match="of one width"):
        vocoder.send("a", codes(1)[:, :2])


def test_latents_are_sentences() -> None:
    """A model of latents decodes one request at a time, and a chunk is used up with its sentence."""
    model = ToyThroat()
    vocoder = Vocoder(model, first_chunk=2, chunk=3)
    vocoder.submit("a")
    sentences = [torch.rand(7, CHANNELS), torch.rand(1, CHANNELS)]
    for sentence in sentences:
        vocoder.send("a", sentence, form="latents", sentence=0)
    while not vocoder.num_consumed:
        vocoder.stage.step(vocoder.outbox)
    assert [len(piece) for piece in vocoder.pieces("a")] == [20, 30, 20]
    vocoder.rest()
    vocoder.send("a", None, form="latents", is_last=True)
    vocoder.rest()
    expected = [model.decode(model.start(), sentence, is_last=True) for sentence in sentences]
    assert np.array_equal(vocoder.sound("a"), np.concatenate(expected))
    assert vocoder.num_consumed == 2
