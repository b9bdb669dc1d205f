from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from omnistage.errors import PipelineError, WeightsError
from omnistage.graph import Graph, load_pipeline
from omnistage.graph.plan import (
    RUNTIME_BYTES,
    Load,
    check_plan,
    machine_memory,
    measure_bandwidth,
    plan_pipeline,
    render_plan,
    size_text,
)

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
    (tmp_path / "thinker" / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_bytes_of_each_stage(model_dir):
    plan = plan_pipeline(load_pipeline("starter"), model_dir)
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
    plan = plan_pipeline(spec, model_dir)
    assert {row.stage: row.weights for row in plan.stages}["thinker"] == 2 * MIB
    assert plan.llms[0].bytes_per_token == PER_TOKEN // 2


def test_what_the_kv_cache_holds(model_dir):
    spec = load_pipeline("starter", overrides=[f"thinker.kv_cache={100 * 16 * PER_TOKEN + 5}"])
    spec_len = load_pipeline(
        "starter", overrides=[f"thinker.kv_cache={100 * 16 * PER_TOKEN + 5}", "thinker.max_model_len=1600"]
    )
    (llm,) = plan_pipeline(spec_len, model_dir, load=Load(prompt_tokens=90, answer_tokens=30)).llms
    assert llm.bytes_per_token == PER_TOKEN
    assert (llm.blocks, llm.tokens) == (100, 1600)
    assert llm.concurrency == 100 // 8  # 120 tokens take 8 blocks of 16
    assert (llm.single_rate, llm.batch_rate, llm.request_rate) == (None, None, None)
    problems = plan_pipeline(spec, model_dir).problems
    assert problems == (
        f"stage thinker holds 1600 tokens in a KV cache of {size_text(1600 * PER_TOKEN)},"
        " fewer than its max_model_len 2048;"
        f" raise kv_cache to {2048 * PER_TOKEN} bytes or lower max_model_len",
    )


def test_rates_are_the_roofline_and_littles_law(model_dir):
    load = Load(prompt_tokens=96, answer_tokens=32, bandwidth={"cpu": 1e9})
    spec = load_pipeline("starter", overrides=["thinker.max_num_seqs=8"])
    (llm,) = plan_pipeline(spec, model_dir, load=load).llms
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
    plan = plan_pipeline(graph.build(), model_dir, device_memory={"cuda:0": 10**9})
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
    rows = {row.stage: row for row in plan_pipeline(graph.build(), model_dir).stages}
    assert rows["thinker"].ranks == 2
    assert rows["thinker"].cache == 2 * 256 * MIB
    assert rows["thinker"].runtime == 2 * RUNTIME_BYTES["cpu"]
    assert rows["hearing"].runtime == 0


def test_a_function_needs_no_weights(tmp_path):
    graph = Graph("p")
    graph.function("f", "a.b:c")
    graph.output(text="f")
    (row,) = plan_pipeline(graph.build(), tmp_path).stages
    assert (row.weights, row.cache, row.workspace) == (0, 0, 0)


def test_remote_stages_do_not_count_here(model_dir):
    spec = load_pipeline("starter", overrides=["thinker.placement=remote"])
    plan = plan_pipeline(spec, model_dir)
    assert set(plan.devices) == {"cpu", "cpu (remote)"}
    assert {row.stage for row in plan.stages if row.device != "cpu"} == {"thinker"}


def test_a_device_over_its_size_names_the_stage_the_bytes_and_the_remedy(model_dir):
    plan = plan_pipeline(load_pipeline("starter"), model_dir, device_memory={"cpu": 500 * MIB})
    with pytest.raises(PipelineError) as caught:
        check_plan(plan)
    total = plan.devices["cpu"]
    thinker = next(row.total for row in plan.stages if row.stage == "thinker")
    assert f"device cpu has 500 MiB, but its stages need {total} bytes" in caught.value.message
    assert f"thinker ({thinker} bytes" in caught.value.message
    assert "lower its kv_cache or move a stage" in caught.value.message


def test_a_stage_over_its_memory_is_named(model_dir):
    spec = load_pipeline("starter", overrides=["talker.memory=100MiB", "device_memory.cpu=64GiB"])
    (problem,) = plan_pipeline(spec, model_dir).problems
    assert problem.startswith("stage talker needs ")
    assert "its memory is 100 MiB; raise it" in problem


def test_missing_weights_are_named(model_dir):
    (model_dir / "talker" / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match="talker; fetch"):
        plan_pipeline(load_pipeline("starter"), model_dir)


def test_the_table(model_dir):
    load = Load(bandwidth={"cpu": 1e9})
    text = render_plan(plan_pipeline(load_pipeline("starter"), model_dir, load=load))
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


def test_bandwidth_is_measured():
    assert 1e8 < measure_bandwidth(4 * MIB) < 1e13


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536 * MIB, "1.5 GiB"), (200 * MIB, "200 MiB")],
)
def test_sizes_for_reading(size, text):
    assert size_text(size) == text
