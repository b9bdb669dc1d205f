from __future__ import annotations

import json
from importlib import resources

import pytest
import yaml

from omnistage.graph.dump import to_plain
from omnistage.graph.loader import built_in_names, load_pipeline
from omnistage.graph.schema import pipeline_schema, schema_json, settings_markdown
from omnistage.graph.spec import EDGE_SETTINGS, PIPELINE_SETTINGS, STAGE_SETTINGS
from omnistage.types import StageKind

STAGE_KEYS = [name for name in STAGE_SETTINGS if name != "name"]


def valid(document) -> bool:
    jsonschema = pytest.importorskip("jsonschema")
    return jsonschema.Draft202012Validator(pipeline_schema()).is_valid(document)


def small(stage: dict, edges: list = ()) -> dict:
    return {"name": "p", "model": "m", "stages": {"a": stage}, "edges": list(edges), "outputs": {"text": "a"}}


def test_the_schema_is_a_schema():
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(pipeline_schema())


def test_the_text_form_is_the_same_schema():
    assert json.loads(schema_json()) == pipeline_schema()


@pytest.mark.parametrize("name", built_in_names())
def test_built_in_pipelines_fit_in_the_short_and_in_the_long_form(name):
    text = (resources.files("omnistage.configs") / f"{name}.yaml").read_text()
    assert valid(yaml.safe_load(text))
    assert valid(to_plain(load_pipeline(name)))


@pytest.mark.parametrize(
    "document",
    [
        {},
        small({}),
        small({"kind": "lmm"}),
        small({"kind": "llm", "max_num_seq": 3}),
        small({"kind": "vocoder", "kv_cache": 3}),
        small({"kind": "llm", "kv_cache": "2 gigs"}),
        small({"kind": "llm", "devices": ["gpu"]}),
        small({"kind": "llm", "replicas": 0}),
        small({"kind": "function"}),
        small({"kind": "llm"}, ["a => b"]),
        small({"kind": "llm"}, [{"a -> b": {"chunk": 3}}]),
        small({"kind": "llm"}, [{"a -> b": {"stream": False, "chunk": 3}}]),
        {**small({"kind": "llm"}), "modle": "x"},
        {**small({"kind": "llm"}), "outputs": {"sound": "a"}},
    ],
)
def test_what_the_loader_refuses_the_schema_refuses(document):
    assert not valid(document)


@pytest.mark.parametrize(
    "document",
    [
        small({"kind": "llm"}),
        small({"kind": "llm", "kv_cache": "2GiB", "max_model_len": None}),
        small({"kind": "function", "function": "a.b:c", "inputs": ["text"], "options": {"x": 1.5}}),
        small({"kind": "llm"}, ["a -> b", {"a->b": {"stream": True, "chunk": 3}}, {"a -> b": None}]),
    ],
)
def test_what_the_loader_takes_the_schema_takes(document):
    assert valid(document)


def test_every_setting_is_described_once_with_its_default():
    schema = pipeline_schema()
    for kind in StageKind:
        properties = schema["$defs"][kind]["properties"]
        assert set(properties) == {name for name in STAGE_KEYS if STAGE_SETTINGS[name].allows(kind)}
        assert all("description" in value for key, value in properties.items() if key != "kind")
    thinker = schema["$defs"]["llm"]["properties"]
    assert thinker["max_num_seqs"]["default"] == 32
    assert thinker["kv_cache"]["default"] == "256MiB"
    assert "Unit: tokens." in thinker["max_model_len"]["description"]


def test_the_docs_table_has_a_row_per_setting():
    text = settings_markdown()
    ends = ("producer", "consumer")
    count = (
        len(PIPELINE_SETTINGS) + len(STAGE_KEYS) + len([name for name in EDGE_SETTINGS if name not in ends])
    )
    assert text.count("\n| `") == count
    assert "| `kv_cache` | llm | byte size | bytes | `256MiB` |" in text
