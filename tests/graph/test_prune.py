from __future__ import annotations

import pytest

from omnistage.graph.loader import load_pipeline, resolve_pipeline
from omnistage.graph.prune import prune


def pruned(pipeline="qwen3-omni", **what):
    went = []
    spec = resolve_pipeline(pipeline, adapt=lambda draft: went.extend(prune(draft, **what))).spec
    return spec, went


def test_nothing_to_prune():
    assert pruned() == (load_pipeline("qwen3-omni"), [])


@pytest.mark.parametrize(
    ("what", "gone"),
    [
        ({"stages": ["talker"]}, ["talker", "vocoder"]),
        ({"stages": ["vocoder"]}, ["talker", "vocoder"]),
        ({"outputs": ["audio"]}, ["talker", "vocoder"]),
        ({"stages": ["vision"]}, ["vision"]),
        ({"stages": ["talker", "hearing"]}, ["hearing", "talker", "vocoder"]),
    ],
)
def test_what_makes_no_sense_alone_goes_too(what, gone):
    whole = load_pipeline("qwen3-omni")
    spec, went = pruned(**what)
    assert went == gone
    assert list(spec.stages) == [name for name in whole.stages if name not in gone]
    assert spec.edges == tuple(
        edge for edge in whole.edges if edge.producer not in gone and edge.consumer not in gone
    )
    assert dict(spec.outputs) == ({"text": "thinker"} if "vocoder" in gone else dict(whole.outputs))


def test_a_pipeline_can_be_pruned_to_nothing():
    draft_left = []
    went = []

    def adapt(draft):
        went.extend(prune(draft, stages=["thinker"]))
        draft_left.append((dict(draft.stages), list(draft.edges), dict(draft.outputs)))

    with pytest.raises(Exception, match="output"):
        resolve_pipeline("qwen3-omni", adapt=adapt)
    assert went == ["vision", "hearing", "thinker", "talker", "vocoder"]
    assert draft_left == [({}, [], {})]
