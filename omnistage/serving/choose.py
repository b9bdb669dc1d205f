"""From what a user names to a pipeline: a file, a built-in one, or a published model's directory.

For a model the built-in pipeline of its architecture is taken, without the stages whose weights the
checkpoint lacks, and the KV caches get the memory that the weights leave.  Reads configurations and
headers of weights, never a weight.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from omnistage.errors import PipelineError, WeightsError
from omnistage.graph import PipelineSpec
from omnistage.graph.checkpoint import check_shards, read_config
from omnistage.graph.draft import Draft
from omnistage.graph.fields import size_text
from omnistage.graph.fit import fit_caches
from omnistage.graph.loader import Resolved, built_in_names, resolve_pipeline
from omnistage.graph.machine import available_memory
from omnistage.graph.plan import Plan, check_plan, plan_pipeline
from omnistage.graph.prune import prune
from omnistage.models.hub import is_hub_name
from omnistage.models.registry import available_parts, part_files, resolve_model
from omnistage.serving.backend_info import check_sampling
from omnistage.types import StageKind

# model_type of config.json -> built-in pipeline.
PIPELINES = {
    "qwen3_omni_moe": "qwen3-omni",
    "qwen3_vl": "qwen3-vl",
    "llama": "llm",
    "qwen2": "llm",
    "qwen3": "llm",
    "qwen3_moe": "llm",
}
USABLE_SHARE = 0.8  # of the memory that is available: the rest is for the API process and other programs

Obtain = Callable[[str], Path]  # a name on the hub -> the model's directory


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What is asked of a pipeline besides its source.

    overrides: settings such as "thinker.max_num_seqs=8", the strongest.  name: clients see it as the
    model's name.  dtype: of all stages of a published model, otherwise of the llm stages.
    memory: bytes of main memory that the stages may use; None is what the machine has to spare.
    """

    overrides: tuple[str, ...] = ()
    name: str | None = None
    dtype: str | None = None
    memory: int | None = None

    def as_overrides(self) -> list[str]:
        """All but dtype, the strongest last."""
        named = [] if self.name is None else [f"name={self.name}"]
        limit = [] if self.memory is None else [f"device_memory.cpu={self.memory}"]
        return [*named, *limit, *self.overrides]


@dataclass(frozen=True)
class Choice:
    """A pipeline that may be started.

    notes: what was left out or made smaller, a line each.  plan: of a published model; None otherwise.
    """

    resolved: Resolved
    notes: tuple[str, ...] = ()
    plan: Plan | None = None

    @property
    def spec(self) -> PipelineSpec:
        return self.resolved.spec


def choose_pipeline(
    source: str | Path, wishes: Wishes | None = None, *, obtain: Obtain = resolve_model
) -> Choice:
    """The pipeline that `source` names.

    source: a YAML file, a built-in name, a model's directory with config.json, or its name on the hub.
    obtain: finds the directory of a hub name; the default looks only into the local cache.
    Raises PipelineError for a wrong pipeline, an unknown architecture or too little memory, WeightsError
    for files that are missing or damaged, and what `obtain` raises.
    """
    asked = wishes or Wishes()
    directory = _model_directory(source, obtain)
    if directory is None:
        choice = Choice(_with_wishes(source, asked))
    else:
        choice = _Model(directory, str(source)).choose(asked)
    check_sampling(choice.spec)
    return choice


def model_name(directory: Path, source: str) -> str:
    """A pipeline's name made from a model's: its last part, as far as a name may have its characters.

    source: as the user gave it.
    """
    name = source.rpartition("/")[2] if is_hub_name(source) and not Path(source).is_dir() else ""
    if not name:
        resolved = directory.resolve()
        in_cache = resolved.parent.name == "snapshots"  # .../models--ORG--NAME/snapshots/REVISION
        name = resolved.parent.parent.name.rpartition("--")[2] if in_cache else resolved.name
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", name)
    if not name[:1].isalpha():
        name = f"model-{name}"
    return name[:64].rstrip("-.")


def _model_directory(source: str | Path, obtain: Obtain) -> Path | None:
    """None for a pipeline."""
    text = str(source)
    if text in built_in_names() or text.endswith((".yaml", ".yml")):
        return None
    directory = Path(text).expanduser()
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise PipelineError(
                f"{text} holds no config.json, so it does not say which pipeline it needs; give the "
                "directory of a published model, or a pipeline file whose model is this directory"
            )
        return directory
    return obtain(text) if is_hub_name(text) else None


def _with_wishes(source: str | Path, wishes: Wishes) -> Resolved:
    overrides = wishes.as_overrides()
    resolved = resolve_pipeline(source, overrides=overrides)
    if wishes.dtype is None:
        return resolved
    stages = resolved.spec.stages.values()
    dtypes = [f"{stage.name}.dtype={wishes.dtype}" for stage in stages if stage.kind is StageKind.LLM]
    return resolve_pipeline(source, overrides=[*dtypes, *overrides])


