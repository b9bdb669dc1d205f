"""How an llm's prompt grows from ids and from what encoders deliver.

What a model wants beside the rows themselves (positions, placeholders) is its adapter's business;
the plain one here wants nothing.  Knows neither engine steps nor sockets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer

from omnistage.engine.request import EmbeddingRows, Rows, TokenRows
from omnistage.errors import StreamError
from omnistage.ops.tensors import to_torch
from omnistage.types import MediaSegment, Payload, PortType, Segment, TokenSegment


class Prompt(Protocol):
    """One request's prompt on its way in.

    has_exports: whether rows of it will be exported.
    """

    has_exports: bool

    @property
    def is_complete(self) -> bool:
        """Whether nothing is pending."""

    def deliver(self, stage: str, item: int, payload: Payload) -> None:
        """What encoder `stage` made of its item.  Raises StreamError for what the prompt does not name."""

    def take_ready(self) -> tuple[Rows, ...]:
        """The rows behind those already taken, up to the first that are still pending."""

    def handover(self) -> Payload:
        """What a consumer needs to know of the complete prompt, without exported rows."""


class PromptAdapter(Protocol):
    """What a model wants of its prompts."""

    def open(self, segments: Sequence[Segment], *, is_heard: bool) -> Prompt:
        """is_heard: whether another llm follows that wants to know the prompt.

        Raises InvalidRequest for segments the model has no form for.
        """


class PlainPrompts:
    """Rows as they come: ids, embeddings, or text to be tokenised here."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def open(self, segments: Sequence[Segment], *, is_heard: bool) -> PlainPrompt:
        """See PromptAdapter."""
        return PlainPrompt(segments, self._tokenizer)


class PlainPrompt:
    """See Prompt."""

    has_exports = False

    def __init__(self, segments: Sequence[Segment], tokenizer: Tokenizer) -> None:
        self._segments = segments
        self._tokenizer = tokenizer
        # None where an encoder has not delivered yet.
        self._pieces: list[Rows | None] = [
            TokenRows(segment.token_ids) if isinstance(segment, TokenSegment) else None
            for segment in segments
        ]
        self._num_taken = 0

    @property
    def is_complete(self) -> bool:
        return None not in self._pieces

    def deliver(self, stage: str, item: int, payload: Payload) -> None:
        wanted = [
            index
            for index, segment in enumerate(self._segments)
            if isinstance(segment, MediaSegment) and segment.stage == stage and segment.item == item
        ]
        if not wanted:
            raise unnamed(stage, item)
        for index in wanted:
            self._pieces[index] = self._rows(payload)

    def take_ready(self) -> tuple[Rows, ...]:
        ready: list[Rows] = []
        for piece in self._pieces[self._num_taken :]:
            if piece is None:
                break
            self._num_taken += 1
            if not (isinstance(piece, TokenRows) and not piece.token_ids):
                ready.append(piece)
        return tuple(ready)

    def handover(self) -> Payload:
        return Payload(type=PortType.TOKENS)

    def _rows(self, payload: Payload) -> Rows:
        if payload.type is PortType.TEXT:
            return TokenRows(
                tuple(self._tokenizer.encode(payload.text.strip(), add_special_tokens=False).ids)
            )
        embeddings = payload.tensors.get("embeddings")
        if embeddings is None:
            raise StreamError(f"an llm stage takes text or embeddings, not {payload.type.value}")
        digest = payload.info.get("digest")
        # Copied, so that rows can be recomputed after a preemption whatever becomes of the encoder.
        return EmbeddingRows(to_torch(embeddings).clone(), digest=str(digest) if digest else None)


def unnamed(stage: str, item: int) -> StreamError:
    """The error for an item that no segment asks for."""
    return StreamError(f"stage {stage!r} brought item {item}, which the prompt does not name")
