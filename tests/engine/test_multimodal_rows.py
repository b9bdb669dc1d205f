"""Positions, rows added between layers and exported hidden states: Qwen3-Omni's thinker on the engine.

Tokens equal the recorded ones, and exports equal transformers' hidden states, however the engine cuts,
batches, shares and repeats the work.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from omnistage.engine.engine import EmbeddingRows, Engine, EngineConfig, EngineRequest, TokenRows
from omnistage.engine.request import Rows
from omnistage.errors import InvalidRequest, PipelineError
from omnistage.models.loader import read_json
from omnistage.models.qwen3_omni_positions import PositionRules, rope_index
from omnistage.models.qwen3_omni_thinker import load_thinker
from omnistage.models.qwen3_text import TextModel
from omnistage.types import FinishReason, SamplingParams
from tests.engine.conftest import Collected
from tests.models.qwen3_reference import MAX_TOKENS, OMNI_CASES, RECORDED, Answer, omni_answer

ACCEPT_HIDDEN_LAYER = 4  # of the small checkpoint's talker
BLOCK_SIZE = 16


class Thinker:
    """The small model, and requests made of what the reference was given."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.model: TextModel = load_thinker(directory, dtype=torch.float32)
        self.config = read_json(directory / "config.json")
        self.rules = PositionRules.of_thinker(self.config)
        self.media_ids = (self.rules.image_token_id, self.rules.video_token_id, self.rules.audio_token_id)
        self._counter = itertools.count()

    def engine(self, **limits: object) -> Engine:
        defaults = {
            "num_blocks": 256,
            "block_size": BLOCK_SIZE,
            "max_model_len": 2048,
            "max_num_batched_tokens": 2048,
            "max_prefill_tokens_per_request": 2048,
            "capture_layer": ACCEPT_HIDDEN_LAYER,
        }
        return Engine(self.model, EngineConfig(**{**defaults, **limits}))

    def answer(self, case: str) -> Answer:
        return omni_answer(self.directory, case)

    def rows(self, case: str) -> tuple[Rows, ...]:
        """Text as ids, media as rows with digests, all with positions; media are exported."""
        answer = self.answer(case)
        positions = rope_index(answer.prompt_ids, answer.media, self.rules).positions
        pieces: list[Rows] = []
        start = 0
        for token_id, run in itertools.groupby(answer.prompt_ids, self.kind_of):
            stop = start + len(list(run))
            taken = positions[:, start:stop]
            if token_id is None:
                pieces.append(TokenRows(tuple(answer.prompt_ids[start:stop]), taken))
            else:
                pieces.append(
                    EmbeddingRows(
                        answer.embeddings[start:stop],
                        f"{case}-{start}",
                        positions=taken,
                        deepstack=self.deepstack(answer, start, stop),
                        is_exported=True,
                    )
                )
            start = stop
        return tuple(pieces)

    def kind_of(self, token_id: int) -> int | None:
        return token_id if token_id in self.media_ids else None

    @staticmethod
    def deepstack(answer: Answer, start: int, stop: int) -> Tensor | None:
        if answer.deepstack is None:
            return None
        chosen = (answer.deepstack.rows >= start) & (answer.deepstack.rows < stop)
        return torch.stack([item[chosen] for item in answer.deepstack.features]) if chosen.any() else None

    def request(self, rows: tuple[Rows, ...], **options: object) -> EngineRequest:
        return EngineRequest(
            request_id=f"request-{next(self._counter)}",
            rows=rows,
            sampling=SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS),
            eos_token_ids=self.model.config.eos_token_ids,
            **options,
        )

    def check(self, case: str, request_id: str, collected: Collected, skip: int = 0) -> None:
        """The recorded tokens from the `skip`th on, and the reference's hidden states at media rows, once."""
        assert collected.token_ids[request_id] == RECORDED["qwen3_omni"][case]["tokens"][skip:]
        self.check_export(case, collected, request_id)

    def check_export(self, case: str, collected: Collected, request_id: str) -> None:
        answer = self.answer(case)
        assert answer.accepted is not None
        is_media = [self.kind_of(token_id) is not None for token_id in answer.prompt_ids]
        exports = [o.exported for o in collected.outputs[request_id] if o.exported is not None]
        if not any(is_media):
            assert exports == []
            return
        (exported,) = exports
        assert collected.outputs[request_id][0].exported is exported
        torch.testing.assert_close(exported, answer.accepted[is_media], atol=1e-4, rtol=0)

    def spans(self, case: str) -> list[tuple[int, int]]:
        """[start, stop) of the rows of each item."""
        bounds = list(itertools.accumulate((len(rows_of(piece)) for piece in self.rows(case)), initial=0))
        pairs = zip(self.rows(case), itertools.pairwise(bounds), strict=True)
        return [pair for piece, pair in pairs if isinstance(piece, EmbeddingRows)]


