from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from omnistage.errors import PipelineError
from omnistage.graph import load_pipeline
from omnistage.graph.loader import built_in_names, from_json, resolve_pipeline, resolve_text
from omnistage.types import StageKind

SMALL = """\
name: small
model: m
stages:
  thinker: {kind: llm}
outputs: {text: thinker}
"""


def problems_of(text: str, *overrides: str) -> list[str]:
    with pytest.raises(PipelineError) as caught:
        resolve_text(text, filename="p.yaml", overrides=overrides)
    head, *lines = caught.value.message.split("\n  ")
    return lines or [head.partition(": ")[2]]


def test_the_starter_is_built_in():
    spec = load_pipeline("starter")
    assert "starter" in built_in_names()
    assert list(spec.stages) == ["hearing", "vision", "thinker", "talker", "vocoder"]
    thinker = spec.stages["thinker"]
    assert thinker.kind is StageKind.LLM
    assert (thinker.kv_cache, thinker.max_num_seqs) == (256 * 1024**2, 32)
    assert (thinker.max_num_batched_tokens, thinker.max_model_len) == (512, 2048)
    assert spec.edges[3].name == "talker->vocoder"
    assert (spec.edges[3].first_chunk, spec.edges[3].chunk) == (24, 64)
    assert {stage.devices for stage in spec.stages.values()} == {("cpu",)}


def test_neither_torch_nor_transformers_is_imported():
    code = (
        "import sys, omnistage.graph, omnistage.graph.plan, omnistage.graph.draw, omnistage.graph.schema;"
        "omnistage.graph.load_pipeline('starter');"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_file_is_loaded_and_its_functions_are_found_beside_it(tmp_path):
    path = tmp_path / "p.yaml"
    path.write_text("name: p\nstages: {f: {kind: function, function: 'f.py:g'}}\noutputs: {text: f}\n")
    for source in (path, str(path)):
        assert load_pipeline(source).stages["f"].function == f"{tmp_path.resolve()}/f.py:g"


def test_every_value_has_a_source():
    text = SMALL.replace("{kind: llm}", "{kind: llm, max_num_seqs: 16}")
    resolved = resolve_text(text, filename="p.yaml", overrides=["thinker.replicas=2", "max_queue=9"])
    assert resolved.source(("name",)) == "p.yaml:1"
    assert resolved.source(("stages", "thinker", "max_num_seqs")) == "p.yaml:4"
    assert resolved.source(("stages", "thinker", "replicas")) == "flag thinker.replicas=2"
    assert resolved.source(("max_queue",)) == "flag max_queue=9"
    assert resolved.source(("stages", "thinker", "dtype")) == "default"
    assert resolved.spec.stages["thinker"].replicas == 2
    assert resolved.spec.max_queue == 9


@pytest.mark.parametrize(
    ("flag", "read"),
    [
        ("thinker.max_num_seqs=8", lambda s: s.stages["thinker"].max_num_seqs == 8),
        ("stages.thinker.max_num_seqs=8", lambda s: s.stages["thinker"].max_num_seqs == 8),
        ("thinker.devices=[cuda:0]", lambda s: s.stages["thinker"].devices == ("cuda:0",)),
        ("thinker.kv_cache=1GiB", lambda s: s.stages["thinker"].kv_cache == 1024**3),
        ("thinker.enable_prefix_cache=false", lambda s: not s.stages["thinker"].enable_prefix_cache),
        ("thinker.max_model_len=null", lambda s: s.stages["thinker"].max_model_len is None),
        ("talker->vocoder.chunk=32", lambda s: s.edges[3].chunk == 32),
        ("edges.talker -> vocoder.chunk=32", lambda s: s.edges[3].chunk == 32),
        ("model=/a/b=c", lambda s: s.model == "/a/b=c"),
        ("model=123", lambda s: s.model == "123"),
        ("outputs.text=hearing", lambda s: s.outputs["text"] == "hearing"),
        ("device_memory.cpu=8GiB", lambda s: s.device_memory == {"cpu": 8 * 1024**3}),
    ],
)
def test_flags_set_values(flag, read):
    assert read(load_pipeline("starter", overrides=[flag]))


def test_the_later_flag_wins():
    spec = load_pipeline("starter", overrides=["max_queue=1", "max_queue=2"])
    assert spec.max_queue == 2


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        (
            "thnker.max_num_seqs=8",
            "--set thnker.max_num_seqs=8: no stage or setting 'thnker'; did you mean 'thinker'?",
        ),
        ("thinker.max_num_seq=8", "did you mean 'max_num_seqs'?"),
        (
            "thinker.max_num_seqs=0",
            "--set thinker.max_num_seqs=0: stages.thinker.max_num_seqs: must be at least 1, not 0",
        ),
        ("thinker.max_num_seqs=[", "not valid YAML"),
        ("thinker.name=x", "names no setting"),
        ("thinker=x", "names no setting"),
        ("thinker", "must be KEY=VALUE"),
        ("talker->vocodr.chunk=3", "no edge 'talker->vocodr'; did you mean 'talker->vocoder'?"),
        ("outputs.text=thinkr", "did you mean 'thinker'?"),
        ("vocoder.kv_cache=1GiB", "not a setting of kind vocoder; only of llm"),
    ],
)
def test_wrong_flags_are_named(flag, message):
    with pytest.raises(PipelineError) as caught:
        load_pipeline("starter", overrides=[flag])
    assert message in caught.value.message


