"""Prompts that grow in any order of delivery end as the reference's whole prompt."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch

from omnistage.engine.request import EmbeddingRows
from omnistage.errors import InvalidRequest, StreamError
from omnistage.models.loader import read_json
from omnistage.models.qwen3_omni_positions import PositionRules, rope_index
from omnistage.ops.tensors import to_host
from omnistage.stages.qwen3_handover import HeardPrompt
from omnistage.stages.qwen3_prompt import Qwen3Prompts, Qwen3Rules
from omnistage.types import MediaSegment, MergedSegment, Payload, PortType, TokenSegment
from tests.models.qwen3_reference import OMNI_CASES, omni_answer
from tests.omni.asking import segments_of

HIDDEN = 8


@pytest.fixture(scope="module")
def config(qwen3_omni_dir):
    return read_json(qwen3_omni_dir / "config.json")


@pytest.fixture(scope="module")
def prompts(config) -> Qwen3Prompts:
    return Qwen3Prompts(Qwen3Rules.of_omni(config))


def payload(modality, num_rows, seed, grid=None, seconds=None):
    generator = torch.Generator().manual_seed(seed)
    info = {"modality": modality, "digest": f"{modality}{seed}", "num_tokens": num_rows}
    tensors = {"embeddings": to_host(torch.randn(num_rows, HIDDEN, generator=generator))}
    if grid is not None:
        info.update(t=grid[0], h=grid[1], w=grid[2])
        tensors["deepstack"] = to_host(torch.randn(2, num_rows, HIDDEN, generator=generator))
    if seconds is not None:
        info["second_per_grid"] = seconds
    return Payload(type=PortType.EMBEDDINGS, tensors=tensors, info=info)


def deliveries_of(directory, case, segments):
    """(stage, item, payload) of a case's media, in the order of the prompt."""
    media = omni_answer(directory, case).media
    grids, films = iter(media.image_grids), iter(zip(media.video_grids, media.seconds_per_grid, strict=True))
    clips = iter(media.audio_lengths)
    config = read_json(directory / "config.json")["thinker_config"]
    kinds = [
        "image" if token == config["image_token_id"] else "video"
        for token, _ in itertools.groupby(omni_answer(directory, case).prompt_ids)
        if token in (config["image_token_id"], config["video_token_id"])
    ]
    if case == "audio_in_video":
        kinds = ["video"]
    seen = iter(kinds)
    found = []
    parts = [
        part
        for segment in segments
        for part in ((segment.video, segment.sound) if isinstance(segment, MergedSegment) else (segment,))
        if isinstance(part, MediaSegment)
    ]
    for seed, part in enumerate(parts):
        if part.stage == "hearing":
            found.append(("hearing", part.item, payload("audio", next(clips), seed)))
        elif next(seen) == "image":
            grid = next(grids)
            found.append(
                ("vision", part.item, payload("image", grid[0] * grid[1] * grid[2] // 4, seed, grid))
            )
        else:
            grid, seconds = next(films)
            rows = grid[0] * grid[1] * grid[2] // 4
            found.append(("vision", part.item, payload("video", rows, seed, grid, seconds)))
    return found


def joined(rows):
    """Ids (-1 where rows are given) and positions [3, n] of consecutive pieces."""
    ids, positions = [], []
    for piece in rows:
        given = isinstance(piece, EmbeddingRows)
        ids += [-1] * piece.embeddings.shape[0] if given else list(piece.token_ids)
        positions.append(piece.positions)
    return ids, np.concatenate(positions, axis=1)


@pytest.mark.parametrize("case", OMNI_CASES)
@pytest.mark.parametrize("seed", range(3))
def test_pieces_in_any_order_make_the_whole_prompt(case, seed, prompts, config, qwen3_omni_dir):
    segments = segments_of(qwen3_omni_dir, case)
    prompt = prompts.open(segments, is_heard=True)
    deliveries = deliveries_of(qwen3_omni_dir, case, segments)
    random.Random(seed).shuffle(deliveries)
    rows = list(prompt.take_ready())
    if deliveries and case != "audio_in_video":
        assert rows, "text before the first picture is known at once"
    for stage, item, delivered in deliveries:
        assert not prompt.is_complete
        prompt.deliver(stage, item, delivered)
        rows += prompt.take_ready()
    assert prompt.is_complete
    assert prompt.take_ready() == ()
    answer = omni_answer(qwen3_omni_dir, case)
    ids, positions = joined(rows)
    thinker = config["thinker_config"]
    media_ids = {thinker[f"{kind}_token_id"] for kind in ("image", "video", "audio")}
    assert ids == [-1 if token in media_ids else token for token in answer.prompt_ids]
    np.testing.assert_array_equal(positions, answer.positions.float().numpy())
    heard = HeardPrompt.of(prompt.handover())
    assert heard.token_ids.tolist() == answer.prompt_ids
    assert list(heard.media.image_grids) == list(answer.media.image_grids)
    assert list(heard.media.audio_lengths) == list(answer.media.audio_lengths)
    exported = [piece for piece in rows if piece.is_exported]
    assert sum(piece.embeddings.shape[0] for piece in exported) == sum(
        token in media_ids for token in answer.prompt_ids
    )


def test_a_sound_track_lies_between_the_frames(prompts, qwen3_omni_dir):
    segments = segments_of(qwen3_omni_dir, "audio_in_video")
    prompt = prompts.open(segments, is_heard=False)
    (_, _, film), (_, _, sound) = deliveries_of(qwen3_omni_dir, "audio_in_video", segments)
    prompt.deliver("vision", 0, film)
    prompt.deliver("hearing", 0, sound)
    merged = next(piece for piece in prompt.take_ready() if isinstance(piece, EmbeddingRows))
    answer = omni_answer(qwen3_omni_dir, "audio_in_video")
    rules = Qwen3Rules.of_omni(read_json(qwen3_omni_dir / "config.json"))
    audio_id = rules.placeholders["audio"]
    first = answer.prompt_ids.index(rules.placeholders["video"])
    order = np.array(answer.prompt_ids[first : first + merged.embeddings.shape[0]])
    seen = torch.from_numpy(film.tensors["embeddings"].numpy().copy())
    heard = torch.from_numpy(sound.tensors["embeddings"].numpy().copy())
    assert torch.equal(merged.embeddings[torch.from_numpy(order != audio_id)], seen)
    assert torch.equal(merged.embeddings[torch.from_numpy(order == audio_id)], heard)
    assert not merged.deepstack[:, torch.from_numpy(order == audio_id)].any()
    assert merged.digest is not None
    assert not merged.is_exported


def test_positions_of_a_prefix_do_not_depend_on_what_follows(config, qwen3_omni_dir):
    rules = PositionRules.of_thinker(config)
    answer = omni_answer(qwen3_omni_dir, "all")
    whole = rope_index(answer.prompt_ids, answer.media, rules).positions
    prompt = Qwen3Prompts(Qwen3Rules.of_omni(config)).open(segments_of(qwen3_omni_dir, "all"), is_heard=False)
    _, early = joined(prompt.take_ready())
    np.testing.assert_array_equal(early, whole[:, : early.shape[1]])


def test_only_media_of_users_turns_are_heard(prompts, config):
    start, user, system = config["im_start_token_id"], config["user_token_id"], config["system_token_id"]
    segments = (
        TokenSegment((start, system)),
        MediaSegment("hearing", 0),
        TokenSegment((start, user)),
        MediaSegment("hearing", 1),
        TokenSegment((start,)),
    )
    prompt = prompts.open(segments, is_heard=True)
    for item in range(2):
        prompt.deliver("hearing", item, payload("audio", 3, item))
    flags = [piece.is_exported for piece in prompt.take_ready() if isinstance(piece, EmbeddingRows)]
    assert flags == [False, True]


def test_one_medium_may_stand_twice(prompts):
    again = MediaSegment("hearing", 0)
    prompt = prompts.open((again, TokenSegment((1, 2)), again), is_heard=False)
    prompt.deliver("hearing", 0, payload("audio", 3, 0))
    assert prompt.is_complete
    assert [piece.positions.shape[1] for piece in prompt.take_ready()] == [3, 2, 3]


def test_what_does_not_fit_is_refused(prompts):
    prompt = prompts.open((TokenSegment((1,)), MediaSegment("vision", 0)), is_heard=False)
    with pytest.raises(StreamError, match="item 3, which the prompt does not name"):
        prompt.deliver("vision", 3, payload("image", 4, 0, (1, 4, 4)))
    with pytest.raises(StreamError, match="takes embeddings, not text"):
        prompt.deliver("vision", 0, Payload(type=PortType.TEXT, text="a cat"))
    with pytest.raises(StreamError, match="no place for smell"):
        prompt.deliver("vision", 0, payload("smell", 4, 0))
    merged = MergedSegment(MediaSegment("vision", 0), MediaSegment("hearing", 0))
    prompt = prompts.open((merged,), is_heard=False)
    prompt.deliver("vision", 0, payload("image", 4, 0, (1, 4, 4)))
    with pytest.raises(StreamError, match="no video with its sound"):
        prompt.deliver("hearing", 0, payload("audio", 3, 1))
    silent = Qwen3Prompts(
        Qwen3Rules(placeholders={"image": 5}, markers=frozenset(), positions=lambda ids, media: None)
    )
    with pytest.raises(InvalidRequest, match="takes no sound of a video"):
        silent.open((merged,), is_heard=False)
    with pytest.raises(StreamError, match="must begin with the prompt"):
        HeardPrompt.of(Payload(type=PortType.TOKENS))
