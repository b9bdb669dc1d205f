"""What stages that run an engine share: names of requests in it, and its gauges."""

from __future__ import annotations

from omnistage.engine.engine import Engine
from omnistage.transport.messages import RequestKey


def engine_id(key: RequestKey) -> str:
    """The engine's name of one attempt of a request."""
    return f"{key.request_id}#{key.attempt}"


def engine_gauges(engine: Engine) -> dict[str, float]:
    """The engine's own numbers, by the names /metrics gives them."""
    stats = engine.stats()
    return {
        "running": stats.num_running,
        "queued": stats.num_waiting,
        "kv_blocks_total": stats.blocks_total,
        "kv_blocks_used": stats.blocks_used,
        "kv_blocks_cached": stats.blocks_cached,
        "prefix_hit_tokens": stats.prefix_hit_tokens,
        "preemptions": stats.preemptions,
        "steps": stats.steps,
        "tokens": stats.tokens,
    }