def rows_of(piece: Rows) -> Tensor | tuple[int, ...]:
    return piece.embeddings if isinstance(piece, EmbeddingRows) else piece.token_ids


@pytest.fixture(scope="module")
def thinker(qwen3_omni_dir: Path) -> Thinker:
    made = Thinker(qwen3_omni_dir)
    assert made.config["talker_config"]["accept_hidden_layer"] == ACCEPT_HIDDEN_LAYER
    return made


@pytest.mark.parametrize("case", OMNI_CASES)
def test_alone(thinker, collected, case: str) -> None:
    request = thinker.request(thinker.rows(case))
    engine = thinker.engine()
    engine.add_request(request)
    thinker.check(case, request.request_id, collected.drain(engine))


@pytest.mark.parametrize("case", ["text", "image", "video"])
def test_without_export(thinker, collected, case: str) -> None:
    pieces = [
        replace(piece, is_exported=False) if isinstance(piece, EmbeddingRows) else piece
        for piece in thinker.rows(case)
    ]
    request = thinker.request(tuple(pieces))
    engine = thinker.engine(capture_layer=None)
    engine.add_request(request)
    collected.drain(engine)
    assert collected.token_ids[request.request_id] == RECORDED["qwen3_omni"][case]["tokens"]
    assert all(output.exported is None for output in collected.outputs[request.request_id])


@pytest.mark.parametrize("prefill", [1, 7, 64])
def test_together_in_chunks(thinker, collected, prefill: int) -> None:
    """Every mix at once, among plain requests, each chunk boundary somewhere in a picture or clip."""
    requests = {case: thinker.request(thinker.rows(case)) for case in OMNI_CASES}
    plain = [thinker.request((TokenRows(tuple(range(3, 3 + 5 * n))),)) for n in range(1, 5)]
    expected = Collected()
    for request in plain:
        alone = thinker.engine(capture_layer=None)
        alone.add_request(request)
        expected.drain(alone)
    engine = thinker.engine(max_prefill_tokens_per_request=prefill)
    for request in itertools.chain(*itertools.zip_longest(requests.values(), plain)):
        if request is not None:
            engine.add_request(request)
    collected.drain(engine)
    for case, request in requests.items():
        thinker.check(case, request.request_id, collected)
    for request in plain:
        assert collected.token_ids[request.request_id] == expected.token_ids[request.request_id]


@pytest.mark.parametrize("case", ["image", "two_images", "audio_in_video", "all"])
@pytest.mark.parametrize("ends_inside", [True, False])
def test_prefix_hit_at_an_item(thinker, collected, case: str, ends_inside: bool) -> None:
    """A first request without export leaves blocks; the second's hit ends in its last item, or after it."""
    rows = thinker.rows(case)
    start, stop = thinker.spans(case)[-1]
    block_size = next(size for size in range(3, 99) if bool(stop % size) == ends_inside)
    engine = thinker.engine(block_size=block_size)
    last = max(index for index, piece in enumerate(rows) if isinstance(piece, EmbeddingRows))
    items = [replace(p, is_exported=False) if isinstance(p, EmbeddingRows) else p for p in rows[: last + 1]]
    engine.add_request(thinker.request((*items, TokenRows((9,) * 40))))
    collected.drain(engine)
    second = thinker.request(rows)
    engine.add_request(second)
    collected.drain(engine)
    thinker.check(case, second.request_id, collected)
    usage = collected.last(second.request_id).usage
    assert usage is not None
    assert usage.cached_tokens == stop // block_size * block_size
    assert (start < usage.cached_tokens < stop) == ends_inside


def test_whole_prompt_cached(thinker, collected) -> None:
    """An answer from the cache has its export, though none of those rows is computed again."""
    engine = thinker.engine()
    requests = [thinker.request(thinker.rows("all")) for _ in range(2)]
    for request in requests:
        engine.add_request(request)
        collected.drain(engine)
        thinker.check("all", request.request_id, collected)
    num_prompt = RECORDED["qwen3_omni"]["all"]["prompt_rows"]
    assert engine.stats().prefix_hit_tokens == (num_prompt - 1) // BLOCK_SIZE * BLOCK_SIZE


