"""What a user names becomes a pipeline that fits the weights and the machine."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from omnistage.errors import PipelineError, WeightsError
from omnistage.graph import load_pipeline
from omnistage.graph.fields import PIPELINE_NAME_PATTERN
from omnistage.models.registry import LAYOUTS
from omnistage.serving.choose import PIPELINES, Wishes, choose_pipeline, model_name

GIB = 1024**3
OMNI = ["vision", "hearing", "thinker", "talker", "vocoder"]


def copy_without(source: Path, target: Path, *prefixes: str, **config) -> Path:
    """A checkpoint without the tensors of these names.  config: changed keys of config.json."""
    shutil.copytree(source, target)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    for path in target.glob("*.safetensors"):
        tensors = {name: one for name, one in load_file(path).items() if not name.startswith(prefixes or "-")}
        save_file(tensors, path)
    kept = {n: file for n, file in index["weight_map"].items() if not n.startswith(prefixes or "-")}
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": kept}))
    change_config(target, **config)
    return target


def change_config(directory: Path, **changes) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def write_llm(directory: Path, model_type: str = "qwen3", **changes) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": model_type,
        "architectures": ["SomethingForCausalLM"],
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "vocab_size": 1000,
        "max_position_embeddings": 4096,
        **changes,
    }
    (directory / "config.json").write_text(json.dumps(config))
    save_file({"model.norm.weight": np.zeros(64, np.float32)}, directory / "model.safetensors")
    return directory


# --- which pipeline


def test_a_published_omni_model(qwen3_omni_dir):
    choice = choose_pipeline(qwen3_omni_dir, Wishes(memory=8 * GIB))
    spec, built_in = choice.spec, load_pipeline("qwen3-omni")
    assert choice.notes == ()
    assert list(spec.stages) == OMNI
    assert (spec.edges, spec.outputs) == (built_in.edges, built_in.outputs)
    assert spec.model == str(qwen3_omni_dir)
    assert spec.device_memory == {"cpu": 8 * GIB}
    talking = spec.edges[-1]
    assert (talking.first_chunk, talking.chunk, talking.credits) == (2, 25, None)
    assert choice.plan is not None
    assert choice.plan.problems == ()


def test_a_published_vl_model(qwen3_vl_dir):
    spec = choose_pipeline(str(qwen3_vl_dir)).spec
    assert list(spec.stages) == ["vision", "thinker"]
    assert dict(spec.outputs) == {"text": "thinker"}


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_a_language_model_alone(tmp_path, model_type):
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    write_llm(tmp_path / "small", model_type, **(experts if model_type == "qwen3_moe" else {}))
    spec = choose_pipeline(tmp_path / "small").spec
    assert list(spec.stages) == ["thinker"]
    assert spec.name == "small"


def test_every_pipeline_that_can_be_chosen_loads_parts_of_that_architecture():
    for kind, name in PIPELINES.items():
        parts = {stage.part for stage in load_pipeline(name).stages.values()}
        assert parts <= LAYOUTS[kind].keys()


def test_an_unknown_architecture_is_named_with_the_known_ones(tmp_path):
    write_llm(tmp_path, "bert", architectures=["BertModel"])
    with pytest.raises(PipelineError) as caught:
        choose_pipeline(tmp_path)
    for words in (
        "model_type 'bert'",
        "['BertModel']",
        "known: qwen3_omni_moe, qwen3_vl, llama",
        "pipeline file",
    ):
        assert words in caught.value.message


def test_pipelines_are_taken_as_before(tmp_path):
    assert choose_pipeline("starter").spec == load_pipeline("starter")
    wishes = Wishes(overrides=("thinker.max_num_seqs=4",), name="mine", dtype="bfloat16", memory=8 * GIB)
    spec = choose_pipeline("starter", wishes).spec
    assert (spec.name, spec.device_memory) == ("mine", {"cpu": 8 * GIB})
    assert [stage.dtype for stage in spec.stages.values()] == ["auto", "auto", "bfloat16", "auto", "auto"]
    path = tmp_path / "p.yaml"
    path.write_text("name: p\nmodel: m\nstages: {thinker: {kind: llm}}\noutputs: {text: thinker}\n")
    assert choose_pipeline(path).spec == load_pipeline(path)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("strater", "did you mean 'starter'"),
        ("./nowhere", r"\./nowhere cannot be read"),
        ("nowhere.yaml", r"nowhere\.yaml cannot be read"),
    ],
)
def test_what_is_nothing_is_a_pipeline_error(source, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PipelineError, match=words):
        choose_pipeline(source)


def test_a_directory_without_a_configuration(tmp_path):
    with pytest.raises(PipelineError, match=r"holds no config\.json, .*pipeline file"):
        choose_pipeline(tmp_path)


def test_a_name_on_the_hub_goes_through_obtain(qwen3_vl_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = []

    def obtain(name):
        asked.append(name)
        return qwen3_vl_dir

    spec = choose_pipeline("Qwen/Qwen3-VL-0.5B", obtain=obtain).spec
    assert asked == ["Qwen/Qwen3-VL-0.5B"]
    assert (spec.name, spec.model) == ("Qwen3-VL-0.5B", str(qwen3_vl_dir))


@pytest.mark.parametrize(
    ("directory", "source", "name"),
    [
        ("/models/Qwen3-Omni-30B", "/models/Qwen3-Omni-30B", "Qwen3-Omni-30B"),
        ("/models/my model.v2", "/models/my model.v2", "my-model.v2"),
        ("/models/7b", "/models/7b", "model-7b"),
        ("/models/x_-", "/models/x_-", "x_"),
        ("/cache/models--a-b--C.d/snapshots/0123", "/cache/models--a-b--C.d/snapshots/0123", "C.d"),
        ("/cache/models--a--b/snapshots/0123", "a/b", "b"),
        ("/" + 80 * "n", "/" + 80 * "n", 64 * "n"),
    ],
)
def test_the_name_that_clients_see(directory, source, name):
    assert model_name(Path(directory), source) == name
    assert re.fullmatch(PIPELINE_NAME_PATTERN, name)


# --- what the checkpoint holds


@pytest.mark.parametrize(
    ("prefixes", "stages", "note"),
    [
        (("talker.",), ["vision", "hearing", "thinker"], "no talker weights in {}: text only"),
        (("code2wav.",), ["vision", "hearing", "thinker"], "no code2wav weights in {}: text only"),
        (
            ("talker.", "code2wav.", "thinker.visual."),
            ["hearing", "thinker"],
            "no visual and talker and code2wav weights in {}: text only, without vision",
        ),
        (
            ("thinker.audio_tower.",),
            ["vision", "thinker", "talker", "vocoder"],
            "no audio_tower weights in {}: without hearing",
        ),
    ],
)
def test_stages_without_weights_are_left_out_and_it_is_said(qwen3_omni_dir, tmp_path, prefixes, stages, note):
    directory = copy_without(qwen3_omni_dir, tmp_path / "m", *prefixes)
    choice = choose_pipeline(directory)
    assert choice.notes[:1] == (note.format(directory),)
    assert list(choice.spec.stages) == stages
    assert all(edge.producer in stages and edge.consumer in stages for edge in choice.spec.edges)
    assert set(choice.spec.outputs) == ({"text", "audio"} if "vocoder" in stages else {"text"})


def test_a_checkpoint_that_says_it_does_not_speak(qwen3_omni_dir, tmp_path):
    directory = copy_without(qwen3_omni_dir, tmp_path / "m", enable_audio_output=False)
    choice = choose_pipeline(directory)
    assert list(choice.spec.stages) == ["vision", "hearing", "thinker"]
    assert choice.notes == (f"{directory / 'config.json'} says enable_audio_output: false: text only",)


def test_without_its_thinker_a_model_is_refused(qwen3_omni_dir, tmp_path):
    directory = copy_without(qwen3_omni_dir, tmp_path / "m", "thinker.model.", "thinker.lm_head.")
    with pytest.raises(WeightsError) as caught:
        choose_pipeline(directory)
    message = caught.value.message
    assert "no part 'thinker', without which nothing can be answered" in message
    assert "its parts: visual, audio_tower, talker, code2wav" in message
    assert "model-00001-of-00003.safetensors" in message


def test_a_missing_shard_is_named_before_anything_is_loaded(qwen3_omni_dir, tmp_path):
    directory = copy_without(qwen3_omni_dir, tmp_path / "m")
    (directory / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"lacks 1 of the 3 .*: model-00002-of-00003\.safetensors; fetch"):
        choose_pipeline(directory)


# --- memory, dtype and names


def test_caches_get_what_the_weights_leave(qwen3_omni_dir):
    large, small = (choose_pipeline(qwen3_omni_dir, Wishes(memory=size * GIB)) for size in (64, 2))
    assert large.spec.stages["thinker"].kv_cache == 32 * 65536 * (1280 + 256)
    assert large.spec.stages["talker"].kv_cache == 32 * 65536 * 768
    assert small.plan.devices["cpu"] <= 2 * GIB < small.plan.devices["cpu"] + 2**20
    assert small.notes == ()
    assert all(llm.tokens >= 65536 for llm in small.plan.llms)


def test_too_little_for_a_full_request_is_said(qwen3_omni_dir):
    least = choose_pipeline(qwen3_omni_dir, Wishes(memory=2 * GIB, overrides=("thinker.kv_cache=1MiB",)))
    assert least.notes == (
        "thinker: prompt and answer may have 672 tokens, not 65536: its KV cache holds no more",
    )
    assert least.resolved.source(("stages", "thinker", "kv_cache")) == "flag thinker.kv_cache=1MiB"
    assert least.resolved.source(("stages", "talker", "kv_cache")) == "the memory there is"


def test_weights_that_do_not_fit_are_refused_with_numbers_and_remedies(qwen3_omni_dir):
    with pytest.raises(PipelineError) as caught:
        choose_pipeline(qwen3_omni_dir, Wishes(memory=GIB))
    message = caught.value.message
    assert re.search(r"needs 1\.8 GiB of memory, but may use 1\.0 GiB: 9\.7 MiB for weights", message)
    assert "--dtype bfloat16 (4.9 MiB for weights)" in message
    assert "smaller model" in message
    with pytest.raises(PipelineError) as caught:
        choose_pipeline(qwen3_omni_dir, Wishes(memory=GIB, dtype="bfloat16"))
    assert "--dtype" not in caught.value.message


def test_the_machine_decides_if_nobody_does(qwen3_vl_dir, monkeypatch):
    from omnistage.serving import choose

    monkeypatch.setattr(choose, "available_memory", lambda: 2 * GIB)
    choice = choose_pipeline(qwen3_vl_dir)
    assert choice.spec.device_memory == {}
    assert 1.59 * GIB < choice.plan.devices["cpu"] <= 1.6 * GIB


def test_dtype_and_name_are_for_the_whole_model(qwen3_omni_dir):
    wishes = Wishes(dtype="bfloat16", name="mine", overrides=("vocoder.dtype=float32",))
    choice = choose_pipeline(qwen3_omni_dir, wishes)
    assert choice.spec.name == "mine"
    assert [stage.dtype for stage in choice.spec.stages.values()] == [*["bfloat16"] * 4, "float32"]
    assert choice.resolved.source(("stages", "talker", "dtype")) == "flag --dtype bfloat16"


def test_wrong_settings_are_still_found(qwen3_omni_dir):
    with pytest.raises(PipelineError, match="did you mean 'max_num_seqs'"):
        choose_pipeline(qwen3_omni_dir, Wishes(overrides=("thinker.max_num_seq=8",)))


def test_choosing_imports_neither_torch_nor_transformers(qwen3_omni_dir):
    code = (
        "import sys; from omnistage.serving.choose import choose_pipeline\n"
        f"choose_pipeline({str(qwen3_omni_dir)!r})\n"
        "sys.exit(sorted({'torch', 'transformers'} & sys.modules.keys()) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("temprature: 0", "temprature"),
        ("max_tokens: -5", "max_tokens"),
        ("top_k: a", "top_k"),
    ],
)
def test_sampling_is_checked_before_anything_starts(setting, message, qwen3_omni_dir, tmp_path):
    path = tmp_path / "pipeline.yaml"
    path.write_text(
        f"name: mine\nmodel: {qwen3_omni_dir}\nstages:\n"
        f"  thinker: {{kind: llm, part: thinker, sampling: {{{setting}}}}}\noutputs: {{text: thinker}}\n"
    )
    with pytest.raises(PipelineError, match=message):
        choose_pipeline(path)
