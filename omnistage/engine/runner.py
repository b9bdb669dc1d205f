"""Turns a plan into one forward pass: flat tensors in, logits out.

Knows sequences and the model; it neither decides what runs nor which token is picked.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Rows
from typing import Protocol, cast, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from omnistage.engine.scheduler import ScheduledChunk
from omnistage.engine.sequence import EmbeddingSpan, Sequence
from omnistage.models.qwen3_residual_codes import CodeSampling
from omnistage.models.qwen3_text import DeepstackRows
from omnistage.ops.attention import (
    AttentionMetadata,
    BlockSelection,
    DecodeGroup,
    DecodeRows,
    PagedKVCache,
    PrefillChunk,
    length_mask,
)

# Rows of padding a decode group may carry before a group of its own costs less: one more gather and
# attention call per layer take about as long as attending this many rows.
_MAX_PADDING_ROWS = 512


class FlatTokenModel(Protocol):
    """What the engine asks of a model.  All tensors are rows, [num_tokens, ...].

    num_position_axes: 1 or 3.  With 3, `forward` takes positions [3, num_tokens] as well.
    decodes_natively: whether a step in which every sequence adds one row comes as DecodeRows.
    num_open_layers: after which `forward` takes rows to add and gives hidden states; 0 if it is not
    an OpenModel's.
    """

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def num_position_axes(self) -> int: ...

    @property
    def num_open_layers(self) -> int: ...

    @property
    def decodes_natively(self) -> bool: ...

    def embed(self, token_ids: Tensor) -> Tensor: ...

    def forward(self, hidden: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class OpenModel(Protocol):
    """A model that takes rows and gives hidden states between its layers; see TextModel.forward."""

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        metadata: AttentionMetadata,
        *,
        deepstack: DeepstackRows | None,
        capture_layer: int | None,
    ) -> Tensor | tuple[Tensor, Tensor]: ...


@runtime_checkable
class FrameModel(Protocol):
    """A model whose sampled code begins a frame of several; see Talker.next_input."""

    def next_input(
        self, hidden: Tensor, code0: Tensor, noise: Rows[CodeSampling]
    ) -> tuple[Tensor, Tensor]: ...


class Runner:
    """Owns the pages of all layers, and those of captured hidden states."""

    def __init__(
        self,
        model: FlatTokenModel,
        cache: PagedKVCache,
        *,
        capture_layer: int | None = None,
        hidden_size: int = 0,
    ) -> None:
        """capture_layer: see EngineConfig; needs an OpenModel and its hidden_size."""
        self._model = model
        self._cache = cache
        self._capture_layer = capture_layer
        num_slots = 0 if capture_layer is None else cache.num_blocks * cache.block_size
        self._captured = torch.zeros(num_slots, hidden_size, dtype=model.dtype)  # rows as in the cache

    def execute(self, plan: Rows[ScheduledChunk]) -> tuple[list[Sequence], Tensor]:
        """Compute the planned rows and write their keys and values.

        Returns the sequences that are to be sampled, and what their logits come from,
        [len(sequences), hidden].
        """
        decodes = [chunk for chunk in plan if chunk.num_tokens == 1]
        decodes.sort(key=lambda chunk: -chunk.stop)  # neighbours in length share a group
        chunks = decodes + [chunk for chunk in plan if chunk.num_tokens > 1]
        stops = np.cumsum([chunk.num_tokens for chunk in chunks])
        embedded, deepstack = self._embed(chunks, stops)
        # a single row of a picture is no output: what is added to it between the layers would be lost
        is_native = not chunks[len(decodes) :] and deepstack is None and self._model.decodes_natively
        metadata = self._decode_rows(chunks) if is_native else self._metadata(chunks, len(decodes), stops)
        hidden = self._forward(embedded, self._positions(chunks), metadata, deepstack)
        sampled = [index for index, chunk in enumerate(chunks) if chunk.is_sampled]
        if len(sampled) < hidden.shape[0]:
            hidden = hidden[torch.from_numpy(stops[sampled] - 1)]
        return [chunks[index].sequence for index in sampled], hidden

    def exported(self, sequence: Sequence) -> Tensor:
        """[num_rows, hidden], own memory: what was captured of the rows in `export_ranges`.

        They must be computed; blocks that came from the cache hold what their first owner captured.
        """
        size = self._cache.block_size
        rows = np.concatenate([np.arange(start, stop) for start, stop in sequence.export_ranges])
        slots = np.array(sequence.block_table, dtype=np.int64)[rows // size] * size + rows % size
        return self._captured[torch.from_numpy(slots)]

    def _forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        metadata: AttentionMetadata,
        deepstack: DeepstackRows | None,
    ) -> Tensor:
        if deepstack is None and self._capture_layer is None:
            return self._model.forward(hidden, positions, metadata)
        result = cast(OpenModel, self._model).forward(
            hidden, positions, metadata, deepstack=deepstack, capture_layer=self._capture_layer
        )
        if isinstance(result, Tensor):
            return result
        hidden, captured = result
        # every row, whoever wants it: a block found in the cache later has its captured rows too
        self._captured.index_copy_(0, metadata.slot_mapping, captured)
        return hidden

    def _positions(self, chunks: list[ScheduledChunk]) -> Tensor:
        """[num_tokens], int64, where all are row indices; else float32, with an axis in front if the
        model's positions have several."""
        if all(chunk.sequence.positions.are_row_indices for chunk in chunks):
            return torch.from_numpy(np.concatenate([np.arange(c.start, c.stop) for c in chunks]))
        rows = np.concatenate([c.sequence.positions.rows(c.start, c.stop) for c in chunks], axis=1)
        return torch.from_numpy(rows if self._model.num_position_axes > 1 else rows[0])

    def _embed(
        self, chunks: list[ScheduledChunk], stops: NDArray[np.int64]
    ) -> tuple[Tensor, DeepstackRows | None]:
        """[num_tokens, hidden]: looked up for ids, copied for rows given as embeddings.

        And what is to be added to some of them between the layers.
        """
        made = [(int(stop) - c.num_tokens, c) for c, stop in zip(chunks, stops, strict=True)]
        made = [(first, chunk) for first, chunk in made if chunk.sequence.makes_frames]
        token_ids: list[int] = []
        given: list[tuple[int, EmbeddingSpan, slice]] = []  # first row of the step, rows of the span
        for chunk, stop in zip(chunks, stops.tolist(), strict=True):
            token_ids.extend(chunk.sequence.token_ids[chunk.start : chunk.stop])
            if chunk.start < chunk.sequence.num_prompt_tokens:
                given += _given_rows(chunk, stop - chunk.num_tokens)
        ids = torch.tensor(token_ids)
        if not given and not made:
            return self._model.embed(ids), None
        hidden = self._model.embed(ids.clamp_(min=0))
        for first, chunk in made:
            skipped = max(0, chunk.sequence.num_prompt_tokens - chunk.start)
            if skipped < chunk.num_tokens:
                rows = chunk.sequence.output_rows(chunk.start + skipped, chunk.stop)
                hidden[first + skipped : first + chunk.num_tokens] = rows
        for first, span, taken in given:
            hidden[first : first + taken.stop - taken.start] = span.embeddings[taken]
        added = [
            (first, span.deepstack[:, taken]) for first, span, taken in given if span.deepstack is not None
        ]
        return hidden, _join(added) if added else None

    def _metadata(
        self, chunks: list[ScheduledChunk], num_decodes: int, stops: NDArray[np.int64]
    ) -> AttentionMetadata:
        slot_mapping = np.concatenate([self._slots(chunk) for chunk in chunks])
        prefills = tuple(
            self._prefill_chunk(chunk, stop - chunk.num_tokens)
            for chunk, stop in zip(chunks[num_decodes:], stops[num_decodes:].tolist(), strict=True)
        )
        return AttentionMetadata(
            cache=self._cache,
            slot_mapping=torch.from_numpy(slot_mapping),
            decode_groups=self._decode_groups(chunks[:num_decodes]),
            prefill_chunks=prefills,
        )

    def _decode_rows(self, chunks: list[ScheduledChunk]) -> AttentionMetadata:
        size = self._cache.block_size
        used = [chunk.sequence.block_table[: -(-chunk.stop // size)] for chunk in chunks]
        tables = np.zeros((len(chunks), max(map(len, used))), dtype=np.int64)
        for row, table in zip(tables, used, strict=True):
            row[: len(table)] = table
        slots = [
            table[-1] * size + (chunk.stop - 1) % size for table, chunk in zip(used, chunks, strict=True)
        ]
        rows = DecodeRows(torch.from_numpy(tables), torch.tensor([chunk.stop for chunk in chunks]))
        return AttentionMetadata(self._cache, torch.tensor(slots), (), (), rows)

    def _slots(self, chunk: ScheduledChunk) -> NDArray[np.int64]:
        """[chunk.num_tokens]: where in the pages each row goes."""
        size = self._cache.block_size
        rows = np.arange(chunk.start, chunk.stop)
        first = chunk.start // size
        blocks = np.array(chunk.sequence.block_table[first : -(-chunk.stop // size)], dtype=np.int64)
        slots: NDArray[np.int64] = blocks[rows // size - first] * size + rows % size
        return slots

    def _decode_groups(self, decodes: list[ScheduledChunk]) -> tuple[DecodeGroup, ...]:
        """decodes: one row each, longest context first."""
        bounds = [0]
        padding = 0
        for index, chunk in enumerate(decodes):
            padding += decodes[bounds[-1]].stop - chunk.stop
            if padding > _MAX_PADDING_ROWS:
                bounds.append(index)
                padding = 0
        return tuple(
            self._decode_group(start, decodes[start:stop])
            for start, stop in zip(bounds, [*bounds[1:], len(decodes)], strict=True)
            if stop > start
        )

    def _decode_group(self, start: int, group: list[ScheduledChunk]) -> DecodeGroup:
        lengths = [chunk.stop for chunk in group]
        context = lengths[0]
        mask = None
        if lengths[-1] != context:
            mask = length_mask(torch.tensor(lengths), context, self._model.dtype)
        return DecodeGroup(start, len(group), self._select(group, context), context, mask)

    def _prefill_chunk(self, chunk: ScheduledChunk, start: int) -> PrefillChunk:
        if chunk.start == 0:
            return PrefillChunk(start, chunk.num_tokens, chunk.stop, None)
        return PrefillChunk(start, chunk.num_tokens, chunk.stop, self._select([chunk], chunk.stop))

    def _select(self, chunks: list[ScheduledChunk], context: int) -> BlockSelection:
        """The blocks of each sequence, padded to those of `context` rows; a slice where that is one."""
        num_blocks = -(-context // self._cache.block_size)
        tables = np.zeros((len(chunks), num_blocks), dtype=np.int64)
        for row, chunk in zip(tables, chunks, strict=True):
            table = chunk.sequence.block_table[:num_blocks]
            row[: len(table)] = table
        if len(chunks) == 1 and (np.diff(tables[0]) == 1).all():
            first = int(tables[0, 0])
            return slice(first, first + num_blocks)
        return torch.from_numpy(tables.reshape(-1))


def _given_rows(chunk: ScheduledChunk, start: int) -> Iterator[tuple[int, EmbeddingSpan, slice]]:
    """What of the chunk, whose first row is row `start` of the step, is given as embeddings."""
    for span in chunk.sequence.embedding_spans:
        first, last = max(span.start, chunk.start), min(span.stop, chunk.stop)
        if first < last:
            yield start + first - chunk.start, span, slice(first - span.start, last - span.start)


def _join(parts: list[tuple[int, Tensor]]) -> DeepstackRows:
    """parts: first row of the step, and [num_layers, num_rows, hidden] of the rows from there on."""
    rows = torch.cat([torch.arange(first, first + part.shape[1]) for first, part in parts])
    num_layers = max(part.shape[0] for _, part in parts)
    # a part with fewer layers adds nothing to the others
    padded = [F.pad(part, (0, 0, 0, 0, 0, num_layers - part.shape[0])) for _, part in parts]
    return DeepstackRows(rows, torch.cat(padded, dim=1).unbind())
