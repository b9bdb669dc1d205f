from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from omnistage.errors import PipelineError, WeightsError
from omnistage.graph import Graph, load_pipeline
from omnistage.graph.fields import size_text
from omnistage.graph.machine import machine_memory
from omnistage.graph.parts import PartFiles
from omnistage.graph.plan import RUNTIME_BYTES, Load, check_plan, plan_pipeline
from omnistage.graph.plan_table import render_plan
from omnistage.models.registry import part_files
from omnistage.types import StageKind

MIB = 1024**2
CONFIG = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "dtype": "float32",
}
PER_TOKEN = 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, width, bytes


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    for part in ("hearing", "vision", "thinker", "talker", "vocoder"):
        (tmp_path / part).mkdir()
        save_file({"weight": np.zeros(MIB, np.float32)}, tmp_path / part / "model.safetensors")
    return tmp_path


def plan_of(spec, folder, **options):
    """The plan of a model with a folder per part."""
    parts = {
        name: PartFiles(folder / stage.part, CONFIG if stage.kind is StageKind.LLM else {})
        for name, stage in spec.stages.items()
        if stage.kind is not StageKind.FUNCTION
    }
    return plan_pipeline(spec, parts, **options)


def test_bytes_of_each_stage(model_dir):
    plan = plan_of(load_pipeline("starter"), model_dir)
    rows = {row.stage: row for row in plan.stages}
    assert {row.weights for row in rows.values()} == {4 * MIB}
    assert rows["thinker"].cache == 256 * MIB
    assert rows["hearing"].cache == 64 * MIB
    assert rows["vocoder"].cache == 0
    assert rows["thinker"].workspace == 512 * (4 * 64 + 3 * 128 + 8 * 16) * 4 + 32 * 1000 * 8
    assert plan.devices == {"cpu": sum(row.total for row in rows.values())}
    assert plan.limits["cpu"] == machine_memory()
    assert check_plan(plan) is plan


def test_weights_grow_with_the_dtype_they_are_loaded_in(model_dir):
    spec = load_pipeline("starter", overrides=["thinker.dtype=bfloat16"])
    plan = plan_of(spec, model_dir)
    assert {row.stage: row.weights for row in plan.stages}["thinker"] == 2 * MIB
    assert plan.llms[0].bytes_per_token == PER_TOKEN // 2


def test_what_the_kv_cache_holds(model_dir):
    spec = load_pipeline("starter", overrides=[f"thinker.kv_cache={100 * 16 * PER_TOKEN + 5}"])
    spec_len = load_pipeline(
        "starter", overrides=[f"thinker.kv_cache={100 * 16 * PER_TOKEN + 5}", "thinker.max_model_len=1600"]
    )
    (llm,) = plan_of(spec_len, model_dir, load=Load(prompt_tokens=90, answer_tokens=30)).llms
    assert llm.bytes_per_token == PER_TOKEN
    assert (llm.blocks, llm.tokens) == (100, 1600)
    assert llm.concurrency == 100 // 8  # 120 tokens take 8 blocks of 16
    assert (llm.single_rate, llm.batch_rate, llm.request_rate) == (None, None, None)
    problems = plan_of(spec, model_dir).problems
    assert problems == (
        f"stage thinker holds 1600 tokens in a KV cache of {size_text(1600 * PER_TOKEN)},"
        " fewer than its max_model_len 2048;"
        f" raise kv_cache to {2048 * PER_TOKEN} bytes or lower max_model_len",
    )


def test_rates_are_the_roofline_and_littles_law(model_dir):
    load = Load(prompt_tokens=96, answer_tokens=32, bandwidth={"cpu": 1e9})
    spec = load_pipeline("starter", overrides=["thinker.max_num_seqs=8"])
    (llm,) = plan_of(spec, model_dir, load=load).llms
    assert llm.concurrency == 8
    kv = (96 + 16) * PER_TOKEN
    assert llm.single_rate == pytest.approx(1e9 / (4 * MIB + kv))
    step = (4 * MIB + 8 * kv) / 1e9
    assert llm.batch_rate == pytest.approx(8 / step)
    # Little: requests in the system = rate * time in the system
    assert llm.request_rate * (32 * step) == pytest.approx(8)


