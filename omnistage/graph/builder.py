"""The Python form of a pipeline: Graph builds the same PipelineSpec that the YAML form loads to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from omnistage.errors import PipelineError
from omnistage.graph.fields import Setting, hint
from omnistage.graph.function import function_reference
from omnistage.graph.spec import (
    EDGE_SETTINGS,
    PIPELINE_SETTINGS,
    STAGE_SETTINGS,
    EdgeSpec,
    PipelineSpec,
    StageSpec,
)
from omnistage.graph.validate import validate, wrong_kind
from omnistage.types import StageKind


@dataclass(frozen=True)
class StageHandle:
    """What Graph's stage methods return, to connect stages and name outputs with."""

    name: str


class Graph:
    """A pipeline under construction.

        graph = Graph("shout", model="starter")
        thinker = graph.llm("thinker")
        upper = graph.function("upper", str_upper)
        graph.connect(thinker, upper, stream=True)
        graph.output(text=upper)
        spec = graph.build()

    settings: those of PipelineSpec, for instance max_queue=64.  Every method checks the names and
    values of its settings at once and raises PipelineError; build() checks the whole.
    """

    def __init__(self, name: str, *, model: str = "", **settings: Any) -> None:
        where = f"pipeline {name!r}"
        self._settings = {"name": name, "model": model, **settings}
        _check(where, self._settings, PIPELINE_SETTINGS)
        self._stages: dict[str, StageSpec] = {}
        self._edges: list[EdgeSpec] = []
        self._outputs: dict[str, str] = {}

    def encoder(self, name: str, **settings: Any) -> StageHandle:
        """A stage that runs once per picture or clip.  settings: those of StageSpec for encoders."""
        return self._add(name, StageKind.ENCODER, settings)

    def llm(self, name: str, **settings: Any) -> StageHandle:
        """An autoregressive stage.  settings: those of StageSpec for llms."""
        return self._add(name, StageKind.LLM, settings)

    def generator(self, name: str, **settings: Any) -> StageHandle:
        """A stage that makes its output in a few passes.  settings: those of StageSpec for generators."""
        return self._add(name, StageKind.GENERATOR, settings)

    def vocoder(self, name: str, **settings: Any) -> StageHandle:
        """A stage that turns frames into sound.  settings: those of StageSpec for vocoders."""
        return self._add(name, StageKind.VOCODER, settings)

    def function(self, name: str, function: Callable[..., Any] | str, **settings: Any) -> StageHandle:
        """A stage that runs a Python callable, or the one named "package.module:name" or "file.py:name".

        The callable must be defined at the top of a module; raises PipelineError for a lambda or a closure.
        """
        reference = function_reference(function)
        return self._add(name, StageKind.FUNCTION, {"function": reference, **settings})

    def connect(self, producer: StageHandle | str, consumer: StageHandle | str, **settings: Any) -> None:
        """Add an edge.  settings: those of EdgeSpec, for instance stream=True, first_chunk=4, chunk=25."""
        ends = (self._stage_name(producer), self._stage_name(consumer))
        table = {name: s for name, s in EDGE_SETTINGS.items() if name not in ("producer", "consumer")}
        mode = "stream" if settings.get("stream") is True else "whole"
        _check(f"edge '{ends[0]}->{ends[1]}'", settings, table, kind=mode)
        self._edges.append(EdgeSpec(*ends, **settings))

    def output(self, **outputs: StageHandle | str) -> None:
        """Name what clients may ask for: output(text=thinker, audio=vocoder)."""
        for output, stage in outputs.items():
            self._outputs[output] = self._stage_name(stage)

    def build(self) -> PipelineSpec:
        """The finished pipeline.  Raises PipelineError that lists every problem."""
        spec = PipelineSpec(
            **self._settings, stages=self._stages, edges=tuple(self._edges), outputs=self._outputs
        )
        return validate(spec)

    def _add(self, name: str, kind: StageKind, settings: dict[str, Any]) -> StageHandle:
        if name in self._stages:
            raise PipelineError(f"stage {name!r} exists already; choose another name")
        table = {key: setting for key, setting in STAGE_SETTINGS.items() if key != "kind"}
        given = {"name": name, **settings}
        _check(f"stage {name!r}", given, table, kind=kind)
        self._stages[name] = StageSpec(kind=kind, **given)
        return StageHandle(name)

    def _stage_name(self, stage: StageHandle | str) -> str:
        name = stage.name if isinstance(stage, StageHandle) else stage
        if name not in self._stages:
            raise PipelineError(f"unknown stage {name!r}; {hint(str(name), self._stages)}")
        return name


def _check(where: str, settings: Mapping[str, Any], table: Mapping[str, Setting], *, kind: str = "") -> None:
    for key, value in settings.items():
        setting = table.get(key)
        if setting is None:
            usable = [name for name, known in table.items() if not kind or known.allows(kind)]
            raise PipelineError(f"{where}: unknown setting {key!r}; {hint(key, usable)}")
        if kind and not setting.allows(kind):
            raise PipelineError(f"{where}: {key}: {wrong_kind(setting, kind)}")
        if setting.default == "" and value == "":
            continue
        try:
            setting.parse(value)
        except ValueError as error:
            raise PipelineError(f"{where}: {key}: {error}") from None