def test_all_problems_are_reported_at_once_with_their_lines():
    lines = problems_of(
        """\
name: bad
modle: x
stages:
  hearing: {kind: encoder, kv_cache: 2GiB}
  thinker: {kind: llm, max_num_seq: 8,
            kv_cache: 2 gigs}
  talker: {kind: generater}
  vocoder: {kind: vocoder}
edges:
  - hearing -> thinkr
  - thinker -> talker: {chunk: 4}
  - talker => vocoder
outputs: {text: thinker, audio: thinker}
"""
    )
    expected = [
        "p.yaml:2: modle: unknown key; did you mean 'model'?",
        "p.yaml:4: stages.hearing.kv_cache: not a setting of kind encoder; only of llm",
        "p.yaml:5: stages.thinker.max_num_seq: unknown key; did you mean 'max_num_seqs'?",
        "p.yaml:6: stages.thinker.kv_cache: '2 gigs' is not a byte size",
        "p.yaml:7: stages.talker.kind: must be one of encoder, llm, generator, vocoder, function",
        "p.yaml:10: edges.hearing->thinkr: unknown stage 'thinkr'; did you mean 'thinker'?",
        "p.yaml:11: edges.thinker->talker.chunk: only a stream has this setting; add stream: true",
        "p.yaml:12: edges.3: 'talker => vocoder' is not an edge; write 'producer -> consumer'",
        "p.yaml:13: outputs.audio: thinker gives text or tokens",
    ]
    for start in expected:
        assert any(line.startswith(start) for line in lines), start
    numbered = [int(found[1]) for line in lines if (found := re.match(r"p\.yaml:(\d+):", line))]
    assert numbered == sorted(numbered)


@pytest.mark.parametrize("flag", ["change.options.word=x", "change.options={word: x}"])
def test_flags_set_options_of_a_function(flag):
    text = "name: f\nstages: {change: {kind: function, function: 'a.b:c'}}\noutputs: {text: change}\n"
    spec = resolve_text(text, filename="f.yaml", overrides=[flag]).spec
    assert spec.stages["change"].options == {"word": "x"}


def test_only_functions_take_options():
    with pytest.raises(PipelineError, match=r"talker\.options.*only of function"):
        load_pipeline("starter", overrides=["talker.options.voice=joe"])


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("", ["must be a mapping"]),
        ("- a\n", ["must be a mapping"]),
        ("name: x\n", ["stages: missing", "outputs: missing"]),
        ("name: 3\nstages: {a: {kind: llm}}\noutputs: {text: a}\nmodel: m", ["not 3; put it in quotes"]),
        (
            SMALL.replace("{kind: llm}", "{max_num_seqs: 3}"),
            ["stages.thinker.kind: missing; one of encoder, llm"],
        ),
        (SMALL.replace("{kind: llm}", "llm"), ["must be a mapping of settings, not 'llm'"]),
        (SMALL.replace("{text: thinker}", "thinker"), ["outputs: must be a mapping"]),
        (SMALL.replace("{text: thinker}", "{text: 3}"), ["must be a stage's name, not 3"]),
        (SMALL + "edges: {a: b}\n", ["edges: must be a list"]),
        (SMALL + "edges: [{a -> b: {}, c -> d: {}}]\n", ["is not an edge"]),
        (SMALL + "edges: [thinker -> ]\n", ["is not an edge"]),
        (SMALL.replace("name: small", "name: small\nname: s"), ["'name' is already given in line 1"]),
        (SMALL.replace("{kind: llm}", "{kind: llm, kv_cache: null}"), ["None is not a byte size"]),
        (SMALL.replace("{kind: llm}", "{kind: llm, 7: 8}"), ["stages.thinker.7: unknown key"]),
        (SMALL.replace("{kind: llm}", "{kind: [llm]}"), ["must be one of encoder"]),
        (
            SMALL.replace("thinker: {", "3: {"),
            ["name must be text, not 3", "unknown stage 'thinker'"],
        ),
    ],
)
def test_files_of_the_wrong_shape_say_so(text, messages):
    lines = problems_of(text)
    for message in messages:
        assert any(message in line for line in lines), lines
    assert len(lines) == len(messages), lines


def test_one_problem_is_told_in_one_line():
    with pytest.raises(
        PipelineError, match=r"^pipeline 'small': p\.yaml:4: stages\.thinker\.xyz: unknown key"
    ):
        resolve_text(SMALL.replace("{kind: llm}", "{kind: llm, xyz: 1}"), filename="p.yaml")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("startr", "no built-in pipeline 'startr'; did you mean 'starter'"),
        ("no/such.yaml", "cannot be read: No such file"),
        (Path("nothing"), "cannot be read"),
    ],
)
def test_a_missing_pipeline_says_what_there_is(source, message):
    with pytest.raises(PipelineError, match=message):
        resolve_pipeline(source)


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "p.yaml"
    path.write_bytes(b"name: \xff\xfe")
    with pytest.raises(PipelineError, match="not UTF-8"):
        load_pipeline(path)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"name": "x"}'])
def test_broken_json_is_refused(data):
    with pytest.raises(PipelineError):
        from_json(data)


@pytest.mark.parametrize("name", built_in_names())
def test_every_built_in_pipeline_is_valid(name):
    assert load_pipeline(name).name == name


def test_a_pipeline_can_be_adapted_before_flags_are_applied():
    def adapt(draft):
        draft.stages["thinker"] |= {"kv_cache": "1MiB", "max_num_seqs": 3}
        draft.origins |= {("stages", "thinker", key): "a guess" for key in ("kv_cache", "max_num_seqs")}

    resolved = resolve_pipeline("llm", overrides=["thinker.max_num_seqs=5"], adapt=adapt)
    thinker = resolved.spec.stages["thinker"]
    assert (thinker.kv_cache, thinker.max_num_seqs) == (1024**2, 5)
    assert resolved.source(("stages", "thinker", "kv_cache")) == "a guess"
    assert resolved.source(("stages", "thinker", "max_num_seqs")) == "flag thinker.max_num_seqs=5"
