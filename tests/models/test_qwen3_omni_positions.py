"""Positions equal transformers' get_rope_index, bit for bit, for any mix of media."""

from __future__ import annotations

import copy
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3VLConfig
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoePreTrainedModelForConditionalGeneration as Reference,
)
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from omnistage.errors import InvalidRequest, WeightsError
from omnistage.models.qwen3_omni_positions import (
    PositionRules,
    PromptMedia,
    last_assistant_row,
    rope_index,
    talker_rope_index,
    user_rows,
    vl_rope_index,
)
from omnistage.models.qwen3_tokens import num_audio_tokens, num_visual_tokens
from tests.models.qwen_configs import SPECIAL_TOKENS, omni_config, vl_config

IDS = {token: 600 + index for index, token in enumerate(SPECIAL_TOKENS)}
ROLES = {"system": 90, "user": 91, "assistant": 92}
CONFIG = omni_config(IDS, ROLES)
THINKER, TALKER = PositionRules.of_thinker(CONFIG), PositionRules.of_talker(CONFIG)
IMAGE, VIDEO, AUDIO = IDS["<|image_pad|>"], IDS["<|video_pad|>"], IDS["<|audio_pad|>"]
VISION_START, VISION_END = IDS["<|vision_start|>"], IDS["<|vision_end|>"]
AUDIO_START, AUDIO_END = IDS["<|audio_start|>"], IDS["<|audio_end|>"]
PAD, IM_START = IDS["<tts_pad>"], IDS["<|im_start|>"]
SECONDS = [1.0, 2.0, 2 / 3, 0.4, 2 / 30, 1 / 7]

grids = st.tuples(st.integers(1, 6), st.integers(1, 7), st.integers(1, 7)).map(
    lambda g: (g[0], 2 * g[1], 2 * g[2])
)
texts = st.tuples(st.just("text"), st.integers(0, 9))
images = st.tuples(st.just("image"), grids.map(lambda grid: (1, grid[1], grid[2])))
audios = st.tuples(st.just("audio"), st.integers(1, 420))
videos = st.tuples(st.just("video"), grids, st.sampled_from(SECONDS))
merged = st.tuples(st.just("merged"), grids, st.sampled_from(SECONDS), st.integers(1, 420))


class Prompt:
    """Token ids and media of a list of items; `frames` are the mel frames of each clip."""

    def __init__(self, items: list[Any], *, audio_in_video: bool = False) -> None:
        self.ids: list[int] = [IM_START, ROLES["user"]]
        self.images, self.videos, self.seconds, self.frames = [], [], [], []
        self.audio_in_video = audio_in_video
        words = cycle(range(5, 60))
        for kind, *sizes in items:
            if kind == "text":
                self.ids += [next(words) for _ in range(sizes[0])]
                continue
            self.ids += self._block(kind, *sizes)
        self.ids += [IDS["<|im_end|>"], IM_START]

    def _block(self, kind: str, *sizes: Any) -> list[int]:
        if kind == "audio":
            return [AUDIO_START, *[AUDIO] * self._clip(sizes[0]), AUDIO_END]
        grid = sizes[0]
        rows = num_visual_tokens(grid, 2)
        if kind == "image":
            self.images.append(grid)
            return [VISION_START, *[IMAGE] * rows, VISION_END]
        self.videos.append(grid)
        self.seconds.append(sizes[1])
        if kind == "video":
            return [VISION_START, *[VIDEO] * rows, VISION_END]
        sound = [AUDIO] * self._clip(sizes[2])  # their order among the frames does not matter to positions
        return [VISION_START, AUDIO_START, *[VIDEO] * rows, *sound, AUDIO_END, VISION_END]

    def _clip(self, num_frames: int) -> int:
        self.frames.append(num_frames)
        return num_audio_tokens(num_frames, 100)

    @property
    def media(self) -> PromptMedia:
        return PromptMedia(
            image_grids=self.images,
            video_grids=self.videos,
            seconds_per_grid=self.seconds,
            audio_lengths=[num_audio_tokens(frames, 100) for frames in self.frames],
            audio_in_video=self.audio_in_video,
        )

    def reference(self, config: Any, extra_ids: list[int], audio_in_video: bool) -> tuple[np.ndarray, float]:
        model = SimpleNamespace(config=config, spatial_merge_size=2)
        model.get_llm_pos_ids_for_vision = Reference.get_llm_pos_ids_for_vision.__get__(model)
        ids = torch.tensor([[*self.ids, *extra_ids]])
        positions, delta = Reference.get_rope_index(
            model,
            ids,
            image_grid_thw=torch.tensor(self.images) if self.images else None,
            video_grid_thw=torch.tensor(self.videos) if self.videos else None,
            attention_mask=torch.ones_like(ids),
            use_audio_in_video=audio_in_video,
            audio_seqlens=torch.tensor(self.frames) if self.frames else None,
            second_per_grids=torch.tensor(self.seconds) if self.seconds else None,
        )
        return positions[:, 0].numpy(), float(delta)


