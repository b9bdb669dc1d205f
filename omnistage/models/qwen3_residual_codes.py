"""Qwen3-Omni's residual-code predictor: of one frame's first code, the codes of all other codebooks.

A small decoder runs over one short row of its own per frame: the talker's hidden state, the first
code, then one code after the other (arXiv 2509.17765).  Rows of several requests run together.
Knows rows and codes; no request, and nothing of what precedes a frame.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from omnistage.errors import WeightsError
from omnistage.models.fused_weights import FusedWeights
from omnistage.models.qwen3_text import TextConfig, TextLayers
from omnistage.ops.attention import AttentionMetadata, DecodeGroup, PagedKVCache
from omnistage.ops.native.library import DTYPES, library
from omnistage.ops.native.structs import Predictor, Sampling, pointers


@dataclass(frozen=True, kw_only=True)
class CodeSampling:
    """How the residual codes of one request's frame are picked.

    temperature: 0 takes the most probable code.  top_k: 0 keeps all.
    seed, choice, stage, position: with the codebook they are all that the noise depends on.
    position: the frame's index in the request.
    """

    temperature: float = 0.0
    top_k: int = 50
    top_p: float = 0.8
    seed: int = 0
    choice: int = 0
    stage: str = "talker"
    position: int = 0

    def uniform(self, codebook: int) -> float:
        """A number in [0, 1) that depends on its key alone."""
        key = f"{self.seed}/{self.choice}/{self.stage}/{self.position}/{codebook}".encode()
        return (int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) >> 11) * 2.0**-53


GREEDY = CodeSampling()


class CodePicker:
    """Picks one code per row.  Draws depend on the row and its key alone.

    In numpy, whose small operations on a CPU take a fraction of torch's time.
    """

    def __init__(self, samplings: Sequence[CodeSampling]) -> None:
        self._drawn = [index for index, item in enumerate(samplings) if item.temperature > 0]
        self._samplings = [samplings[index] for index in self._drawn]
        self._temperature = np.array([[item.temperature] for item in self._samplings], dtype=np.float32)
        self._top_k = np.array([[item.top_k] for item in self._samplings])
        self._top_p = np.array([[item.top_p] for item in self._samplings])

    def __call__(self, logits: Tensor, codebook: int) -> Tensor:
        """logits: [num_rows, codebook_size].  Returns [num_rows], int64."""
        scores: NDArray[np.float32] = logits.float().numpy()
        codes = scores.argmax(axis=1)
        if self._drawn:
            codes[self._drawn] = self._draw(scores[self._drawn] / self._temperature, codebook)
        return torch.from_numpy(codes)

    def _draw(self, scores: NDArray[np.float32], codebook: int) -> NDArray[np.int64]:
        """Top-k, then top-p of what that leaves (arXiv 1904.09751), then inverse transform by code order.

        Candidates are cut by a threshold on the score, so that nothing depends on a sort's order of equals.
        """
        size = scores.shape[1]
        top_k = np.where(self._top_k > 0, np.minimum(self._top_k, size), size)
        width = int(top_k.max())
        best = np.sort(np.partition(scores, size - width, axis=1)[:, size - width :], axis=1)[:, ::-1]
        mass = np.exp(best - best[:, :1], dtype=np.float64)
        mass[np.arange(width) >= top_k] = 0
        mass /= mass.sum(axis=1, keepdims=True)
        is_kept = (mass.cumsum(axis=1) - mass < self._top_p) & (mass > 0)
        last = np.maximum(is_kept.sum(axis=1, keepdims=True), 1) - 1
        weights = np.exp(scores - best[:, :1])
        weights[scores < np.take_along_axis(best, last, axis=1)] = 0
        cumulative = weights.cumsum(axis=1, dtype=np.float64)
        uniform = np.array([[item.uniform(codebook)] for item in self._samplings])
        total = cumulative[:, -1:]
        target = np.minimum(uniform * total, np.nextafter(total, 0))  # rounding up to total
        codes: NDArray[np.int64] = (cumulative <= target).sum(axis=1)  # the first one beyond the target
        return codes


def drawing_arrays(samplings: Sequence[CodeSampling], num_codes: int) -> tuple[NDArray[Any], ...]:
    """What the native kernels draw by: temperature, top_k, top_p of each row, and the numbers drawn.

    The last is [num_rows, num_codes], -1 where the most probable code is taken.
    """
    uniforms = [
        [item.uniform(index + 1) if item.temperature > 0 else -1.0 for index in range(num_codes)]
        for item in samplings
    ]
    return (
        np.array([item.temperature for item in samplings], dtype=np.float32),
        np.array([item.top_k for item in samplings], dtype=np.int64),
        np.array([item.top_p for item in samplings], dtype=np.float64),
        np.array(uniforms, dtype=np.float64),
    )


@dataclass(frozen=True)
class ResidualConfig:
    """num_groups: codes of a frame, the first included.  codebook_size: of each of the others."""

    text: TextConfig
    num_groups: int
    codebook_size: int

    @classmethod
    def from_json(cls, values: Mapping[str, Any], num_groups: int) -> ResidualConfig:
        """values: code_predictor_config.  num_groups: the talker's.  Raises WeightsError."""
        own = int(values.get("num_code_groups", num_groups))
        if own != num_groups or num_groups < 2:
            raise WeightsError(
                f"the talker has {num_groups} code groups and its code predictor {own}; "
                "both must be the same and at least 2"
            )
        text = TextConfig.from_json({**values, "num_experts": 0})
        return cls(text, num_groups, text.vocab_size)