def test_other_positions_share_nothing(thinker, collected) -> None:
    """Equal rows at other places: the hit ends before the first row whose position differs."""
    rows = thinker.rows("image")
    engine = thinker.engine(block_size=4)
    engine.add_request(thinker.request(rows))
    collected.drain(engine)
    start, stop = thinker.spans("image")[0]
    moved = [
        replace(piece, positions=piece.positions + np.float32([[0], [0], [1]]))
        if isinstance(piece, EmbeddingRows)
        else piece
        for piece in rows
    ]
    for pieces, is_moved in ((moved, True), (rows, False)):
        request = thinker.request(tuple(pieces))
        engine.add_request(request)
        collected.drain(engine)
        usage = collected.last(request.request_id).usage
        assert usage.cached_tokens == (start if is_moved else usage.prompt_tokens - 1) // 4 * 4
    assert stop > start + 4


def test_preemption(thinker, collected) -> None:
    """A pool that holds less than all of them: prompts and answers start over, exports come once."""
    cases = ["image", "two_images", "audio", "long_audio", "image", "two_images"]
    requests = [thinker.request(thinker.rows(case)) for case in cases]
    engine = thinker.engine(
        num_blocks=40, block_size=4, enable_prefix_cache=False, max_prefill_tokens_per_request=11
    )
    for request in requests:
        engine.add_request(request)
    collected.drain(engine)
    assert engine.stats().preemptions > 0
    for case, request in zip(cases, requests, strict=True):
        thinker.check(case, request.request_id, collected)


@pytest.mark.parametrize("enable_prefix_cache", [True, False])
def test_preemption_in_the_middle_of_a_video(thinker, collected, enable_prefix_cache: bool) -> None:
    """What was captured before comes from the cache with its blocks, or is captured again."""
    engine = thinker.engine(
        num_blocks=42, max_prefill_tokens_per_request=100, enable_prefix_cache=enable_prefix_cache
    )
    rows = thinker.rows("long_audio")
    urgent = thinker.request(rows[:1], prompt_is_complete=False)
    late = thinker.request(thinker.rows("video"), priority=1)
    for request in (urgent, late):
        engine.add_request(request)
    for _ in range(5):
        collected.step(engine)
    engine.extend_prompt(urgent.request_id, rows[1:], True)
    collected.step(engine)
    assert engine.stats().preemptions == 1
    assert late.request_id not in collected.outputs
    collected.drain(engine)
    thinker.check("video", late.request_id, collected)
    thinker.check("long_audio", urgent.request_id, collected)
    assert (engine.stats().prefix_hit_tokens > 0) == enable_prefix_cache


def test_a_picture_that_comes_later(thinker, collected) -> None:
    """Rows before it are computed meanwhile; the positions come with the pieces."""
    rows = thinker.rows("two_images")
    engine = thinker.engine()
    request = thinker.request(rows[:1], prompt_is_complete=False)
    engine.add_request(request)
    for index, piece in enumerate(rows[1:], 2):
        collected.drain(engine)
        engine.extend_prompt(request.request_id, (piece,), index == len(rows))
    assert request.request_id not in collected.outputs
    thinker.check("two_images", request.request_id, collected.drain(engine))


@pytest.mark.parametrize("case", ["image", "video"])
def test_forced_tokens(thinker, collected, case: str) -> None:
    """A second attempt goes on where the first broke off, at the same positions."""
    forced = tuple(RECORDED["qwen3_omni"][case]["tokens"][:7])
    request = thinker.request(thinker.rows(case), forced_token_ids=forced)
    engine = thinker.engine(max_prefill_tokens_per_request=20)
    engine.add_request(request)
    thinker.check(case, request.request_id, collected.drain(engine), skip=7)


def test_complete_forced_output_still_exports(thinker, collected) -> None:
    tokens = RECORDED["qwen3_omni"]["image"]["tokens"]
    request = thinker.request(thinker.rows("image"), forced_token_ids=tuple(tokens))
    engine = thinker.engine()
    engine.add_request(request)
    collected.drain(engine)
    thinker.check("image", request.request_id, collected, skip=len(tokens))
    (output,) = collected.outputs[request.request_id]
    assert output.finish_reason is FinishReason.STOP
    assert output.usage is not None
    assert output.usage.completion_tokens == len(tokens)
    assert engine.stats().blocks_used == 0


def test_embed(thinker) -> None:
    ids = thinker.answer("text").prompt_ids
    torch.testing.assert_close(thinker.engine().embed(ids), thinker.answer("text").embeddings)
    with pytest.raises(InvalidRequest, match="outside the vocabulary"):
        thinker.engine().embed([thinker.model.config.vocab_size])


