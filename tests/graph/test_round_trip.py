"""YAML, JSON, the printed configuration and the Python builder all give the same pipeline back."""

from __future__ import annotations

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from omnistage.graph import EdgeSpec, Graph, PipelineSpec, StageSpec, load_pipeline
from omnistage.graph.dump import render_config, to_json, to_plain, to_yaml
from omnistage.graph.fields import AnyScalar, Bytes, Choice, Count, Flag, ListOf, MapOf, Setting, Text
from omnistage.graph.loader import Resolved, from_json, resolve_pipeline, resolve_text
from omnistage.graph.ports import OUTPUT_PORTS, edge_ports, output_ports
from omnistage.graph.spec import EDGE_SETTINGS, PIPELINE_SETTINGS, STAGE_SETTINGS
from omnistage.graph.validate import find_problems
from omnistage.types import StageKind

NAMES = st.one_of(
    st.from_regex(r"[A-Za-z](?:[A-Za-z0-9_-]{0,6}[A-Za-z0-9_])?", fullmatch=True),
    st.sampled_from(["on", "y", "null", "true", "e1", "stages"]),  # what YAML takes for something else
)
BYTES = st.one_of(st.integers(0, 2**40), st.integers(0, 1000).map(lambda count: count * 1024**2))
SCALARS = st.one_of(
    st.booleans(),
    st.integers(-(2**62), 2**62),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
)
SETTINGS_LEFT = ("name", "kind", "devices", "tensor_parallel", "colocate", "memory")  # checked against others


def values_of(type_):
    match type_:
        case Flag():
            return st.booleans()
        case Count():
            return st.integers(type_.minimum, min(type_.maximum, 2000))
        case Bytes():
            return BYTES
        case Choice():
            return st.sampled_from(type_.words)
        case ListOf():
            return st.lists(values_of(type_.item), min_size=1, max_size=2).map(tuple)
        case MapOf(item=AnyScalar()):
            return st.dictionaries(
                st.from_regex(r"[a-z_][a-z0-9_-]{0,8}", fullmatch=True), SCALARS, max_size=3
            )
        case MapOf():
            return st.dictionaries(st.sampled_from(["cpu", "cuda:0", "cuda:12"]), st.just(2**50), max_size=2)
        case Text(what="package.module:name or path/file.py:name"):
            return st.sampled_from(["pkg.mod:name", "/a b/ü.py:Class.name"])
        case Text(what="a folder name inside the model"):
            return st.sampled_from(["visual", "a/b", "on", "1"])
        case Text():
            return st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12)
    raise AssertionError(type_)


def drawn(draw, table: dict[str, Setting], kind: str, left: tuple[str, ...]) -> dict[str, object]:
    chosen = {}
    for name, setting in table.items():
        if name not in left and setting.allows(kind) and (setting.is_required or draw(st.booleans())):
            chosen[name] = draw(values_of(setting.type))
    return chosen


@st.composite
def pipelines(draw) -> PipelineSpec:
    """Valid pipelines: a random acyclic graph over random stages with random settings."""
    stages: dict[str, StageSpec] = {}
    edges = []
    for name in draw(st.lists(NAMES, min_size=1, max_size=6, unique=True)):
        stage = draw(stages_named(name))
        producers = [other for other in stages if edge_ports(stages[other], stage)]
        if stage.kind is StageKind.VOCODER and not producers:
            continue
        stages[name] = stage
        chosen = draw(st.lists(st.sampled_from(producers), unique=True)) if producers else []
        if stage.kind is StageKind.VOCODER and not chosen:
            chosen = producers[:1]
        edges += [draw(edges_between(producer, stage)) for producer in chosen]
    makers = {
        output: [name for name, stage in stages.items() if port in output_ports(stage)]
        for output, port in OUTPUT_PORTS.items()
    }
    outputs = {output: draw(st.sampled_from(able)) for output, able in makers.items() if able}
    assume(outputs)
    needed = set(outputs.values())
    for edge in reversed(edges):  # of each stage, the edges into it come before those out of it
        if edge.consumer in needed:
            needed.add(edge.producer)
    chosen = drawn(draw, PIPELINE_SETTINGS, "", ("name", "model"))
    return PipelineSpec(
        name=draw(NAMES),
        model="a model",
        stages={name: stage for name, stage in stages.items() if name in needed},
        edges=tuple(edge for edge in edges if edge.consumer in needed),
        outputs=outputs,
        **chosen,
    )


