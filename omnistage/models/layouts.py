"""Where published checkpoints of one directory keep their parts, by architecture.

Data for omnistage.models.registry.  Importable without torch; knows no file but by its tensors' names.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class PartLayout:
    """Where a published checkpoint of one directory keeps a part.

    config: keys that lead to the part's configuration in config.json.  prefix: of its tensors.
    model_type: what FACTORIES calls it; the checkpoint's own word for a part is often empty.
    own: a longer prefix that no other part's tensors have, if other parts lie inside `prefix`.
    reads: prefixes of all tensors that are loaded for it, if those are others than `prefix`.
    looped: prefix of layers that run once for each further code of a frame (`num_code_groups` - 1 times).
    """

    config: tuple[str, ...]
    prefix: str
    model_type: str
    own: str = ""
    reads: tuple[str, ...] = ()
    looped: str = ""

    def is_in(self, names: Iterable[str]) -> bool:
        """Whether a checkpoint with tensors of these names holds the part."""
        return any(name.startswith(self.own or self.prefix) for name in names)

    @property
    def prefixes(self) -> tuple[str, ...]:
        """What the names of all tensors that the part loads begin with."""
        return self.reads or (self.prefix,)


_QWEN3_VL = {
    "thinker": PartLayout(
        ("text_config",),
        "model.language_model.",
        "qwen3_vl_text",
        reads=("model.language_model.", "lm_head."),
    ),
    "visual": PartLayout(("vision_config",), "model.visual.", "qwen3_vl_vision"),
}


def _plain(model_type: str) -> dict[str, PartLayout]:
    """A language model alone is its own only part."""
    return {"thinker": PartLayout((), "", model_type)}


# model_type of the model's config.json -> part -> where it is.
LAYOUTS: dict[str, dict[str, PartLayout]] = {
    "qwen3_omni_moe": {
        "thinker": PartLayout(
            ("thinker_config",),
            "thinker.",
            "qwen3_omni_moe_thinker",
            own="thinker.model.",
            reads=("thinker.model.", "thinker.lm_head."),
        ),
        "visual": PartLayout(
            ("thinker_config", "vision_config"), "thinker.visual.", "qwen3_omni_moe_vision_encoder"
        ),
        "audio_tower": PartLayout(
            ("thinker_config", "audio_config"), "thinker.audio_tower.", "qwen3_omni_moe_audio_encoder"
        ),
        "talker": PartLayout(
            ("talker_config",),
            "talker.",
            "qwen3_omni_moe_talker",
            reads=("talker.", "thinker.model.embed_tokens."),
            looped="talker.code_predictor.model.layers.",
        ),
        "code2wav": PartLayout(("code2wav_config",), "code2wav.", "qwen3_omni_moe_code2wav"),
    },
    "qwen3_vl": _QWEN3_VL,
    "qwen3_vl_moe": _QWEN3_VL,
    **{kind: _plain(kind) for kind in ("llama", "qwen2", "qwen3", "qwen3_moe")},
}
