"""The command `omnistage`: what its arguments are, and how its errors look.

Every subcommand lives in a module of its own that is imported when it runs, so `omnistage --help`
and the small commands stay quick.  Exit status: 0 done, 1 failed, 2 a wrong command line or pipeline,
130 stopped by Ctrl-C.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from omnistage.errors import OmnistageError, PipelineError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.  arguments: sys.argv[1:] by default.  Returns the exit status."""
    options = build_parser().parse_args(arguments)
    logging.basicConfig(
        level=options.log_level.upper(), format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    os.environ["OMNISTAGE_LOG"] = options.log_level  # for the workers
    module_name, _, function_name = options.command.partition(":")
    try:
        command = getattr(importlib.import_module(module_name), function_name)
        status = int(command(options))
        sys.stdout.flush()
        return status
    except PipelineError as error:
        print(f"omnistage: {error.message}", file=sys.stderr)
        return EXIT_USAGE
    except OmnistageError as error:
        print(f"omnistage: {error.message}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("omnistage: stopped", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="omnistage", description="Serve any-to-any models as a graph of stages."
    )
    parser.add_argument("--version", action="version", version=f"omnistage {version('omnistage')}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_serve(commands)
    _add_run(commands)
    _add_chat(commands)
    _add_fetch(commands)
    _add_graph_commands(commands)
    _add_worker(commands)
    return parser


Commands = argparse._SubParsersAction  # argparse has no public name for it


def _command(
    commands: Commands[argparse.ArgumentParser], name: str, module: str, help_text: str
) -> argparse.ArgumentParser:
    """A subcommand run by the function `name` of omnistage.serving.`module`."""
    parser = commands.add_parser(name, help=help_text, description=help_text)
    parser.set_defaults(command=f"omnistage.serving.{module}:{name}")
    parser.add_argument(
        "--log-level",
        default="warning",
        choices=["debug", "info", "warning", "error"],
        help="what to log (default: %(default)s)",
    )
    return parser


def byte_size(text: str) -> int:
    """A size on the command line.  Raises argparse.ArgumentTypeError."""
    from omnistage.graph.fields import parse_bytes

    try:
        return parse_bytes(int(text) if text.isdecimal() else text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _add_pipeline(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "pipeline",
        nargs="?",
        default="starter",
        help="a YAML file, a built-in name, or a model: its directory or its name on the hub"
        " (default: starter)",
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change one setting, for instance thinker.max_num_seqs=8; may be repeated",
    )
    parser.add_argument(
        "--dtype",
        choices=["auto", "float32", "bfloat16"],
        help="of a model's weights; of a pipeline's llm stages",
    )
    parser.add_argument("--name", help="what clients call the model (default: the model's or pipeline's own)")
    parser.add_argument(
        "--memory",
        type=byte_size,
        metavar="SIZE",
        help="how much the stages may use, for instance 8GiB; a model's KV caches get what its weights leave"
        " (default: four fifths of what is available)",
    )


def _add_serve(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = _command(commands, "serve", "cli_serve", "serve a pipeline over HTTP")
    _add_pipeline(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: %(default)s)")
    parser.add_argument("--media-root", type=Path, metavar="DIR", help="requests may name files under it")
    parser.add_argument(
        "--allow-private-media-hosts",
        action="store_true",
        help="also fetch media from loopback and private addresses",
    )
    parser.add_argument("--listen", default="", metavar="tcp://HOST:PORT", help="where remote workers join")
    parser.add_argument("--advertise", default="", metavar="HOST", help="the host name they use")
    parser.add_argument("--key", default="", metavar="FILE", help="the cluster's keys; made if missing")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and start nothing")
    parser.set_defaults(log_level="info")


def _add_question(parser: argparse.ArgumentParser) -> None:
    """How to sample and to speak, for run and chat."""
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument("--max-tokens", type=int, default=256, help="of an answer (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="makes sampling and speech reproducible")
    parser.add_argument("--voice", help="one of the pipeline's voices (default: its first)")


def _add_run(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = _command(commands, "run", "cli_run", "answer once, with files, and show where the time went")
    _add_pipeline(parser)
    _add_question(parser)
    parser.add_argument("--text", help="the question, or what else to say")
    parser.add_argument("--image", type=Path, action="append", default=[], metavar="FILE", help="repeatable")
    parser.add_argument("--audio", type=Path, action="append", default=[], metavar="FILE", help="repeatable")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="speak the answer into a .wav, .mp3, .flac, .opus or .aac file",
    )
    parser.add_argument("--timeline", type=Path, metavar="FILE.svg", help="draw the timeline")


def _add_chat(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = _command(commands, "chat", "cli_chat", "talk in the terminal; /help lists what it understands")
    _add_pipeline(parser)
    _add_question(parser)
    parser.add_argument(
        "--out-dir", type=Path, default=Path(), metavar="DIR", help="where spoken answers go (default: here)"
    )


def _add_fetch(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = _command(
        commands, "fetch", "cli_tools", "download weights, once; the starter's are converted too"
    )
    parser.add_argument(
        "pipeline", nargs="?", default="starter", help="starter, or a model's name on the hub: ORG/NAME"
    )
    parser.add_argument(
        "--hearing", choices=["tiny.en", "base"], help="the size of the starter's hearing stage"
    )
    parser.add_argument("--verify", action="store_true", help="check every hash of the starter's files again")


def _add_graph_commands(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = _command(commands, "config", "cli_tools", "print the resolved pipeline and each value's source")
    _add_pipeline(parser)
    _command(commands, "schema", "cli_tools", "print the JSON schema of pipeline files, for editors")
    parser = _command(commands, "graph", "cli_tools", "draw a pipeline")
    _add_pipeline(parser)
    parser.add_argument(
        "--format", choices=["mermaid", "svg"], help="default: by --output's name, or mermaid"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="default: standard output")
    parser = _command(commands, "plan", "cli_tools", "print bytes per device, KV capacity and concurrency")
    _add_pipeline(parser)
    parser.add_argument("--prompt-tokens", type=int, help="mean length of a prompt")
    parser.add_argument("--answer-tokens", type=int, help="mean length of an answer")
    parser.add_argument("--measure", action="store_true", help="measure the memory's speed for upper bounds")


def _add_worker(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = _command(commands, "worker", "cli_tools", "serve one stage of a pipeline on another host")
    parser.add_argument(
        "--join", required=True, metavar="tcp://HOST:PORT", help="where `serve --listen` listens"
    )
    parser.add_argument("--stage", required=True, help="the stage to serve")
    parser.add_argument("--key", required=True, metavar="FILE", help="a copy of the cluster's key file")
    parser.add_argument(
        "--bind", default="tcp://0.0.0.0:0", help="where peers reach it (default: %(default)s)"
    )
    parser.add_argument("--advertise", default="", metavar="HOST", help="this host's name as peers know it")
    parser.add_argument(
        "--patience",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="silence of the server after which it gives up (default: %(default)s)",
    )
    parser.set_defaults(log_level="info")


if __name__ == "__main__":
    sys.exit(main())
