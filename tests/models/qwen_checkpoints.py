"""Small random checkpoints of the real architectures, as the hub has them, and media to ask about.

Tensors carry the published names, in several shards.  A weight depends on its name and the seed
alone.  Scales are chosen so that every part matters: attention, positions, experts, deepstack.
"""

from __future__ import annotations

import functools
import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from omnistage.models.protocols import Sliced
from tests.models import qwen_configs as configs

SEED = 20240607
BPE_SIZE = 640
ROLES = ("user", "assistant", "system")
TEXT = """
You are a helpful assistant. You are Qwen, a virtual human developed by the Qwen Team, Alibaba Group,
capable of perceiving auditory and visual inputs, as well as generating text and speech.
system user assistant system user assistant system user assistant tool
Describe the picture in one short sentence. What do you hear in this recording? What happens in the video?
The quick brown fox jumps over the lazy dog while the small grey cat sleeps under the old wooden table.
Please read the following words aloud: one two three four five six seven eight nine ten eleven twelve.
A serving engine schedules requests, keeps pages of keys and values, and streams tokens to the client.
Say hello to everyone, then count from zero to ninety nine and stop when the light turns green.
Music, rain, wind, footsteps and a bell can be heard; a red ball rolls past the blue door again and again.
""".strip()
OMNI_NAMES = (
    (r"^thinker\.model\.audio_tower\.", "thinker.audio_tower."),
    (r"^thinker\.model\.visual\.", "thinker.visual."),
    (r"^thinker\.model\.language_model\.", "thinker.model."),
)


# --- tokenizer


@functools.cache
def train_bpe() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of a byte-level tokenizer in which every role is one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=BPE_SIZE, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT] * 4 + ["user\nassistant\nsystem\n"] * 200, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merges = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in model["merges"]]
    return model["vocab"], merges


def build_tokenizer(template: str) -> transformers.Qwen2Tokenizer:
    """The small tokenizer, its special tokens after the vocabulary in the published order."""
    vocab, merges = train_bpe()
    tokenizer = transformers.Qwen2Tokenizer(
        vocab=vocab,
        merges=merges,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token=None,
        extra_special_tokens=configs.NAMED_TOKENS,
        model_max_length=32768,
        chat_template=template,
    )
    special = [AddedToken(token, special=True, normalized=False) for token in configs.SPECIAL_TOKENS]
    tokenizer.add_tokens(special, special_tokens=True)
    return tokenizer


def chat_template(**placeholders: str) -> str:
    """ChatML.  placeholders: what stands for one item, by kind ("image", "audio", "video")."""
    branches = "".join(
        f"{{% elif c['type'] == '{kind}' or '{kind}' in c or '{kind}_url' in c %}}{text}"
        for kind, text in placeholders.items()
    )
    branches = branches.replace("elif", "if", 1) + "{% elif 'text' in c %}{{ c['text'] }}{% endif %}"
    return (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for c in message['content'] %}" + branches + "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


# --- weights


def _generator(name: str) -> torch.Generator:
    seed = (SEED * 1_000_003 + zlib.crc32(name.encode())) & 0x7FFF_FFFF_FFFF_FFFF
    return torch.Generator().manual_seed(seed)


@torch.no_grad()
def init_weights(model: nn.Module) -> None:
    """Fill every parameter from a generator seeded by its name."""
    for prefix, module in model.named_modules():
        # Code2Wav has no norms; a smaller gain keeps its activations out of the chaotic range.
        gain = 0.6 if "code2wav.decoder" in prefix else 1.0
        for leaf, parameter in module.named_parameters(recurse=False):
            name = f"{prefix}.{leaf}".strip(".")
            drawn = torch.randn(parameter.shape, generator=_generator(name))
            parameter.copy_(_scaled(drawn, name, leaf, module, gain).to(parameter.dtype))


