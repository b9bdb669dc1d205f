"""From command-line options to a pipeline that runs.  The seam where tests put a pipeline of their own."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from omnistage.graph import PipelineSpec
from omnistage.models.registry import part_files, resolve_model
from omnistage.serving.choose import Choice, Wishes, choose_pipeline
from omnistage.serving.requests import Event

if TYPE_CHECKING:
    from omnistage.graph.plan import Load, Plan

REPORT_SECONDS = 10.0  # between two lines about a long load, where no terminal shows it moving


class Talker(Protocol):
    """What run and chat need of omnistage.serving.omni.Omni."""

    def stream(self, request: dict[str, Any], /) -> Iterator[Event]:
        """request: the body of a chat completion without its model."""

    def close(self) -> None: ...


class LoadProgress:
    """One line that says how far each replica is, and what the slowest does; called from any thread.

    On a terminal it moves; elsewhere it is printed every REPORT_SECONDS.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._fractions: dict[str, float] = {}
        self._lock = threading.Lock()
        self._doing: dict[str, str] = {}
        self._started = self._reported = time.monotonic()

    def __call__(self, replica: str, fraction: float, what: str) -> None:
        with self._lock:
            self._fractions[replica] = fraction
            self._doing[replica] = what
            if self._stream.isatty():
                width = shutil.get_terminal_size().columns - 1
                self._stream.write(f"\r\x1b[K{self._line()[:width]}")
                self._stream.flush()
            elif time.monotonic() - self._reported >= REPORT_SECONDS:
                self._reported = time.monotonic()
                print(self._line(), file=self._stream, flush=True)

    def _line(self) -> str:
        slowest = min(self._fractions, key=lambda replica: self._fractions[replica])
        parts = "  ".join(f"{name} {done:4.0%}" for name, done in sorted(self._fractions.items()))
        return f"loading  {parts}  ({slowest}: {self._doing[slowest]})"

    def finish(self) -> None:
        """Replace the line by how long it took."""
        if self._stream.isatty():
            self._stream.write("\r\x1b[K")
        print(f"ready after {time.monotonic() - self._started:.1f} s", file=self._stream, flush=True)


def choose(options: Namespace, *, downloads: bool) -> Choice:
    """The pipeline the options name, with what they change; prints what was left out.

    downloads: whether a model of the hub is fetched if it is not in the cache.
    Raises OmnistageError, with the remedy.
    """
    from omnistage.serving.launch import fetch_model

    wishes = Wishes(
        overrides=tuple(options.overrides), name=options.name, dtype=options.dtype, memory=options.memory
    )
    obtain = fetch_model if downloads else resolve_model
    choice = choose_pipeline(options.pipeline, wishes, obtain=obtain)
    for note in choice.notes:
        print(f"omnistage: {note}", file=sys.stderr)
    return choice


def plan_of(spec: PipelineSpec, load: Load | None = None) -> Plan:
    """The plan of a pipeline whose model is on this machine.  Raises WeightsError."""
    from omnistage.graph.plan import plan_pipeline

    parts = part_files(resolve_model(spec.model), spec) if spec.model else {}
    return plan_pipeline(spec, parts, load=load)


def open_talker(options: Namespace) -> Talker:
    """Start the pipeline and wait until it answers.  Raises OmnistageError, with the remedy."""
    from omnistage.serving.launch import LaunchOptions
    from omnistage.serving.omni import Omni

    spec = choose(options, downloads=True).spec
    progress = LoadProgress()
    omni = Omni(spec, options=LaunchOptions(progress=progress))
    progress.finish()
    return omni
