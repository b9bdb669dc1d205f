"""Finds a model's parts on disk and the code that runs each of them.

Importable without torch: the table holds names of factories, which are imported when a part is loaded.
A model is a directory; a part of it is a subdirectory with its own config.json, or what LAYOUTS says of
the model's architecture, or a `<part>_config` entry in the model's config.json, or the model itself.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from omnistage.errors import WeightsError
from omnistage.graph import PipelineSpec
from omnistage.graph.checkpoint import (
    INDEX_FILE,
    TensorInfo,
    check_shards,
    main_dtype,
    read_config,
    read_headers,
    shard_names,
)
from omnistage.graph.fields import size_text
from omnistage.graph.parts import PartFiles
from omnistage.home import omnistage_home
from omnistage.models.hub import cached_model, is_hub_name
from omnistage.models.layouts import LAYOUTS, PartLayout
from omnistage.types import StageKind

if TYPE_CHECKING:
    from omnistage.models.decoder import Decoder
    from omnistage.models.protocols import AcousticModel, EncoderModel, VocoderModel

Progress = Callable[[float, str], None]  # fraction done in [0, 1], what is being done

STARTER = "starter"
_IMPORTED, _ALMOST = 0.05, 0.99  # fractions done once a part's code is there, and before it is ready

# role -> model_type of config.json -> "module:factory".  A factory is called as
# factory(source, device=str, dtype=str), a decoder's as factory(directory, dtype=torch.dtype, prefix=str).
FACTORIES: dict[str, dict[str, str]] = {
    "encoder": {
        "whisper": "omnistage.models.whisper:load_whisper",
        "efficientnet_lite0": "omnistage.models.efficientnet:load_efficientnet",
        "qwen3_omni_moe_audio_encoder": "omnistage.models.qwen3_encoders:load_audio_encoder",
        "qwen3_omni_moe_vision_encoder": "omnistage.models.qwen3_encoders:load_vision_encoder",
        "qwen3_vl_vision": "omnistage.models.qwen3_encoders:load_vision_encoder",
    },
    "acoustic": {"vits_acoustic": "omnistage.models.vits:load_acoustic"},
    "vocoder": {
        "vits_hifigan": "omnistage.models.hifigan:load_vocoder",
        "qwen3_omni_moe_code2wav": "omnistage.models.qwen3_code2wav:load_code2wav",
    },
    "decoder": {
        "llama": "omnistage.models.decoder:load_decoder",
        "qwen2": "omnistage.models.decoder:load_decoder",
        "qwen3": "omnistage.models.decoder:load_decoder",
        "qwen3_moe": "omnistage.models.qwen3_omni_thinker:load_thinker",
        "qwen3_vl_text": "omnistage.models.qwen3_omni_thinker:load_thinker",
        "qwen3_omni_moe_thinker": "omnistage.models.qwen3_omni_thinker:load_thinker",
        "qwen3_omni_moe_talker": "omnistage.models.qwen3_omni_talker:load_talker",
        "null": "omnistage.models.null:load_null",
    },
}


@dataclass(frozen=True)
class PartSource:
    """Where one part's weights are and what its configuration says.

    directory: holds the *.safetensors files and, where the part has one, tokenizer.json.
    config: the part's own configuration, its model_type the one that FACTORIES knows.
    prefix: how its tensors' names begin in the files, "" or ending in a dot.
    layout: what LAYOUTS says of it, None for a part that is not laid out there.
    """

    directory: Path
    config: dict[str, Any]
    prefix: str = ""
    layout: PartLayout | None = None

    @property
    def model_type(self) -> str:
        """Raises WeightsError if the configuration does not say."""
        kind = self.config.get("model_type")
        if not isinstance(kind, str):
            raise WeightsError(f"the configuration in {self.directory} has no model_type")
        return kind

    @property
    def prefixes(self) -> tuple[str, ...]:
        """What the names of all tensors that the part loads begin with."""
        return (self.prefix,) if self.layout is None else self.layout.prefixes


def resolve_model(name: str) -> Path:
    """The directory of a model given as "starter", as a path or as a name in the hub's local cache.

    Downloads nothing.  Raises WeightsError, with the remedy, if there is none.
    """
    if name == STARTER:
        directory = omnistage_home() / "models" / STARTER
        if not directory.is_dir():
            raise WeightsError(f"the starter is not in {directory}; run `omnistage fetch starter`")
        return directory
    directory = Path(name).expanduser()
    if directory.is_dir():
        return directory
    if is_hub_name(name):
        cached = cached_model(name)
        if cached is None:
            raise WeightsError(
                f"model {name!r} is neither a directory nor whole in the hub's cache; run `omnistage fetch "
                f"{name}`"
            )
        return cached
    raise WeightsError(
        f"model {name!r} is neither 'starter' nor a directory; give a model's directory or its hub name"
    )


def check_files(model: Path, spec: PipelineSpec) -> None:
    """See that every file is there which an index of the model, or of a part's folder, lists.

    Raises WeightsError naming the files that are missing.
    """
    for folder in dict.fromkeys(
        [model, *(model / stage.part for stage in spec.stages.values() if stage.part)]
    ):
        check_shards(folder)


def part_files(model: Path, spec: PipelineSpec) -> dict[str, PartFiles]:
    """Where each stage's part is, for omnistage.graph.plan.  Raises WeightsError for one that is missing."""
    found = {}
    for name, stage in spec.stages.items():
        if stage.kind is StageKind.FUNCTION:
            continue
        source = find_part(model, stage.part)
        layout = source.layout
        num_codes = source.config.get("num_code_groups")
        found[name] = PartFiles(
            folder=source.directory,
            config=source.config,
            prefixes=source.prefixes,
            dtype=stored_dtype(source),
            looped=layout.looped if layout else "",
            num_loops=num_codes - 1 if isinstance(num_codes, int) else 1,
        )
    return found


