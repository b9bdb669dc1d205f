from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from omnistage.graph import Graph, load_pipeline
from omnistage.graph.draw import COLOURS, to_mermaid, to_svg
from omnistage.types import StageKind

SVG = "{http://www.w3.org/2000/svg}"


def luminance(colour: str) -> float:
    """Relative luminance of WCAG 2.2."""
    channels = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_the_svg_shows_every_stage_edge_and_output():
    spec = load_pipeline("starter")
    root = ElementTree.fromstring(to_svg(spec))
    texts = [element.text for element in root.iter(f"{SVG}text")]
    for name in spec.stages:
        assert name in texts
    assert texts.count("text") == 4  # prompt, output, hearing -> thinker and thinker -> talker
    assert {"embeddings", "latents", "pcm", "image", "audio", "whole", "stream"} <= set(texts)
    curves = [path for path in root.iter(f"{SVG}path") if path.get("d", "").count("C")]
    assert len(curves) == 4 + 3 + 2  # edges, what requests bring, outputs
    dashed = [path for path in curves if path.get("stroke-dasharray")]
    assert len(dashed) == 2 + 2


def test_everything_lies_inside_the_picture():
    root = ElementTree.fromstring(to_svg(load_pipeline("starter")))
    left, top, width, height = map(float, root.get("viewBox").split())
    for rect in root.iter(f"{SVG}rect"):
        assert float(rect.get("x")) >= left
        assert float(rect.get("y")) >= top
        assert float(rect.get("x")) + float(rect.get("width")) <= left + width + 1
        assert float(rect.get("y")) + float(rect.get("height")) <= top + height + 1


def test_names_from_users_are_escaped():
    graph = Graph("p")
    graph.function("f", "/a<b>&c.py:f")
    graph.output(text="f")
    ElementTree.fromstring(to_svg(graph.build()))


def test_a_long_edge_goes_round_the_stages_between():
    graph = Graph("p", model="m")
    graph.llm("a")
    graph.llm("b")
    graph.llm("c")
    graph.connect("a", "b")
    graph.connect("b", "c")
    graph.connect("a", "c", stream=True)
    graph.output(text="c")
    root = ElementTree.fromstring(to_svg(graph.build()))
    assert any(path.get("d").count("C") == 2 for path in root.iter(f"{SVG}path"))


@pytest.mark.parametrize("kind", list(StageKind))
def test_white_text_is_readable_on_every_box(kind):
    assert contrast(COLOURS[kind], "#ffffff") >= 4.5


@pytest.mark.parametrize("ground", ["#ffffff", "#0d1117"])
def test_text_outside_boxes_is_readable_on_light_and_dark(ground):
    colours = set(re.findall(r'<text[^>]*fill="(#[0-9a-f]{6})"', to_svg(load_pipeline("starter"))))
    assert colours
    assert all(contrast(colour, ground) >= 4.1 for colour in colours)


def test_mermaid_text():
    lines = to_mermaid(load_pipeline("starter")).splitlines()
    assert lines[0] == "flowchart LR"
    assert '    n2["<b>thinker</b><br/>llm<br/>cpu"]:::llm' in lines
    assert '    n1 -->|"embeddings"| n2' in lines
    assert '    n3 -.->|"latents"| n4' in lines
    assert sum("-.->" in line for line in lines) == 4
    assert sum("classDef" in line for line in lines) == len(StageKind) + 1


def test_mermaid_ids_do_not_depend_on_names():
    graph = Graph("p", model="m")
    graph.llm("end")
    graph.output(text="end")
    assert '    n0["<b>end</b><br/>llm<br/>cpu"]:::llm' in to_mermaid(graph.build()).splitlines()


def test_details_of_a_stage_are_shown():
    graph = Graph("p", model="m")
    graph.llm(
        "a",
        part="thinker",
        devices=["cuda:0", "cuda:1", "cuda:2", "cuda:3"],
        tensor_parallel=2,
        replicas=2,
    )
    graph.output(text="a")
    text = to_mermaid(graph.build())
    assert "llm · thinker<br/>cuda:0 cuda:1 cuda:2 cuda:3 · TP 2 · 2 replicas" in text