class ResidualCodePredictor:
    """Keeps the keys and values of the frame it works on, and no state between frames."""

    def __init__(self, config: ResidualConfig, weights: FusedWeights) -> None:
        """weights: names from "model" and "lm_head" on.  Raises WeightsError."""
        self.config = config
        size, hidden = config.codebook_size, config.text.hidden_size
        codebooks = range(config.num_groups - 1)
        self._layers = TextLayers(config.text, weights.within("model."))
        self._tables = [
            weights.tensor(f"model.codec_embedding.{index}.weight", size, hidden) for index in codebooks
        ]
        self._heads = [weights.stacked([(f"lm_head.{index}.weight", size)], hidden) for index in codebooks]
        self._rotation = self._layers.rotation(torch.arange(config.num_groups))
        self._native = self._native_form(weights.dtype) if self._layers.native is not None else None
        self._cache = self._new_cache(1)
        self._steps: dict[int, list[_Step]] = {}  # by the number of requests

    def __call__(
        self, hidden: Tensor, first: Tensor, samplings: Sequence[CodeSampling]
    ) -> tuple[Tensor, Tensor]:
        """One frame of several requests.

        hidden: the talker's after its final norm, first: embeddings of the first codes, both
        [num_requests, hidden].  Returns the other codes [num_requests, num_groups - 1], int64, and the
        sum of all codes' embeddings [num_requests, hidden].
        """
        if self._native is not None:
            return self._predict_natively(self._native, hidden, first, samplings)
        pick = CodePicker(samplings)
        num_requests = hidden.shape[0]
        rows = torch.cat((hidden, first))
        total = first
        codes = []
        for index, step in enumerate(self._plan(num_requests)):
            rows, _ = self._layers.run(rows, step.rotation, step.metadata)
            code = pick(self._heads[index](self._layers.normalise(rows[-num_requests:])), index + 1)
            codes.append(code)
            rows = F.embedding(code, self._tables[index])
            total = total + rows
        return torch.stack(codes, dim=1), total

    def add_codes(self, total: Tensor, codes: Tensor) -> Tensor:
        """The sum that `__call__` returns, of codes already known.

        total: embeddings of the first codes [num_frames, hidden].  codes: [num_frames, num_groups - 1].
        """
        for index, table in enumerate(self._tables):
            total = total + F.embedding(codes[:, index], table)
        return total

    def _native_form(self, dtype: torch.dtype) -> Predictor | None:
        """What the kernels read; None if a head is not packed."""
        assert self._layers.native is not None
        packed = [head.packed for head in self._heads]
        if dtype not in DTYPES or any(each is None for each in packed):
            return None
        return Predictor(
            model=self._layers.native.model,
            final_norm=self._layers.final_norm.data_ptr(),
            heads=pointers([each.data_ptr() for each in packed if each is not None]),
            tables=pointers([table.data_ptr() for table in self._tables]),
            num_codes=self.config.num_groups - 1,
            codebook_size=self.config.codebook_size,
        )

    def _predict_natively(
        self, predictor: Predictor, hidden: Tensor, first: Tensor, samplings: Sequence[CodeSampling]
    ) -> tuple[Tensor, Tensor]:
        """As __call__, in one call."""
        native = library()
        assert native is not None
        num_requests, num_codes = hidden.shape[0], self.config.num_groups - 1
        self._make_room(num_requests)
        hidden, first = hidden.contiguous(), first.contiguous()
        settings = drawing_arrays(samplings, num_codes)
        codes = torch.empty(num_requests, num_codes, dtype=torch.int64)
        total = torch.empty_like(first)
        native.omnistage_predict(
            DTYPES[hidden.dtype],
            torch.get_num_threads(),
            ctypes.byref(predictor),
            num_requests,
            hidden.data_ptr(),
            first.data_ptr(),
            self._cache.addresses,
            self._rotation[0].data_ptr(),
            self._rotation[1].data_ptr(),
            ctypes.byref(Sampling(*(array.ctypes.data for array in settings))),
            codes.data_ptr(),
            total.data_ptr(),
        )
        return codes, total

    def _new_cache(self, num_requests: int) -> PagedKVCache:
        """One block per request, as long as a frame."""
        text = self.config.text
        with torch.inference_mode(False):  # so that it can be written to in either mode
            return PagedKVCache(
                num_layers=text.num_layers,
                num_blocks=num_requests,
                block_size=self.config.num_groups,
                num_kv_heads=text.num_kv_heads,
                head_dim=text.head_dim,
                dtype=self._layers.dtype,
            )

    def _make_room(self, num_requests: int) -> None:
        """A cache of so many blocks or more; a new one makes the planned steps void."""
        if num_requests > self._cache.num_blocks:
            self._cache = self._new_cache(max(num_requests, 2 * self._cache.num_blocks))
            self._steps.clear()

    def _plan(self, num_requests: int) -> list[_Step]:
        """The steps of a frame, which are the same for every frame of as many requests."""
        self._make_room(num_requests)
        if num_requests not in self._steps:
            # The first step has two rows of each request: all rows at 0, then all at 1, which see those.
            positions = [(0, 1), *((index,) for index in range(2, self.config.num_groups))]
            self._steps[num_requests] = [self._step(step, num_requests) for step in positions]
        return self._steps[num_requests]

    def _step(self, positions: tuple[int, ...], num_requests: int) -> _Step:
        length = self.config.num_groups
        blocks = slice(0, num_requests)
        groups = tuple(
            DecodeGroup(index * num_requests, num_requests, blocks, position + 1, None)
            for index, position in enumerate(positions)
        )
        firsts = torch.arange(num_requests) * length
        slots = torch.cat([firsts + position for position in positions])
        rows = torch.tensor(positions).repeat_interleave(num_requests)
        cosine, sine = self._rotation
        return _Step((cosine[rows], sine[rows]), AttentionMetadata(self._cache, slots, groups, ()))


@dataclass(frozen=True)
class _Step:
    rotation: tuple[Tensor, Tensor]
    metadata: AttentionMetadata