class _Model:
    """A published model that is being given a pipeline."""

    def __init__(self, directory: Path, source: str) -> None:
        self._directory = directory.resolve()
        self._name = model_name(directory, source)
        self._config = read_config(directory / "config.json")
        self._built_in = self._pipeline()
        check_shards(directory)
        self._parts = available_parts(directory)
        self._left_out: list[str] = []  # the line that says so, if anything is

    def choose(self, wishes: Wishes) -> Choice:
        bare = self._resolve(wishes, {})
        parts = part_files(self._directory, bare.spec)
        plan = plan_pipeline(bare.spec, parts)
        budget = wishes.memory
        if budget is None:
            budget = int(available_memory() * USABLE_SHARE)
        given = [name for name in bare.spec.stages if bare.source(_cache_of(name)).startswith("flag ")]
        try:
            sizes = fit_caches(bare.spec, plan, budget=budget, given=given)
        except PipelineError as error:
            raise PipelineError(error.message + self._remedy(wishes, plan)) from None
        resolved = self._resolve(wishes, sizes)
        plan = plan_pipeline(resolved.spec, parts)
        shorter = [
            f"{llm.stage}: prompt and answer may have {llm.tokens} tokens, not {llm.max_model_len}: "
            "its KV cache holds no more"
            for llm in plan.llms
            if llm.tokens < llm.max_model_len
        ]
        return Choice(resolved, (*self._left_out, *shorter), check_plan(plan))

    def _pipeline(self) -> str:
        """The built-in pipeline's name.  Raises PipelineError."""
        kind = self._config.get("model_type")
        if kind not in PIPELINES:
            raise PipelineError(
                f"{self._directory / 'config.json'} has model_type {kind!r} (architectures "
                f"{self._config.get('architectures')}), for which there is no built-in pipeline; known: "
                f"{', '.join(PIPELINES)}. Give a model of one of these, or write a pipeline file"
            )
        return PIPELINES[kind]

    def _resolve(self, wishes: Wishes, sizes: Mapping[str, int]) -> Resolved:
        """sizes: bytes of KV caches, by stage; those left out get almost nothing."""

        def adapt(draft: Draft) -> None:
            draft.pipeline |= {"model": str(self._directory), "name": self._name}
            draft.origins |= {("model",): "command line", ("name",): "the model's name"}
            self._prune(draft)
            for name, settings in draft.stages.items():
                if settings["kind"] == StageKind.LLM:
                    settings["kv_cache"] = sizes.get(name, 1)
                    draft.origins[_cache_of(name)] = "the memory there is"
                if wishes.dtype is not None:
                    settings["dtype"] = wishes.dtype
                    draft.origins["stages", name, "dtype"] = f"flag --dtype {wishes.dtype}"

        return resolve_pipeline(self._built_in, overrides=wishes.as_overrides(), adapt=adapt)

    def _prune(self, draft: Draft) -> None:
        """Take out what has no weights.  Raises WeightsError if nothing could be answered without it."""
        kinds = {name: stage["kind"] for name, stage in draft.stages.items()}
        parts = {name: stage["part"] for name, stage in draft.stages.items()}
        lacking = {name: part for name, part in parts.items() if part not in self._parts}
        if (part := lacking.get(draft.outputs["text"])) is not None:
            files = ", ".join(sorted(path.name for path in self._directory.glob("*.safetensors")))
            raise WeightsError(
                f"the weights in {self._directory} have no part {part!r}, without which nothing can be "
                f"answered; its parts: {', '.join(self._parts) or 'none'}; its files: {files or 'none'}; "
                "fetch the model again"
            )
        is_mute = self._config.get("enable_audio_output") is False
        had_audio = "audio" in draft.outputs
        went = prune(draft, stages=lacking, outputs=["audio"] if is_mute else [])
        effects = ["text only"] if had_audio and "audio" not in draft.outputs else []
        effects += [f"without {name}" for name in went if kinds[name] == StageKind.ENCODER]
        if not effects:
            return
        reason = f"no {' and '.join(lacking.values())} weights in {self._directory}"
        if not lacking:
            reason = f"{self._directory / 'config.json'} says enable_audio_output: false"
        self._left_out = [f"{reason}: {', '.join(effects)}"]

    def _remedy(self, wishes: Wishes, plan: Plan) -> str:
        """What to do if the weights do not fit."""
        half = ""
        if wishes.dtype != "bfloat16":
            spec = self._resolve(dataclasses.replace(wishes, dtype="bfloat16"), {}).spec
            short = plan_pipeline(spec, part_files(self._directory, spec))
            held = [sum(row.weights for row in one.stages) for one in (plan, short)]
            half = f"--dtype bfloat16 ({size_text(held[1])} for weights), " if held[1] < held[0] else ""
        return f"; choose {half}a smaller model or a machine with more memory (--memory says how much to use)"


def _cache_of(stage: str) -> tuple[str, str, str]:
    return "stages", stage, "kv_cache"
