"""Messages to prompt segments: chat template, places for media, special tokens out of users' hands.

What every format shares, and the starter's; omnistage.serving.qwen_prompt has that of chat checkpoints.
A text-only prompt is tokenised in one piece, so its ids equal transformers' apply_chat_template.
There is one exception: where a user's own text spells a special token ("<|im_end|>"), transformers
encodes the special token, which lets the user end their turn and speak as somebody else.  Here such
text is encoded letter by letter.  Media placeholders never pass through text a user could type.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NoReturn, Protocol

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from omnistage.errors import InvalidRequest, WeightsError
from omnistage.models.files import read_settings
from omnistage.serving.requests import BackendInfo
from omnistage.serving.tokenizer import Tokenizer
from omnistage.types import MediaSegment, Segment, TokenSegment

Modality = Literal["image", "audio", "video"]  # as omnistage.models.protocols, which imports torch

_PRIVATE_USE = range(0x100000, 0x10FFFE)  # characters no text means anything by


@dataclass(frozen=True)
class TextPiece:
    text: str


@dataclass(frozen=True)
class MediaPiece:
    """item: index into the request's media of the stage that takes this modality.

    sound: of a video whose sound track is to be heard, its index among the media of the hearing stage.
    """

    modality: Modality
    item: int
    sound: int | None = None


Piece = TextPiece | MediaPiece


@dataclass(frozen=True)
class PromptMessage:
    role: str
    pieces: tuple[Piece, ...]


class PromptFormat(Protocol):
    """How a model wants its conversation written.

    merges_sound: whether a video can stand in it together with its sound track.
    """

    tokenizer: Tokenizer
    merges_sound: bool

    def render(self, messages: Sequence[PromptMessage]) -> list[Segment]:
        """Raises InvalidRequest if the conversation cannot be written in this format."""


class ChatTemplate:
    """A model's jinja template with the globals and filters transformers gives it, in a sandbox."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)

    @classmethod
    def load(cls, directory: Path) -> ChatTemplate:
        """From chat_template.jinja, or else chat_template.json, or else tokenizer_config.json.

        Raises WeightsError if none of them has it.
        """
        config = read_settings(directory / "tokenizer_config.json")
        try:
            source = (directory / "chat_template.jinja").read_text(encoding="utf-8")
        except FileNotFoundError:
            settings = read_settings(directory / "chat_template.json")
            found = _default_template(settings) or _default_template(config)
            if found is None:
                raise WeightsError(
                    f"no chat template in {directory}: neither chat_template.jinja nor an entry "
                    "'chat_template' in chat_template.json or tokenizer_config.json; fetch the model again, "
                    "one that was trained to chat"
                ) from None
            source = found
        except (OSError, ValueError) as error:
            raise WeightsError(
                f"the chat template in {directory} cannot be read ({error}); fetch the model again"
            ) from error
        return cls(source, _special_tokens(config))

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """messages: "role" and "content", which is a string or a list of parts.

        Raises InvalidRequest with the template's own complaint.
        """
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except jinja2.TemplateError as error:
            raise InvalidRequest(
                f"these messages do not fit the model's chat template: {error.message or error}",
                code="chat_template_error",
                param="messages",
            ) from None


class Holes:
    """Marks inside a rendered text: a character that occurs in no message, a number, the character again."""

    def __init__(self, messages: Sequence[PromptMessage], tokenizer: Tokenizer) -> None:
        texts = (
            piece.text for message in messages for piece in message.pieces if isinstance(piece, TextPiece)
        )
        used = set().union(*texts)
        self._mark = next(chr(code) for code in _PRIVATE_USE if chr(code) not in used)
        self._special = tokenizer.special_pattern
        self._contents: list[MediaPiece | str] = []

    def guard(self, text: str) -> str:
        """A user's text with holes where it spells special tokens."""
        if self._special is None:
            return text
        return self._special.sub(lambda match: self.put(match.group()), text)

    def put(self, content: MediaPiece | str) -> str:
        self._contents.append(content)
        return f"{self._mark}{len(self._contents) - 1}{self._mark}"

    def split(self, rendered: str) -> list[str | MediaPiece | TextPiece]:
        """Template text as str, users' own text that must stay plain as TextPiece, media as MediaPiece."""
        parts: list[str | MediaPiece | TextPiece] = []
        for position, part in enumerate(re.split(f"{self._mark}(\\d+){self._mark}", rendered)):
            if position % 2 == 0:
                parts.append(part)
            else:
                content = self._contents[int(part)]
                parts.append(TextPiece(content) if isinstance(content, str) else content)
        return parts


