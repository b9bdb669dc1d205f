"""Gives a pipeline's KV caches the memory that its weights leave."""

from __future__ import annotations

from collections.abc import Collection

from omnistage.errors import PipelineError
from omnistage.graph.fields import size_text
from omnistage.graph.kv_sizes import CacheNeed, least_bytes, share_out
from omnistage.graph.plan import Plan
from omnistage.graph.spec import PipelineSpec

_DEVICE = "cpu"


def fit_caches(spec: PipelineSpec, plan: Plan, *, budget: int, given: Collection[str] = ()) -> dict[str, int]:
    """kv_cache of each llm stage on this machine's CPU, in bytes, so that the pipeline fits the budget.

    plan: of the same pipeline; its KV caches do not matter.  budget: bytes for all stages together.
    given: stages whose kv_cache stays as it is.
    Raises PipelineError with the numbers if not even a short request fits.
    """
    rows = [row for row in plan.stages if row.device == _DEVICE]
    here = {row.stage for row in rows}
    needs = {
        llm.stage: CacheNeed(
            bytes_per_token=llm.held_per_token,
            max_model_len=llm.max_model_len,
            max_num_seqs=spec.stages[llm.stage].max_num_seqs,
            replicas=spec.stages[llm.stage].replicas,
        )
        for llm in plan.llms
        if llm.stage in here and llm.stage not in given
    }
    weights = sum(row.weights for row in rows)
    caches = sum(row.cache for row in rows if row.stage not in needs)
    others = sum(row.workspace + row.runtime for row in rows)
    least = least_bytes(needs)
    total = weights + caches + others + least
    if total > budget:
        raise PipelineError(
            f"pipeline {spec.name!r} needs {size_text(total)} of memory, but may use {size_text(budget)}: "
            f"{size_text(weights)} for weights, {size_text(others)} for workspace and processes, "
            f"{size_text(caches + least)} for the smallest caches"
        )
    return share_out(needs, budget - (total - least))
