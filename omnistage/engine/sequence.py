"""One request inside the engine: its rows, how far they are computed, and where they lie.

Knows neither scheduling nor tensors of a step.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from omnistage.engine.positions import RowPositions
from omnistage.engine.request import EmbeddingRows, EngineRequest, Rows
from omnistage.types import Usage

EMBEDDING_ROW = -1  # stands in token_ids for a row given as an embedding


class SequenceStatus(Enum):
    WAITING = "waiting"  # holds no blocks
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, eq=False)
class EmbeddingSpan:
    """Rows [start, stop) of the sequence are given: embeddings [stop - start, hidden].

    deepstack: [num_layers, stop - start, hidden].
    """

    start: int
    stop: int
    embeddings: Tensor
    digest: str | None
    deepstack: Tensor | None


class Sequence:
    """The engine's state of one request.

    token_ids: one entry per known row, prompt then output.  num_computed_tokens: rows whose keys and
    values are in the pages; only the scheduler and the engine's update change it.
    block_table: blocks owned, in row order.  num_cached_tokens: rows of others that were found in the
    cache (not its own, found again after a preemption).
    export_ranges: [start, stop) of prompt rows whose captured hidden states are still to be delivered.
    makes_frames: output rows are not looked up by id.  The row after output i is frame_rows[i] +
    text_rows[i], both [hidden]; `filler` stands for text rows that never come.
    """

    def __init__(
        self, request: EngineRequest, arrival: int, block_size: int, *, makes_frames: bool = False
    ) -> None:
        self.request = request
        self.arrival = arrival
        self.status = SequenceStatus.WAITING
        self.token_ids: list[int] = []
        self.embedding_spans: list[EmbeddingSpan] = []
        self.positions = RowPositions()
        self.export_ranges: list[tuple[int, int]] = []
        self.prompt_is_complete = False
        self.num_prompt_tokens = 0
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.was_preempted = False
        self.block_table: list[int] = []
        self.output_counts: dict[int, int] = {}  # token id -> times in the output
        self.makes_frames = makes_frames
        self.frame_rows: list[Tensor] = []
        self.text_rows: list[Tensor] = []
        self.filler: Tensor | None = None
        self._block_size = block_size
        self._hashes = [_digest(b"root", request.cache_salt.encode())]  # [i + 1] covers block i
        self._is_hashable = not makes_frames

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def order(self) -> tuple[int, float, int]:
        """Smaller is served first and preempted last."""
        deadline = self.request.deadline
        return (self.request.priority, float("inf") if deadline is None else deadline, self.arrival)

    @property
    def num_pending_tokens(self) -> int:
        """Rows that a step could compute now.

        The last row of an open prompt is kept back: once the prompt is complete without further
        rows, its hidden state is what the first token is sampled from.
        """
        known = self._num_given_rows if self.prompt_is_complete else len(self.token_ids) - 1
        return max(0, known - self.num_computed_tokens)

    @property
    def _num_given_rows(self) -> int:
        """Leading rows whose content is known."""
        if not self.makes_frames:
            return len(self.token_ids)
        num_frames = len(self.frame_rows)
        return self.num_prompt_tokens + (
            num_frames if self.filler is not None else min(num_frames, len(self.text_rows))
        )

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=self.num_output_tokens,
            cached_tokens=self.num_cached_tokens,
        )

    def extend_prompt(self, rows: tuple[Rows, ...], *, is_complete: bool) -> None:
        """Append prompt rows; with the last ones, the forced output follows at once."""
        assert not self.prompt_is_complete
        for piece in rows:
            start = len(self.token_ids)
            if isinstance(piece, EmbeddingRows):
                stop = start + piece.embeddings.shape[0]
                self.token_ids.extend([EMBEDDING_ROW] * (stop - start))
                self.embedding_spans.append(
                    EmbeddingSpan(start, stop, piece.embeddings, piece.digest, piece.deepstack)
                )
            else:
                self.token_ids.extend(piece.token_ids)
            if piece.positions is not None:
                self.positions.extend(start, piece.positions)
            if piece.is_exported and len(self.token_ids) > start:
                self.export_ranges.append((start, len(self.token_ids)))
        self.num_prompt_tokens = len(self.token_ids)
        self.prompt_is_complete = is_complete
        if is_complete:
            for token_id in self.request.forced_token_ids:
                self.append_output(token_id)
            if self.request.forced_rows is not None:
                self.frame_rows.extend(self.request.forced_rows)

    def append_output(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.output_counts[token_id] = self.output_counts.get(token_id, 0) + 1

    def output_rows(self, start: int, stop: int) -> Tensor:
        """[stop - start, hidden]: rows [start, stop), which must be output of a model that makes frames."""
        first, last = start - self.num_prompt_tokens, stop - self.num_prompt_tokens
        texts = self.text_rows[first:last]
        if self.filler is not None:
            texts = texts + [self.filler] * (last - first - len(texts))
        return torch.stack(self.frame_rows[first:last]) + torch.stack(texts)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks to add so that the first `num_tokens` rows have a place."""
        return max(0, -(-num_tokens // self._block_size) - len(self.block_table))

    def block_hash(self, index: int) -> bytes | None:
        """Names everything that determines the keys and values of block `index`.

        The block's rows must be known.  None if the block or one before it holds rows without a
        digest.  Rotary positions are covered: by the chain over the parents where they are row indices.
        """
        while self._is_hashable and len(self._hashes) <= index + 1:
            material = self._block_material(len(self._hashes) - 1)
            if material is None:
                self._is_hashable = False
            else:
                self._hashes.append(_digest(self._hashes[-1], material))
        return self._hashes[index + 1] if len(self._hashes) > index + 1 else None

    def _block_material(self, index: int) -> bytes | None:
        start, stop = index * self._block_size, (index + 1) * self._block_size
        assert stop <= len(self.token_ids), f"block {index} is not known yet"
        pieces = [array("q", self.token_ids[start:stop]).tobytes(), self.positions.material(start, stop)]
        for span in self.embedding_spans:
            if span.start < stop and span.stop > start:
                if span.digest is None:
                    return None
                # where the block lies in the span, and in the block; then the name, its length first
                digest = span.digest.encode()
                pieces.append(array("q", (start - span.start, span.stop - start, len(digest))).tobytes())
                pieces.append(digest)
        return b"".join(pieces)


def _digest(parent: bytes, material: bytes) -> bytes:
    return hashlib.blake2b(material, key=parent, digest_size=16).digest()
