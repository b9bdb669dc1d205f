"""transformers' Qwen3-Omni and Qwen3-VL on small checkpoints: what goes into their decoders, and answers.

Every answer is computed once per test run and kept.
"""

from __future__ import annotations

import contextlib
import functools
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from omnistage.models.qwen3_omni_positions import PromptMedia
from omnistage.models.qwen3_text import DeepstackRows
from omnistage.models.qwen3_tokens import num_audio_tokens
from tests.models.qwen_checkpoints import make_audio, make_image, make_video

MAX_TOKENS, MAX_CODES, REPETITION_PENALTY = 40, 60, 1.05
QUESTION = "Describe the picture in one short sentence."
RECORDED = json.loads((Path(__file__).parents[1] / "data/qwen3_answers.json").read_text())
OMNI_CASES = tuple(RECORDED["qwen3_omni"])
VL_CASES = tuple(RECORDED["qwen3_vl"])
KINDS = {
    "text": (),
    "image": ("image",),
    "two_images": ("image", "image"),
    "audio": ("audio",),
    "long_audio": ("audio",),
    "video": ("video",),
    "audio_in_video": ("video",),
    "all": ("image", "audio", "video"),
}


@dataclass(frozen=True, eq=False)
class Answer:
    """One request.  n prompt rows.

    embeddings: [n, hidden], positions: [3, n], deepstack: what went into the thinker's decoder.
    accepted: [n, hidden], the hidden states the talker hears.  logits: [n, vocab].  tokens: the answer.
    talker_rows, talker_positions: of the talker's prompt.  codes: [num_frames, num_groups].
    """

    prompt_ids: list[int]
    media: PromptMedia
    embeddings: Tensor
    positions: Tensor
    deepstack: DeepstackRows | None
    logits: Tensor
    tokens: list[int]
    accepted: Tensor | None = None
    talker_rows: Tensor | None = None
    talker_positions: Tensor | None = None
    codes: Tensor | None = None


@functools.cache
def load(directory: Path) -> Any:
    """The model, with what its talker's code reads and its configuration class lacks."""
    kind = transformers.AutoConfig.from_pretrained(directory).architectures[0]
    model = getattr(transformers, kind).from_pretrained(directory, dtype=torch.float32).eval()
    if hasattr(model, "talker"):
        model.talker.config.audio_config = model.config.thinker_config.audio_config
    return model


@functools.cache
def processor(directory: Path) -> Any:
    return transformers.AutoProcessor.from_pretrained(directory)


