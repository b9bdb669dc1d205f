"""`omnistage serve`: the HTTP server and the pipeline's workers, started together and stopped in order.

The server answers from the first moment: /health at once, everything else once the stages are loaded.
On SIGINT or SIGTERM it drains: running answers may finish, new ones are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from argparse import Namespace
from collections.abc import Generator

import uvicorn

from omnistage.errors import TransportError
from omnistage.graph import PipelineSpec
from omnistage.graph.machine import measure_bandwidth
from omnistage.graph.plan import Load, check_plan
from omnistage.graph.plan_table import render_plan
from omnistage.serving.app import create_app
from omnistage.serving.cli_pipeline import LoadProgress, choose, plan_of
from omnistage.serving.launch import (
    LaunchOptions,
    Pipeline,
    ensure_weights,
    refuse_unsupported,
    start_pipeline,
)
from omnistage.serving.settings import MediaSettings, ServerSettings

logger = logging.getLogger(__name__)

GRACE_SECONDS = 10  # that running answers get when the server stops
FLUSH_SECONDS = 2  # that their last bytes get after that


class _Server(uvicorn.Server):
    """Leaves signals alone: uvicorn would raise them again before the workers are stopped."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def serve(options: Namespace) -> int:
    choice = choose(options, downloads=not options.dry_run)
    spec = choice.spec
    if options.dry_run:
        plan = plan_of(spec, Load(bandwidth={"cpu": measure_bandwidth()}))
        print(render_plan(plan), end="")
        refuse_unsupported(spec)
        check_plan(plan)
        return 0
    if choice.plan is not None:
        print(render_plan(choice.plan), file=sys.stderr)
    ensure_weights(spec)
    with listen(options.host, options.port) as listener:
        return asyncio.run(_serve(options, spec, listener))


def listen(host: str, port: int) -> socket.socket:
    """A listening socket.  Raises TransportError if the address is in use or not this machine's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise TransportError(
            f"cannot listen on {host} port {port} ({error.strerror}); choose another --host or --port"
        ) from error


def server_settings(options: Namespace) -> ServerSettings:
    media = MediaSettings(root=options.media_root, allow_private_hosts=options.allow_private_media_hosts)
    return ServerSettings(media=media)


async def _serve(options: Namespace, spec: PipelineSpec, listener: socket.socket) -> int:
    progress = LoadProgress()
    launch = LaunchOptions(
        listen=options.listen, advertise=options.advertise, key_file=options.key, progress=progress
    )
    async with start_pipeline(spec, launch) as pipeline:
        config = uvicorn.Config(
            create_app(pipeline.orchestrator, server_settings(options)),
            log_level=options.log_level,
            access_log=options.log_level == "debug",
            log_config=None,
            timeout_graceful_shutdown=FLUSH_SECONDS,
            ws="none",
        )
        server = _Server(config)
        stopping = _stop_on_signals(server, pipeline)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        loading = asyncio.create_task(pipeline.wait_ready())
        try:
            await asyncio.wait({serving, loading}, return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                loading.result()
                progress.finish()
                host, port = listener.getsockname()[:2]
                logger.info("serving %s on http://%s:%d", spec.name, host, port)
            await serving
        finally:
            server.should_exit = True
            loading.cancel()
            stopping.cancel()
            await asyncio.gather(serving, loading, stopping, return_exceptions=True)
    return 0


def _stop_on_signals(server: uvicorn.Server, pipeline: Pipeline) -> asyncio.Task[None]:
    """The first signal drains: 503 for new requests, GRACE_SECONDS for running ones; a second cuts them."""
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()

    def on_signal() -> None:
        if asked.is_set():
            server.should_exit = server.force_exit = True
        asked.set()

    async def stop() -> None:
        await asked.wait()
        try:
            await pipeline.drain(GRACE_SECONDS)
        finally:
            server.should_exit = True  # what is left are the last bytes of answers

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    return asyncio.create_task(stop())
