"""The orchestrator's table of stage replicas: who is ready, who holds what, who gets the next request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from enum import StrEnum

from omnistage.graph import StageSpec
from omnistage.transport.messages import RequestKey
from omnistage.types import Scalar

MAX_DIRECTORY = 65536  # media keys remembered per encoder stage


class ReplicaState(StrEnum):
    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"  # its model cannot be loaded, or it died too often


class Replica:
    """One place in the graph for a worker process.  address, pid: of the present process."""

    def __init__(self, stage: StageSpec, index: int) -> None:
        self.stage = stage
        self.index = index
        self.state = ReplicaState.STARTING
        self.worker = ""
        self.address = ""
        self.host = ""
        self.pid = 0
        self.info: dict[str, Scalar | list[str]] = {}
        self.phases: dict[str, float] = {}
        self.gauges: dict[str, float] = {}
        self.restarts = 0
        self.failure = ""
        self.heard = 0.0  # time.monotonic() of the last message
        self.held: set[RequestKey] = set()  # attempts this process has been given and not given back

    @property
    def name(self) -> str:
        return f"{self.stage.name}.{self.index}"

    @property
    def has_room(self) -> bool:
        return self.state is ReplicaState.READY and len(self.held) < self.stage.max_num_seqs


class ReplicaTable:
    """All replicas of a pipeline, by stage and by the address of their present process."""

    def __init__(self, stages: Iterable[StageSpec]) -> None:
        self.by_stage = {
            stage.name: [Replica(stage, index) for index in range(stage.replicas)] for stage in stages
        }
        self.by_address: dict[str, Replica] = {}
        # Which replica has an item in its encoder cache; the bytes live there.
        self._directory: dict[str, OrderedDict[str, Replica]] = {
            name: OrderedDict() for name in self.by_stage
        }

    def all(self) -> list[Replica]:
        return [replica for replicas in self.by_stage.values() for replica in replicas]

    @property
    def is_ready(self) -> bool:
        return all(
            any(replica.state is ReplicaState.READY for replica in replicas)
            for replicas in self.by_stage.values()
        )

    def failure_of(self, stage: str) -> str:
        """Why no replica of the stage will ever serve again, "" if one may."""
        replicas = self.by_stage[stage]
        if all(replica.state is ReplicaState.FAILED for replica in replicas):
            return replicas[0].failure
        return ""

    def choose(self, stage: str, media_keys: Iterable[str]) -> Replica | None:
        """The replica for a request: the one that has its media encoded, else the least busy with room."""
        directory = self._directory[stage]
        for key in media_keys:
            owner = directory.get(key)
            if owner is not None and owner.has_room:
                return owner
        candidates = [replica for replica in self.by_stage[stage] if replica.has_room]
        return min(candidates, key=lambda replica: len(replica.held), default=None)

    def assign_media(self, replica: Replica, media_keys: Iterable[str]) -> None:
        """Later requests for the same media go where it is being encoded: single flight over replicas."""
        directory = self._directory[replica.stage.name]
        for key in media_keys:
            directory[key] = replica
            directory.move_to_end(key)
        while len(directory) > MAX_DIRECTORY:
            directory.popitem(last=False)

    def forget_media(self, replica: Replica, media_keys: Iterable[str] | None = None) -> None:
        """Evicted keys, or (None) everything a dead process had."""
        directory = self._directory[replica.stage.name]
        keys = (
            [key for key, owner in directory.items() if owner is replica]
            if media_keys is None
            else media_keys
        )
        for key in keys:
            if directory.get(key) is replica:
                del directory[key]
