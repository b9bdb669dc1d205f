"""Which replicas share a worker process, and how often that process was started and has died.

Bookkeeping alone: the supervisor (omnistage.serving.supervisor) starts the processes and hears of their
ends.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from omnistage.serving.replicas import Replica, ReplicaState, ReplicaTable

QUICK_DEATH_SECONDS = 10.0  # after its start, and without a request to blame


class WorkerProcess:
    """Replicas that start, become ready, die and restart together.

    replicas: the one of the stage that others share, then those of its guests (`colocate`).
    num_starts, num_quick_deaths (in a row): of the process, whatever the number of its replicas.
    """

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.replicas = tuple(replicas)
        self.num_starts = 0
        self.num_quick_deaths = 0
        self._started = 0.0
        self._loaded: set[Replica] = set()

    @property
    def name(self) -> str:
        """For messages: "thinker.0", or "thinker.0 with vision.0 and hearing.0"."""
        first, *guests = (replica.name for replica in self.replicas)
        return " with ".join([first, " and ".join(guests)]) if guests else first

    @property
    def wanted(self) -> list[Replica]:
        """Those that have not been given up; the first of them gives the process its name."""
        return [replica for replica in self.replicas if replica.state is not ReplicaState.FAILED]

    def begin(self) -> None:
        """A process is about to be started."""
        self.num_starts += 1
        self._started = time.monotonic()

    def note_loaded(self, replica: Replica) -> bool:
        """Whether all have loaded now.  Until then none serves: what a request ends ends them all."""
        self._loaded.add(replica)
        return self._loaded.issuperset(self.wanted)

    def forget_loaded(self, replica: Replica) -> None:
        self._loaded.discard(replica)

    def note_death(self) -> None:
        """Count a death; call it while the replicas still have the states they died in.

        It is quick if they never served, or had nothing to do: the next process would die of the same
        cause.  What a request causes is bounded by that request's replay budget.
        """
        never_served = any(replica.state is not ReplicaState.READY for replica in self.wanted)
        is_new = time.monotonic() - self._started < QUICK_DEATH_SECONDS
        is_idle = not any(replica.held for replica in self.replicas)
        is_quick = never_served or (is_new and is_idle)
        self.num_quick_deaths = self.num_quick_deaths + 1 if is_quick else 0


def share_processes(table: ReplicaTable, *, with_guests: bool) -> list[WorkerProcess]:
    """A process for each replica; with_guests: replica i of a guest is in that of its host's replica i."""
    processes = []
    for replica in table.all():
        if with_guests and replica.stage.colocate is not None:
            continue
        guests = [
            guest
            for guest in table.all()
            if with_guests and guest.stage.colocate == replica.stage.name and guest.index == replica.index
        ]
        processes.append(WorkerProcess([replica, *guests]))
    return processes