def stored_dtype(source: PartSource) -> str:
    """What "auto" loads a part as: its configuration's word, the checkpoint's, or else how it is stored."""
    whole = source.directory / "config.json"
    for values in (source.config, source.config.get("text_config"), read_config(whole)):
        stored = (values or {}).get("dtype") or (values or {}).get("torch_dtype")
        if stored:
            return str(stored)
    return main_dtype(_headers_of(source))


def _headers_of(source: PartSource) -> dict[str, TensorInfo]:
    """The part's own tensors; none for a model that needs no weights."""
    if not any(source.directory.glob("*.safetensors")):
        return {}
    headers = read_headers(source.directory)
    return {name: tensor for name, tensor in headers.items() if name.startswith(source.prefixes)}


def find_part(model: Path, part: str | None) -> PartSource:
    """The part called `part` of the model in directory `model`; None or "" is the model itself.

    Raises WeightsError if the model has no such part: unknown to its configuration, or without weights
    in a checkpoint that may leave parts out.
    """
    if not part:
        return PartSource(model, _read_config(model))
    if (model / part / "config.json").is_file():
        return PartSource(model / part, _read_config(model / part))
    if (model / "config.json").is_file():
        config = _read_config(model)
        layouts = LAYOUTS.get(str(config.get("model_type")))
        if layouts is not None:
            return _find_laid_out(model, config, part, layouts)
        values = config.get(f"{part}_config")
        if isinstance(values, dict):
            return PartSource(model, values, prefix=f"{part}.")
    known = ", ".join(_part_names(model)) or "none"
    remedy = "; run `omnistage fetch starter`" if model.name == STARTER else ""
    raise WeightsError(f"the model in {model} has no part {part!r}; its parts: {known}{remedy}")


def available_parts(model: Path) -> list[str]:
    """The parts of which the model in directory `model` holds weights, by file names and headers alone.

    In the order of LAYOUTS where the architecture is in it, otherwise sorted.  Empty for a model
    without parts.  Raises WeightsError if there is neither a configuration nor a part's folder, or for
    unreadable files.
    """
    folders = _part_folders(model)
    if not (model / "config.json").is_file() and folders:
        return folders
    config = _read_config(model)
    layouts = LAYOUTS.get(str(config.get("model_type")))
    if layouts is not None:
        names = _tensor_names(model)
        return [part for part, layout in layouts.items() if layout.is_in(names)]
    keys = [key.removesuffix("_config") for key in config if key.endswith("_config")]
    names = _tensor_names(model) if keys else set()
    inside = [part for part in keys if any(name.startswith(f"{part}.") for name in names)]
    return sorted({*folders, *inside})


