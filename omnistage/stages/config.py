"""What a worker is started with.  Shared by the supervisor, which imports no torch, and the worker."""

from __future__ import annotations

import msgspec


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """JSON on the way to the worker.

    name: unique for each start of a replica.  run_id: the server's name on this host.
    control: the orchestrator's address.  bind, advertise, key_file, shared_memory (bytes), host: as
    ZmqEndpoint takes them, "" for none.  lease_socket: the device lease's broker, "" for none.
    patience: seconds of silence after which the orchestrator is taken for gone, 0.0 for never.
    started: time.monotonic() when the supervisor asked for the worker, 0.0 if it joined by itself.
    guests: workers of other stages that run beside this one in its process; they have none themselves.
    """

    name: str
    stage: str
    run_id: str
    control: str
    bind: str = ""
    advertise: str = ""
    key_file: str = ""
    shared_memory: int = 0
    host: str = ""
    lease_socket: str = ""
    patience: float = 0.0
    started: float = 0.0
    guests: tuple[WorkerConfig, ...] = ()
