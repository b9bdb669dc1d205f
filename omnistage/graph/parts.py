"""What a stage's part of a checkpoint holds and what one step reads of it, from headers alone.

Tensors are told apart by the names that published checkpoints give them: tables of rows to look up,
experts of a mixture, and layers that run several times in a step.  Knows no architecture beyond that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omnistage.graph.checkpoint import TensorInfo

_TABLE = re.compile(r"(?:^|\.)(?:embed_tokens|codec_embedding(?:\.\d+)?)\.weight$")
_HEAD = re.compile(r"(?:^|\.)(?:lm_head|codec_head)\.weight$")
_EXPERT = re.compile(r"\.experts\.")


@dataclass(frozen=True)
class PartFiles:
    """Where a part's weights are.

    folder: with the *.safetensors files.  config: the part's own configuration.
    prefixes: its tensors' names begin with one of these ("" is all).  dtype: of weights loaded as "auto".
    looped: what names begin with in layers that a step runs `num_loops` times.
    """

    folder: Path
    config: Mapping[str, Any]
    prefixes: tuple[str, ...] = ("",)
    dtype: str = "auto"
    looped: str = ""
    num_loops: int = 1


@dataclass(frozen=True)
class PartWeights:
    """Bytes as loaded.  held: all of them.

    dense: read once in every step.  looped: read num_loops times.  experts: of all mixtures together, of
    which a row uses num_active in num_experts.  What is left are tables, of which a step reads rows.
    """

    held: int = 0
    dense: int = 0
    looped: int = 0
    num_loops: int = 1
    experts: int = 0
    num_active: int = 0
    num_experts: int = 1

    def read_by_step(self, num_rows: int) -> int:
        """Bytes of weights that a step of so many rows reads, each of a request of its own.

        dense + looped * num_loops + experts * (1 - (1 - num_active / num_experts) ** num_rows): a row picks
        num_active experts, and with even routing the last factor is the share that some row picks.
        """
        share = 1.0 - (1.0 - self.num_active / self.num_experts) ** num_rows
        return self.dense + self.looped * self.num_loops + round(self.experts * share)


def part_weights(
    files: PartFiles, headers: Mapping[str, TensorInfo], dtype: str = "auto", *, is_llm: bool = False
) -> PartWeights:
    """headers: all tensors of the folder.  dtype: what they are loaded as, "auto" for the part's own.

    is_llm: whether the engine runs it, which holds a table that is also the output head twice: plain for
    look-ups, packed for products.
    """
    loaded = files.dtype if dtype == "auto" else dtype
    sizes = {
        name: tensor.loaded_bytes(loaded)
        for name, tensor in headers.items()
        if name.startswith(files.prefixes)
    }
    looped = sum(size for name, size in sizes.items() if files.looped and name.startswith(files.looped))
    tables = sum(size for name, size in sizes.items() if _TABLE.search(name))
    experts = sum(size for name, size in sizes.items() if _EXPERT.search(name))
    tied = 0 if not is_llm or any(_HEAD.search(name) for name in sizes) else tables
    total = sum(sizes.values())
    active, number = experts_of(files.config)
    return PartWeights(
        held=total + tied,
        dense=total + tied - tables - experts - looped,
        looped=looped,
        num_loops=files.num_loops,
        experts=experts,
        num_active=active,
        num_experts=number,
    )


def experts_of(config: Mapping[str, Any]) -> tuple[int, int]:
    """How many experts a row uses, and of how many; (0, 1) for none.  As written, in text_config or not."""
    nested = config.get("text_config")
    text = nested if isinstance(nested, Mapping) else config
    number = text.get("num_local_experts") or text.get("num_experts") or 0
    active = text.get("num_experts_per_tok") or 0
    if not isinstance(number, int) or not isinstance(active, int) or number < 1:
        return 0, 1
    return min(active, number), number
