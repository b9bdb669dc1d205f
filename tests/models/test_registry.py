"""Models and parts are found by name, directory and configuration; faults name the remedy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from omnistage.errors import WeightsError
from omnistage.graph import Graph
from omnistage.home import omnistage_home
from omnistage.models.registry import (
    FACTORIES,
    PartSource,
    available_parts,
    check_files,
    find_part,
    load_decoder,
    load_encoder,
    load_vocoder,
    part_files,
    resolve_model,
    stored_dtype,
)


def write_config(directory, **config):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_the_home_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("OMNISTAGE_HOME", str(tmp_path / "here"))
    assert omnistage_home() == tmp_path / "here"
    monkeypatch.delenv("OMNISTAGE_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert omnistage_home() == tmp_path / "cache" / "omnistage"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    assert omnistage_home() == tmp_path / ".cache" / "omnistage"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert omnistage_home() == tmp_path / "Library" / "Caches" / "omnistage"


def test_the_starter_is_found_in_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("OMNISTAGE_HOME", str(tmp_path))
    with pytest.raises(WeightsError, match="run `omnistage fetch starter`"):
        resolve_model("starter")
    (tmp_path / "models" / "starter").mkdir(parents=True)
    assert resolve_model("starter") == tmp_path / "models" / "starter"


def test_a_model_may_be_a_directory(tmp_path):
    assert resolve_model(str(tmp_path)) == tmp_path
    with pytest.raises(WeightsError, match="neither 'starter' nor a directory"):
        resolve_model(str(tmp_path / "nowhere"))


def test_a_part_is_a_subdirectory_a_key_or_the_model(tmp_path):
    write_config(tmp_path, model_type="any", thinker_config={"model_type": "qwen3"})
    write_config(tmp_path / "vision", model_type="efficientnet_lite0")
    assert find_part(tmp_path, None).config["model_type"] == find_part(tmp_path, "").model_type == "any"
    assert find_part(tmp_path, "vision") == PartSource(
        tmp_path / "vision", {"model_type": "efficientnet_lite0"}
    )
    assert find_part(tmp_path, "thinker") == PartSource(tmp_path, {"model_type": "qwen3"}, "thinker.")
    with pytest.raises(WeightsError, match="no part 'talker'; its parts: thinker, vision"):
        find_part(tmp_path, "talker")


OMNI_PARTS = ["thinker", "visual", "audio_tower", "talker", "code2wav"]


def write_omni(directory, *, without=(), model_type="qwen3_omni_moe", is_sharded=True):
    """A published checkpoint's configuration and tensor names; its tensors are single numbers.

    without: prefixes of tensors that are left out.
    """
    write_config(
        directory,
        model_type=model_type,
        thinker_config={
            "model_type": "qwen3_omni_moe_thinker",
            "text_config": {"layers": 1},
            "vision_config": {"model_type": "other", "depth": 2},
            "audio_config": {"layers": 3},
        },
        talker_config={"model_type": "", "layers": 4},
        code2wav_config={"model_type": "", "layers": 5},
    )
    names = [
        *("thinker.model.embed_tokens.weight", "thinker.lm_head.weight", "thinker.visual.pos_embed.weight"),
        *("thinker.audio_tower.proj1.bias", "talker.model.norm.weight", "code2wav.code_embedding.weight"),
    ]
    kept = [name for name in names if not name.startswith(tuple(without) or "-")]
    shards = [kept[::2], kept[1::2]] if is_sharded else [kept]
    weight_map = {}
    for index, shard in enumerate(shards):
        file_name = f"model-{index}.safetensors" if is_sharded else "model.safetensors"
        save_file({name: np.zeros(1, np.float32) for name in shard}, directory / file_name)
        weight_map |= dict.fromkeys(shard, file_name)
    if is_sharded:
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


@pytest.mark.parametrize("is_sharded", [True, False])
def test_parts_inside_a_published_omni_checkpoint(tmp_path, is_sharded):
    write_omni(tmp_path, is_sharded=is_sharded)
    expected = {
        "thinker": ("qwen3_omni_moe_thinker", "thinker."),
        "visual": ("qwen3_omni_moe_vision_encoder", "thinker.visual."),
        "audio_tower": ("qwen3_omni_moe_audio_encoder", "thinker.audio_tower."),
        "talker": ("qwen3_omni_moe_talker", "talker."),
        "code2wav": ("qwen3_omni_moe_code2wav", "code2wav."),
    }
    found = {part: find_part(tmp_path, part) for part in OMNI_PARTS}
    assert {part: (source.model_type, source.prefix) for part, source in found.items()} == expected
    assert all(source.directory == tmp_path for source in found.values())
    assert found["visual"].config == {"model_type": "qwen3_omni_moe_vision_encoder", "depth": 2}
    assert [found[part].config["layers"] for part in ("audio_tower", "talker", "code2wav")] == [3, 4, 5]
    assert found["thinker"].config["text_config"] == {"layers": 1}
    assert available_parts(tmp_path) == OMNI_PARTS
    assert find_part(tmp_path, None).model_type == "qwen3_omni_moe"


def test_parts_inside_a_published_vl_checkpoint(qwen3_vl_dir):
    source = find_part(qwen3_vl_dir, "visual")
    assert (source.model_type, source.prefix) == ("qwen3_vl_vision", "model.visual.")
    assert source.config["depth"] == 6
    assert find_part(qwen3_vl_dir, "thinker").prefix == "model.language_model."
    assert available_parts(qwen3_vl_dir) == ["thinker", "visual"]
    with pytest.raises(WeightsError, match="no part 'audio_tower'; its parts: thinker, visual"):
        find_part(qwen3_vl_dir, "audio_tower")


def test_every_tower_and_vocoder_of_a_published_checkpoint_loads(qwen3_omni_dir):
    assert available_parts(qwen3_omni_dir) == OMNI_PARTS
    for part, load in (("visual", load_encoder), ("audio_tower", load_encoder), ("code2wav", load_vocoder)):
        heard = []
        model = load(
            find_part(qwen3_omni_dir, part),
            progress=lambda fraction, what, heard=heard: heard.append(fraction),
        )
        assert model.weight_bytes > 0
        assert heard[-1] == 1.0


def test_a_checkpoint_without_speech_names_what_is_missing(tmp_path):
    write_omni(tmp_path, without=("talker.", "code2wav."))
    assert available_parts(tmp_path) == ["thinker", "visual", "audio_tower"]
    for part in ("talker", "code2wav"):
        with pytest.raises(
            WeightsError,
            match=rf"no part '{part}' .*'{part}\.'.*its parts: thinker, visual, audio_tower; leave",
        ):
            find_part(tmp_path, part)
    assert find_part(tmp_path, "visual").prefix == "thinker.visual."


def test_a_checkpoint_of_towers_alone_has_no_thinker(tmp_path):
    write_omni(tmp_path, without=("thinker.model.", "thinker.lm_head."))
    assert "thinker" not in available_parts(tmp_path)
    with pytest.raises(WeightsError, match=r"no part 'thinker' .*'thinker\.model\.'"):
        find_part(tmp_path, "thinker")


def test_weights_without_their_configuration_are_named(tmp_path):
    write_omni(tmp_path)
    write_config(tmp_path, model_type="qwen3_omni_moe", thinker_config={"vision_config": None})
    with pytest.raises(WeightsError, match=r"lacks thinker_config\.vision_config, which 'visual' needs"):
        find_part(tmp_path, "visual")
    with pytest.raises(WeightsError, match="lacks talker_config"):
        find_part(tmp_path, "talker")


def test_a_language_model_is_its_own_thinker(tmp_path):
    plain = write_config(tmp_path / "plain", model_type="qwen3", layers=3)
    with pytest.raises(WeightsError, match="fetch the model's weights"):
        available_parts(plain)
    save_file({"model.norm.weight": np.zeros(1, np.float32)}, plain / "model.safetensors")
    assert available_parts(plain) == ["thinker"]
    source = find_part(plain, "thinker")
    assert (source.model_type, source.prefix, source.config["layers"]) == ("qwen3", "", 3)
    assert source.prefixes == ("",)


def test_files_of_each_stage(qwen3_omni_dir, qwen3_vl_dir):
    graph = Graph("omni", model=str(qwen3_omni_dir))
    graph.connect(graph.llm("thinker"), graph.llm("voice", part="talker"), stream=True)
    graph.connect("voice", graph.vocoder("vocoder", part="code2wav"), stream=True)
    graph.output(text="thinker", audio="vocoder")
    files = part_files(qwen3_omni_dir, graph.build())
    assert files["thinker"].prefixes == ("thinker.model.", "thinker.lm_head.")
    assert files["thinker"].num_loops == 1
    assert files["voice"].prefixes == ("talker.", "thinker.model.embed_tokens.")
    assert (files["voice"].looped, files["voice"].num_loops) == ("talker.code_predictor.model.layers.", 3)
    assert files["vocoder"].prefixes == ("code2wav.",)
    assert {one.dtype for one in files.values()} == {"float32"}
    assert find_part(qwen3_vl_dir, "thinker").prefixes == ("model.language_model.", "lm_head.")


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({}, "float16"),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "bfloat16", "text_config": {"dtype": "float32"}}, "bfloat16"),
        ({"text_config": {"dtype": "bfloat16"}}, "bfloat16"),
    ],
)
def test_the_dtype_of_auto(tmp_path, config, dtype):
    write_config(tmp_path, model_type="qwen3", **config)
    save_file({"a": np.zeros(8, np.float16), "b": np.zeros(2, np.float32)}, tmp_path / "model.safetensors")
    assert stored_dtype(find_part(tmp_path, "thinker")) == dtype


def test_progress_is_told_in_bytes_of_the_part(qwen3_omni_dir):
    heard = []
    load_decoder(find_part(qwen3_omni_dir, "thinker"), progress=lambda *told: heard.append(told))
    fractions = [fraction for fraction, _ in heard]
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)
    assert len([one for one in fractions if 0.05 < one < 1.0]) > 10
    assert any(0.4 < one < 0.6 for one in fractions)
    assert heard[-2][1] == "loading qwen3_omni_moe_thinker: 1.7 MiB of 1.7 MiB"


def test_a_model_of_the_hub_is_looked_for_in_the_cache(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        WeightsError, match=r"nor whole in the hub's cache; run `omnistage fetch an-org/a-model`"
    ):
        resolve_model("an-org/a-model")
    (tmp_path / "an-org" / "a-model").mkdir(parents=True)
    assert resolve_model("an-org/a-model") == Path("an-org/a-model")


def test_files_are_checked_in_the_model_and_in_the_folders_of_its_parts(tmp_path):
    graph = Graph("p", model=str(tmp_path))
    graph.llm("thinker", part="mind")
    graph.output(text="thinker")
    spec = graph.build()
    check_files(tmp_path, spec)
    (tmp_path / "mind").mkdir()
    (tmp_path / "mind" / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "one.safetensors"}}'
    )
    with pytest.raises(WeightsError, match=r"mind lacks 1 .*one\.safetensors"):
        check_files(tmp_path, spec)


def test_parts_of_other_models(tmp_path):
    with pytest.raises(WeightsError, match="does not exist"):
        available_parts(tmp_path)
    for part in ("vision", "hearing"):
        write_config(tmp_path / part, model_type="any")
    assert available_parts(tmp_path) == ["hearing", "vision"]
    write_omni(tmp_path, model_type="unheard_of", without=("talker.",))
    assert available_parts(tmp_path) == ["code2wav", "hearing", "thinker", "vision"]
    (write_omni(tmp_path / "bare") / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(WeightsError, match="no weight_map"):
        available_parts(tmp_path / "bare")


@pytest.mark.parametrize("content", ["not json", "[1]"])
def test_an_unreadable_configuration_is_named(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(WeightsError, match=r"config\.json"):
        find_part(tmp_path, None)


def test_an_unknown_model_type_lists_the_known_ones(tmp_path):
    with pytest.raises(WeightsError, match=r"'bert'.*known: efficientnet_lite0, .*whisper"):
        load_encoder(PartSource(tmp_path, {"model_type": "bert"}))
    with pytest.raises(WeightsError, match="no model_type"):
        load_encoder(PartSource(tmp_path, {}))


def test_devices_and_dtypes_are_checked(tmp_path):
    write_config(tmp_path, model_type="llama")
    with pytest.raises(WeightsError, match="not on 'cuda:0'"):
        load_decoder(find_part(tmp_path, None), device="cuda:0")
    with pytest.raises(WeightsError, match="'int8' is unknown"):
        load_decoder(find_part(tmp_path, None), dtype="int8")


@pytest.mark.starter
def test_every_part_of_the_starter_is_known(starter_dir):
    kinds = {
        path.parent.name: find_part(starter_dir, path.parent.name).model_type
        for path in starter_dir.glob("*/config.json")
    }
    roles = {
        "thinker": "decoder",
        "hearing": "encoder",
        "vision": "encoder",
        "talker": "acoustic",
        "vocoder": "vocoder",
    }
    assert kinds.keys() == roles.keys()
    assert all(kinds[part] in FACTORIES[role] for part, role in roles.items())


@pytest.mark.starter
def test_loading_reports_progress(starter_dir):
    heard = []
    load_encoder(
        find_part(starter_dir, "vision"), progress=lambda fraction, what: heard.append((fraction, what))
    )
    assert heard[0][0] == 0.0
    assert heard[-1] == (1.0, "loaded efficientnet_lite0")
    assert [fraction for fraction, _ in heard] == sorted(fraction for fraction, _ in heard)


def test_importing_registry_and_fetch_imports_no_torch():
    code = (
        "import sys, omnistage.models.registry, omnistage.models.fetch\n"
        "sys.exit(sorted({'torch', 'transformers', 'onnx', 'gguf'} & sys.modules.keys()) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
