"""What the engine refuses, and why.  Knows requests and sizes of a model; computes nothing."""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from omnistage.engine.positions import NUM_AXES
from omnistage.engine.request import EmbeddingRows, EngineConfig, Rows
from omnistage.engine.runner import FlatTokenModel
from omnistage.errors import InvalidRequest, PipelineError
from omnistage.types import SamplingParams


class ModelSizes(Protocol):
    """What the engine reads of a model's configuration."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def max_position_embeddings(self) -> int: ...


class SizedModel(FlatTokenModel, Protocol):
    """A model that says what its rows and pages take."""

    @property
    def config(self) -> ModelSizes: ...

    def kv_bytes_per_block(self, block_size: int) -> int: ...


def num_kv_blocks(model: SizedModel, config: EngineConfig) -> int:
    """Blocks that the configuration asks for.  Raises PipelineError if its limits contradict each other."""
    if (config.num_blocks is None) == (config.kv_bytes is None):
        raise PipelineError("give exactly one of num_blocks and kv_bytes")
    if config.dtype not in (None, model.dtype):
        raise PipelineError(f"a KV cache in {config.dtype} does not fit weights in {model.dtype}")
    for name in ("block_size", "max_num_seqs", "max_num_batched_tokens", "max_prefill_tokens_per_request"):
        if getattr(config, name) < 1:
            raise PipelineError(f"{name} is {getattr(config, name)}; it must be at least 1")
    per_block = model.kv_bytes_per_block(config.block_size)
    if config.capture_layer is not None:
        if not 0 <= config.capture_layer <= model.num_open_layers or not model.num_open_layers:
            raise PipelineError(
                f"capture_layer is {config.capture_layer}, but the model has {model.num_open_layers} layers "
                "that give hidden states; unset it or lower it"
            )
        per_block += config.block_size * model.config.hidden_size * model.dtype.itemsize
    num_blocks = config.num_blocks if config.kv_bytes is None else config.kv_bytes // per_block
    if not num_blocks or num_blocks < 1:
        raise PipelineError(
            f"{config.kv_bytes} bytes of KV cache hold no block; one takes {per_block} bytes: give more"
        )
    return num_blocks


def check_rows(model: SizedModel, config: EngineConfig, piece: Rows) -> int:
    """Number of rows.  Raises InvalidRequest."""
    if isinstance(piece, EmbeddingRows):
        check_tensor("embeddings", piece.embeddings, ("num_rows", model.config.hidden_size))
        num_rows = piece.embeddings.shape[0]
        if piece.deepstack is not None:
            check_tensor(
                "deepstack rows", piece.deepstack, ("num_layers", num_rows, model.config.hidden_size)
            )
            if piece.deepstack.shape[0] > model.num_open_layers:
                raise InvalidRequest(
                    f"deepstack rows are for {piece.deepstack.shape[0]} layers; this model takes "
                    f"them after {model.num_open_layers}"
                )
    else:
        for token_id in piece.token_ids:
            check_token_id(token_id, model.config.vocab_size, "prompt")
        num_rows = len(piece.token_ids)
    if piece.positions is not None:
        _check_positions(model, piece.positions, num_rows)
    if piece.is_exported and config.capture_layer is None:
        raise InvalidRequest("rows are to be exported, but the engine has no capture_layer; set one")
    return num_rows


def _check_positions(model: SizedModel, positions: NDArray[Any], num_rows: int) -> None:
    shapes: list[tuple[int, ...]] = [(num_rows,)]
    if model.num_position_axes == NUM_AXES:
        shapes.append((NUM_AXES, num_rows))
    if positions.shape not in shapes:
        raise InvalidRequest(
            f"positions have shape {list(positions.shape)}, not "
            + " or ".join(str(list(shape)) for shape in shapes)
        )
    if not bool(np.isfinite(positions).all()):
        raise InvalidRequest("positions hold NaN or infinite values")


def check_tensor(name: str, tensor: Tensor, shape: tuple[int | str, ...]) -> None:
    """shape: numbers that are given, and names of those that are not.  Raises InvalidRequest."""
    fits = tensor.ndim == len(shape) and all(
        isinstance(wanted, str) or size == wanted for size, wanted in zip(tensor.shape, shape, strict=True)
    )
    if not fits:
        expected = ", ".join(str(size) for size in shape)
        raise InvalidRequest(f"{name} have shape {list(tensor.shape)}, not [{expected}]")
    if not bool(tensor.isfinite().all()):
        raise InvalidRequest(f"{name} hold NaN or infinite values")


def check_token_id(token_id: int, vocab_size: int, param: str) -> None:
    """Raises InvalidRequest."""
    if not 0 <= token_id < vocab_size:
        raise InvalidRequest(
            f"token id {token_id} in {param} is outside the vocabulary of {vocab_size}", param=param
        )


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Raises InvalidRequest naming the parameter, its value and its range."""
    infinity = math.inf
    ranges: dict[str, tuple[float, float]] = {
        "max_tokens": (1, infinity),
        "min_tokens": (0, params.max_tokens),
        "temperature": (0.0, infinity),
        "top_k": (0, infinity),
        "top_p": (0.0, 1.0),
        "min_p": (0.0, 1.0),
        "repetition_penalty": (0.0, infinity),
        "presence_penalty": (-2.0, 2.0),
        "frequency_penalty": (-2.0, 2.0),
        "logprobs": (0, vocab_size),
    }
    for name, (low, high) in ranges.items():
        value = getattr(params, name)
        if value is not None and not (low <= value <= high and value < infinity):
            raise InvalidRequest(f"{name} is {value}; it must be between {low} and {high}", param=name)
    for name in ("top_p", "repetition_penalty"):
        if getattr(params, name) == 0:
            raise InvalidRequest(f"{name} is 0; it must be greater", param=name)
    for token_id, bias in params.logit_bias.items():
        check_token_id(token_id, vocab_size, "logit_bias")
        if not math.isfinite(bias):
            raise InvalidRequest(f"logit_bias of token {token_id} is {bias}, not finite", param="logit_bias")
    for token_id in params.stop_token_ids:
        check_token_id(token_id, vocab_size, "stop_token_ids")