def test_tensor_parallel_ranks_share_weights_and_heads(model_dir):
    graph = Graph("p", model="m")
    graph.llm("thinker", devices=["cuda:0", "cuda:1"], tensor_parallel=2, kv_cache="1MiB")
    graph.output(text="thinker")
    plan = plan_of(graph.build(), model_dir, device_memory={"cuda:0": 10**9})
    assert set(plan.devices) == {"cuda:0", "cuda:1"}
    assert {row.weights for row in plan.stages} == {2 * MIB}
    assert {row.runtime for row in plan.stages} == {RUNTIME_BYTES["cuda"]}
    assert plan.llms[0].bytes_per_token == PER_TOKEN // 2


def test_replicas_count_each_and_colocated_stages_share_a_process(model_dir):
    graph = Graph("p", model="m")
    graph.llm("thinker", replicas=2)
    graph.encoder("hearing", replicas=2, colocate="thinker")
    graph.connect("hearing", "thinker")
    graph.output(text="thinker")
    rows = {row.stage: row for row in plan_of(graph.build(), model_dir).stages}
    assert rows["thinker"].ranks == 2
    assert rows["thinker"].cache == 2 * 256 * MIB
    assert rows["thinker"].runtime == 2 * RUNTIME_BYTES["cpu"]
    assert rows["hearing"].runtime == 0


def test_a_function_needs_no_weights(tmp_path):
    graph = Graph("p")
    graph.function("f", "a.b:c")
    graph.output(text="f")
    (row,) = plan_of(graph.build(), tmp_path).stages
    assert (row.weights, row.cache, row.workspace) == (0, 0, 0)


def test_remote_stages_do_not_count_here(model_dir):
    spec = load_pipeline("starter", overrides=["thinker.placement=remote"])
    plan = plan_of(spec, model_dir)
    assert set(plan.devices) == {"cpu", "cpu (remote)"}
    assert {row.stage for row in plan.stages if row.device != "cpu"} == {"thinker"}


def test_a_device_over_its_size_names_the_stage_the_bytes_and_the_remedy(model_dir):
    plan = plan_of(load_pipeline("starter"), model_dir, device_memory={"cpu": 500 * MIB})
    with pytest.raises(PipelineError) as caught:
        check_plan(plan)
    total = plan.devices["cpu"]
    thinker = next(row.total for row in plan.stages if row.stage == "thinker")
    assert f"device cpu has 500 MiB, but its stages need {total} bytes" in caught.value.message
    assert f"thinker ({thinker} bytes" in caught.value.message
    assert "lower its kv_cache or move a stage" in caught.value.message


def test_a_stage_over_its_memory_is_named(model_dir):
    spec = load_pipeline("starter", overrides=["talker.memory=100MiB", "device_memory.cpu=64GiB"])
    (problem,) = plan_of(spec, model_dir).problems
    assert problem.startswith("stage talker needs ")
    assert "its memory is 100 MiB; raise it" in problem


def test_missing_weights_are_named(model_dir):
    (model_dir / "talker" / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match="talker; fetch"):
        plan_of(load_pipeline("starter"), model_dir)


