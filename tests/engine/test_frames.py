"""A model that makes frames: rows that come per step, starvation, preemption and forced frames."""

from __future__ import annotations

import pytest
import torch

from omnistage.engine.engine import EmbeddingRows, Engine, EngineConfig, EngineRequest, TokenRows
from omnistage.errors import InvalidRequest
from omnistage.models.qwen3_omni_talker import Talker, load_talker
from omnistage.types import FinishReason, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=18, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, top_k=50, max_tokens=18, ignore_eos=True, seed=3)


@pytest.fixture(scope="module")
def talker(qwen3_omni_dir) -> Talker:
    return load_talker(qwen3_omni_dir, dtype=torch.float32)


def new_engine(talker, **limits):
    return Engine(talker, EngineConfig(**{"num_blocks": 64, "max_model_len": 256, **limits}))


def prompt(talker, seed=0, rows=21):
    generator = torch.Generator().manual_seed(seed)
    return EmbeddingRows(torch.randn(rows, talker.config.hidden_size, generator=generator), digest=None)


def texts(talker, count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, talker.config.hidden_size, generator=generator)


def request(talker, name="a", *, sampling=GREEDY, seed=0, **fields):
    return EngineRequest(request_id=name, rows=(prompt(talker, seed),), sampling=sampling, **fields)


def frames_of(engine, max_steps=200):
    """Frames and endings by request, until nothing can be done."""
    frames, endings = {}, {}
    for _ in range(max_steps):
        if not engine.has_work:
            break
        for output in engine.step():
            if output.frame:
                assert output.frame[0] == output.token_ids[0]
                frames.setdefault(output.request_id, []).append(output.frame)
            if output.finish_reason:
                endings[output.request_id] = output.finish_reason
    return frames, endings


def whole(talker, sampling=GREEDY, seed=0):
    engine = new_engine(talker)
    engine.add_request(request(talker, sampling=sampling, seed=seed))
    engine.feed("a", texts(talker, 20, seed + 1), filler=talker.pad_row)
    return frames_of(engine)[0]["a"]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_a_starved_request_waits_without_work(talker, sampling):
    engine = new_engine(talker)
    engine.add_request(request(talker, sampling=sampling))
    rows = texts(talker, 20)
    frames, endings = frames_of(engine)
    assert len(frames["a"]) == 1  # the first code needs no text
    assert not endings
    made = list(frames["a"])
    for index in range(17):
        assert not engine.has_work
        engine.feed("a", rows[index : index + 1])
        fresh, endings = frames_of(engine)
        made += fresh.get("a", [])
    assert made == whole(talker, sampling)
    assert endings == {"a": FinishReason.LENGTH}
    assert len(made) == sampling.max_tokens - 1  # the last code makes no frame
    assert engine.stats().blocks_used == 0


def test_filler_stands_for_text_that_never_comes(talker):
    engine = new_engine(talker)
    engine.add_request(request(talker))
    engine.feed("a", texts(talker, 2), filler=talker.pad_row)
    explicit = new_engine(talker)
    explicit.add_request(request(talker))
    explicit.feed("a", torch.cat((texts(talker, 2), talker.pad_row.expand(20, -1))))
    assert frames_of(engine)[0] == frames_of(explicit)[0]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_requests_do_not_change_one_another(talker, sampling):
    engine = new_engine(talker)
    for index, name in enumerate("abcd"):
        engine.add_request(request(talker, name, sampling=sampling, seed=10 * index))
        engine.feed(name, texts(talker, 20, 10 * index + 1), filler=talker.pad_row)
    frames, _ = frames_of(engine)
    assert frames == {name: whole(talker, sampling, 10 * index) for index, name in enumerate("abcd")}


@pytest.mark.parametrize("rows", [1, 5, 64])
def test_preempted_requests_rebuild_their_rows(talker, rows):
    engine = new_engine(talker, num_blocks=4, max_num_batched_tokens=rows, max_num_seqs=min(rows, 4))
    for index, name in enumerate("abc"):
        engine.add_request(request(talker, name, seed=10 * index))
        engine.feed(name, texts(talker, 20, 10 * index + 1), filler=talker.pad_row)
    frames, _ = frames_of(engine, max_steps=2000)
    assert frames == {name: whole(talker, seed=10 * index) for index, name in enumerate("abc")}
    assert engine.stats().preemptions > 0 or rows == 1


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize("num_forced", [1, 4, 17])
def test_forced_frames_are_continued(talker, sampling, num_forced):
    expected = whole(talker, sampling)
    forced = torch.tensor(expected[:num_forced])
    engine = new_engine(talker)
    engine.add_request(
        request(
            talker,
            sampling=sampling,
            forced_token_ids=tuple(forced[:, 0].tolist()),
            forced_rows=talker.frame_rows(forced),
        )
    )
    engine.feed("a", texts(talker, 20), filler=talker.pad_row)
    frames, endings = frames_of(engine)
    assert frames.get("a", []) == expected[num_forced:]
    assert endings == {"a": FinishReason.LENGTH}


def test_a_talkers_blocks_are_never_shared(talker):
    """Its rows are not determined by ids: two equal prompts may go on differently."""
    engine = new_engine(talker)
    named = EmbeddingRows(prompt(talker).embeddings, digest="same")
    for name in "ab":
        engine.add_request(EngineRequest(request_id=name, rows=(named,), sampling=GREEDY))
        engine.feed(name, texts(talker, 20), filler=talker.pad_row)
    frames_of(engine)
    assert engine.stats().prefix_hit_tokens == 0


def test_what_does_not_fit_is_refused(talker, llama):
    engine = new_engine(talker)
    engine.add_request(request(talker))
    with pytest.raises(InvalidRequest, match=r"text rows have shape \[1, 3\], not"):
        engine.feed("a", torch.zeros(1, 3))
    with pytest.raises(InvalidRequest, match="NaN"):
        engine.feed("a", torch.full((1, talker.config.hidden_size), torch.nan))
    engine.feed("a", texts(talker, 1), filler=talker.pad_row)
    with pytest.raises(InvalidRequest, match=r"takes no \(more\) text rows"):
        engine.feed("a", texts(talker, 1))
    engine.feed("unknown", texts(talker, 1))
    with pytest.raises(InvalidRequest, match="2 forced codes need the rows"):
        engine.add_request(request(talker, "b", forced_token_ids=(1, 2)))
    with pytest.raises(InvalidRequest, match=r"forced rows have shape \[1, 32\], not \[2, 32\]"):
        engine.add_request(request(talker, "b", forced_token_ids=(1, 2), forced_rows=texts(talker, 1)))
    plain = llama.engine()
    plain.add_request(EngineRequest(request_id="a", rows=(TokenRows((1, 2)),)))
    with pytest.raises(InvalidRequest, match="takes no"):
        plain.feed("a", torch.zeros(1, llama.decoder.config.hidden_size))
