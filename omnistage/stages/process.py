"""A worker's process: from its configuration to a running loop.

Entered in a process forked by the nursery, in the process of `omnistage worker --join`, or (tests,
`in_process` pipelines) in a thread with a memory endpoint.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import torch

from omnistage.errors import OmnistageError, TransportError
from omnistage.graph.loader import from_json
from omnistage.models.registry import resolve_model
from omnistage.stages.config import WorkerConfig
from omnistage.stages.factory import build_stage
from omnistage.stages.lease import BrokerLease, DeviceLease
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

logger = logging.getLogger(__name__)

CONFIGURE_TIMEOUT = 60.0  # seconds


def run_worker(raw: Mapping[str, object]) -> int:
    """Serve one stage until told to stop; the return value is the process's exit status."""
    config = msgspec.convert(raw, WorkerConfig)
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
        serve_stage(config, endpoint)
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
    build: Callable[[StageContext], Stage] = build_stage,
) -> None:
    """Handshake, load, run.  Raises what loading raises, after telling the orchestrator.

    lease: this worker's turn on its device; None asks the broker of config.  build: makes the stage.
    """
    phases = {"start": time.monotonic() - config.started} if config.started else {}
    hello = Hello(
        worker=config.name, stage=config.stage, address=endpoint.address, pid=os.getpid(), host=host_id()
    )
    endpoint.send(ORCHESTRATOR, hello)
    configure = endpoint.receive(CONFIGURE_TIMEOUT)
    if isinstance(configure, Shutdown):
        return
    if not isinstance(configure, Configure):
        raise TransportError(
            f"the orchestrator at {config.control} sent no configuration within {CONFIGURE_TIMEOUT:.0f} s; "
            "is it running, and are the keys right?"
        )
    pipeline = from_json(configure.pipeline)
    spec = pipeline.stages[configure.stage]
    device = spec.devices_of(configure.replica)[0]
    if lease is None:
        # A worker that joined from another host shares its device with nobody.
        lease = BrokerLease(config.lease_socket, device, spec.name)
        torch.set_num_threads(spec.threads or os.cpu_count() or 1)
    worker = Worker(
        name=config.name,
        stage_name=spec.name,
        endpoint=endpoint,
        lease=lease,
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