def test_the_table(model_dir):
    load = Load(bandwidth={"cpu": 1e9})
    text = render_plan(plan_of(load_pipeline("starter"), model_dir, load=load))
    lines = text.splitlines()
    assert lines[0].split()[:4] == ["device", "stage", "ranks", "weights"]
    cells = {line.split()[1]: line for line in lines if line.startswith("cpu")}
    assert set(cells) == {"hearing", "vision", "thinker", "talker", "vocoder", "all"}
    assert "4.0 MiB" in cells["thinker"]
    assert "256 MiB" in cells["thinker"]
    assert text.endswith("\n")
    row = next(line for line in lines if line.startswith("thinker"))
    assert row.split()[1:4] == [
        str(PER_TOKEN),
        str(256 * MIB // (16 * PER_TOKEN)),
        str(256 * MIB // PER_TOKEN),
    ]


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536 * MIB, "1.5 GiB"), (200 * MIB, "200 MiB")],
)
def test_sizes_for_reading(size, text):
    assert size_text(size) == text


# --- a published checkpoint, sizes as in tests.models.qwen_configs


def omni_graph(directory, **thinker):
    graph = Graph("omni", model=str(directory))
    vision = graph.encoder("vision", part="visual")
    hearing = graph.encoder("hearing", part="audio_tower")
    llm = graph.llm("thinker", **thinker)
    talker = graph.llm("talker")
    vocoder = graph.vocoder("vocoder", part="code2wav")
    graph.connect(vision, llm)
    graph.connect(hearing, llm)
    graph.connect(llm, talker, stream=True)
    graph.connect(talker, vocoder, stream=True)
    graph.output(text=llm, audio=vocoder)
    return graph.build()


# Weights of one layer: four projections, two norms of a head, two norms.
ATTENTION = {hidden: hidden * 16 * (4 + 2 + 2) + 4 * 16 * hidden + 2 * 16 + 2 * hidden for hidden in (32, 64)}
THINKER_LAYER = ATTENTION[64] + 8 * 64  # the router
THINKER_EXPERTS = 8 * 3 * 32 * 64  # of one layer
TALKER_LAYER = ATTENTION[32] + 8 * 32 + 32 + 3 * 32 * 32  # router, gate of the shared expert, that expert
TALKER_EXPERTS = 8 * 3 * 24 * 32
PREDICTOR_LAYER = ATTENTION[32] + 3 * 96 * 32
PROJECTION = 64 * 64 + 64 + 64 * 32 + 32


def test_bytes_of_a_published_checkpoint(qwen3_omni_dir):
    spec = omni_graph(qwen3_omni_dir)
    plan = plan_pipeline(spec, part_files(qwen3_omni_dir, spec))
    rows = {row.stage: row for row in plan.stages}
    tables = 2 * 1024 * 64  # embeddings and head
    assert rows["thinker"].weights == 4 * (tables + 64 + 5 * (THINKER_LAYER + THINKER_EXPERTS))
    own = 2 * 3072 * 32 + 32 + 2 * PROJECTION + 3 * (TALKER_LAYER + TALKER_EXPERTS)
    predictor = 3 * 2 * 2048 * 32 + 32 + 2 * PREDICTOR_LAYER  # a table and a head for each further code
    assert rows["talker"].weights == 4 * (own + predictor + 1024 * 64)  # and the thinker's table
    stored = {"vision": "thinker.visual.", "hearing": "thinker.audio_tower.", "vocoder": "code2wav."}
    for stage, prefix in stored.items():
        assert rows[stage].weights == bytes_in_files(qwen3_omni_dir, prefix)
    thinker, talker = plan.llms
    assert thinker.bytes_per_token == 5 * 2 * 2 * 16 * 4
    assert talker.bytes_per_token == 3 * 2 * 2 * 16 * 4
    assert (thinker.exported_per_token, talker.exported_per_token) == (64 * 4, 0)
    assert (thinker.max_model_len, talker.max_model_len) == (65536, 65536)
    # A row's MLP: two of eight experts of 32; a step's exported rows.
    row = 4 * 64 + 3 * 2 * 32 + (4 + 2 * 2) * 16
    assert rows["thinker"].workspace == 512 * row * 4 + 32 * 1024 * 8 + 512 * 64 * 4
    row = 4 * 32 + 3 * (2 * 24 + 32) + (4 + 2 * 2) * 16
    assert rows["talker"].workspace == 512 * row * 4 + 32 * 3072 * 8


