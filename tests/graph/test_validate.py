from __future__ import annotations

import dataclasses

import pytest

from omnistage.errors import PipelineError
from omnistage.graph import EdgeSpec, PipelineSpec, StageSpec, load_pipeline
from omnistage.graph.validate import find_problems, validate
from omnistage.types import StageKind


def stage(name: str, kind: str = "llm", **settings) -> StageSpec:
    if kind == "function":
        settings.setdefault("function", "pkg.mod:f")
    return StageSpec(name=name, kind=StageKind(kind), **settings)


def pipeline(stages: list[StageSpec], edges: list[str] = (), outputs=None, **settings) -> PipelineSpec:
    return PipelineSpec(
        name="p",
        model="m",
        stages={one.name: one for one in stages},
        edges=tuple(EdgeSpec(*edge.split("->")) for edge in edges),
        outputs={"text": "a"} if outputs is None else outputs,
        **settings,
    )


def messages(spec: PipelineSpec, **limits) -> list[str]:
    return [".".join(p.path) + ": " + p.message for p in find_problems(spec, **limits)]


def test_a_valid_pipeline_is_returned():
    spec = load_pipeline("starter")
    assert validate(spec) is spec
    assert find_problems(spec) == []


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (pipeline([stage("a")], ["a->b"]), ["edges.a->b: unknown stage 'b'; known: a"]),
        (
            pipeline([stage("a")], ["a->a"]),
            ["edges.a->a: a stage cannot feed itself; an llm feeds back inside its own stage"],
        ),
        (pipeline([stage("b"), stage("a")], ["b->a", "b->a"]), ["edges.b->a: given 2 times; keep one"]),
        (
            pipeline([stage("b"), stage("a")]),
            ["stages.b: no output is reached from this stage; connect it, or remove it"],
        ),
        (
            pipeline([stage("a"), stage("b"), stage("c")], ["a->b", "b->c", "c->a"]),
            ["edges: cycle a -> b -> c -> a; remove one of these edges"],
        ),
        (
            pipeline(
                [stage("a"), stage("b"), stage("c"), stage("d")], ["a->b", "b->a", "c->d", "d->c", "c->a"]
            ),
            [
                "edges: cycle a -> b -> a; remove one of these edges",
                "edges: cycle c -> d -> c; remove one of these edges",
            ],
        ),
        (
            pipeline([stage("a")], outputs={}),
            ["outputs: no outputs; name at least one, for instance {text: STAGE}"],
        ),
        (
            pipeline([stage("a")], outputs={"text": "a", "sound": "a"}),
            ["outputs.sound: unknown output; known: text, audio, image"],
        ),
        (
            pipeline([stage("a")], outputs={"text": "aa"}),
            ["outputs.text: unknown stage 'aa'; did you mean 'a'?"],
        ),
        (
            pipeline([stage("a")], outputs={"text": "a", "audio": "a"}),
            [
                "outputs.audio: a gives text or tokens or hidden_states or codec_frames, but audio needs pcm;"
                " no stage of the pipeline does"
            ],
        ),
        (
            pipeline([stage("vision", "encoder"), stage("a", "function")], ["vision->a"]),
            [
                "edges.vision->a: vision gives embeddings, but a takes text;"
                " a function's ports are set by inputs and outputs"
            ],
        ),
        (
            pipeline([stage("hearing", "encoder"), stage("a", "vocoder")], ["hearing->a"], {"audio": "a"}),
            ["edges.hearing->a: hearing gives text, but a takes codec_frames or latents"],
        ),
        (
            pipeline([stage("b"), stage("a", "encoder")], ["b->a"]),
            ["edges.b->a: a is an encoder and reads the request's media; no edge leads to it"],
        ),
        (
            pipeline([stage("a", "vocoder")], outputs={"audio": "a"}),
            ["stages.a: a vocoder needs an edge from the stage that makes its frames"],
        ),
        (
            pipeline([stage("a", "vocoder", kv_cache=3)], outputs={"audio": "a"}),
            [
                "stages.a.kv_cache: not a setting of kind vocoder; only of llm: leave it out",
                "stages.a: a vocoder needs an edge from the stage that makes its frames",
            ],
        ),
        (pipeline([stage("a", replicas=0)]), ["stages.a.replicas: must be at least 1, not 0"]),
        (pipeline([stage("a")], max_queue=-1), ["max_queue: must be at least 0, not -1"]),
        (
            pipeline([stage("a", part="../x")]),
            ["stages.a.part: must be a folder name inside the model, not '../x'"],
        ),
        (
            pipeline([stage("a", "function", function="no colon")]),
            ["stages.a.function: must be package.module:name or path/file.py:name, not 'no colon'"],
        ),
        (
            pipeline([stage("a", "function", function="")]),
            [
                "stages.a.function: a function stage needs its callable:"
                " package.module:name or path/file.py:name"
            ],
        ),
        (
            dataclasses.replace(pipeline([stage("a")]), model=""),
            ["model: the stages load parts of a model, but none is named; give a model"],
        ),
        (
            dataclasses.replace(pipeline([]), stages={}, outputs={}),
            [
                "outputs: no outputs; name at least one, for instance {text: STAGE}",
                "stages: no stages; a pipeline needs at least one",
            ],
        ),
        (
            PipelineSpec(name="p", model="m", stages={"a": stage("b")}, outputs={"text": "a"}),
            ["stages.a.name: stage 'b' is listed under another name"],
        ),
    ],
)
def test_each_fault_is_named(spec, expected):
    assert messages(spec) == expected


def test_a_pipeline_of_functions_needs_no_model():
    spec = dataclasses.replace(pipeline([stage("a", "function")]), model="")
    assert find_problems(spec) == []


def test_all_problems_come_in_one_error():
    spec = pipeline(
        [stage("a", replicas=0), stage("b", devices=("gpu",)), stage("c", "vocoder")],
        ["a->x", "b->b"],
        {"audio": "a"},
    )
    with pytest.raises(PipelineError) as caught:
        validate(spec)
    head, *lines = caught.value.message.split("\n  ")
    assert head == "pipeline 'p' has 8 problems:"
    assert len(lines) == 8
    assert caught.value.code == "invalid_pipeline"


def test_two_problems_of_one_edge_are_both_told():
    lines = messages(pipeline([stage("a")], ["x->y"]))
    assert [line.partition(";")[0] for line in lines] == [
        "edges.x->y: unknown stage 'x'",
        "edges.x->y: unknown stage 'y'",
    ]


def test_chunks_belong_to_edges_into_a_vocoder():
    with pytest.raises(PipelineError, match=r"thinker->talker\.chunk: only an edge into a vocoder"):
        load_pipeline("starter", overrides=["thinker->talker.chunk=8"])


def test_edges_into_a_vocoder_stream():
    with pytest.raises(PipelineError, match=r"talker->vocoder: .*add stream: true"):
        load_pipeline(
            "starter",
            overrides=[
                "talker->vocoder.stream=false",
                "talker->vocoder.first_chunk=null",
                "talker->vocoder.chunk=null",
                "talker->vocoder.credits=null",
            ],
        )


@pytest.mark.parametrize("setting", ["replicas", "tensor_parallel", "threads"])
def test_counts_of_processes_are_bounded(setting):
    with pytest.raises(PipelineError, match=rf"thinker\.{setting}: must be at most 1024, not 99999999999"):
        load_pipeline("starter", overrides=[f"thinker.{setting}=99999999999"])