@pytest.fixture(scope="module")
def configs() -> tuple[Any, Any]:
    """The thinker's and the talker's; the latter with what transformers' code needs and its class lacks."""
    config = Qwen3OmniMoeConfig(**copy.deepcopy(CONFIG))
    config.talker_config.audio_config = config.thinker_config.audio_config
    return config.thinker_config, config.talker_config


def check(prompt: Prompt, config: Any) -> None:
    expected, delta = prompt.reference(config, [], prompt.audio_in_video)
    index = rope_index(prompt.ids, prompt.media, THINKER)
    np.testing.assert_array_equal(index.positions, expected)
    assert index.positions.dtype == np.float32
    # generate() goes on from the last position; the stored delta is of the largest one.
    assert index.rope_delta == pytest.approx(expected[0, -1] + 1 - len(prompt.ids), abs=1e-4)
    if expected.max() == expected[0, -1]:
        assert index.rope_delta == delta


@settings(max_examples=200, deadline=None, database=None)
@given(items=st.lists(st.one_of(texts, images, audios, videos), max_size=7))
def test_mixed_media(items, configs):
    check(Prompt(items), configs[0])


@settings(max_examples=200, deadline=None, database=None)
@given(items=st.lists(st.one_of(texts, images, audios, merged), max_size=6))
def test_sound_tracks_in_videos(items, configs):
    check(Prompt(items, audio_in_video=True), configs[0])


@settings(max_examples=50, deadline=None, database=None)
@given(items=st.lists(st.one_of(texts, images, videos, merged), max_size=5))
def test_a_silent_video_beside_sound_tracks(items, configs):
    """The reference does not count it and takes what is left in the end for text, or fails; so does this."""
    prompt = Prompt(items, audio_in_video=True)
    try:
        expected, _ = prompt.reference(configs[0], [], True)
    except (ValueError, IndexError, RuntimeError, TypeError):
        with pytest.raises(InvalidRequest):
            rope_index(prompt.ids, prompt.media, THINKER)
        return
    np.testing.assert_array_equal(rope_index(prompt.ids, prompt.media, THINKER).positions, expected)


@settings(max_examples=200, deadline=None, database=None)
@given(items=st.lists(st.one_of(texts, images, audios, videos, merged), max_size=6))
def test_the_talker_is_not_told_of_sound_tracks(items, configs):
    prompt = Prompt(items, audio_in_video=True)
    try:
        expected, _ = prompt.reference(configs[1], [PAD] * 9, False)
    except (ValueError, IndexError, RuntimeError, TypeError):
        with pytest.raises(InvalidRequest):
            talker_rope_index(prompt.ids, 9, PAD, prompt.media, TALKER)
        return
    index = talker_rope_index(prompt.ids, 9, PAD, prompt.media, TALKER)
    np.testing.assert_array_equal(index.positions, expected)


def test_without_pictures_positions_are_row_indices(configs):
    prompt = Prompt([("text", 4), ("audio", 150), ("text", 3)])
    index = rope_index(prompt.ids, prompt.media, THINKER)
    np.testing.assert_array_equal(
        index.positions, np.broadcast_to(np.arange(len(prompt.ids)), index.positions.shape)
    )
    assert index.rope_delta == 0
    np.testing.assert_array_equal(
        index.following(len(prompt.ids), 2)[1], [len(prompt.ids), len(prompt.ids) + 1]
    )
    check(prompt, configs[0])


def test_seconds_stay_fractional():
    prompt = Prompt([("video", (3, 4, 4), 2 / 3)])
    index = rope_index(prompt.ids, prompt.media, THINKER)
    assert index.positions[0, 3 + 4] == np.float32(3) + np.float32(2 / 3) * np.float32(13)
    assert index.positions[0, -1] % 1 != 0