def inputs_of(directory: Path, case: str) -> Any:
    """The processor's output for one case."""
    loaded = processor(directory)
    is_omni = "Omni" in type(loaded).__name__
    content = [{"type": kind} for kind in KINDS[case]] + [{"type": "text", "text": QUESTION}]
    system = [{"type": "text", "text": "You are a helpful assistant."}]
    turns = [{"role": "system", "content": system}, {"role": "user", "content": content}]
    prompt = loaded.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    media: dict[str, Any] = {}
    if "image" in KINDS[case]:
        sizes = [(160, 128, 0), (96, 200, 3)]
        media["images"] = [make_image(*size) for size in sizes[: KINDS[case].count("image")]]
    if "audio" in KINDS[case]:
        media["audio"] = [make_audio(5.3, seed=1) if case == "long_audio" else make_audio(1.5)]
    if "video" in KINDS[case]:
        media["videos"] = [make_video(8)]
        media["videos_kwargs"] = {"do_sample_frames": False}
        if is_omni:
            media["videos_kwargs"]["fps"] = 2.0
        else:
            times = {"fps": 2.0, "total_num_frames": 8, "duration": 4.0, "frames_indices": list(range(8))}
            media["videos_kwargs"]["video_metadata"] = [times]
    if case == "audio_in_video":
        media["audio"] = [make_audio(4.0, seed=2)]
        media.update(load_audio_from_video=True, audio_from_video_indices=[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy's, about how a sound track's length is read
        return loaded(text=[prompt], return_tensors="pt", **media)


def media_of(inputs: Any, case: str) -> PromptMedia:
    def rows(key: str) -> list[Any]:
        return np.asarray(inputs[key]).tolist() if key in inputs else []

    frames = inputs["feature_attention_mask"].sum(-1).tolist() if "feature_attention_mask" in inputs else []
    return PromptMedia(
        image_grids=[tuple(grid) for grid in rows("image_grid_thw")],
        video_grids=[tuple(grid) for grid in rows("video_grid_thw")],
        seconds_per_grid=rows("video_second_per_grid"),
        audio_lengths=[num_audio_tokens(int(count), 100) for count in frames],
        audio_in_video=case == "audio_in_video",
    )


@contextlib.contextmanager
def watched(owner: Any, name: str, seen: list[Any]) -> Iterator[None]:
    """Keeps (positional, keyword, result) of every call of a method."""
    original: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(original)  # generate() inspects signatures
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        seen.append((args, kwargs, result))
        return result

    setattr(owner, name, wrapper)
    try:
        yield
    finally:
        setattr(owner, name, original)


def prefill_of(calls: list[Any]) -> tuple[Tensor, Tensor, DeepstackRows | None, Tensor]:
    """Embeddings, positions, deepstack and normalised output of a decoder's first call."""
    _, kwargs, result = calls[0]
    deepstack = None
    if kwargs.get("deepstack_visual_embeds") is not None:
        rows = kwargs["visual_pos_masks"][0].nonzero().squeeze(1)
        deepstack = DeepstackRows(rows, list(kwargs["deepstack_visual_embeds"]))
    positions = kwargs["position_ids"][-3:, 0]
    return kwargs["inputs_embeds"][0], positions, deepstack, result.last_hidden_state[0]


@functools.cache
@torch.no_grad()
def omni_answer(directory: Path, case: str) -> Answer:
    """Greedy text and speech."""
    model, inputs = load(directory), inputs_of(directory, case)
    end = processor(directory).tokenizer.convert_tokens_to_ids("<|im_end|>")
    decoder: list[Any] = []
    thinker: list[Any] = []
    talker: list[Any] = []
    talker_decoder: list[Any] = []
    frames: list[Any] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(watched(model.thinker.model.language_model, "forward", decoder))
        stack.enter_context(watched(model.thinker, "generate", thinker))
        stack.enter_context(watched(model.talker, "generate", talker))
        stack.enter_context(watched(model.talker.model, "forward", talker_decoder))
        stack.enter_context(watched(model.code2wav, "chunked_decode", frames))
        sequences, _ = model.generate(
            **inputs,
            thinker_max_new_tokens=MAX_TOKENS,
            thinker_do_sample=False,
            thinker_eos_token_id=end,
            use_audio_in_video=case == "audio_in_video",
            return_audio=True,
            talker_max_new_tokens=MAX_CODES,
            talker_do_sample=False,
            talker_repetition_penalty=REPETITION_PENALTY,
        )
        embeddings, positions, deepstack, output = prefill_of(decoder)
    num_rows = embeddings.shape[0]
    accepted = thinker[0][2].hidden_states[0][model.config.talker_config.accept_hidden_layer][0]
    return Answer(
        prompt_ids=inputs["input_ids"][0].tolist(),
        media=media_of(inputs, case),
        embeddings=embeddings,
        positions=positions,
        deepstack=deepstack,
        logits=model.thinker.lm_head(output),
        tokens=sequences[0, num_rows:].tolist(),
        accepted=accepted,
        talker_rows=talker[0][1]["inputs_embeds"][0],
        talker_positions=talker_decoder[0][1]["position_ids"][-3:, 0],
        codes=frames[0][0][0][0].T,
    )


@functools.cache
@torch.no_grad()
def vl_answer(directory: Path, case: str) -> Answer:
    """Greedy text."""
    model, inputs = load(directory), inputs_of(directory, case)
    decoder: list[Any] = []
    with watched(model.model.language_model, "forward", decoder):
        sequences = model.generate(**inputs, max_new_tokens=MAX_TOKENS, do_sample=False)
        embeddings, positions, deepstack, output = prefill_of(decoder)
    return Answer(
        prompt_ids=inputs["input_ids"][0].tolist(),
        media=media_of(inputs, case),
        embeddings=embeddings,
        positions=positions,
        deepstack=deepstack,
        logits=model.lm_head(output),
        tokens=sequences[0, embeddings.shape[0] :].tolist(),
    )
