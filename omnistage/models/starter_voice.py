"""Convert a Piper voice (one ONNX file and its JSON) to the talker's and the vocoder's files.

The exported graph keeps the training names of its weights (enc_p, dp, flow, dec) but for three kinds:
weights folded from weight norm are anonymous and take the name of their convolution's bias, the
phoneme embedding has lost its name, and the duration flow's log scale is stored as exp(-log_scale).
Sizes are read from the tensors and the graph.  Only this module needs the `onnx` package.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from omnistage.errors import WeightsError
from omnistage.models import hifigan, vits
from omnistage.models.vits_files import CONFIG_FILE, PHONEMES_FILE, WEIGHTS_FILE

Array = NDArray[Any]

TAIL_BOUND = 5.0  # of the duration splines; a constant of VITS


class _Graph:
    """The ONNX graph as named weights and convolution attributes."""

    def __init__(self, path: Path) -> None:
        import onnx
        from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

        try:
            graph = onnx.load(str(path)).graph
        except (OSError, DecodeError) as error:
            raise WeightsError(f"cannot read the voice {path}: {error}; download it again") from error
        stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
        self.weights: dict[str, Array] = dict(stored)
        self._attributes: dict[str, dict[str, list[int]]] = {}  # of each convolution, by its weight's name
        for node in graph.node:
            if node.op_type in ("Conv", "ConvTranspose"):
                name = node.input[1]
                if name.startswith("onnx::") and len(node.input) > 2:
                    name = node.input[2].removesuffix(".bias") + ".weight"
                    self.weights[name] = stored[node.input[1]]
                self._attributes[name] = {item.name: list(item.ints) for item in node.attribute}
            elif node.name == "/enc_p/emb/Gather":
                self.weights["enc_p.emb.weight"] = stored[node.input[0]]
            elif node.name == "/dp/flows.0/Mul":
                folded = [stored[name] for name in node.input if name in stored]
                if folded:
                    self.weights["dp.flows.0.logs"] = -np.log(folded[0])

    def __getitem__(self, name: str) -> Array:
        if name not in self.weights:
            raise WeightsError(
                f"the voice's ONNX file has no weight {name!r}; only Piper's VITS voices convert"
            )
        return self.weights[name]

    def attribute(self, weight: str, attribute: str) -> int:
        return self._attributes[weight][attribute][0]

    def count(self, template: str) -> int:
        """How many weights there are with 0, 1, 2, ... in the template's place."""
        number = 0
        while template.format(number) in self.weights:
            number += 1
        return number

    def take(self, pairs: Iterable[tuple[str, str]]) -> dict[str, Array]:
        """Weights and biases of modules, renamed: pairs of (new prefix, old prefix)."""
        return {f"{new}.{kind}": self[f"{old}.{kind}"] for new, old in pairs for kind in ("weight", "bias")}


