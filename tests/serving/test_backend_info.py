"""What the API learns of a pipeline from its graph, its model's files and its workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from omnistage.errors import PipelineError, WeightsError
from omnistage.graph import Graph, PipelineSpec
from omnistage.serving.backend_info import check_sampling, describe
from omnistage.serving.replicas import ReplicaTable
from omnistage.types import Scalar, StageKind


def omni_spec(directory: Path, **sampling: Scalar) -> PipelineSpec:
    """As a Qwen3-Omni pipeline: a talker that is an llm."""
    graph = Graph("omni", model=str(directory))
    vision = graph.encoder("vision", part="visual")
    hearing = graph.encoder("hearing", part="audio_tower")
    thinker = graph.llm("thinker", sampling=sampling)
    talker = graph.llm("talker")
    vocoder = graph.vocoder("vocoder", part="code2wav")
    graph.connect(vision, thinker)
    graph.connect(hearing, thinker)
    graph.connect(thinker, talker, stream=True)
    graph.connect(talker, vocoder, stream=True)
    graph.output(text=thinker, audio=vocoder)
    return graph.build()


READY: dict[str, dict[str, Any]] = {
    "vision": {"modalities": ["image", "video"], "output": "embeddings"},
    "hearing": {"modalities": ["audio"], "output": "embeddings"},
    "thinker": {"max_model_len": 4096},
    "talker": {"max_model_len": 65536, "voices": ["chelsie", "ethan"]},
    "vocoder": {"sample_rate": 24000},
}


def ready(spec: PipelineSpec, facts: dict[str, dict[str, Any]]) -> ReplicaTable:
    table = ReplicaTable(spec.stages.values())
    for stage, info in facts.items():
        table.by_stage[stage][0].info = info
    return table


def test_a_checkpoint_of_one_directory(qwen3_omni_dir: Path):
    spec = omni_spec(qwen3_omni_dir, temperature=0.25, max_tokens=64)
    info = describe(spec, ready(spec, READY), str(qwen3_omni_dir))
    assert info.architecture == "qwen3_omni_moe"
    assert info.prompt_directory == info.model_dir == str(qwen3_omni_dir)
    assert info.encoders == {"image": "vision", "video": "vision", "audio": "hearing"}
    assert (info.entry, info.llm_stages) == ("thinker", ("thinker", "talker"))
    assert info.sampling == {"temperature": 0.25, "max_tokens": 64}
    assert info.voices == ("chelsie", "ethan"), "the talker's, where no generator has any"
    assert (info.max_model_len, info.sample_rate) == (4096, 24000)
    assert (info.speech_entry, info.transcriber) == (None, None)


def part(directory: Path, name: str, **files: Any) -> None:
    (directory / name).mkdir()
    for file, content in {"config": {"model_type": "llama"}, **files}.items():
        (directory / name / f"{file}.json").write_text(json.dumps(content))


def separate_spec(directory: Path) -> PipelineSpec:
    graph = Graph("parts", model=str(directory))
    hearing = graph.encoder("hearing")
    thinker = graph.llm("thinker", sampling={"top_k": 5})
    talker = graph.generator("talker")
    vocoder = graph.vocoder("vocoder")
    graph.connect(hearing, thinker)
    graph.connect(thinker, talker, stream=True)
    graph.connect(talker, vocoder, stream=True)
    graph.output(text=thinker, audio=vocoder)
    return graph.build()


def test_a_model_of_separate_parts(tmp_path: Path):
    settings = {"do_sample": False, "temperature": 0.6, "top_k": 50, "top_p": 0.9}
    part(tmp_path, "thinker", generation_config=settings)
    spec = separate_spec(tmp_path)
    facts = {
        "hearing": {"modalities": ["audio"], "output": "text"},
        "talker": {"voices": ["joe"]},
    }
    info = describe(spec, ready(spec, facts), str(tmp_path))
    assert info.architecture == ""
    assert info.prompt_directory == str(tmp_path / "thinker")
    assert info.sampling == {"temperature": 0.0, "top_k": 5, "top_p": 0.9}, "the pipeline's over the model's"
    assert (info.speech_entry, info.transcriber, info.voices) == ("talker", "hearing", ("joe",))
    assert info.llm_stages == ("thinker",)


def test_a_checkpoint_s_nonsense_is_an_error(tmp_path: Path):
    part(tmp_path, "thinker", generation_config={"top_p": 7})
    spec = separate_spec(tmp_path)
    with pytest.raises(WeightsError, match=r"generation_config.json.top_p' is 7.*mend the file"):
        describe(spec, ready(spec, {}), str(tmp_path))


@pytest.mark.parametrize(("name", "value"), [("temprature", 1), ("top_p", 0), ("max_tokens", "many")])
def test_a_pipeline_s_nonsense_is_an_error(tmp_path: Path, name: str, value: Scalar):
    spec = omni_spec(tmp_path, **{name: value})
    assert spec.stages["thinker"].kind is StageKind.LLM
    with pytest.raises(PipelineError, match=f"'stages.thinker.sampling.{name}' is"):
        check_sampling(spec)
    check_sampling(omni_spec(tmp_path, temperature=0.5))
