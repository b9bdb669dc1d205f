from __future__ import annotations

import pytest

from omnistage.errors import InvalidRequest
from omnistage.graph import Graph, load_pipeline, plan_route
from omnistage.graph.spec import topological_order

STARTER = load_pipeline("starter")


@pytest.mark.parametrize(
    ("inputs", "outputs", "entry", "stages", "edges", "prompt_stage"),
    [
        pytest.param(set(), ("text",), None, "thinker", "", "thinker", id="text only"),
        pytest.param(
            set(),
            ("text", "audio"),
            None,
            "thinker talker vocoder",
            "thinker->talker talker->vocoder",
            "thinker",
            id="text and audio",
        ),
        pytest.param(
            {"vision"}, ("text",), None, "vision thinker", "vision->thinker", "thinker", id="picture and text"
        ),
        pytest.param(
            {"hearing"},
            ("text", "audio"),
            None,
            "hearing thinker talker vocoder",
            "hearing->thinker thinker->talker talker->vocoder",
            "thinker",
            id="voice, text and audio",
        ),
        pytest.param(
            {"hearing", "vision"},
            ("audio",),
            None,
            "hearing vision thinker talker vocoder",
            "hearing->thinker vision->thinker thinker->talker talker->vocoder",
            "thinker",
            id="everything, audio alone wanted",
        ),
        pytest.param(
            set(), ("audio",), "talker", "talker vocoder", "talker->vocoder", "talker", id="speech of a text"
        ),
        pytest.param({"hearing"}, ("hearing",), None, "hearing", "", None, id="transcription"),
    ],
)
def test_routes_of_the_starter(inputs, outputs, entry, stages, edges, prompt_stage):
    route = plan_route(STARTER, inputs=inputs, outputs=outputs, entry=entry)
    assert " ".join(route.stages) == stages
    assert " ".join(edge.name for edge in route.edges) == edges
    assert route.entry == prompt_stage
    assert route.outputs == {output: STARTER.outputs.get(output, output) for output in outputs}


@pytest.mark.parametrize(
    ("inputs", "outputs", "entry", "message"),
    [
        (set(), ("hearing",), None, "output 'hearing' needs media for stage 'hearing'"),
        (
            set(),
            ("text",),
            "talker",
            "output 'text' is not reached from stage 'talker'; start further upstream",
        ),
        (set(), (), None, "ask for one of text, audio"),
        (set(), ("txt",), None, "has no output 'txt'; did you mean 'text'"),
        ({"thinker"}, ("text",), None, "has no encoder 'thinker'; known: hearing, vision"),
        ({"vison"}, ("text",), None, "did you mean 'vision'"),
        (set(), ("text",), "thinkr", "has no stage 'thinkr'"),
        ({"vision"}, ("hearing",), None, "needs media for stage 'hearing'"),
        ({"vision", "hearing"}, ("hearing",), None, "the media for stage 'vision' cannot reach"),
        (
            {"vision"},
            ("audio",),
            "talker",
            "the media for stage 'vision' cannot reach the wanted output audio",
        ),
    ],
)
def test_what_cannot_be_reached_is_refused(inputs, outputs, entry, message):
    with pytest.raises(InvalidRequest, match=message) as caught:
        plan_route(STARTER, inputs=inputs, outputs=outputs, entry=entry)
    assert caught.value.status == 400


def branching() -> Graph:
    """hearing -> glossary -> thinker -> (upper, talker); voice print -> talker -> vocoder."""
    graph = Graph("p", model="m")
    graph.encoder("hearing")
    graph.encoder("voiceprint")
    graph.function("glossary", "pkg.mod:f")
    graph.llm("thinker")
    graph.function("upper", "pkg.mod:f")
    graph.llm("talker")
    graph.vocoder("vocoder")
    for edge in (
        "hearing->glossary",
        "glossary->thinker",
        "thinker->upper",
        "thinker->talker",
        "voiceprint->talker",
        "talker->vocoder",
    ):
        graph.connect(*edge.split("->"), stream=edge.endswith("vocoder"))
    graph.output(text="upper", audio="vocoder")
    return graph


@pytest.mark.parametrize(
    ("inputs", "outputs", "entry", "stages"),
    [
        (set(), ("text",), None, "thinker upper"),
        ({"hearing"}, ("text",), None, "hearing glossary thinker upper"),
        (set(), ("thinker",), None, "thinker"),
        ({"hearing"}, ("glossary",), None, "hearing glossary"),
        (set(), ("audio",), None, "thinker talker vocoder"),
        ({"voiceprint"}, ("text", "audio"), None, "thinker upper voiceprint talker vocoder"),
        (set(), ("audio",), "talker", "talker vocoder"),
        (set(), ("talker",), "talker", "talker"),
        ({"hearing"}, ("text",), "glossary", None),
        (set(), ("text",), "glossary", "glossary thinker upper"),
        (set(), ("glossary",), None, None),
    ],
)
def test_branches_and_functions_run_only_where_something_feeds_them(inputs, outputs, entry, stages):
    spec = branching().build()
    if stages is None:
        with pytest.raises(InvalidRequest):
            plan_route(spec, inputs=inputs, outputs=outputs, entry=entry)
        return
    route = plan_route(spec, inputs=inputs, outputs=outputs, entry=entry)
    assert sorted(route.stages) == sorted(stages.split())
    position = {name: index for index, name in enumerate(route.stages)}
    for edge in route.edges:
        assert position[edge.producer] < position[edge.consumer]
    assert {edge.consumer for edge in route.edges} <= set(route.stages)
    for name in route.stages:
        assert route.edges_into(name) == tuple(e for e in spec.edges_into(name) if e in route.edges)
        assert route.edges_out_of(name) == tuple(e for e in spec.edges_out_of(name) if e in route.edges)


def test_a_route_without_an_llm_starts_at_its_first_function():
    graph = Graph("p")
    graph.function("f", "pkg.mod:f")
    graph.function("g", "pkg.mod:g")
    graph.connect("f", "g")
    graph.output(text="g")
    route = plan_route(graph.build(), inputs=set(), outputs=("text",))
    assert route.entry == "f"
    assert route.stages == ("f", "g")


def test_order_is_topological_whatever_the_order_of_the_file():
    graph = Graph("p", model="m")
    graph.vocoder("v")
    graph.generator("g")
    graph.llm("t")
    graph.connect("g", "v", stream=True)
    graph.connect("t", "g")
    graph.output(text="t", audio="v")
    spec = graph.build()
    assert topological_order(spec) == ("t", "g", "v")
    assert plan_route(spec, inputs=set(), outputs=("audio",)).stages == ("t", "g", "v")
