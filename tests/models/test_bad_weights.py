"""Checkpoints with a fault: each part that meets it says what is wrong, in which file, and what to do."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from omnistage.errors import PipelineError, WeightsError
from omnistage.models.registry import find_part, load_decoder, load_encoder, load_vocoder
from omnistage.serving.choose import choose_pipeline

LOADERS: dict[str, Callable[..., Any]] = {
    "thinker": load_decoder,
    "visual": load_encoder,
    "audio_tower": load_encoder,
    "talker": load_decoder,
    "code2wav": load_vocoder,
}
# Tensors of every sort: projections, stacked and not, norms, tables, heads, experts, convolutions.
TENSORS = [
    ("thinker", "thinker.model.layers.1.self_attn.k_proj.weight"),
    ("thinker", "thinker.model.layers.4.mlp.experts.7.down_proj.weight"),
    ("thinker", "thinker.lm_head.weight"),
    ("visual", "thinker.visual.blocks.2.attn.qkv.bias"),
    ("visual", "thinker.visual.merger_list.1.mlp.0.weight"),
    ("audio_tower", "thinker.audio_tower.conv2d2.weight"),
    ("audio_tower", "thinker.audio_tower.layers.0.fc1.weight"),
    ("talker", "talker.model.layers.2.mlp.shared_expert_gate.weight"),
    ("talker", "talker.code_predictor.lm_head.1.weight"),
    ("talker", "thinker.model.embed_tokens.weight"),
    ("code2wav", "code2wav.pre_transformer.layers.1.self_attn.q_proj.weight"),
    ("code2wav", "code2wav.decoder.1.block.1.conv.weight"),
]


@pytest.fixture(scope="module")
def broken(qwen3_omni_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy to break; `whole` mends it after each test."""
    return Path(shutil.copytree(qwen3_omni_dir, tmp_path_factory.mktemp("bad") / "model"))


@pytest.fixture(autouse=True)
def whole(broken: Path, qwen3_omni_dir: Path) -> Iterator[None]:
    yield
    for path in qwen3_omni_dir.iterdir():
        copy = broken / path.name
        if not copy.exists() or copy.stat().st_mtime_ns != path.stat().st_mtime_ns:
            shutil.copy2(path, copy)


def load(directory: Path, part: str) -> object:
    return LOADERS[part](find_part(directory, part))


def file_of(directory: Path, name: str) -> Path:
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    return directory / index["weight_map"][name]


def change(directory: Path, name: str, changed: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    """Replace one tensor.  Returns its file."""
    path = file_of(directory, name)
    tensors = load_file(path)
    tensors[name] = changed(tensors[name]).contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def poisoned(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[-1] = torch.nan
    return tensor


def message_of(directory: Path, part: str) -> str:
    with pytest.raises(WeightsError) as caught:
        load(directory, part)
    return caught.value.message


@pytest.mark.parametrize("part", LOADERS)
def test_the_copy_is_whole_before_it_is_broken(broken, part):
    assert load(broken, part) is not None


@pytest.mark.parametrize(("part", "name"), TENSORS)
def test_nan(broken, part, name):
    path = change(broken, name, poisoned)
    message = message_of(broken, part)
    assert f"{name} in {path} holds NaN or infinite values" in message
    assert "fetch the file again" in message


@pytest.mark.parametrize(("part", "name"), TENSORS)
def test_wrong_shape(broken, part, name):
    path = change(broken, name, lambda tensor: torch.cat((tensor, tensor[:1])))
    message = message_of(broken, part)
    assert f"{name} in {path} has shape [" in message
    assert "config.json asks for [" in message
    assert "fetch both files" in message


@pytest.mark.parametrize(("part", "name"), TENSORS[::3])
def test_a_quantised_tensor(broken, part, name):
    change(broken, name, lambda tensor: tensor.to(torch.int8))
    assert "quantised checkpoints are not supported" in message_of(broken, part)


@pytest.mark.parametrize("part", LOADERS)
def test_a_missing_shard(broken, part):
    path = broken / "model-00002-of-00003.safetensors"
    path.unlink()
    message = message_of(broken, part)
    assert str(path) in message
    assert "fetch the model again" in message


@pytest.mark.parametrize("part", LOADERS)
@pytest.mark.parametrize("keep", [0.5, 0.999])
def test_a_truncated_shard(broken, part, keep):
    path = broken / "model-00003-of-00003.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])
    message = message_of(broken, part)
    assert str(path) in message
    assert "damaged" in message
    assert "fetch the model again" in message
    with pytest.raises(WeightsError, match=r"model-00003-of-00003\.safetensors is truncated: .*; fetch"):
        choose_pipeline(broken)


@pytest.mark.parametrize(
    ("part", "keys", "words"),
    [
        # What the reference has a default for shows as weights that do not fit it.
        ("thinker", "thinker_config.text_config.vocab_size", "asks for .*fetch both files"),
        ("visual", "thinker_config.vision_config.depth", "missing from .*config.json of the same model"),
        ("audio_tower", "thinker_config.audio_config.d_model", "asks for .*fetch both files"),
        ("talker", "talker_config.code_predictor_config", "lacks 'code_predictor_config'"),
        ("talker", "tts_bos_token_id", "lacks 'tts_bos_token_id'"),
        ("code2wav", "code2wav_config.sliding_window", "sliding_window"),
    ],
)
def test_a_missing_key(broken, part, keys, words):
    path = broken / "config.json"
    config = json.loads(path.read_text())
    *folders, last = keys.split(".")
    values = config
    for key in folders:
        values = values[key]
    del values[last]
    path.write_text(json.dumps(config))
    assert re.search(words, message_of(broken, part))


@pytest.mark.parametrize("part", LOADERS)
def test_a_missing_part_of_the_configuration(broken, part):
    path = broken / "config.json"
    config = json.loads(path.read_text())
    sections = {"thinker": "thinker_config", "talker": "talker_config", "code2wav": "code2wav_config"}
    del config[sections.get(part, "thinker_config")]
    path.write_text(json.dumps(config))
    assert "config.json lacks" in message_of(broken, part)


def test_an_unknown_architecture(broken):
    path = broken / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "qwen9_omni"}))
    with pytest.raises(PipelineError, match=r"model_type 'qwen9_omni' .*known: qwen3_omni_moe"):
        choose_pipeline(broken)