def _scaled(drawn: Tensor, name: str, leaf: str, module: nn.Module, gain: float) -> Tensor:
    by_name = {"alpha": (0.0, 0.2), "beta": (0.0, 0.2), "scale": (0.5, 0.1), "gamma": (0.3, 0.05)}
    if isinstance(module, nn.Embedding):
        return drawn
    if leaf in by_name:
        mean, deviation = by_name[leaf]
        return mean + deviation * drawn
    if leaf == "bias":
        return 0.05 * drawn
    if drawn.ndim == 1:  # the weight of a norm
        return 1.0 + 0.1 * drawn
    fan_in = drawn.shape[-1] if drawn.ndim == 3 and "experts" in name else drawn[0].numel()
    if isinstance(module, nn.ConvTranspose1d):
        fan_in = max(1, drawn.shape[0] * drawn.shape[2] // module.stride[0])
    return drawn * (gain / math.sqrt(fan_in))


@torch.no_grad()
def shape_head(weight: Tensor, suppressed: Sequence[int], boosted: Mapping[int, float]) -> None:
    """Make an output head usable: some tokens never come, end tokens come sometimes."""
    weight[list(suppressed)] = 0
    size = weight.shape[1]
    for token, factor in boosted.items():
        weight[token] = factor * torch.randn(size, generator=_generator(f"head{token}")) / math.sqrt(size)


def published_tensors(model: nn.Module, renames: Sequence[tuple[str, str]] = ()) -> dict[str, Tensor]:
    """The weights under the hub's names, one tensor per expert and projection."""
    tensors = {}
    for own_name, tensor in model.state_dict().items():
        name = own_name
        for pattern, replacement in renames:
            name = re.sub(pattern, replacement, name)
        for key, value in _split_experts(name, tensor):
            tensors[key] = value.detach().clone().contiguous()
    return tensors


def _split_experts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    folder, _, leaf = name.rpartition(".")
    if not folder.endswith("mlp.experts"):
        yield name, tensor
        return
    for index, weights in enumerate(tensor):
        if leaf == "gate_up_proj":
            gate, up = weights.chunk(2)
            yield f"{folder}.{index}.gate_proj.weight", gate
            yield f"{folder}.{index}.up_proj.weight", up
        else:
            yield f"{folder}.{index}.{leaf}.weight", weights


def save_shards(tensors: Mapping[str, Tensor], directory: Path, num_shards: int = 3) -> None:
    """Spread the tensors over shards, so that no part's tensors share a file, and write their index."""
    names = sorted(tensors)
    weight_map = {}
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        chosen = {name: tensors[name] for name in names[shard::num_shards]}
        save_file(chosen, directory / file_name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(chosen, file_name))
    write_json(directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def save_tower(model: nn.Module, directory: Path, prefix: str) -> None:
    """One encoder as a part of a sharded checkpoint, with weights from `init_weights`."""
    init_weights(model)
    tensors = {prefix + name: tensor for name, tensor in published_tensors(model).items()}
    save_shards({**tensors, "other.weight": torch.zeros(3)}, directory)


def result_of(work: Sliced[Any]) -> Any:
    """What sliced work returns in the end."""
    while True:
        try:
            next(work)
        except StopIteration as stop:
            return stop.value


# --- directories


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def build_qwen3_omni(directory: Path, changes: Mapping[str, Any] | None = None) -> Path:
    """Qwen3-Omni with talker and vocoder.  changes: see qwen_configs.changed."""
    template = chat_template(
        image="<|vision_start|><|image_pad|><|vision_end|>",
        audio="<|audio_start|><|audio_pad|><|audio_end|>",
        video="<|vision_start|><|video_pad|><|vision_end|>",
    )
    tokenizer = build_tokenizer(template)
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in configs.SPECIAL_TOKENS}
    roles = {role: tokenizer.encode(role, add_special_tokens=False)[0] for role in ROLES}
    config = configs.changed(configs.omni_config(ids, roles), changes or {})
    write_json(directory / "config.json", config)
    model = _build_model(transformers.Qwen3OmniMoeForConditionalGeneration, directory)
    _shape_text_head(model.thinker.lm_head.weight, tokenizer, boost=2.0)
    codecs = [code for code in range(configs.CODEC_SIZE, configs.CODEC_VOCAB) if code != configs.CODEC_EOS]
    shape_head(model.talker.codec_head.weight.data, codecs, {configs.CODEC_EOS: 2.1})
    model.code2wav.decoder[-1].conv.weight.data.mul_(0.5)
    save_shards(published_tensors(model, OMNI_NAMES), directory)
    settings = {
        "processor_class": "Qwen3OmniMoeProcessor",
        **configs.picture_settings(),
        **configs.sound_settings(),
        "min_pixels": 56 * 56,
        "max_pixels": 12845056,
    }
    _save_processor(directory, tokenizer, template, settings)
    generation = {
        "bos_token_id": "<|im_start|>",
        "eos_token_id": "<|im_end|>",
        "pad_token_id": "<|endoftext|>",
    }
    write_json(directory / "generation_config.json", {key: ids[token] for key, token in generation.items()})
    return directory


def build_qwen3_vl(directory: Path, changes: Mapping[str, Any] | None = None) -> Path:
    """Qwen3-VL.  changes: see qwen_configs.changed."""
    template = chat_template(
        image="<|vision_start|><|image_pad|><|vision_end|>",
        video="<|vision_start|><|video_pad|><|vision_end|>",
    )
    tokenizer = build_tokenizer(template)
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in configs.SPECIAL_TOKENS}
    write_json(directory / "config.json", configs.changed(configs.vl_config(ids), changes or {}))
    model = _build_model(transformers.Qwen3VLForConditionalGeneration, directory)
    _shape_text_head(model.lm_head.weight, tokenizer, boost=1.9)
    save_shards(published_tensors(model), directory)
    pictures = {**configs.picture_settings(), "processor_class": "Qwen3VLProcessor"}
    size = {"shortest_edge": 56 * 56, "longest_edge": 16777216}
    fast = {"image_processor_type": "Qwen2VLImageProcessorFast"}
    _save_processor(directory, tokenizer, template, {**pictures, "size": size, **fast})
    del pictures["image_processor_type"]
    videos = {
        "size": {"shortest_edge": 4096, "longest_edge": 25165824},
        "video_processor_type": "Qwen3VLVideoProcessor",
    }
    write_json(directory / "video_preprocessor_config.json", {**pictures, **videos})
    ends = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    generation = {"bos_token_id": ids["<|im_start|>"], "eos_token_id": ends, "pad_token_id": ends[1]}
    write_json(directory / "generation_config.json", {**generation, "do_sample": False})
    return directory