def convert_voice(onnx_path: Path, json_path: Path, talker_dir: Path, vocoder_dir: Path) -> None:
    """Write talker_dir (config, weights, phoneme map) and vocoder_dir (config, weights).

    The directories are created.  Raises WeightsError if the files are not a one-speaker Piper voice
    phonemized by eSpeak NG, of medium quality or lower.
    """
    try:
        voice: dict[str, Any] = json.loads(json_path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise WeightsError(f"cannot read {json_path}: {error}; download the voice again") from error
    if voice.get("num_speakers", 1) != 1 or voice.get("phoneme_type", "espeak") != "espeak":
        raise WeightsError(
            f"{json_path.name} has {voice.get('num_speakers')} speakers and phonemes by "
            f"{voice.get('phoneme_type')!r}; only one-speaker voices phonemized by espeak convert"
        )
    graph = _Graph(onnx_path)
    try:
        talker, vocoder, phoneme_map = (
            _talker_config(graph, voice),
            _vocoder_config(graph, voice),
            voice["phoneme_id_map"],
        )
    except KeyError as error:
        raise WeightsError(f"{json_path.name} has no {error}; only Piper's voices convert") from error
    _write(talker_dir, talker, _talker_weights(graph))
    (talker_dir / PHONEMES_FILE).write_text(json.dumps(phoneme_map, ensure_ascii=False), encoding="utf-8")
    _write(
        vocoder_dir,
        vocoder,
        {name[4:]: weight for name, weight in graph.weights.items() if name.startswith("dec.")},
    )


def _write(directory: Path, config: Mapping[str, Any], weights: Mapping[str, Array]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: np.ascontiguousarray(weight, dtype=np.float32) for name, weight in weights.items()},
        directory / WEIGHTS_FILE,
    )
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _talker_config(graph: _Graph, voice: Mapping[str, Any]) -> dict[str, Any]:
    embedding = graph["enc_p.emb.weight"]
    offsets = graph["enc_p.encoder.attn_layers.0.emb_rel_k"]
    ffn = graph["enc_p.encoder.ffn_layers.0.conv_1.weight"]
    latent_size = graph["enc_p.proj.weight"].shape[0] // 2
    num_wavenet_layers = graph.count("flow.flows.0.enc.in_layers.{}.weight")
    gate = "flow.flows.0.enc.in_layers.{}.weight"
    duration_conv = graph["dp.convs.convs_sep.0.weight"]
    inference = voice["inference"]
    return {
        "model_type": vits.MODEL_TYPE,
        "voices": {voice["dataset"]: voice["espeak"]["voice"]},
        "frame_rate": voice["audio"]["sample_rate"] / math.prod(_upsample_rates(graph)),
        "inference": {
            "noise_scale": inference["noise_scale"],
            "length_scale": inference["length_scale"],
            "duration_noise_scale": inference["noise_w"],
        },
        "text_encoder": {
            "num_symbols": embedding.shape[0],
            "hidden_size": embedding.shape[1],
            "num_layers": graph.count("enc_p.encoder.attn_layers.{}.conv_q.weight"),
            "num_heads": embedding.shape[1] // offsets.shape[2],
            "window_size": (offsets.shape[1] - 1) // 2,
            "ffn_size": ffn.shape[0],
            "ffn_kernel_size": ffn.shape[2],
            "latent_size": latent_size,
        },
        "duration": {
            "hidden_size": duration_conv.shape[0],
            "kernel_size": duration_conv.shape[2],
            "num_layers": graph.count("dp.convs.convs_sep.{}.weight"),
            "num_flows": len(_duration_flows(graph)),
            "num_bins": (graph["dp.flows.3.proj.weight"].shape[0] + 1) // 3,
            "tail_bound": TAIL_BOUND,
        },
        "flow": {
            "latent_size": latent_size,
            "hidden_size": graph["flow.flows.0.pre.weight"].shape[0],
            "num_couplings": len(_couplings(graph)),
            "kernel_size": graph[gate.format(0)].shape[2],
            "dilations": [
                graph.attribute(gate.format(layer), "dilations") for layer in range(num_wavenet_layers)
            ],
        },
    }


def _duration_flows(graph: _Graph) -> list[int]:
    """Numbers of the spline flows in the order of inference; training's first one is not in the graph."""
    return [number for number in range(63, 1, -2) if f"dp.flows.{number}.pre.weight" in graph.weights]


def _couplings(graph: _Graph) -> list[int]:
    """Numbers of the prior's couplings in the order of inference; odd numbers are flips."""
    return [number for number in range(62, -1, -2) if f"flow.flows.{number}.pre.weight" in graph.weights]


def _talker_weights(graph: _Graph) -> dict[str, Array]:
    return {**_text_weights(graph), **_duration_weights(graph), **_flow_weights(graph)}


def _text_weights(graph: _Graph) -> dict[str, Array]:
    weights = {
        "text_encoder.embedding": graph["enc_p.emb.weight"],
        "text_encoder.projection.weight": graph["enc_p.proj.weight"][:, :, 0],
        "text_encoder.projection.bias": graph["enc_p.proj.bias"],
    }
    for layer in range(graph.count("enc_p.encoder.attn_layers.{}.conv_q.weight")):
        old, new = f"enc_p.encoder.attn_layers.{layer}", f"text_encoder.layers.{layer}"
        for name, letter in (("query", "q"), ("key", "k"), ("value", "v"), ("output", "o")):
            weights[f"{new}.attention.{name}.weight"] = graph[f"{old}.conv_{letter}.weight"][:, :, 0]
            weights[f"{new}.attention.{name}.bias"] = graph[f"{old}.conv_{letter}.bias"]
        weights[f"{new}.attention.key_offsets"] = graph[f"{old}.emb_rel_k"][0]
        weights[f"{new}.attention.value_offsets"] = graph[f"{old}.emb_rel_v"][0]
        weights |= _norm(graph, f"{new}.attention_norm", f"enc_p.encoder.norm_layers_1.{layer}")
        weights |= _norm(graph, f"{new}.ffn_norm", f"enc_p.encoder.norm_layers_2.{layer}")
        ffn = f"enc_p.encoder.ffn_layers.{layer}"
        weights |= graph.take([(f"{new}.ffn_in", f"{ffn}.conv_1"), (f"{new}.ffn_out", f"{ffn}.conv_2")])
    return weights


