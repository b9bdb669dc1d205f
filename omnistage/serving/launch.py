"""From a pipeline spec to running workers: run directory, keys, lease broker, hub, supervisor.

Imports no torch: workers live in processes of their own, or (mode "threads", for tests and
notebooks) torch comes in with the first worker thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from omnistage.errors import FetchError, PipelineError, TransportError
from omnistage.graph import PipelineSpec
from omnistage.models.hub import cached_model, is_hub_name
from omnistage.models.registry import STARTER, check_files, resolve_model
from omnistage.serving.orchestrator import Orchestrator
from omnistage.serving.supervisor import HEARTBEAT_SECONDS, SILENCE_SECONDS, Progress, Supervisor
from omnistage.serving.worker_hosts import BuildStage, NurseryHost, ThreadHost, WorkerHost, exited
from omnistage.stages.config import WorkerConfig
from omnistage.stages.lease import start_broker, stop_broker
from omnistage.transport import ClusterKeys, Hub, MemoryNetwork, ZmqHub

logger = logging.getLogger(__name__)

DRAIN_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """How a pipeline's workers are run.

    mode: a process per replica, or a thread per replica in this process.
    transport: "auto" uses Unix sockets and shared memory on one host; "tcp" sends everything through
    loopback tcp, as between hosts.  listen: "tcp://HOST:PORT" where workers of other hosts join.
    advertise: the host name they use.  key_file: the cluster's CURVE keys; made if it does not exist.
    drain_seconds: how long requests under way may go on when the pipeline is closed.
    heartbeat_seconds: how often a worker that joined is asked whether it lives.  silence_seconds: without
    a word for so long it is taken for dead (one that loads, for thirty times as long); one whose
    connection breaks, at the next heartbeat.
    network, build: of mode "threads": the memory network, to inject faults in tests, and what makes a
    stage from its context, to bring stages of your own.
    """

    mode: Literal["processes", "threads"] = "processes"
    transport: Literal["auto", "tcp"] = "auto"
    listen: str = ""
    advertise: str = ""
    key_file: str = ""
    drain_seconds: float = DRAIN_SECONDS
    heartbeat_seconds: float = HEARTBEAT_SECONDS
    silence_seconds: float = SILENCE_SECONDS
    progress: Progress | None = None
    network: MemoryNetwork | None = None
    build: BuildStage | None = None


@dataclass(frozen=True)
class Pipeline:
    """A started pipeline.  orchestrator: the Backend of the API."""

    spec: PipelineSpec
    orchestrator: Orchestrator
    supervisor: Supervisor
    address: str  # of the hub, for workers that join

    async def wait_ready(self) -> None:
        """Return when every stage serves.  Raises the error of a stage that cannot."""
        await self.supervisor.wait_ready()

    async def drain(self, seconds: float) -> None:
        """Refuse new requests; end those that still run after that time with an error."""
        await self.orchestrator.drain(seconds)


@contextlib.asynccontextmanager
async def start_pipeline(spec: PipelineSpec, options: LaunchOptions | None = None) -> AsyncIterator[Pipeline]:
    """Start a pipeline's workers; the block is entered at once, before they are ready.

    On leaving, requests under way may finish within drain_seconds; then every worker is ended, and
    sockets, shared memory and the run directory are removed.
    Raises PipelineError if the pipeline cannot run so, WeightsError if the model is missing,
    TransportError if a port or key is unusable.
    """
    chosen = options or LaunchOptions()
    refuse_unsupported(spec)
    _check_remote(spec, chosen)
    model_dir = _model_directory(spec)
    _make_keys(chosen)
    run_id = secrets.token_hex(4)
    async with contextlib.AsyncExitStack() as stack:
        run_dir = Path(tempfile.mkdtemp(prefix="omnistage-"))
        stack.callback(shutil.rmtree, run_dir, ignore_errors=True)
        hub: Hub
        host: WorkerHost
        if chosen.mode == "threads":
            network = chosen.network or MemoryNetwork()
            hub, host = network.hub(), ThreadHost(network, chosen.build)
            template = WorkerConfig(name="", stage="", run_id=run_id, control=hub.address)
        else:
            listen = chosen.listen or ("tcp://127.0.0.1:0" if chosen.transport == "tcp" else "")
            hub = ZmqHub(
                run_id=run_id,
                run_dir=run_dir,
                listen_tcp=listen or None,
                advertise=chosen.advertise or None,
                key_file=chosen.key_file or None,
            )
            host = NurseryHost(run_dir)
            await stack.enter_async_context(lease_broker(str(run_dir / "lease.sock")))
            template = _template(spec, chosen, run_id=run_id, run_dir=run_dir, control=hub.address)
        stack.callback(hub.close)
        orchestrator = Orchestrator(spec, hub, model_dir)
        supervisor = Supervisor(
            spec=spec,
            hub=hub,
            host=host,
            orchestrator=orchestrator,
            template=template,
            progress=chosen.progress,
            heartbeat_seconds=chosen.heartbeat_seconds,
            silence_seconds=chosen.silence_seconds,
        )
        stack.push_async_callback(supervisor.close)
        await supervisor.start()
        try:
            yield Pipeline(spec, orchestrator, supervisor, hub.address)
        finally:
            await orchestrator.drain(chosen.drain_seconds)


@contextlib.asynccontextmanager
async def lease_broker(path: str) -> AsyncIterator[None]:
    """Keep a lease broker at `path` while the block runs: one that dies is replaced."""
    broker = await asyncio.to_thread(start_broker, path)

    async def keep() -> None:
        nonlocal broker
        while True:
            await exited(broker)
            stop_broker(broker)
            logger.error("the lease broker died; starting another")
            try:
                broker = start_broker(path)  # blocks for some 40 ms, and cannot be cancelled halfway
            except OSError as error:
                logger.error("%s; stages on one device no longer take turns", error)
                return

    keeper = asyncio.create_task(keep())
    try:
        yield
    finally:
        keeper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeper
        stop_broker(broker)


def refuse_unsupported(spec: PipelineSpec) -> None:
    """Settings the graph knows and this version does not carry out.  Raises PipelineError naming all."""
    problems = []
    for name, stage in spec.stages.items():
        gpus = [device for device in stage.devices if device != "cpu"]
        if gpus:
            problems.append(f"{name}.devices names {', '.join(gpus)}, but only cpu runs yet")
        if stage.tensor_parallel > 1:
            problems.append(f"{name}.tensor_parallel is {stage.tensor_parallel}, but only 1 runs yet")
    if problems:
        raise PipelineError(f"pipeline {spec.name!r} cannot run: {'; '.join(problems)}")


def _model_directory(spec: PipelineSpec) -> str:
    """Empty for a pipeline without a model.  Raises WeightsError, before anything is loaded."""
    if not spec.model:
        return ""
    directory = resolve_model(spec.model)
    check_files(directory, spec)
    return str(directory)


def _check_remote(spec: PipelineSpec, options: LaunchOptions) -> None:
    """Raises PipelineError if workers are to join and have nowhere to."""
    remote = [name for name, stage in spec.stages.items() if stage.placement == "remote"]
    if remote and (options.mode == "threads" or not (options.listen or options.transport == "tcp")):
        raise PipelineError(
            f"the workers of {', '.join(remote)} join from other hosts (placement: remote), but the server "
            "listens for none; give --listen tcp://HOST:PORT, or leave the placement out"
        )


def _template(
    spec: PipelineSpec, options: LaunchOptions, *, run_id: str, run_dir: Path, control: str
) -> WorkerConfig:
    is_tcp = options.transport == "tcp"
    bind_host = options.listen.removeprefix("tcp://").rpartition(":")[0] if options.listen else "127.0.0.1"
    binds = [] if is_tcp else [f"ipc://{run_dir}"]
    if is_tcp or options.listen:  # as soon as any worker joins, those of this host must be reachable too
        binds.append(f"tcp://{bind_host}:0")
    return WorkerConfig(
        name="",
        stage="",
        run_id=run_id,
        control=control,
        bind=",".join(binds),
        advertise=options.advertise,
        lease_socket=str(run_dir / "lease.sock"),
        key_file=options.key_file,
        shared_memory=0 if is_tcp else spec.shared_memory,
        host="elsewhere" if is_tcp else "",
    )


def _make_keys(options: LaunchOptions) -> None:
    """The cluster's key file, made on first use."""
    path = Path(options.key_file)
    if options.key_file and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        ClusterKeys.generate().save(path)
        logger.warning("new cluster keys in %s; copy the file to the hosts whose workers join", path)


