"""The graph as data: pipelines, stages and edges, frozen and comparable.

The field tables here are the only place where a setting is defined.  Nothing here is checked beyond
the form of single values: see omnistage.graph.validate.  Knows no file format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from omnistage.graph.fields import (
    DEVICE_PATTERN,
    NAME_PATTERN,
    OPTION_PATTERN,
    PIPELINE_NAME_PATTERN,
    AnyScalar,
    Bytes,
    Choice,
    Count,
    Flag,
    ListOf,
    MapOf,
    Text,
    described,
    normalise,
    settings_of,
)
from omnistage.types import PortType, Scalar, StageKind

_NAME = Text(NAME_PATTERN, "a letter followed by letters, digits, '_' or '-' (at most 64)")
_PIPELINE_NAME = Text(
    PIPELINE_NAME_PATTERN,
    "a letter followed by letters, digits, '_', '.' or '-' (at most 64)",
)
_OPTION_NAME = Text(OPTION_PATTERN, "a name of letters, digits, '_' or '-'")
_DEVICE = Text(DEVICE_PATTERN, "a device, cpu or cuda:N")
_PATH = Text(r"(?!/)(?!(?:.*/)?\.\.(?:/|$))[^\x00-\x1f\x7f]+", "a folder name inside the model")
_REFERENCE = Text(
    r"[^\x00-\x1f\x7f]+:[^\W\d]\w*(?:\.[^\W\d]\w*)*", "package.module:name or path/file.py:name"
)
_PORTS = ListOf(Choice(tuple(PortType)))

_MODEL_KINDS = (StageKind.ENCODER, StageKind.LLM, StageKind.GENERATOR, StageKind.VOCODER)
_LLM = (StageKind.LLM,)
_FUNCTION = (StageKind.FUNCTION,)


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """A node of the graph.  Values are stored parsed: StageSpec(kv_cache="2GiB").kv_cache is an int."""

    name: str = field(metadata=described(_NAME, "Name of the stage in the graph."))
    kind: StageKind = field(
        metadata=described(
            Choice(tuple(StageKind)),
            "What the stage does; llm is autoregressive, generator makes its output in a few passes.",
        )
    )
    part: str = field(
        default="",
        metadata=described(
            _PATH,
            "Part of the model that the stage loads: a folder in the model's directory."
            " Left out: the stage's name.",
            kinds=_MODEL_KINDS,
        ),
    )
    function: str = field(
        default="",
        metadata=described(
            _REFERENCE,
            "The Python callable to run, package.module:name or path/file.py:name; a relative path in a"
            " file starts at that file's folder.",
            kinds=_FUNCTION,
        ),
    )
    inputs: tuple[PortType, ...] = field(
        default=(PortType.TEXT,),
        metadata=described(_PORTS, "Port types the function takes.", kinds=_FUNCTION),
    )
    outputs: tuple[PortType, ...] = field(
        default=(PortType.TEXT,),
        metadata=described(_PORTS, "Port types the function returns.", kinds=_FUNCTION),
    )
    granularity: Literal["delta", "sentence", "whole"] = field(
        default="sentence",
        metadata=described(
            Choice(("delta", "sentence", "whole")),
            "How much text the function gets per call: each delta as it comes, a sentence, or all of it.",
            kinds=_FUNCTION,
        ),
    )
    devices: tuple[str, ...] = field(
        default=("cpu",),
        metadata=described(
            ListOf(_DEVICE),
            "Devices, cpu or cuda:N: one tensor-parallel group that all replicas share, or one group"
            " after another for each replica.",
        ),
    )
    replicas: int = field(
        default=1,
        metadata=described(
            Count(maximum=1024), "Worker processes (or tensor-parallel groups) of this stage."
        ),
    )
    tensor_parallel: int = field(
        default=1,
        metadata=described(
            Count(maximum=1024), "Devices over which one replica's weights are split.", kinds=_LLM
        ),
    )
    dtype: Literal["auto", "float32", "bfloat16"] = field(
        default="auto",
        metadata=described(
            Choice(("auto", "float32", "bfloat16")),
            "Type of weights and activations; auto: as stored.",
            kinds=_MODEL_KINDS,
        ),
    )
    kv_cache: int = field(
        default=256 * 1024**2,
        metadata=described(Bytes(), "Size of the KV cache on each device.", unit="bytes", kinds=_LLM),
    )
    memory: int | None = field(
        default=None,
        metadata=described(
            Bytes(),
            "The most the stage may use on each of its devices: weights, caches and workspace."
            " Left out: no limit.",
            unit="bytes",
        ),
    )
    max_num_seqs: int = field(
        default=32,
        metadata=described(
            Count(), "The most requests computed together in a step.", unit="requests", kinds=_MODEL_KINDS
        ),
    )
    max_num_batched_tokens: int = field(
        default=512,
        metadata=described(Count(), "The most tokens computed in a step.", unit="tokens", kinds=_LLM),
    )
    max_model_len: int | None = field(
        default=None,
        metadata=described(
            Count(),
            "The longest prompt and answer together. Left out: the model's own limit.",
            unit="tokens",
            kinds=_LLM,
        ),
    )
    enable_prefix_cache: bool = field(
        default=True,
        metadata=described(Flag(), "Reuse KV blocks of equal prompt prefixes.", kinds=_LLM),
    )
    sampling: Mapping[str, Scalar] = field(
        default_factory=lambda: MappingProxyType({}),
        metadata=described(
            MapOf(_OPTION_NAME, AnyScalar()),
            "Sampling defaults, by the names the API has for them (temperature, top_k, top_p, min_p,"
            " repetition_penalty, presence_penalty, frequency_penalty, max_tokens). Left out: the"
            " checkpoint's generation_config.json.",
            kinds=_LLM,
        ),
    )
    encoder_cache: int = field(
        default=64 * 1024**2,
        metadata=described(
            Bytes(), "Size of the cache of encoded media.", unit="bytes", kinds=(StageKind.ENCODER,)
        ),
    )
    max_media_seconds: int = field(
        default=600,
        metadata=described(
            Count(), "The longest clip; a longer one is refused.", unit="seconds", kinds=(StageKind.ENCODER,)
        ),
    )
    threads: int | None = field(
        default=None,
        metadata=described(
            Count(maximum=1024),
            "CPU threads of each replica. Left out: one per core (stages on a device take turns).",
            unit="threads",
        ),
    )
    placement: Literal["local", "remote"] = field(
        default="local",
        metadata=described(
            Choice(("local", "remote")),
            "local: the server starts the workers; remote: they join from other hosts.",
        ),
    )
    colocate: str | None = field(
        default=None,
        metadata=described(
            _NAME,
            "A stage whose worker processes this one shares. Left out: processes of its own.",
            kinds=(StageKind.ENCODER, StageKind.GENERATOR, StageKind.VOCODER),
        ),
    )
    options: Mapping[str, Scalar] = field(
        default_factory=lambda: MappingProxyType({}),
        metadata=described(
            MapOf(_OPTION_NAME, AnyScalar()),
            "Keyword arguments of the function, or of the class that is made once per replica.",
            kinds=_FUNCTION,
        ),
    )

    def __post_init__(self) -> None:
        normalise(self, STAGE_SETTINGS)
        if not self.part and self.kind in _MODEL_KINDS:
            object.__setattr__(self, "part", self.name)

    def devices_of(self, replica: int) -> tuple[str, ...]:
        """The devices of one replica, one per tensor-parallel rank, in rank order."""
        size = self.tensor_parallel
        if len(self.devices) == size * self.replicas:
            return self.devices[replica * size : (replica + 1) * size]
        return self.devices * size if len(self.devices) == 1 else self.devices[:size]


@dataclass(frozen=True)
class EdgeSpec:
    """An edge: whole (one message per request and item) or stream (ordered chunks)."""

    producer: str = field(metadata=described(_NAME, "Stage whose output passes over the edge."))
    consumer: str = field(metadata=described(_NAME, "Stage that receives it."))
    stream: bool = field(
        default=False,
        metadata=described(Flag(), "Send ordered chunks as they are made, rather than one whole message."),
    )
    first_chunk: int | None = field(
        default=None,
        metadata=described(
            Count(),
            "Frames the vocoder decodes for the first sound; few give it early. Left out: as chunk.",
            unit="frames",
            kinds=("stream",),
        ),
    )
    chunk: int | None = field(
        default=None,
        metadata=described(
            Count(),
            "Frames the vocoder decodes at a time after that. Left out: 64.",
            unit="frames",
            kinds=("stream",),
        ),
    )
    credits: int | None = field(
        default=None,
        metadata=described(
            Count(),
            "Chunks that may be under way before the consumer grants more. Left out: no bound.",
            unit="chunks",
            kinds=("stream",),
        ),
    )

    def __post_init__(self) -> None:
        normalise(self, EDGE_SETTINGS)

    @property
    def name(self) -> str:
        """ "producer->consumer", as messages name it."""
        return f"{self.producer}->{self.consumer}"

    @property
    def mode(self) -> str:
        """ "stream" or "whole"."""
        return "stream" if self.stream else "whole"


@dataclass(frozen=True, kw_only=True)
class PipelineSpec:
    """A graph, the model it serves and its deployment options."""

    name: str = field(
        metadata=described(_PIPELINE_NAME, "Name of the pipeline; clients see it as the model's name.")
    )
    model: str = field(
        default="",
        metadata=described(
            Text(),
            "The model: starter, a published model's directory or its name on the hub, or a directory with a"
            " folder per part.",
        ),
    )
    max_queue: int = field(
        default=256,
        metadata=described(
            Count(0), "Requests that may wait for a place; past it clients get 429.", unit="requests"
        ),
    )
    replay_budget: int = field(
        default=2,
        metadata=described(
            Count(0),
            "Deaths of workers that one request survives by replay before it fails.",
            unit="deaths",
        ),
    )
    shared_memory: int = field(
        default=256 * 1024**2,
        metadata=described(
            Bytes(), "Size of each worker's pool for tensors sent to others on its host.", unit="bytes"
        ),
    )
    device_memory: Mapping[str, int] = field(
        default_factory=lambda: MappingProxyType({}),
        metadata=described(
            MapOf(_DEVICE, Bytes()),
            "What the pipeline may use of each device; the stages' budgets are checked against it.",
            unit="bytes",
        ),
    )
    stages: Mapping[str, StageSpec]
    edges: tuple[EdgeSpec, ...] = ()
    outputs: Mapping[str, str]

    def __post_init__(self) -> None:
        normalise(self, PIPELINE_SETTINGS)
        object.__setattr__(self, "stages", MappingProxyType(dict(self.stages)))
        object.__setattr__(self, "edges", tuple(self.edges))
        object.__setattr__(self, "outputs", MappingProxyType(dict(self.outputs)))

    def edges_into(self, stage: str) -> tuple[EdgeSpec, ...]:
        return tuple(edge for edge in self.edges if edge.consumer == stage)

    def edges_out_of(self, stage: str) -> tuple[EdgeSpec, ...]:
        return tuple(edge for edge in self.edges if edge.producer == stage)


STRUCTURE: Mapping[str, str] = MappingProxyType(
    {
        "stages": "The nodes of the graph, by name.",
        "edges": "'producer -> consumer', or that as a key with the edge's settings.",
        "outputs": "What clients may ask for (text, audio, image) and the stage that makes it.",
    }
)
STAGE_SETTINGS = settings_of(StageSpec)
EDGE_SETTINGS = settings_of(EdgeSpec)
PIPELINE_SETTINGS = settings_of(PipelineSpec)


def topological_order(spec: PipelineSpec) -> tuple[str, ...]:
    """Every stage after all its producers, ties in the order of spec.stages; a cycle is left out."""
    waiting = {
        name: {edge.producer for edge in spec.edges_into(name) if edge.producer in spec.stages}
        for name in spec.stages
    }
    order: list[str] = []
    while ready := [name for name, producers in waiting.items() if not producers]:
        first = ready[0]
        order.append(first)
        del waiting[first]
        for producers in waiting.values():
            producers.discard(first)
    return tuple(order)
