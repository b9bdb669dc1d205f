from __future__ import annotations

import pytest

from omnistage.errors import PipelineError
from omnistage.graph import EdgeSpec, Graph, StageSpec, load_pipeline
from omnistage.graph.loader import resolve_text
from omnistage.types import PortType, StageKind

QWEN = """
name: qwen3-omni
model: Qwen/Qwen3-Omni-30B-A3B-Instruct
stages:
  vision:  {kind: encoder, part: visual,      devices: [cuda:0]}
  hearing: {kind: encoder, part: audio_tower, devices: [cuda:0]}
  thinker: {kind: llm, part: thinker, devices: [cuda:0, cuda:1], tensor_parallel: 2,
            kv_cache: 40GiB, max_num_batched_tokens: 8192, max_num_seqs: 64}
  talker:  {kind: llm, part: talker, devices: [cuda:2], max_num_seqs: 64}
  vocoder: {kind: vocoder, part: code2wav, devices: [cuda:2]}
edges:
  - vision -> thinker
  - hearing -> thinker
  - thinker -> talker:  {stream: true}
  - talker -> vocoder:  {stream: true, first_chunk: 4, chunk: 25}
outputs: {text: thinker, audio: vocoder}
"""


def starter() -> Graph:
    graph = Graph("starter", model="starter")
    hearing = graph.encoder("hearing")
    vision = graph.encoder("vision", part="vision")
    thinker = graph.llm("thinker", dtype="float32", kv_cache="256MiB", max_num_seqs=32, max_model_len=2048)
    talker = graph.generator("talker")
    vocoder = graph.vocoder("vocoder")
    graph.connect(hearing, thinker)
    graph.connect(vision, thinker)
    graph.connect(thinker, talker, stream=True)
    graph.connect(talker, vocoder, stream=True, first_chunk=24, chunk=64, credits=8)
    graph.output(text=thinker, audio=vocoder)
    return graph


def shout(text: str) -> str:
    return text.upper()


def test_python_and_yaml_give_equal_pipelines():
    assert starter().build() == load_pipeline("starter")


def test_a_pipeline_on_gpus_reads_the_same_in_both_forms():
    graph = Graph("qwen3-omni", model="Qwen/Qwen3-Omni-30B-A3B-Instruct")
    vision = graph.encoder("vision", part="visual", devices=["cuda:0"])
    hearing = graph.encoder("hearing", part="audio_tower", devices=["cuda:0"])
    thinker = graph.llm(
        "thinker",
        devices=["cuda:0", "cuda:1"],
        tensor_parallel=2,
        kv_cache="40GiB",
        max_num_batched_tokens=8192,
        max_num_seqs=64,
    )
    talker = graph.llm("talker", devices=["cuda:2"], max_num_seqs=64)
    vocoder = graph.vocoder("vocoder", part="code2wav", devices=["cuda:2"])
    graph.connect(vision, thinker)
    graph.connect(hearing, thinker)
    graph.connect(thinker, talker, stream=True)
    graph.connect(talker, vocoder, stream=True, first_chunk=4, chunk=25)
    graph.output(text=thinker, audio=vocoder)
    assert graph.build() == resolve_text(QWEN).spec
    changed = graph.build().stages["thinker"]
    assert changed.kv_cache == 40 * 1024**3
    assert changed.devices_of(0) == ("cuda:0", "cuda:1")


def test_stages_connect_by_name_too():
    graph = Graph("p", model="m")
    graph.llm("thinker")
    graph.function("shout", "pkg.mod:shout", inputs=["text"], options={"loud": True})
    graph.connect("thinker", "shout", stream=True, credits=4)
    graph.output(text="shout")
    spec = graph.build()
    assert spec.edges == (EdgeSpec("thinker", "shout", stream=True, credits=4),)
    assert spec.stages["shout"].inputs == (PortType.TEXT,)
    assert spec.stages["shout"].options == {"loud": True}


def test_values_are_stored_parsed_and_specs_are_frozen():
    stage = StageSpec(name="a", kind="llm", kv_cache="2GiB", devices=["cpu"])  # type: ignore[arg-type]
    assert stage == StageSpec(name="a", kind=StageKind.LLM, kv_cache=2 * 1024**3)
    assert stage.part == "a"
    with pytest.raises(AttributeError):
        stage.replicas = 2  # type: ignore[misc]
    spec = starter().build()
    with pytest.raises(TypeError):
        spec.stages["new"] = stage  # type: ignore[index]


def test_edges_of_a_stage_in_both_directions():
    spec = starter().build()
    assert [edge.name for edge in spec.edges_into("thinker")] == ["hearing->thinker", "vision->thinker"]
    assert [edge.name for edge in spec.edges_out_of("thinker")] == ["thinker->talker"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda g: g.llm("t", max_num_seq=8),
            "stage 't': unknown setting 'max_num_seq'; did you mean 'max_num_seqs'",
        ),
        (lambda g: g.vocoder("v", kv_cache=1), "kv_cache: not a setting of kind vocoder; only of llm"),
        (lambda g: g.llm("t", max_num_seqs=0), "stage 't': max_num_seqs: must be at least 1, not 0"),
        (lambda g: g.llm("t", kind="encoder"), "unknown setting 'kind'"),
        (lambda g: g.llm("a b"), "must be a letter followed by"),
        (lambda g: g.llm("thinker"), "exists already"),
        (lambda g: g.connect("thinker", "thinkr"), "unknown stage 'thinkr'"),
        (lambda g: g.connect("thinker", "talker", chunk=4), "add stream: true"),
        (lambda g: g.connect("thinker", "talker", strem=True), "did you mean 'stream'"),
        (lambda g: g.output(text="thinkr"), "did you mean 'thinker'"),
        (lambda g: g.function("f", lambda text: text), "is a lambda"),
        (lambda g: Graph("p", max_que=3), "did you mean 'max_queue'"),
        (lambda g: Graph("p", max_queue=-1), "at least 0, not -1"),
    ],
)
def test_wrong_calls_are_refused_at_once(call, message):
    graph = Graph("p", model="m")
    graph.llm("thinker")
    graph.llm("talker")
    with pytest.raises(PipelineError, match=message):
        call(graph)


def test_build_reports_what_is_wrong_with_the_whole():
    graph = Graph("p", model="m")
    graph.llm("thinker")
    graph.vocoder("vocoder")
    graph.output(audio="thinker")
    with pytest.raises(PipelineError) as caught:
        graph.build()
    assert "has 3 problems" in caught.value.message
    assert "audio needs pcm; stages that do: vocoder" in caught.value.message


def test_a_function_stage_takes_a_callable():
    graph = Graph("p")
    graph.function("shout", shout)
    graph.output(text="shout")
    assert graph.build().stages["shout"].function.endswith(":shout")
