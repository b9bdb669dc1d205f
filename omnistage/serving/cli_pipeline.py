"""From command-line options to a pipeline that runs.  The seam where tests put a pipeline of their own."""

from __future__ import annotations

import sys
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from typing import Any, Protocol, TextIO

from omnistage.graph import PipelineSpec, load_pipeline
from omnistage.serving.requests import Event
from omnistage.types import StageKind


class Talker(Protocol):
    """What run and chat need of omnistage.serving.omni.Omni."""

    def stream(self, request: dict[str, Any], /) -> Iterator[Event]:
        """request: the body of a chat completion without its model."""

    def close(self) -> None: ...


class LoadProgress:
    """One line that says which replicas still load; called from any thread.  Silent off a terminal."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._fractions: dict[str, float] = {}
        self._lock = threading.Lock()
        self._started = time.monotonic()

    def __call__(self, replica: str, fraction: float, what: str) -> None:
        with self._lock:
            self._fractions[replica] = fraction
            if self._stream.isatty():
                parts = "  ".join(f"{name} {done:4.0%}" for name, done in sorted(self._fractions.items()))
                self._stream.write(f"\r\x1b[Kloading  {parts}")
                self._stream.flush()

    def finish(self) -> None:
        """Replace the line by how long it took."""
        if self._stream.isatty():
            self._stream.write("\r\x1b[K")
        print(f"ready after {time.monotonic() - self._started:.1f} s", file=self._stream, flush=True)


def load_spec(options: Namespace) -> PipelineSpec:
    """The pipeline the options name, with --set and --dtype applied.  Raises PipelineError."""
    return load_pipeline(options.pipeline, overrides=overrides_of(options))


def overrides_of(options: Namespace) -> list[str]:
    """--dtype and --set as settings, the more specific last.  Raises PipelineError."""
    overrides = list(options.overrides)
    if options.dtype is not None:
        plain = load_pipeline(options.pipeline)
        llms = [name for name, stage in plain.stages.items() if stage.kind is StageKind.LLM]
        overrides = [f"{name}.dtype={options.dtype}" for name in llms] + overrides
    return overrides


def open_talker(options: Namespace) -> Talker:
    """Start the pipeline and wait until it answers.  Raises OmnistageError, with the remedy."""
    from omnistage.serving.launch import LaunchOptions
    from omnistage.serving.omni import Omni

    progress = LoadProgress()
    omni = Omni(load_spec(options), options=LaunchOptions(progress=progress))
    progress.finish()
    return omni
