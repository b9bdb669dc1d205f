"""The function stage: a user's Python callable as a node of the graph.

Text goes in by sentence, by delta or whole (`granularity`); tensors go in chunk by chunk as numpy
arrays.  A class is instantiated once per replica and then called, so it can hold a loaded model.
An exception in the callable ends that request with an error that names it; others go on.
"""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec
import numpy as np

from omnistage.errors import OmnistageError, PipelineError, RequestFailed
from omnistage.graph.function import load_function
from omnistage.stages.stage import Outbox, StageContext
from omnistage.transport.messages import Chunk, RequestKey, Submit
from omnistage.types import HostTensor, Payload, PortType, Scalar

logger = logging.getLogger(__name__)

# A sentence ends with the first white space after its closing mark, or at a line's end: decided as soon
# as it is seen, so that function stages in a row do not wait for one another.
_SENTENCE_END = re.compile(r"[.!?\u3002\uff01\uff1f][\"')\]]*\s|\n")


def load_callable(reference: str, options: Mapping[str, Scalar] | None = None) -> Callable[[Any], Any]:
    """What omnistage.graph.function.load_function finds; a class is instantiated.

    options: keyword arguments of the class, or of every call of a function.

    Raises PipelineError naming the part of the reference that does not exist.
    """
    found = load_function(reference)
    made = found(**options or {}) if isinstance(found, type) else partial(found, **options or {})
    if not callable(made):
        raise PipelineError(f"{reference} makes a {type(made).__name__}, not a callable; define __call__")
    return made


class _Call:
    """One request's input on its way through the callable."""

    def __init__(self) -> None:
        self.text = ""
        self.pieces: deque[tuple[Payload, tuple[str, ...]]] = (
            deque()
        )  # payload, edges whose chunks it used up
        self.unused_edges: list[str] = []  # chunks in `text` that no piece has taken yet
        self.is_complete = False
        self.arrived = time.monotonic()


class FunctionStage:
    """See omnistage.stages.stage.Stage."""

    def __init__(self, context: StageContext, function: Callable[[Any], Any]) -> None:
        self._context = context
        self._function = function
        self._granularity = context.spec.granularity
        self._open: dict[RequestKey, _Call] = {}
        self._calls = 0

    def submit(self, message: Submit) -> None:
        call = _Call()
        if message.text is not None:
            call.text = message.text
            self._cut(call, is_last=True)
        self._open[message.key] = call

    def receive(self, chunk: Chunk) -> None:
        call = self._open[chunk.key]
        if chunk.payload.tensors:
            # Copied: the producer's slot is free again as soon as this call returns.
            owned = {name: _copy(tensor) for name, tensor in chunk.payload.tensors.items()}
            call.pieces.append((msgspec.structs.replace(chunk.payload, tensors=owned), (chunk.edge,)))
            call.is_complete = chunk.is_last
            return
        call.text += chunk.payload.text
        call.unused_edges.append(chunk.edge)
        self._cut(call, is_last=chunk.is_last)

    def abort(self, key: RequestKey) -> None:
        self._open.pop(key, None)

    def deadline(self) -> float | None:
        return min((call.arrived for _, call in self._runnable()), default=None)

    def step(self, outbox: Outbox) -> None:
        key, call = min(self._runnable(), key=lambda entry: entry[1].arrived, default=(None, None))
        if key is None or call is None:
            return
        outbox.worked.append(key)
        if not call.pieces:
            del self._open[key]
            outbox.emit(key, Payload(type=PortType.TEXT), is_last=True)
            outbox.end(key)
            return
        payload, edges = call.pieces.popleft()
        outbox.consumed.extend((key, edge) for edge in edges)
        is_last = call.is_complete and not call.pieces
        try:
            made = self._apply(payload)
        except Exception as error:  # the user's code may raise anything; it is this request's fault alone
            logger.exception("function stage %r failed", self._context.spec.name)
            del self._open[key]
            outbox.end(key, error=self._failure(error))
            return
        outbox.emit(key, made, is_last=is_last)
        if is_last:
            del self._open[key]
            outbox.end(key)

    def info(self) -> dict[str, Scalar | list[str]]:
        return {"weight_bytes": 0}

    def gauges(self) -> dict[str, float]:
        return {
            "requests": len(self._open),
            "queued": sum(len(call.pieces) for call in self._open.values()),
            "running": len(self._runnable()),
            "calls": self._calls,
        }

    def close(self) -> None:
        self._open.clear()

    def _runnable(self) -> list[tuple[RequestKey, _Call]]:
        return [
            (key, call)
            for key, call in self._open.items()
            if (call.pieces or call.is_complete) and self._context.credits(key) != 0
        ]

    def _cut(self, call: _Call, *, is_last: bool) -> None:
        """Move finished pieces from call.text to call.pieces; all text is kept, white space included."""
        texts: list[str] = []
        if self._granularity == "delta":
            texts, call.text = [call.text], ""
        elif self._granularity == "sentence":
            start = 0
            for match in _SENTENCE_END.finditer(call.text):
                texts.append(call.text[start : match.end()])
                start = match.end()
            call.text = call.text[start:]
        if is_last:
            texts.append(call.text)
            call.text = ""
            call.is_complete = True
        for text in filter(None, texts):
            call.pieces.append((Payload(type=PortType.TEXT, text=text), tuple(call.unused_edges)))
            call.unused_edges.clear()

    def _apply(self, payload: Payload) -> Payload:
        self._calls += 1
        if not payload.tensors:
            text = self._function(payload.text)
            if not isinstance(text, str):
                raise TypeError(f"it returned a {type(text).__name__} for text; return a str")
            return Payload(type=PortType.TEXT, text=text, info=payload.info)
        made = {name: self._function(tensor.numpy()) for name, tensor in payload.tensors.items()}
        for name, array in made.items():
            if not isinstance(array, np.ndarray):
                raise TypeError(f"it returned a {type(array).__name__} for {name!r}; return a numpy array")
        tensors = {name: HostTensor.from_numpy(array) for name, array in made.items()}
        return msgspec.structs.replace(payload, tensors=tensors)

    def _failure(self, error: Exception) -> OmnistageError:
        spec = self._context.spec
        return RequestFailed(
            f"function {spec.function!r} of stage {spec.name!r} raised {type(error).__name__}: {error}",
            code="function_failed",
        )


def _copy(tensor: HostTensor) -> HostTensor:
    return HostTensor(tensor.dtype, tensor.shape, bytes(tensor.data))
