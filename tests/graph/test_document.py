from __future__ import annotations

import pytest

from omnistage.errors import PipelineError
from omnistage.graph.document import line_of, read_yaml


def test_data_remembers_its_lines():
    data = read_yaml("a: 1\nb:\n  - x\n  - {c: 2,\n     d: 3}\n", "f.yaml")
    assert data == {"a": 1, "b": ["x", {"c": 2, "d": 3}]}
    assert line_of(data, "b") == 2
    assert line_of(data["b"], 1) == 4
    assert line_of(data["b"][1], "d") == 5
    assert line_of({"plain": 1}, "plain") == 0


def test_an_empty_document_is_none():
    assert read_yaml("# nothing\n", "f.yaml") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", r"f\.yaml:3: 'a' is already given in line 1"),
        ("a: &x 1\nb: *x\n", r"f\.yaml:1: aliases"),
        ("a: {<<: {b: 1}}\n", r"f\.yaml:1: merge keys"),
        ("a: [1, 2\n", r"f\.yaml:\d: not valid YAML"),
        ("a: !!python/object/apply:os.getcwd []\nb: !thing x", r"f\.yaml:2: not valid YAML"),
        ("a: 1\n---\nb: 2\n", r"f\.yaml:2: not valid YAML"),
        ("? [a]\n: 1\n", r"f\.yaml:1: a key must be a word"),
        ("a: 2024-13-41\n", r"f\.yaml:1: '2024-13-41' cannot be read"),
        ("a: \x00\n", r"f\.yaml: not valid YAML"),
        ("a: " + "[" * 5000 + "]" * 5000, r"f\.yaml: nested deeper"),
        ("a: " + "[" * 40 + "]" * 40, r"f\.yaml:1: nested deeper"),
    ],
)
def test_what_yaml_would_let_pass_is_an_error_with_its_line(text, message):
    with pytest.raises(PipelineError, match=message):
        read_yaml(text, "f.yaml")
