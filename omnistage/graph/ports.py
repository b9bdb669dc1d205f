"""Which port types a stage gives and takes, and what passes over an edge.

Decided from the stage's kind, its part's name and, for functions, its own declaration: no weights
are read.  Which of several possible types an edge uses at run time is the model adapter's business;
edge_port gives the likeliest, for drawings.
"""

from __future__ import annotations

from omnistage.graph.spec import StageSpec
from omnistage.types import PortType, StageKind

ANY = frozenset(PortType)

# What known encoder parts make; a part that is not listed may make text or embeddings.
_ENCODER_OUTPUTS = {
    "hearing": frozenset({PortType.TEXT}),
    "vision": frozenset({PortType.EMBEDDINGS}),
    "visual": frozenset({PortType.EMBEDDINGS}),
    "audio_tower": frozenset({PortType.EMBEDDINGS}),
}
# What known encoder parts read, for drawings and clients.
_ENCODER_MEDIA = {"hearing": "audio", "audio_tower": "audio", "vision": "image", "visual": "image"}

_OUTPUTS = {
    StageKind.ENCODER: frozenset({PortType.TEXT, PortType.EMBEDDINGS}),
    StageKind.LLM: frozenset({PortType.TEXT, PortType.TOKENS, PortType.HIDDEN_STATES, PortType.CODEC_FRAMES}),
    StageKind.GENERATOR: frozenset({PortType.LATENTS, PortType.IMAGE}),
    StageKind.VOCODER: frozenset({PortType.PCM}),
}
_INPUTS = {
    StageKind.ENCODER: frozenset[PortType](),  # reads the request's media
    StageKind.LLM: frozenset({PortType.TEXT, PortType.TOKENS, PortType.EMBEDDINGS, PortType.HIDDEN_STATES}),
    StageKind.GENERATOR: frozenset(
        {PortType.TEXT, PortType.TOKENS, PortType.HIDDEN_STATES, PortType.CODEC_FRAMES}
    ),
    StageKind.VOCODER: frozenset({PortType.LATENTS, PortType.CODEC_FRAMES}),
}
# Between two llms (a thinker and its talker) hidden states pass; otherwise the first that fits.
_PREFERENCE = (
    PortType.LATENTS,
    PortType.EMBEDDINGS,
    PortType.TEXT,
    PortType.CODEC_FRAMES,
    PortType.HIDDEN_STATES,
    PortType.TOKENS,
    PortType.PCM,
    PortType.IMAGE,
)

# Output name -> the port type that a stage must give to make it.
OUTPUT_PORTS = {"text": PortType.TEXT, "audio": PortType.PCM, "image": PortType.IMAGE}


def output_ports(stage: StageSpec) -> frozenset[PortType]:
    """Every type the stage may give."""
    if stage.kind is StageKind.FUNCTION:
        return frozenset(stage.outputs)
    if stage.kind is StageKind.ENCODER and stage.part in _ENCODER_OUTPUTS:
        return _ENCODER_OUTPUTS[stage.part]
    return _OUTPUTS.get(stage.kind, ANY)


def input_ports(stage: StageSpec) -> frozenset[PortType]:
    """Every type the stage takes from other stages; none for an encoder."""
    if stage.kind is StageKind.FUNCTION:
        return frozenset(stage.inputs)
    return _INPUTS.get(stage.kind, ANY)


def edge_ports(producer: StageSpec, consumer: StageSpec) -> frozenset[PortType]:
    """Types that the producer gives and the consumer takes; empty if they do not fit."""
    return output_ports(producer) & input_ports(consumer)


def edge_port(producer: StageSpec, consumer: StageSpec) -> PortType | None:
    """The type that an edge most likely carries, or None if none fits."""
    fitting = edge_ports(producer, consumer)
    if producer.kind is consumer.kind is StageKind.LLM:
        return PortType.HIDDEN_STATES
    return next((port for port in _PREFERENCE if port in fitting), None)


def encoder_media(stage: StageSpec) -> str:
    """ "image" or "audio" for an encoder of a known part, "media" for others."""
    return _ENCODER_MEDIA.get(stage.part, "media")


def port_list(ports: frozenset[PortType]) -> str:
    """For messages: "text or tokens"."""
    words = [port for port in PortType if port in ports]
    return " or ".join(words) if words else "nothing"
