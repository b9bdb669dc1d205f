"""Mixture-of-experts MLPs over flat rows: a router picks a few experts for every row.

Rows are sorted by expert, and each expert that was picked multiplies its rows in one piece; experts
nobody picked cost nothing.  What a row gives does not depend on the rows beside it.
Knows rows and weights; no sequence, no attention and no architecture's names beyond those of its MLP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from omnistage.errors import WeightsError
from omnistage.models.fused_weights import FusedWeights
from omnistage.models.layers import GatedMLP
from omnistage.ops.linear import Linear


def count_experts(values: Mapping[str, Any]) -> int:
    """Experts of a layer, 0 for none.  Both spellings; the newer one is never filled in by a default."""
    return int(values.get("num_local_experts") or values.get("num_experts") or 0)


@dataclass(frozen=True, kw_only=True)
class MixtureConfig:
    """Sizes in elements.

    num_active: experts of each row.  normalises: whether their weights are scaled to sum to one.
    shared_size: of the expert that sees every row; None where there is none.
    """

    num_experts: int
    num_active: int
    expert_size: int
    normalises: bool
    shared_size: int | None = None

    @classmethod
    def from_json(cls, values: Mapping[str, Any], *, has_shared: bool = False) -> MixtureConfig:
        """values: a text model's configuration.  Raises WeightsError, and KeyError for a missing key."""
        num_experts = count_experts(values)
        config = cls(
            num_experts=num_experts,
            num_active=int(values["num_experts_per_tok"]),
            expert_size=int(values["moe_intermediate_size"]),
            normalises=bool(values.get("norm_topk_prob", False)),
            shared_size=int(values["shared_expert_intermediate_size"]) if has_shared else None,
        )
        if not 1 <= config.num_active <= num_experts:
            raise WeightsError(
                f"num_experts_per_tok is {config.num_active}, but there are {num_experts} experts; "
                "is config.json complete?"
            )
        return config


class Mixture:
    """sum over the picked experts of weight * expert(x) (+ sigmoid(gate(x)) * shared(x)).

    experts: gate and up fused, as in GatedMLP.  shared: the expert that sees every row, or None.
    router: one output per expert, and a last one that gates the shared expert where there is one.
    num_active: experts of each row.  normalises: whether their weights are scaled to sum to one.
    """

    def __init__(
        self,
        *,
        router: Linear,
        experts: Sequence[GatedMLP],
        num_active: int,
        normalises: bool,
        shared: GatedMLP | None = None,
    ) -> None:
        self.router = router
        self.experts = list(experts)
        self.num_active = num_active
        self.normalises = normalises
        self.shared = shared

    def __call__(self, rows: Tensor, residual: Tensor) -> Tensor:
        """rows: normalised, residual: not, both [num_tokens, hidden].  Returns residual + mixture."""
        scores = self.router(rows)
        probabilities = scores[:, : len(self.experts)].softmax(-1, dtype=torch.float32)
        weights, chosen = probabilities.topk(self.num_active, dim=-1)  # [num_tokens, num_active]
        if self.normalises:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights.to(rows.dtype)
        if self.shared is not None:
            shared = self.shared.down(self.shared.gate_up(rows))
            residual = residual.addcmul(scores[:, -1:].sigmoid(), shared)
        if rows.shape[0] == 1:
            spans = [(expert, index, index + 1) for index, expert in enumerate(chosen[0].tolist())]
            outputs = self._run(spans, [rows] * self.num_active)
            return torch.addmm(residual, weights, outputs)
        order = chosen.flatten().argsort(stable=True)  # sorted slot -> row * num_active + rank
        spans = self._spans(chosen)
        sorted_rows = rows[order // self.num_active]
        outputs = self._run(spans, [sorted_rows[start:stop] for _, start, stop in spans])
        # Summed in the order of rank, which is the row's own, and not in that of experts or of arrival.
        by_rank = torch.empty_like(outputs).index_copy_(0, order, outputs)
        by_rank = by_rank.view(rows.shape[0], self.num_active, -1)
        return torch.baddbmm(residual.unsqueeze(1), weights.unsqueeze(1), by_rank).squeeze(1)

    def _spans(self, chosen: Tensor) -> list[tuple[int, int, int]]:
        """Expert, start and stop of each run of sorted slots."""
        spans, start = [], 0
        for expert, count in enumerate(torch.bincount(chosen.flatten()).tolist()):
            if count:
                spans.append((expert, start, start + count))
                start += count
        return spans

    def _run(self, spans: list[tuple[int, int, int]], parts: list[Tensor]) -> Tensor:
        """parts: the rows of each span.  Returns [num_slots, hidden], unweighted."""
        experts = self.experts
        return torch.cat(
            [
                experts[expert].down(experts[expert].gate_up(part))
                for (expert, _, _), part in zip(spans, parts, strict=True)
            ]
        )


def load_mixture(config: MixtureConfig, weights: FusedWeights, name: str, hidden_size: int) -> Mixture:
    """Take the tensors of the MLP called `name`, which has one tensor per expert and projection."""
    router = [(f"{name}.gate.weight", config.num_experts)]
    shared = None
    if config.shared_size is not None:
        router.append((f"{name}.shared_expert_gate.weight", 1))
        shared = load_gated_mlp(weights, f"{name}.shared_expert", hidden_size, config.shared_size)
    return Mixture(
        router=weights.stacked(router, hidden_size),
        experts=[
            load_gated_mlp(weights, f"{name}.experts.{index}", hidden_size, config.expert_size)
            for index in range(config.num_experts)
        ],
        num_active=config.num_active,
        normalises=config.normalises,
        shared=shared,
    )


def load_gated_mlp(weights: FusedWeights, name: str, hidden_size: int, size: int) -> GatedMLP:
    """A gated MLP without biases."""
    return GatedMLP(
        gate_up=weights.gated(name, size, hidden_size),
        down=weights.linear(name, {"down_proj": hidden_size}, size),
    )
