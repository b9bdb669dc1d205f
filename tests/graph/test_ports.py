from __future__ import annotations

import pytest

from omnistage.graph import StageSpec
from omnistage.graph.ports import edge_port, edge_ports, encoder_media, output_ports, port_list
from omnistage.types import PortType, StageKind


def stage(kind: str, part: str = "unknown", **settings) -> StageSpec:
    if kind != "function":
        settings["part"] = part
    return StageSpec(name="s", kind=StageKind(kind), **settings)


@pytest.mark.parametrize(
    ("producer", "consumer", "port"),
    [
        (stage("encoder", "hearing"), stage("llm"), "text"),
        (stage("encoder", "vision"), stage("llm"), "embeddings"),
        (stage("encoder", "audio_tower"), stage("llm"), "embeddings"),
        (stage("encoder"), stage("llm"), "embeddings"),
        (stage("encoder"), stage("function"), "text"),
        (stage("llm"), stage("llm"), "hidden_states"),
        (stage("llm"), stage("generator"), "text"),
        (stage("llm"), stage("vocoder"), "codec_frames"),
        (stage("generator"), stage("vocoder"), "latents"),
        (stage("llm"), stage("function"), "text"),
        (stage("vocoder"), stage("function", inputs=["pcm"]), "pcm"),
        (stage("function", outputs=["codec_frames"]), stage("vocoder"), "codec_frames"),
        (stage("vocoder"), stage("llm"), None),
        (stage("llm"), stage("encoder"), None),
        (stage("generator"), stage("llm"), None),
        (stage("encoder", "vision"), stage("generator"), None),
        (stage("function"), stage("vocoder"), None),
    ],
)
def test_what_passes_over_an_edge(producer, consumer, port):
    assert edge_port(producer, consumer) == port
    assert bool(edge_ports(producer, consumer)) == (port is not None)


def test_an_unknown_encoder_part_may_make_text_or_embeddings():
    assert output_ports(stage("encoder")) == {PortType.TEXT, PortType.EMBEDDINGS}


def test_what_encoders_read():
    assert encoder_media(stage("encoder", "hearing")) == "audio"
    assert encoder_media(stage("encoder", "visual")) == "image"
    assert encoder_media(stage("encoder")) == "media"


def test_lists_for_messages():
    assert port_list(frozenset({PortType.PCM, PortType.TEXT})) == "text or pcm"
    assert port_list(frozenset()) == "nothing"