def bytes_in_files(directory, prefix):
    """Measured with the reference reader."""
    total = 0
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "np") as file:
            total += sum(file.get_tensor(name).nbytes for name in file.keys() if name.startswith(prefix))  # noqa: SIM118
    return total


def test_a_step_reads_the_experts_it_uses_and_the_predictor_for_each_code(qwen3_omni_dir):
    spec = omni_graph(qwen3_omni_dir)
    load = Load(prompt_tokens=96, answer_tokens=32, bandwidth={"cpu": 1e9})
    thinker, talker = plan_pipeline(spec, part_files(qwen3_omni_dir, spec), load=load).llms
    dense = 1024 * 64 + 64 + 5 * THINKER_LAYER
    assert thinker.read_per_step == 4 * (dense + 5 * THINKER_EXPERTS * 2 // 8)
    heads = 3072 * 32 + 3 * 2048 * 32
    dense = heads + 2 * 32 + 2 * PROJECTION + 3 * TALKER_LAYER
    # Four codes a frame: the predictor's layers run three times.
    assert talker.read_per_step == 4 * (dense + 3 * TALKER_EXPERTS * 2 // 8 + 3 * 2 * PREDICTOR_LAYER)
    kv = 112 * thinker.bytes_per_token
    assert thinker.single_rate == pytest.approx(1e9 / (thinker.read_per_step + kv))
    # 32 rows miss an expert with probability (6 / 8) ** 32.
    read = 4 * (1024 * 64 + 64 + 5 * THINKER_LAYER + 5 * THINKER_EXPERTS * (1 - 0.75**32))
    assert thinker.concurrency == 32
    assert thinker.batch_rate == pytest.approx(32 * 1e9 / (read + 32 * kv), rel=1e-5)


def test_a_published_checkpoint_in_bfloat16(qwen3_omni_dir):
    spec = omni_graph(qwen3_omni_dir, dtype="bfloat16")
    parts = part_files(qwen3_omni_dir, spec)
    whole, short = (plan_pipeline(one, parts) for one in (omni_graph(qwen3_omni_dir), spec))
    assert 2 * short.stages[2].weights == whole.stages[2].weights
    assert short.llms[0].bytes_per_token == 640
    assert short.llms[0].exported_per_token == 128
    assert short.stages[3] == whole.stages[3]


def test_a_tied_head_is_held_twice(tmp_path):
    tensors = {"model.embed_tokens.weight": np.zeros((1000, 64), np.float32), "x": np.zeros(100, np.float32)}
    save_file(tensors, tmp_path / "model.safetensors")
    graph = Graph("p", model="m")
    graph.llm("thinker")
    graph.output(text="thinker")
    spec = graph.build()
    plan = plan_pipeline(spec, {"thinker": PartFiles(tmp_path, CONFIG)})
    assert plan.stages[0].weights == 2 * 256000 + 400
    assert plan.llms[0].read_per_step == 256000 + 400
    save_file({**tensors, "lm_head.weight": np.zeros((1000, 64), np.float32)}, tmp_path / "model.safetensors")
    assert plan_pipeline(spec, {"thinker": PartFiles(tmp_path, CONFIG)}).stages == plan.stages


def test_the_table_of_a_published_checkpoint(qwen3_omni_dir):
    spec = omni_graph(qwen3_omni_dir)
    text = render_plan(plan_pipeline(spec, part_files(qwen3_omni_dir, spec)))
    (head,) = [line for line in text.splitlines() if "KV bytes/token" in line]
    assert "exported/token" in head
    assert "experts * (1 - (1 - used / all) ** n)" in text
    rows = [line.split() for line in text.splitlines() if line.startswith(("thinker", "talker"))]
    assert [row[:3] for row in rows] == [["thinker", "1280", "256"], ["talker", "768", "0"]]
