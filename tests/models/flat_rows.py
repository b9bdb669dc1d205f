"""Runs a flat-row model over one or more sequences in chunks, over pages whose blocks lie scattered."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from omnistage.models.qwen3_text import DeepstackRows
from omnistage.ops.attention import AttentionMetadata, DecodeGroup, PagedKVCache, PrefillChunk

BLOCK_SIZE = 4


class PagedRun:
    """One sequence's pages in a model, and how many rows are computed."""

    def __init__(
        self, model: Any, max_rows: int, *, cache: PagedKVCache | None = None, seed: int = 0
    ) -> None:
        num_blocks = -(-max_rows // BLOCK_SIZE) + 1
        self.model = model
        self.cache = cache or model.new_kv_cache(2 * num_blocks, BLOCK_SIZE)
        order = np.random.default_rng(seed).permutation(self.cache.num_blocks)[:num_blocks]
        self.blocks = torch.from_numpy(order.astype(np.int64))
        self.num_rows = 0

    def slots(self, rows: Tensor) -> Tensor:
        return self.blocks[rows // BLOCK_SIZE] * BLOCK_SIZE + rows % BLOCK_SIZE

    def metadata(self, num_rows: int) -> AttentionMetadata:
        start, stop = self.num_rows, self.num_rows + num_rows
        slots = self.slots(torch.arange(start, stop))
        blocks = self.blocks[: -(-stop // BLOCK_SIZE)]
        if num_rows == 1:
            return AttentionMetadata(self.cache, slots, (DecodeGroup(0, 1, blocks, stop, None),), ())
        first = start == 0
        chunk = PrefillChunk(0, num_rows, stop, None if first else blocks)
        return AttentionMetadata(self.cache, slots, (), (chunk,))

    def forward(self, hidden: Tensor, positions: Any, **options: Any) -> Any:
        """The next rows, in one step."""
        result = self.model.forward(
            hidden, torch.as_tensor(positions), self.metadata(hidden.shape[0]), **options
        )
        self.num_rows += hidden.shape[0]
        return result

    def prefill(
        self,
        hidden: Tensor,
        positions: Any,
        chunk: int,
        *,
        deepstack: DeepstackRows | None = None,
        capture_layer: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """All rows, `chunk` at a time.  Returns them, and what was captured."""
        positions = torch.as_tensor(positions)
        outputs, captured = [], []
        for start in range(0, hidden.shape[0], chunk):
            stop = min(start + chunk, hidden.shape[0])
            options: dict[str, Any] = {"deepstack": _part(deepstack, start, stop)}
            result = self.forward(
                hidden[start:stop], positions[..., start:stop], capture_layer=capture_layer, **options
            )
            rows, taken = (result, None) if capture_layer is None else result
            outputs.append(rows)
            captured += [] if taken is None else [taken]
        return torch.cat(outputs), torch.cat(captured) if captured else None


def _part(deepstack: DeepstackRows | None, start: int, stop: int) -> DeepstackRows | None:
    """What falls into rows [start, stop)."""
    if deepstack is None:
        return None
    chosen = (deepstack.rows >= start) & (deepstack.rows < stop)
    return DeepstackRows(deepstack.rows[chosen] - start, [item[chosen] for item in deepstack.features])


def decode_together(runs: list[PagedRun], hidden: Tensor, positions: Tensor) -> Tensor:
    """One row of each sequence in one step, over pages they share.  hidden: [len(runs), hidden]."""
    cache = runs[0].cache
    slots = torch.cat([run.slots(torch.tensor([run.num_rows])) for run in runs])
    groups = tuple(
        DecodeGroup(index, 1, run.blocks[: -(-(run.num_rows + 1) // BLOCK_SIZE)], run.num_rows + 1, None)
        for index, run in enumerate(runs)
    )
    result: Tensor = runs[0].model.forward(hidden, positions, AttentionMetadata(cache, slots, groups, ()))
    for run in runs:
        run.num_rows += 1
    return result
