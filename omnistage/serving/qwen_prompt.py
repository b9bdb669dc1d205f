"""Prompts of chat checkpoints as they are published: their own template, media where it puts them.

For Qwen3-Omni and Qwen3-VL, and without media for any other model with a chat template (Llama, Qwen2,
Qwen3).  The template is given what transformers' processors give it, and the ids are theirs too, with
one segment for each run of an item's placeholders.  Which ids are placeholders config.json says; how
many rows an item has only its encoder knows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, get_args

from omnistage.errors import InvalidRequest
from omnistage.models.files import read_settings
from omnistage.serving.prompt import (
    ChatTemplate,
    Holes,
    MediaPiece,
    Modality,
    Piece,
    PromptMessage,
    TextPiece,
)
from omnistage.serving.requests import BackendInfo
from omnistage.serving.tokenizer import Tokenizer
from omnistage.types import MediaSegment, MergedSegment, Segment, TokenSegment


@dataclass(frozen=True)
class MediaTokens:
    """placeholders: id -> modality.  sound: ids that begin and end the sound, None if not known."""

    placeholders: Mapping[int, Modality] = field(default_factory=dict)
    sound: tuple[int, int] | None = None

    @classmethod
    def read(cls, model: Path) -> MediaTokens:
        """Of the model in this directory.  Raises WeightsError if its config.json is unreadable."""
        config = read_settings(model / "config.json")
        values: dict[str, Any] = {**config, **(config.get("thinker_config") or {})}
        placeholders: dict[int, Modality] = {}
        for modality in get_args(Modality):
            token_id = values.get(f"{modality}_token_id")
            if isinstance(token_id, int):
                placeholders[token_id] = modality
        begin, end = values.get("audio_start_token_id"), values.get("audio_end_token_id")
        sound = (begin, end) if isinstance(begin, int) and isinstance(end, int) else None
        return cls(placeholders, sound)


class ChatPrompt:
    """A checkpoint's own form.  encoders: modality -> stage."""

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        encoders: Mapping[str, str],
        tokens: MediaTokens,
    ) -> None:
        self.tokenizer = tokenizer
        self.merges_sound = tokens.sound is not None and {"audio", "video"} <= set(
            tokens.placeholders.values()
        )
        self._template = template
        self._encoders = dict(encoders)
        self._tokens = tokens

    def render(self, messages: Sequence[PromptMessage]) -> list[Segment]:
        holes = Holes(messages, self.tokenizer)
        rendered = self._template.render(
            [{"role": message.role, "content": self._content(message.pieces, holes)} for message in messages]
        )
        ids: list[int] = []
        for part in holes.split(rendered):
            if isinstance(part, TextPiece):
                ids += self.tokenizer.encode_plain(part.text)
            elif isinstance(part, str):
                ids += self.tokenizer.encode(part)
        pieces = [piece for message in messages for piece in message.pieces]
        return self._segments(ids, [piece for piece in pieces if isinstance(piece, MediaPiece)])

    def _content(self, pieces: Sequence[Piece], holes: Holes) -> str | list[dict[str, str]]:
        """What stands in a message: one text as such, else parts; a model of text alone gets lines."""
        texts = [holes.guard(piece.text) for piece in pieces if isinstance(piece, TextPiece)]
        if len(texts) == len(pieces) == 1:
            return texts[0]
        if not self._tokens.placeholders:
            return "\n".join(texts)
        remaining = iter(texts)
        return [
            {"type": "text", "text": next(remaining)}
            if isinstance(piece, TextPiece)
            else {"type": piece.modality}
            for piece in pieces
        ]

    def _segments(self, ids: Sequence[int], pieces: Sequence[MediaPiece]) -> list[Segment]:
        """Cut at the placeholders: each stands for the next of `pieces` of its modality."""
        waiting = {
            modality: deque(piece for piece in pieces if piece.modality == modality)
            for modality in get_args(Modality)
        }
        segments: list[Segment] = []
        token_ids: list[int] = []
        for token_id in ids:
            modality = self._tokens.placeholders.get(token_id)
            if modality is None:
                token_ids.append(token_id)
                continue
            if not waiting[modality]:
                _misplaced(modality, "more")
            piece = waiting[modality].popleft()
            segment, begin, end = self._media(piece)
            token_ids += begin
            if token_ids:
                segments.append(TokenSegment(tuple(token_ids)))
            segments.append(segment)
            token_ids = end
        if token_ids:
            segments.append(TokenSegment(tuple(token_ids)))
        for modality, left in waiting.items():
            if left:
                _misplaced(modality, "fewer")
        return segments

    def _media(self, piece: MediaPiece) -> tuple[Segment, list[int], list[int]]:
        """The segment of an item, and the ids that the template lacks before and after it."""
        item = MediaSegment(self._encoders[piece.modality], piece.item)
        if piece.sound is None:
            return item, [], []
        assert self._tokens.sound is not None, "whoever asks for sound looks at merges_sound first"
        begin, end = self._tokens.sound
        return MergedSegment(item, MediaSegment(self._encoders["audio"], piece.sound)), [begin], [end]


def chat_prompt(info: BackendInfo) -> ChatPrompt:
    """Raises WeightsError if tokenizer, chat template or configuration are missing or unreadable."""
    directory = Path(info.prompt_directory)
    return ChatPrompt(
        tokenizer=Tokenizer(directory),
        template=ChatTemplate.load(directory),
        encoders=info.encoders,
        tokens=MediaTokens.read(Path(info.model_dir)),
    )


def _misplaced(modality: Modality, compared: str) -> NoReturn:
    raise InvalidRequest(
        f"the model's chat template has {compared} places for {modality} items than these messages have such "
        "items; put them into messages of the user, in a form that the model's template knows",
        code="chat_template_error",
        param="messages",
    )
