"""A plan as aligned text, for a terminal."""

from __future__ import annotations

from omnistage.graph.fields import size_text
from omnistage.graph.plan import LlmCapacity, Plan

_READ = """\
** read by a step of one request, without tables: of a mixture the experts that a row uses (with n requests
   experts * (1 - (1 - used / all) ** n)), and what writes a frame's further codes once for each of them
"""
_EXPORTED = "exported/token: bytes of hidden states sent to the next llm for a row of a picture or of sound\n"


def render_plan(plan: Plan) -> str:
    """The plan as aligned text, for a terminal."""
    head = ["device", "stage", "ranks", "weights", "cache", "workspace*", "runtime*", "total", "limit"]
    rows = []
    for device, total in plan.devices.items():
        for row in (row for row in plan.stages if row.device == device):
            sizes = [row.weights, row.cache, row.workspace, row.runtime, row.total]
            limit = "" if row.limit is None else size_text(row.limit)
            rows.append([device, row.stage, str(row.ranks), *map(size_text, sizes), limit])
        limit = size_text(plan.limits[device]) if device in plan.limits else ""
        rows.append([device, "all", "", "", "", "", "", size_text(total), limit])
    text = _table(head, rows, num_left=2) + (
        f"* estimated; each worker may use up to {size_text(plan.shared_memory)} of shared memory besides,"
        " while tensors are under way\n"
    )
    if plan.llms:
        load = plan.load
        text += (
            f"\nRequests of {load.prompt_tokens} prompt and {load.answer_tokens} answer tokens, per replica;"
            " rates are upper bounds by memory bandwidth.\n"
        )
        exports = any(llm.exported_per_token for llm in plan.llms)
        columns = [
            "KV bytes/token",
            *(["exported/token"] if exports else []),
            "blocks",
            "tokens",
            "concurrent",
        ]
        head = ["stage", *columns, "weights/step**", "tok/s alone", "tok/s all", "req/s"]
        text += _table(head, [_capacity_row(llm, exports) for llm in plan.llms], num_left=1)
        text += _READ + (_EXPORTED if exports else "")
    return text


def _capacity_row(llm: LlmCapacity, exports: bool) -> list[str]:
    rates = [llm.single_rate, llm.batch_rate, llm.request_rate]
    shown = ["-" if rate is None else f"{rate:.0f}" if rate >= 10 else f"{rate:.2f}" for rate in rates]
    exported = [str(llm.exported_per_token)] if exports else []
    counts = [llm.blocks, llm.tokens, llm.concurrency]
    read = size_text(llm.read_per_step)
    return [llm.stage, str(llm.bytes_per_token), *exported, *map(str, counts), read, *shown]


def _table(head: list[str], rows: list[list[str]], *, num_left: int) -> str:
    """Columns padded to their widest cell, the first num_left to the left, the others to the right."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = []
    for row in [head, ["-" * width for width in widths], *rows]:
        cells = [
            cell.ljust(width) if column < num_left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines) + "\n"
