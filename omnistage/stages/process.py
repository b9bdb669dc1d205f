"""A worker's process: from its configuration to a running loop, and its guests' beside it.

Entered in a process forked by the nursery, in the process of `omnistage worker --join`, or (tests,
`in_process` pipelines) in a thread with a memory endpoint.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import torch

from omnistage.errors import OmnistageError, PipelineError, TransportError
from omnistage.graph import PipelineSpec, StageSpec
from omnistage.graph.loader import from_json
from omnistage.models.registry import resolve_model
from omnistage.stages.config import WorkerConfig
from omnistage.stages.factory import build_stage
from omnistage.stages.lease import BrokerLease, DeviceLease, LeaseGroup, ThreadLease
from omnistage.stages.stage import Stage, StageContext
from omnistage.stages.worker import Worker
from omnistage.transport import Endpoint, ZmqEndpoint, host_id
from omnistage.transport.messages import (
    ORCHESTRATOR,
    Configure,
    Hello,
    LoadFailed,
    Loading,
    Ready,
    Shutdown,
)
from omnistage.types import StageKind

logger = logging.getLogger(__name__)

CONFIGURE_TIMEOUT = 60.0  # seconds, for workers that the supervisor has started


BuildStage = Callable[[StageContext], Stage]


def run_worker(raw: Mapping[str, object]) -> int:
    """Serve a stage until told to stop; the return value is the process's exit status.

    The configuration's guests run in threads of their own and are told to stop each by itself.  An error
    of one of them ends the process there and then with status 1, as the caller ends it for an error of
    this one: what the others were doing is replayed.
    """
    config = msgspec.convert(raw, WorkerConfig)
    if not config.guests:
        return _serve(config, build_stage)
    turn = threading.Lock()

    def build(context: StageContext) -> Stage:
        with turn:  # imports in the middle of loading, transformers' above all, are not safe in threads
            return build_stage(context)

    guests = [
        threading.Thread(target=_serve_guest, args=(guest, build), name=guest.name, daemon=True)
        for guest in config.guests
    ]
    for guest in guests:
        guest.start()
    status = _serve(config, build)
    if status == 0:
        for guest in guests:
            guest.join()
    return status


def _serve_guest(config: WorkerConfig, build: BuildStage) -> None:
    """A guest's thread."""
    status = 1
    try:
        status = _serve(config, build)
    except Exception:  # the thread's boundary: the reason is logged, and the process ends
        logger.exception("worker %s failed", config.name)
    finally:
        if status != 0:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)


def _serve(config: WorkerConfig, build: BuildStage) -> int:
    """Serve one stage over an endpoint of its own; 0 if it was told to stop, 1 after a logged error."""
    endpoint = ZmqEndpoint(
        name=config.name,
        run_id=config.run_id,
        control=config.control,
        bind=config.bind,
        advertise=config.advertise or None,
        key_file=config.key_file or None,
        shared_memory=config.shared_memory,
        host=config.host or None,
    )
    try:
        serve_stage(config, endpoint, build=build)
    except OmnistageError as error:
        logger.error("worker %s: %s", config.name, error)
        return 1
    except KeyboardInterrupt:
        return 0
    finally:
        endpoint.close()
    return 0


def serve_stage(
    config: WorkerConfig,
    endpoint: Endpoint,
    lease: DeviceLease | None = None,
    build: BuildStage = build_stage,
) -> None:
    """Handshake, load, run.  Raises what loading raises, after telling the orchestrator.

    lease: this worker's turn on its device; None asks the broker of config.  build: makes the stage.
    """
    phases = {"start": time.monotonic() - config.started} if config.started else {}
    configure = _introduce(config, endpoint)
    if configure is None:
        return
    pipeline = from_json(configure.pipeline)
    spec = pipeline.stages[configure.stage]
    device = spec.devices_of(configure.replica)[0]
    if lease is None:
        lease = _lease(config, device)
        torch.set_num_threads(spec.threads or os.cpu_count() or 1)
    worker = Worker(
        name=config.name,
        stage_name=spec.name,
        endpoint=endpoint,
        lease=lease,
        whole_edges=_whole_edges(pipeline, spec),
        patience=config.patience or None,
    )

    def progress(fraction: float, what: str) -> None:
        endpoint.send(ORCHESTRATOR, Loading(worker=config.name, fraction=fraction, what=what))

    context = StageContext(
        pipeline=pipeline,
        spec=spec,
        model_dir=resolve_model(pipeline.model) if pipeline.model else Path(),
        replica=configure.replica,
        share=endpoint.share,
        unshare=endpoint.unshare,
        credits=worker.credits,
        progress=progress,
    )
    began = time.monotonic()
    try:
        stage = build(context)
    except OmnistageError as error:
        endpoint.send(
            ORCHESTRATOR, LoadFailed(worker=config.name, kind=type(error).__name__, text=str(error))
        )
        raise
    worker.attach(stage)
    phases["load"] = time.monotonic() - began
    endpoint.send(ORCHESTRATOR, Ready(worker=config.name, info=stage.info(), phases=phases))
    try:
        with torch.inference_mode():
            worker.run()
    finally:
        lease.close()


def _introduce(config: WorkerConfig, endpoint: Endpoint) -> Configure | None:
    """Say hello and wait for what to do; None if the server is about to stop.

    Raises TransportError if there is no answer, PipelineError if the worker joined and is not needed.
    """
    hello = Hello(
        worker=config.name,
        stage=config.stage,
        address=endpoint.address,
        pid=os.getpid(),
        host=config.host or host_id(),
    )
    endpoint.send(ORCHESTRATOR, hello)
    timeout = config.patience or CONFIGURE_TIMEOUT
    answer = endpoint.receive(timeout)
    if isinstance(answer, Configure):
        return answer
    if not isinstance(answer, Shutdown):
        raise TransportError(
            f"the orchestrator at {config.control} sent no configuration within {timeout:.0f} s; "
            "is it running, and are the keys right?"
        )
    if not config.started:
        raise PipelineError(
            f"the server needs no worker for stage {config.stage!r}: the stage is not one of its pipeline "
            "with `placement: remote`, or all its replicas have joined"
        )
    return None


def _lease(config: WorkerConfig, device: str) -> DeviceLease:
    """The worker's turn on its device; one that joined has no broker and takes no turns with others."""
    if config.lease_socket:
        return BrokerLease(config.lease_socket, device, config.stage)
    return ThreadLease(LeaseGroup())


def _whole_edges(pipeline: PipelineSpec, spec: StageSpec) -> list[str]:
    """An encoder's output is whole per item already, whatever its edges say."""
    if spec.kind is StageKind.ENCODER:
        return []
    return [edge.name for edge in pipeline.edges_out_of(spec.name) if not edge.stream]