def _norm(graph: _Graph, new: str, old: str) -> dict[str, Array]:
    return {f"{new}.weight": graph[f"{old}.gamma"], f"{new}.bias": graph[f"{old}.beta"]}


def _duration_weights(graph: _Graph) -> dict[str, Array]:
    weights = {
        "durations.shift": graph["dp.flows.0.m"],
        "durations.log_scale": graph["dp.flows.0.logs"],
        **graph.take([("durations.entry", "dp.pre"), ("durations.exit", "dp.proj")]),
        **_stack_weights(graph, "durations.stack", "dp.convs"),
    }
    for index, number in enumerate(_duration_flows(graph)):
        new, old = f"durations.couplings.{index}", f"dp.flows.{number}"
        weights |= graph.take([(f"{new}.entry", f"{old}.pre"), (f"{new}.exit", f"{old}.proj")])
        weights |= _stack_weights(graph, f"{new}.stack", f"{old}.convs")
    return weights


def _stack_weights(graph: _Graph, new: str, old: str) -> dict[str, Array]:
    weights: dict[str, Array] = {}
    for layer in range(graph.count(old + ".convs_sep.{}.weight")):
        weights |= graph.take(
            [
                (f"{new}.depthwise.{layer}", f"{old}.convs_sep.{layer}"),
                (f"{new}.pointwise.{layer}", f"{old}.convs_1x1.{layer}"),
            ]
        )
        weights |= _norm(graph, f"{new}.depthwise_norms.{layer}", f"{old}.norms_1.{layer}")
        weights |= _norm(graph, f"{new}.pointwise_norms.{layer}", f"{old}.norms_2.{layer}")
    return weights


def _flow_weights(graph: _Graph) -> dict[str, Array]:
    weights: dict[str, Array] = {}
    for index, number in enumerate(_couplings(graph)):
        new, old = f"flow.couplings.{index}", f"flow.flows.{number}"
        weights |= graph.take([(f"{new}.entry", f"{old}.pre"), (f"{new}.exit", f"{old}.post")])
        for layer in range(graph.count(old + ".enc.in_layers.{}.weight")):
            weights |= graph.take(
                [
                    (f"{new}.wavenet.gates.{layer}", f"{old}.enc.in_layers.{layer}"),
                    (f"{new}.wavenet.mixes.{layer}", f"{old}.enc.res_skip_layers.{layer}"),
                ]
            )
    return weights


def _upsample_rates(graph: _Graph) -> list[int]:
    """Their product is the number of samples per frame."""
    count = graph.count("dec.ups.{}.weight")
    return [graph.attribute(f"dec.ups.{stage}.weight", "strides") for stage in range(count)]


def _vocoder_config(graph: _Graph, voice: Mapping[str, Any]) -> dict[str, Any]:
    entry = graph["dec.conv_pre.weight"]
    num_upsamplings = graph.count("dec.ups.{}.weight")
    upsamplings = [f"dec.ups.{stage}.weight" for stage in range(num_upsamplings)]
    num_blocks = graph.count("dec.resblocks.{}.convs.0.weight")
    if not num_blocks:
        raise WeightsError(
            "the voice's vocoder has residual blocks of the first kind (high quality); use a medium voice"
        )
    blocks = [f"dec.resblocks.{block}.convs." for block in range(num_blocks // len(upsamplings))]
    return {
        "model_type": hifigan.MODEL_TYPE,
        "sample_rate": voice["audio"]["sample_rate"],
        "num_channels": entry.shape[1],
        "initial_channels": entry.shape[0],
        "kernel_size": entry.shape[2],
        "upsample_rates": _upsample_rates(graph),
        "upsample_kernel_sizes": [graph[name].shape[2] for name in upsamplings],
        "resblock_kernel_sizes": [graph[block + "0.weight"].shape[2] for block in blocks],
        "resblock_dilations": [
            [
                graph.attribute(f"{block}{layer}.weight", "dilations")
                for layer in range(graph.count(block + "{}.weight"))
            ]
            for block in blocks
        ],
    }
