from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import save_file

from omnistage.errors import PipelineError
from omnistage.graph import Graph
from omnistage.graph.fit import fit_caches
from omnistage.graph.parts import PartFiles
from omnistage.graph.plan import plan_pipeline

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
}
PER_TOKEN = 2 * 2 * 2 * 16 * 4


def planned(folder, **thinker):
    save_file({"weight": np.zeros(MIB, np.float32)}, folder / "model.safetensors")
    graph = Graph("p", model=str(folder))
    graph.encoder("vision")
    graph.llm("thinker", **thinker)
    graph.connect("vision", "thinker")
    graph.output(text="thinker")
    spec = graph.build()
    parts = {"vision": PartFiles(folder, {}), "thinker": PartFiles(folder, CONFIG)}
    return spec, plan_pipeline(spec, parts)


def fixed_bytes(plan):
    """All but the thinker's cache."""
    return sum(row.total - (row.cache if row.stage == "thinker" else 0) for row in plan.stages)


def test_the_cache_gets_what_is_left(tmp_path):
    spec, plan = planned(tmp_path)
    fixed = fixed_bytes(plan)
    assert fit_caches(spec, plan, budget=fixed + 5000 * PER_TOKEN) == {"thinker": 4992 * PER_TOKEN}
    assert fit_caches(spec, plan, budget=10**12) == {"thinker": 32 * 4096 * PER_TOKEN}


def test_what_the_user_set_counts_and_stays(tmp_path):
    spec, plan = planned(tmp_path, max_num_seqs=2, max_model_len=1000)
    assert fit_caches(spec, plan, budget=10**12) == {"thinker": 2 * 1008 * PER_TOKEN}
    spec, plan = planned(tmp_path, kv_cache="3MiB")
    assert fit_caches(spec, plan, budget=10**12, given=["thinker"]) == {}
    with pytest.raises(PipelineError, match=r"67\.0 MiB for the smallest caches"):
        fit_caches(spec, plan, budget=1, given=["thinker"])


def test_weights_that_do_not_fit_are_refused_with_the_numbers(tmp_path):
    spec, plan = planned(tmp_path)
    least = fixed_bytes(plan) + 1024 * PER_TOKEN
    assert fit_caches(spec, plan, budget=least) == {"thinker": 1024 * PER_TOKEN}
    with pytest.raises(PipelineError) as caught:
        fit_caches(spec, plan, budget=least - 1)
    assert "'p' needs 738 MiB of memory, but may use 738 MiB: 8.0 MiB for weights" in caught.value.message


def test_stages_on_other_hosts_have_their_own_memory(tmp_path):
    spec, plan = planned(tmp_path, placement="remote")
    assert fit_caches(spec, plan, budget=10**12) == {}
