"""The commands that serve nothing: fetch, config, schema, graph, plan; and `worker`, for other hosts."""

from __future__ import annotations

import os
import re
import secrets
import socket
import sys
from argparse import Namespace
from typing import TYPE_CHECKING

from omnistage.errors import FetchError, OmnistageError
from omnistage.serving.cli_pipeline import choose, plan_of

if TYPE_CHECKING:
    from omnistage.models.fetch import FetchProgress

BAR_WIDTH = 30  # characters
MEGABYTE = 1_000_000


class FetchBar:
    """Prints a fetch's progress: a moving bar on a terminal, one line per package elsewhere."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._last_line = ""

    def __call__(self, progress: FetchProgress) -> None:
        line = self._line(progress)
        if self._is_terminal:
            sys.stderr.write(f"\r\x1b[K{line}")
            sys.stderr.flush()
        elif line != self._last_line:
            print(line, file=sys.stderr, flush=True)
        self._last_line = line

    def finish(self) -> None:
        if self._is_terminal and self._last_line:
            sys.stderr.write("\r\x1b[K")

    def _line(self, progress: FetchProgress) -> str:
        if progress.action == "wait":
            return f"waiting for {progress.subject}"
        if progress.action == "convert":
            return f"converting {progress.subject} ({progress.done} of {progress.total})"
        if not self._is_terminal:
            return f"downloading {progress.subject}"
        fraction = progress.done / progress.total if progress.total else 0.0
        filled = min(BAR_WIDTH, round(fraction * BAR_WIDTH))
        bar = "#" * filled + "." * (BAR_WIDTH - filled)
        megabytes = f"{progress.done / MEGABYTE:.0f} of {progress.total / MEGABYTE:.0f} MB"
        return f"downloading [{bar}] {megabytes}  {progress.subject}"


def fetch(options: Namespace) -> int:
    from omnistage.models.fetch import fetch_starter
    from omnistage.models.hub import download_model, is_hub_name
    from omnistage.models.registry import STARTER

    if options.pipeline != STARTER:
        if not is_hub_name(options.pipeline):
            raise FetchError(
                f"{options.pipeline!r} is neither {STARTER!r} nor ORG/NAME of a model on the hub"
            )
        print(f"downloading {options.pipeline}", file=sys.stderr, flush=True)
        print(download_model(options.pipeline))
        return 0
    bar = FetchBar()
    try:
        directory = fetch_starter(hearing=options.hearing, verify=options.verify, progress=bar)
    finally:
        bar.finish()
    print(directory)
    return 0


def config(options: Namespace) -> int:
    from omnistage.graph.dump import render_config

    print(render_config(choose(options, downloads=False).resolved), end="")
    return 0


def schema(options: Namespace) -> int:
    from omnistage.graph.schema import schema_json

    print(schema_json().rstrip("\n"))
    return 0


def graph(options: Namespace) -> int:
    from omnistage.graph.draw import to_mermaid, to_svg

    spec = choose(options, downloads=False).spec
    is_svg_name = options.output is not None and options.output.suffix.lower() == ".svg"
    kind = options.format or ("svg" if is_svg_name else "mermaid")
    drawing = to_svg(spec) if kind == "svg" else to_mermaid(spec)
    if options.output is None:
        print(drawing.rstrip("\n"))
        return 0
    try:
        options.output.write_text(drawing, encoding="utf-8")
    except OSError as error:
        raise OmnistageError(f"cannot write {options.output} ({error.strerror})") from error
    return 0


def plan(options: Namespace) -> int:
    from omnistage.graph.machine import measure_bandwidth
    from omnistage.graph.plan import Load, check_plan
    from omnistage.graph.plan_table import render_plan

    defaults = Load()
    load = Load(
        prompt_tokens=options.prompt_tokens or defaults.prompt_tokens,
        answer_tokens=options.answer_tokens or defaults.answer_tokens,
        bandwidth={"cpu": measure_bandwidth()} if options.measure else {},
    )
    planned = plan_of(choose(options, downloads=False).spec, load)
    print(render_plan(planned))
    check_plan(planned)
    return 0


def worker(options: Namespace) -> int:
    from omnistage.serving.launch import join_address
    from omnistage.stages.process import run_worker

    unique = secrets.token_hex(4)
    place = re.sub(r"[^A-Za-z0-9_.-]", "-", f"{socket.gethostname()[:64]}.{os.getpid()}")
    return run_worker(
        {
            "name": f"{options.stage}.{place}.{unique}",
            "stage": options.stage,
            "run_id": unique,
            "host": f"joined.{unique}",  # a host of its own: tcp and keys only, no memory shared with others
            "patience": options.patience,
            "control": join_address(options.join),
            "bind": options.bind,
            "advertise": options.advertise,
            "key_file": options.key,
        }
    )
