"""Qwen3-Omni's talker: text rows in, frames of codes out, one frame per step (arXiv 2509.17765).

It hears the users' turns, then begins to speak as soon as the answer's first token id is known.  Each
step gives the first code of a frame; `next_input` completes the frame and makes the next row of it
and of the next token of the answer.
Knows rows, ids and codes; no request, no thinker and no sound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from omnistage.errors import NotFound, StreamError, WeightsError
from omnistage.models.fused_weights import FusedWeights
from omnistage.models.loader import Checkpoint, read_json
from omnistage.models.packed_blocks import with_defaults
from omnistage.models.qwen3_residual_codes import (
    CodeSampling,
    ResidualCodePredictor,
    ResidualConfig,
)
from omnistage.models.qwen3_text import TextConfig, TextLayers, TextModel
from omnistage.ops.linear import Linear
from omnistage.types import SamplingParams

NUM_SPEECH_ROWS = 9  # that begin the speech, the first token's included
NUM_LEADING_IDS = (
    4  # of the assistant's turn, in those rows: two of its marker, a line break, the first token
)
NUM_RESERVED_CODES = 1024  # at the end of the codec's vocabulary, which are no sound
IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)  # computed; some checkpoints store it
_SECTIONS = (24, 20, 20)
# The reference's defaults for speech (arguments of its generate); checkpoints may state others.
SPEECH_SAMPLING = SamplingParams(max_tokens=4096, temperature=0.9, top_k=50, repetition_penalty=1.05)
# What config.json may leave out: the architecture classes of the published models.
_TALKER_DEFAULTS: dict[str, Any] = {
    "num_code_groups": 32,
    "thinker_hidden_size": 2048,
    "codec_eos_token_id": 4198,
    "accept_hidden_layer": 18,
    "codec_nothink_id": 4203,
    "codec_think_bos_id": 4204,
    "codec_think_eos_id": 4205,
    "codec_pad_id": 4196,
    "codec_bos_id": 4197,
}
_TEXT_DEFAULTS: dict[str, Any] = {
    "vocab_size": 3072,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 20,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "moe_intermediate_size": 384,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
_PREDICTOR_DEFAULTS: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 5,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "num_code_groups": 32,
}


@dataclass(frozen=True, kw_only=True)
class TalkerConfig:
    """What config.json says of the talker.

    thinker_vocab_size, thinker_hidden_size: of the thinker's token table.
    accept_layer: the talker hears media as the thinker has them after so many layers.
    speakers: by lower-case name, the code that stands for the voice.
    tts_*_id: tokens of the thinker.  codec_*_id: codes.
    suppressed_codes: must not be sampled.
    """

    text: TextConfig
    residual: ResidualConfig
    thinker_vocab_size: int
    thinker_hidden_size: int
    accept_layer: int
    speakers: Mapping[str, int]
    tts_bos_id: int
    tts_eos_id: int
    tts_pad_id: int
    codec_bos_id: int
    codec_eos_id: int
    codec_pad_id: int
    codec_nothink_id: int
    codec_think_bos_id: int
    codec_think_eos_id: int

    @property
    def num_groups(self) -> int:
        """Codes of a frame."""
        return self.residual.num_groups

    @property
    def suppressed_codes(self) -> tuple[int, ...]:
        size = self.text.vocab_size
        reserved = range(max(0, size - NUM_RESERVED_CODES), size)
        return tuple(code for code in reserved if code != self.codec_eos_id)

    def speaker_code(self, name: str) -> int:
        """Raises NotFound with the names there are, which are compared without regard to case."""
        code = self.speakers.get(name.lower())
        if code is None:
            raise NotFound(f"voice {name!r} is not one of {', '.join(sorted(self.speakers))}", param="voice")
        return code

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> TalkerConfig:
        """config: the whole config.json.  Raises WeightsError for what is missing or does not fit."""
        try:
            return _parse(config)
        except KeyError as error:
            raise WeightsError(f"config.json lacks {error.args[0]!r}, which the talker needs") from error


def _parse(config: Mapping[str, Any]) -> TalkerConfig:
    values = with_defaults(config["talker_config"], _TALKER_DEFAULTS)
    text_values = with_defaults(values["text_config"], _TEXT_DEFAULTS)
    rope = dict(text_values.get("rope_parameters") or text_values.get("rope_scaling") or {})
    rope.setdefault("mrope_section", _SECTIONS)
    text_values["rope_parameters"] = rope
    text = TextConfig.from_json(text_values, shares_expert=True, is_mixed_throughout=True)
    predictor = with_defaults(values["code_predictor_config"], _PREDICTOR_DEFAULTS)
    residual = ResidualConfig.from_json(predictor, int(values["num_code_groups"]))
    if residual.text.hidden_size != text.hidden_size:
        raise WeightsError(
            f"the talker's hidden_size is {text.hidden_size} and its code predictor's "
            f"{residual.text.hidden_size}; they must be equal"
        )
    return TalkerConfig(
        text=text,
        residual=residual,
        thinker_vocab_size=int(config["thinker_config"]["text_config"]["vocab_size"]),
        thinker_hidden_size=int(values["thinker_hidden_size"]),
        accept_layer=int(values["accept_hidden_layer"]),
        speakers={str(name).lower(): int(code) for name, code in (values.get("speaker_id") or {}).items()},
        tts_bos_id=int(config["tts_bos_token_id"]),
        tts_eos_id=int(config["tts_eos_token_id"]),
        tts_pad_id=int(config["tts_pad_token_id"]),
        codec_bos_id=int(values["codec_bos_id"]),
        codec_eos_id=int(values["codec_eos_token_id"]),
        codec_pad_id=int(values["codec_pad_id"]),
        codec_nothink_id=int(values["codec_nothink_id"]),
        codec_think_bos_id=int(values["codec_think_bos_id"]),
        codec_think_eos_id=int(values["codec_think_eos_id"]),
    )


@dataclass(frozen=True)
class _Projection:
    """From the thinker's width to the talker's."""

    first: Linear
    second: Linear

    def __call__(self, rows: Tensor) -> Tensor:
        return self.second(F.silu(self.first(rows)))


class Talker(TextModel):
    """`embed`, `forward` and `logits` are over codes of the first codebook.

    closing_row: [hidden], the text part of the step after the last token.  pad_row: of all later steps.
    """

    def __init__(self, config: TalkerConfig, weights: FusedWeights, thinker_table: Tensor) -> None:
        """weights: names within the talker.  thinker_table: [vocab, thinker hidden].  Raises WeightsError."""
        text = config.text
        embedding = weights.tensor("model.codec_embedding.weight", text.vocab_size, text.hidden_size)
        layers = TextLayers(text, weights.within("model."))
        head = weights.stacked([("codec_head.weight", text.vocab_size)], text.hidden_size)
        self.talker_config = config
        self._thinker_table = thinker_table
        self._project_text = _load_projection(config, weights, "text_projection")
        self._project_media = _load_projection(config, weights, "hidden_projection")
        self._predictor = ResidualCodePredictor(config.residual, weights.within("code_predictor."))
        suppression = torch.zeros(text.vocab_size, dtype=weights.dtype)
        suppression[list(config.suppressed_codes)] = -torch.inf
        self._suppression = suppression
        weight_bytes = weights.nbytes + thinker_table.nbytes
        super().__init__(text, embedding=embedding, layers=layers, head=head, weight_bytes=weight_bytes)
        fixed = self.text_rows(torch.tensor([config.tts_bos_id, config.tts_eos_id, config.tts_pad_id]))
        self._bos_row, self.closing_row, self.pad_row = fixed.unbind(0)

    def text_rows(self, token_ids: Tensor) -> Tensor:
        """Text parts of the thinker's tokens.  token_ids: [num_rows], int64.  Returns [num_rows, hidden]."""
        return self._project_text(F.embedding(token_ids, self._thinker_table))

    def media_rows(self, hidden: Tensor) -> Tensor:
        """Rows of pictures and sound.

        hidden: [num_rows, thinker hidden], the thinker's after `accept_layer` layers.
        Returns [num_rows, hidden].
        """
        return self._project_media(hidden.to(self.dtype))

    def speech_rows(self, leading_ids: Sequence[int], speaker: str) -> Tensor:
        """The rows that begin the speech, after the users' turns: [9, hidden].

        leading_ids: the first four of the assistant's turn: its marker of two tokens, a line break and
        the answer's first token.  Raises NotFound for an unknown speaker.
        """
        config = self.talker_config
        assert len(leading_ids) == NUM_LEADING_IDS, f"{len(leading_ids)} leading ids, not {NUM_LEADING_IDS}"
        text = self.text_rows(torch.tensor(leading_ids))
        pads = self.pad_row.expand(NUM_SPEECH_ROWS - NUM_LEADING_IDS - 1, -1)
        rows = torch.cat((text[:-1], pads, self._bos_row.unsqueeze(0), text[-1:]))
        codes = [config.codec_nothink_id, config.codec_think_bos_id, config.codec_think_eos_id]
        codes += [config.speaker_code(speaker), config.codec_pad_id, config.codec_bos_id]
        rows[-len(codes) :] += self.embed(torch.tensor(codes))
        return rows

    def next_input(
        self, hidden: Tensor, code0: Tensor, noise: Sequence[CodeSampling]
    ) -> tuple[Tensor, Tensor]:
        """Complete one frame of each request and make its part of the row that asks for the next.

        The other part of that row is the text's: of the next token, `closing_row` or `pad_row`.

        hidden: [num_requests, hidden] from `forward`, before the final norm.
        code0: [num_requests], int64, the codes sampled from it.
        noise: one per request.  A request's result does not depend on the others.
        Returns the frames [num_requests, num_groups], int64, and their parts [num_requests, hidden].
        """
        first = self.embed(code0)
        others, total = self._predictor(self._layers.normalise(hidden), first, noise)
        return torch.cat((code0.unsqueeze(1), others), dim=1), total

    def frame_rows(self, frames: Tensor) -> Tensor:
        """The parts that `next_input` made with these frames, bit for bit.

        frames: [num_frames, num_groups], int64.  Returns [num_frames, hidden].  Raises StreamError for
        codes that no codebook has.
        """
        sizes = [self.config.vocab_size] + [self.talker_config.residual.codebook_size] * (
            self.talker_config.num_groups - 1
        )
        is_known = (frames >= 0) & (frames < torch.tensor(sizes))
        if frames.ndim != 2 or frames.shape[1] != len(sizes) or not bool(is_known.all()):
            raise StreamError(
                f"frames {list(frames.shape)} do not fit {len(sizes)} codebooks of at most {max(sizes)} codes"
            )
        return self._predictor.add_codes(self.embed(frames[:, 0]), frames[:, 1:])

    def logits(self, hidden: Tensor) -> Tensor:
        """As TextModel's; codes that are no sound are never sampled: theirs are -inf."""
        return super().logits(hidden) + self._suppression


def _load_projection(config: TalkerConfig, weights: FusedWeights, name: str) -> _Projection:
    middle = config.text.intermediate_size
    return _Projection(
        first=weights.linear(name, {"linear_fc1": middle}, config.thinker_hidden_size, bias=True),
        second=weights.linear(name, {"linear_fc2": config.text.hidden_size}, middle, bias=True),
    )


def talker_config(directory: Path) -> TalkerConfig:
    """What config.json says of the talker.  Raises WeightsError."""
    return TalkerConfig.from_json(read_json(directory / "config.json"))


def load_talker(directory: Path, *, dtype: torch.dtype, prefix: str = "") -> Talker:
    """The talker of a model directory.  Raises WeightsError naming what is missing or wrong.

    prefix: not used; the architecture decides where the tensors are.
    """
    config = talker_config(directory)
    table = Checkpoint(directory, prefix="thinker.model.").take(
        "embed_tokens.weight", (config.thinker_vocab_size, config.thinker_hidden_size), dtype
    )
    checkpoint = Checkpoint(directory, prefix="talker.")
    talker = Talker(config, FusedWeights(checkpoint, dtype), table)
    checkpoint.finish(ignored_suffixes=IGNORED_SUFFIXES)
    return talker