def test_generated_rows_follow_the_last_row_and_not_the_largest_position(configs):
    """A wide picture of a moment: its columns outrun its clock, and what follows starts over within them."""
    prompt = Prompt([("merged", (1, 2, 60), 1.0, 30)], audio_in_video=True)
    expected, delta = prompt.reference(configs[0], [], True)
    index = rope_index(prompt.ids, prompt.media, THINKER)
    assert expected.max() > expected[0, -1]
    assert delta > index.rope_delta
    np.testing.assert_array_equal(index.following(len(prompt.ids), 1)[:, 0], expected[:, -1] + 1)


@pytest.mark.parametrize(
    "change", ["one picture too few", "a stray marker", "one row too few", "clip missing"]
)
def test_markers_that_do_not_fit_are_refused(change):
    prompt = Prompt([("text", 2), ("image", (1, 4, 4)), ("text", 2), ("image", (1, 2, 6)), ("audio", 120)])
    if change == "one picture too few":
        prompt.images.pop()
    elif change == "a stray marker":
        prompt.ids.insert(3, VISION_START)
    elif change == "one row too few":
        prompt.images[-1] = (1, 40, 60)
    else:
        prompt.frames.clear()
    with pytest.raises(InvalidRequest, match="media markers do not fit"):
        rope_index(prompt.ids, prompt.media, THINKER)


def test_a_config_without_a_token_is_refused():
    config = copy.deepcopy(CONFIG)
    del config["talker_config"]["audio_start_token_id"]
    with pytest.raises(WeightsError, match="audio_start_token_id"):
        PositionRules.of_talker(config)


def test_users_turns_and_the_turn_to_be_generated():
    end = IDS["<|im_end|>"]
    ids = [
        IM_START,
        90,
        7,
        end,
        8,
        IM_START,
        91,
        9,
        10,
        end,
        8,
        IM_START,
        92,
        11,
        end,
        IM_START,
        91,
        end,
        IM_START,
        92,
        8,
    ]
    rows = user_rows(ids, im_start_id=IM_START, user_id=91)
    assert rows.tolist() == [5, 6, 7, 8, 9, 10, 15, 16, 17]
    assert last_assistant_row(ids, im_start_id=IM_START, assistant_id=92) == 18
    assert user_rows(ids[:5], im_start_id=IM_START, user_id=91).tolist() == []
    assert user_rows([7, 8], im_start_id=IM_START, user_id=91).tolist() == []
    with pytest.raises(InvalidRequest, match="assistant's turn"):
        last_assistant_row(ids[:11], im_start_id=IM_START, assistant_id=92)


@settings(max_examples=100, deadline=None, database=None)
@given(items=st.lists(st.one_of(texts, images, videos), max_size=6))
def test_qwen3_vl_writes_times_as_text(items):
    ids, image_grids, video_grids = [3, 4], [], []
    for kind, *sizes in items:
        if kind == "text":
            ids += [9] * sizes[0]
        elif kind == "image":
            image_grids.append(sizes[0])
            ids += [VISION_START, *[IMAGE] * num_visual_tokens(sizes[0], 2), VISION_END]
        else:
            video_grids.append(sizes[0])
            frame = (1, *sizes[0][1:])
            for _ in range(sizes[0][0]):
                ids += [11, 12, VISION_START, *[VIDEO] * num_visual_tokens(frame, 2), VISION_END]
    rows = torch.tensor([ids])
    model = SimpleNamespace(config=Qwen3VLConfig(**vl_config(IDS)))
    model.get_vision_position_ids = Qwen3VLModel.get_vision_position_ids.__get__(model)
    expected, delta = Qwen3VLModel.get_rope_index(
        model,
        rows,
        (rows == IMAGE).int() + 2 * (rows == VIDEO).int(),
        image_grid_thw=torch.tensor(image_grids) if image_grids else None,
        video_grid_thw=torch.tensor(video_grids) if video_grids else None,
        attention_mask=torch.ones_like(rows),
    )
    media = PromptMedia(image_grids=image_grids, video_grids=video_grids)
    index = vl_rope_index(ids, media, image_token_id=IMAGE, video_token_id=VIDEO, merge_size=2)
    np.testing.assert_array_equal(index.positions, expected[:, 0].numpy())
    assert index.rope_delta == float(delta) or expected.max() > expected[0, 0, -1]