@st.composite
def stages_named(draw, name: str) -> StageSpec:
    kind = draw(st.sampled_from(list(StageKind)))
    chosen = drawn(draw, STAGE_SETTINGS, kind, SETTINGS_LEFT)
    if kind is StageKind.FUNCTION:
        chosen.setdefault("function", "pkg.mod:name")
    if kind is StageKind.LLM:
        chosen["max_num_batched_tokens"] = chosen.get("max_num_seqs", 32) + draw(st.integers(0, 100))
    return StageSpec(name=name, kind=kind, **chosen)


@st.composite
def edges_between(draw, producer: str, consumer: StageSpec) -> EdgeSpec:
    into_vocoder = consumer.kind is StageKind.VOCODER
    mode = "stream" if into_vocoder else draw(st.sampled_from(["stream", "whole"]))
    left = () if into_vocoder else ("first_chunk", "chunk")
    chosen = drawn(draw, EDGE_SETTINGS, mode, ("producer", "consumer", "stream", *left))
    return EdgeSpec(producer, consumer.name, stream=mode == "stream", **chosen)


def rebuilt(spec: PipelineSpec) -> PipelineSpec:
    """The same pipeline through the builder's methods."""
    chosen = {name: getattr(spec, name) for name in PIPELINE_SETTINGS}
    graph = Graph(**chosen)
    for stage in spec.stages.values():
        method = getattr(graph, stage.kind)
        taken = [key for key, s in STAGE_SETTINGS.items() if s.allows(stage.kind) and key != "kind"]
        method(**{key: getattr(stage, key) for key in taken})
    for edge in spec.edges:
        taken = [key for key, s in EDGE_SETTINGS.items() if s.allows(edge.mode)]
        graph.connect(**{key: getattr(edge, key) for key in taken})
    graph.output(**spec.outputs)
    return graph.build()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pipelines())
def test_every_form_gives_the_same_pipeline(spec):
    assert find_problems(spec) == []
    assert from_json(to_json(spec)) == spec
    assert resolve_text(to_yaml(spec)).spec == spec
    assert resolve_text(render_config(Resolved(spec, {}))).spec == spec
    assert rebuilt(spec) == spec
    assert list(from_json(to_json(spec)).stages) == list(spec.stages)


def test_the_starter_keeps_its_form():
    spec = load_pipeline("starter")
    assert from_json(to_json(spec)) == spec
    assert resolve_text(to_yaml(spec)).spec == spec
    assert rebuilt(spec) == spec
    assert to_yaml(spec).splitlines()[-1] == "outputs: {text: thinker, audio: vocoder}"


def test_yaml_is_short_and_json_is_complete():
    spec = load_pipeline("starter")
    assert "  vocoder: {kind: vocoder}\n" in to_yaml(spec)
    assert "  - hearing -> thinker\n" in to_yaml(spec)
    plain = to_plain(spec)
    assert plain["stages"]["vocoder"]["max_num_seqs"] == 32
    assert "kv_cache" not in plain["stages"]["vocoder"]
    assert plain["edges"][0] == {"hearing -> thinker": {"stream": False}}


def test_the_printed_configuration_shows_every_source_and_loads_again():
    resolved = resolve_pipeline("starter", overrides=["thinker.max_num_seqs=8", "device_memory.cpu=8GiB"])
    text = render_config(resolved)
    assert resolve_text(text).spec == resolved.spec
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "max_num_seqs: 8 # flag thinker.max_num_seqs=8" in lines
    assert "kv_cache: 256MiB # starter.yaml:10" in lines
    assert "cpu: 8GiB # flag device_memory.cpu=8GiB" in lines
    assert "dtype: auto # default" in lines
    assert "audio: vocoder # starter.yaml:20" in lines
    for line in lines:
        assert "#" in line or line.endswith(":"), line