def ensure_weights(spec: PipelineSpec) -> None:
    """Fetch the starter's weights, or a model of the hub, if they are missing.

    Raises FetchError if that fails, WeightsError for another model that is not there.
    """
    if spec.model != STARTER:
        if is_hub_name(spec.model) and not Path(spec.model).is_dir():
            fetch_model(spec.model)
        elif spec.model:
            resolve_model(spec.model)
        return
    from omnistage.models.fetch import is_complete

    if is_complete():
        return
    _fetch(STARTER)


def fetch_model(name: str) -> Path:
    """The directory of a model of the hub, fetched if it is not whole in the cache.  Raises FetchError."""
    cached = cached_model(name)
    if cached is None:
        _fetch(name)
        cached = cached_model(name)
    if cached is None:
        raise FetchError(
            f"{name} was fetched, but is no model of config.json and *.safetensors; choose another"
        )
    return cached


def _fetch(what: str) -> None:
    """In a process of its own, which shows its progress and may import what this one must not.

    Raises FetchError.
    """
    command = [sys.executable, "-m", "omnistage.serving.cli", "fetch", what]
    if subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode != 0:
        raise FetchError(f"the weights of {what} could not be fetched; the reason stands above")


def join_address(url: str) -> str:
    """The address of an orchestrator given as "tcp://HOST:PORT".  Raises TransportError."""
    if not url.startswith("tcp://") or url.count(":") < 2:
        raise TransportError(f"{url!r} is not where an orchestrator listens; write tcp://HOST:PORT")
    return f"orchestrator@elsewhere|{url}"