class StarterPrompt:
    """The starter's form: "Picture of:<slots>. " before the text that follows; speech as its transcript.

    encoders: modality -> stage.  The stage `encoders["audio"]` answers with text, which the thinker
    tokenises where its MediaSegment stands; it is set off by line breaks.
    """

    merges_sound = False

    def __init__(self, *, tokenizer: Tokenizer, template: ChatTemplate, encoders: Mapping[str, str]) -> None:
        self.tokenizer = tokenizer
        self._template = template
        self._encoders = dict(encoders)

    def render(self, messages: Sequence[PromptMessage]) -> list[Segment]:
        holes = Holes(messages, self.tokenizer)
        rendered = self._template.render(
            [{"role": message.role, "content": self._content(message.pieces, holes)} for message in messages]
        )
        return self._segments(holes.split(rendered))

    def _content(self, pieces: Sequence[Piece], holes: Holes) -> str:
        content = ""
        previous: Piece | None = None
        for piece in pieces:
            if previous is not None:
                content += _separator(previous, piece)
            if isinstance(piece, TextPiece):
                content += holes.guard(piece.text)
            elif piece.modality == "image":
                content += f"Picture of:{holes.put(piece)}."
            else:
                content += holes.put(piece)
            previous = piece
        return content

    def _segments(self, parts: Sequence[str | MediaPiece | TextPiece]) -> list[Segment]:
        segments: list[Segment] = []
        token_ids: tuple[int, ...] = ()
        for part in parts:
            if isinstance(part, MediaPiece):
                if token_ids:
                    segments.append(TokenSegment(token_ids))
                    token_ids = ()
                segments.append(MediaSegment(stage=self._encoders[part.modality], item=part.item))
            elif isinstance(part, TextPiece):
                token_ids += self.tokenizer.encode_plain(part.text)
            else:
                token_ids += self.tokenizer.encode(part)
        if token_ids:
            segments.append(TokenSegment(token_ids))
        return segments


def starter_prompt(info: BackendInfo) -> StarterPrompt:
    """Raises WeightsError if tokenizer or chat template are missing."""
    directory = Path(info.prompt_directory)
    return StarterPrompt(
        tokenizer=Tokenizer(directory), template=ChatTemplate.load(directory), encoders=info.encoders
    )


def _separator(before: Piece, after: Piece) -> str:
    """Between two pieces of one message: sentences of one line, everything else on lines of its own."""
    is_picture_before = isinstance(before, MediaPiece) and before.modality == "image"
    is_speech_after = isinstance(after, MediaPiece) and after.modality == "audio"
    return " " if is_picture_before and not is_speech_after else "\n"


def _default_template(settings: Mapping[str, Any]) -> str | None:
    """The entry "chat_template": a text, or several by name, of which the one named "default" counts."""
    found = settings.get("chat_template")
    if isinstance(found, list):
        named = [entry for entry in found if isinstance(entry, dict)]
        found = next((entry.get("template") for entry in named if entry.get("name") == "default"), None)
    return found if isinstance(found, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Those that tokenizer_config.json names ("bos_token"), for templates that ask for them."""
    extra = config.get("extra_special_tokens")
    tokens = {}
    for name, value in {**(extra if isinstance(extra, dict) else {}), **config}.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """json.dumps, as transformers gives templates; jinja's own filter escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %} marks the assistant's part for training; when serving it is its contents."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))