def test_captured_rows_count_as_memory(thinker) -> None:
    blocks = {
        layer: thinker.engine(num_blocks=None, kv_bytes=2**20, capture_layer=layer).stats().blocks_total
        for layer in (None, ACCEPT_HIDDEN_LAYER)
    }
    per_block = thinker.model.kv_bytes_per_block(BLOCK_SIZE)
    assert blocks[None] == 2**20 // per_block
    assert blocks[ACCEPT_HIDDEN_LAYER] == 2**20 // (per_block + BLOCK_SIZE * 64 * 4)


@pytest.mark.parametrize("layer", [-1, 6])
def test_a_layer_that_does_not_exist(thinker, llama, layer: int) -> None:
    with pytest.raises(PipelineError, match="has 5 layers"):
        thinker.engine(capture_layer=layer)
    with pytest.raises(PipelineError, match="has 0 layers"):
        llama.engine(capture_layer=0)


def test_rows_that_do_not_fit(thinker, llama) -> None:
    engine = thinker.engine(capture_layer=None)
    hidden = torch.zeros(3, 64)
    bad: list[tuple[Rows, str]] = [
        (TokenRows((1, 2, 3), np.zeros(2)), r"\[2\], not \[3\] or \[3, 3\]"),
        (TokenRows((1, 2, 3), np.zeros((2, 3))), r"\[2, 3\], not"),
        (TokenRows((1,), np.array([np.nan])), "positions hold NaN"),
        (TokenRows((1,), is_exported=True), "no capture_layer"),
        (EmbeddingRows(hidden, None, deepstack=torch.zeros(2, 2, 64)), r"not \[num_layers, 3, 64\]"),
        (EmbeddingRows(hidden, None, deepstack=torch.full((2, 3, 64), torch.inf)), "deepstack rows hold"),
        (EmbeddingRows(hidden, None, deepstack=torch.zeros(6, 3, 64)), "6 layers; this model takes"),
    ]
    for piece, message in bad:
        with pytest.raises(InvalidRequest, match=message):
            engine.add_request(thinker.request((piece,)))
    assert not engine.has_work
    width = llama.decoder.config.hidden_size
    deepstack = EmbeddingRows(torch.zeros(3, width), None, deepstack=torch.zeros(1, 3, width))
    for piece, message in (
        (deepstack, "takes them after 0"),
        (TokenRows((1, 2), np.zeros((3, 2))), r"\[3, 2\], not \[2\]$"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            llama.engine().add_request(llama.request(piece))


def test_given_positions_on_one_axis(llama, collected) -> None:
    """A plain decoder counts on from a prompt's last position, beside a request with row indices."""
    (prompt,) = llama.prompts([21])
    positions = np.arange(21) * 2 + 3
    shifted = llama.request(TokenRows(prompt, positions), max_tokens=12)
    plain = llama.request(prompt, max_tokens=12)
    engine = llama.engine(max_prefill_tokens_per_request=8)
    for request in (shifted, plain):
        engine.add_request(request)
    collected.drain(engine)
    llama.assert_greedy(plain, collected.token_ids[plain.request_id])
    tokens = collected.token_ids[shifted.request_id]
    everything = torch.tensor([[*prompt, *tokens]])
    ids = torch.cat((torch.from_numpy(positions), torch.arange(44, 56)))[None]
    with torch.no_grad():
        logits = llama.reference(everything, position_ids=ids).logits[0]
    assert logits[20:-1].argmax(-1).tolist() == tokens


def test_pictures_with_different_numbers_of_layers_in_one_step(thinker, collected) -> None:
    """Each gets its own rows after its own layers, as it does alone."""
    rows = thinker.rows("image")
    variants = [
        tuple(
            replace(piece, digest=None, deepstack=piece.deepstack[:count] * 3)
            if isinstance(piece, EmbeddingRows)
            else piece
            for piece in rows
        )
        for count in (1, 2, 3)
    ]
    alone, together = [], [thinker.request(variant) for variant in variants]
    for variant in variants:
        engine = thinker.engine()
        alone.append(thinker.request(variant))
        engine.add_request(alone[-1])
        collected.drain(engine)
    engine = thinker.engine()
    for request in together:
        engine.add_request(request)
    collected.drain(engine)
    exports = []
    for one, other in zip(alone, together, strict=True):
        assert collected.token_ids[one.request_id] == collected.token_ids[other.request_id]
        exports.append(collected.outputs[one.request_id][0].exported)
        torch.testing.assert_close(
            collected.outputs[other.request_id][0].exported, exports[-1], atol=1e-5, rtol=0
        )
    assert (exports[0] - exports[1]).abs().max() > 0.1
    assert (exports[1] - exports[2]).abs().max() > 0.1