def _build_model(kind: Any, directory: Path) -> Any:
    model = kind(transformers.AutoConfig.from_pretrained(directory)).eval()
    init_weights(model)
    return model


def _shape_text_head(weight: Tensor, tokenizer: transformers.Qwen2Tokenizer, *, boost: float) -> None:
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    first_special = tokenizer.convert_tokens_to_ids(configs.SPECIAL_TOKENS[0])
    special = [token for token in range(first_special, configs.VOCAB_SIZE) if token != end]
    shape_head(weight.data, special, {end: boost})


def _save_processor(
    directory: Path, tokenizer: transformers.Qwen2Tokenizer, template: str, settings: Mapping[str, Any]
) -> None:
    tokenizer.save_pretrained(directory)
    vocab, merges = train_bpe()
    write_json(directory / "vocab.json", vocab)
    lines = ["#version: 0.2", *(" ".join(merge) for merge in merges)]
    (directory / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    ids = {tokenizer.convert_tokens_to_ids(token): token for token in configs.SPECIAL_TOKENS}
    described = {
        "add_prefix_space": False,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "errors": "replace",
        "model_max_length": 32768,
        "tokenizer_class": "Qwen2Tokenizer",
        "added_tokens_decoder": {str(index): {"content": token, **flags} for index, token in ids.items()},
        "additional_special_tokens": list(configs.SPECIAL_TOKENS),
        "extra_special_tokens": configs.NAMED_TOKENS,
        **configs.NAMED_TOKENS,
        "chat_template": template,
    }
    write_json(directory / "tokenizer_config.json", described)
    write_json(directory / "chat_template.json", {"chat_template": template})
    write_json(directory / "preprocessor_config.json", settings)


# --- media


def make_image(width: int = 160, height: int = 128, seed: float = 0) -> np.ndarray:
    """uint8 [height, width, 3]: waves in all colours, and one patch."""
    y, x = np.mgrid[0:height, 0:width].astype(np.float32)
    waves = (np.sin(x / 9 + seed), np.cos(y / 7 - seed), np.sin((x + y) / 13 + 2 * seed))
    pixels = 127 + 120 * np.stack(waves, -1)
    pixels[height // 4 : height // 2, width // 3 : width // 2] = (230, 40, 10 + 20 * (seed % 10))
    return pixels.clip(0, 255).astype(np.uint8)


def make_audio(seconds: float = 1.5, seed: int = 0, rate: int = 16_000) -> np.ndarray:
    """float32 [num_samples]: a tone in noise."""
    time = np.arange(int(seconds * rate)) / rate
    noise = np.random.default_rng(seed).standard_normal(time.shape)
    return (0.4 * np.sin(2 * np.pi * (330 + 40 * seed) * time) + 0.05 * noise).astype(np.float32)


def make_video(num_frames: int = 8, width: int = 112, height: int = 112, seed: float = 0) -> np.ndarray:
    """uint8 [num_frames, height, width, 3]."""
    return np.stack([make_image(width, height, seed + 0.37 * index) for index in range(num_frames)])