def _find_laid_out(
    model: Path, config: dict[str, Any], part: str, layouts: dict[str, PartLayout]
) -> PartSource:
    names = _tensor_names(model)
    layout = layouts.get(part)
    if layout is None or not layout.is_in(names):
        held = ", ".join(name for name, each in layouts.items() if each.is_in(names)) or "none"
        begins = f" (no tensor begins with {layout.own or layout.prefix!r})" if layout else ""
        raise WeightsError(
            f"the weights in {model} have no part {part!r}{begins}; its parts: {held}; leave the stage out, "
            "or fetch a checkpoint that has it"
        )
    values: Any = config
    for key in layout.config:
        values = values.get(key)
        if not isinstance(values, dict):
            raise WeightsError(
                f"{model / 'config.json'} lacks {'.'.join(layout.config)}, which {part!r} needs; fetch the "
                "model again"
            )
    return PartSource(model, {**values, "model_type": layout.model_type}, layout.prefix, layout)


def load_encoder(
    source: PartSource, *, device: str = "cpu", dtype: str = "float32", progress: Progress | None = None
) -> EncoderModel:
    """device: torch's name of it.  Raises WeightsError for an unknown model type or unfit weights."""
    return cast("EncoderModel", _load("encoder", source, device, dtype, progress))


def load_acoustic(
    source: PartSource, *, device: str = "cpu", dtype: str = "float32", progress: Progress | None = None
) -> AcousticModel:
    """As load_encoder, for the model that turns sentences into vocoder frames."""
    return cast("AcousticModel", _load("acoustic", source, device, dtype, progress))


def load_vocoder(
    source: PartSource, *, device: str = "cpu", dtype: str = "float32", progress: Progress | None = None
) -> VocoderModel:
    """As load_encoder, for the model that turns frames into sound."""
    return cast("VocoderModel", _load("vocoder", source, device, dtype, progress))


def load_decoder(
    source: PartSource, *, device: str = "cpu", dtype: str = "float32", progress: Progress | None = None
) -> Decoder:
    """As load_encoder, for an autoregressive decoder that the engine runs.

    Raises WeightsError for any device but the CPU.
    """
    if device != "cpu":
        raise WeightsError(f"decoders run on the device 'cpu', not on {device!r}")
    from omnistage.models.weights import dtype_of

    factory = _factory("decoder", source, progress)
    with _reporting(source, progress):
        decoder: Decoder = factory(source.directory, dtype=dtype_of(dtype), prefix=source.prefix)
    return decoder


def _load(role: str, source: PartSource, device: str, dtype: str, progress: Progress | None) -> object:
    factory = _factory(role, source, progress)
    with _reporting(source, progress):
        model: object = factory(source, device=device, dtype=dtype)
    return model


@contextmanager
def _reporting(source: PartSource, progress: Progress | None) -> Iterator[None]:
    """Tell `progress` of the bytes that a Checkpoint takes in this block, at every percent or so."""
    if progress is None:
        yield
        return
    from omnistage.models.loader import watching

    total = max(1, sum(tensor.num_bytes for tensor in _headers_of(source).values()))
    done = reported = 0

    def on_bytes(count: int) -> None:
        nonlocal done, reported
        done += count
        if done - reported >= total // 100:
            reported = done
            fraction = _IMPORTED + (1 - _IMPORTED) * min(1.0, done / total)
            progress(
                min(fraction, _ALMOST),
                f"loading {source.model_type}: {size_text(done)} of {size_text(total)}",
            )

    with watching(on_bytes):
        yield
    progress(1.0, f"loaded {source.model_type}")


def _factory(role: str, source: PartSource, progress: Progress | None) -> Callable[..., Any]:
    kinds = FACTORIES[role]
    kind = source.model_type
    if kind not in kinds:
        raise WeightsError(
            f"model type {kind!r} of {source.directory} is no known {role}; known: {', '.join(sorted(kinds))}"
        )
    module_name, factory_name = kinds[kind].split(":")
    report = progress or (lambda fraction, what: None)
    report(0.0, f"importing {kind}")
    factory: Callable[..., Any] = getattr(importlib.import_module(module_name), factory_name)
    report(_IMPORTED, f"loading {kind}")
    return factory


def _read_config(directory: Path) -> dict[str, Any]:
    return read_config(directory / "config.json")


def _tensor_names(model: Path) -> set[str]:
    """Of all tensors, from the shards' index or else the files' headers.  Raises WeightsError."""
    index = model / INDEX_FILE
    return set(shard_names(index) if index.is_file() else read_headers(model))


def _part_folders(model: Path) -> list[str]:
    return sorted(path.parent.name for path in model.glob("*/config.json"))


def _part_names(model: Path) -> list[str]:
    names = set(_part_folders(model))
    if (model / "config.json").is_file():
        names |= {key.removesuffix("_config") for key in _read_config(model) if key.endswith("_config")}
    return sorted(names)
