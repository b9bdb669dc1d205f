"""The nursery: a small process that has imported torch once and forks a worker on demand.

    supervisor  --{"spawn": name, "config": ...}-->  nursery
    supervisor  <--{"started"|"exited": name, "pid": ..., "status": ...}--  nursery

JSON lines over the socket whose descriptor is argv[1].  When that socket closes (the API process is
gone) the nursery kills its workers, removes their shared memory and the run directory argv[2], and
ends; when the nursery dies, the kernel kills the workers.  SIGINT and SIGTERM, which terminals and
service managers send to all processes at once, are the API process's to handle: it drains first.
It runs no tensor operation itself: forking is safe only while torch has started no threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import logging
import os
import selectors
import shutil
import signal
import socket
import sys
import traceback
from collections.abc import Iterator

import msgspec

from omnistage.stages.config import WorkerConfig
from omnistage.transport import remove_leftovers

# What workers need; imported once here, shared by every fork.
PRELOAD = (
    "torch",
    "omnistage.stages.factory",
    "omnistage.stages.process",
    "omnistage.models.decoder",
    "omnistage.models.whisper",
    "omnistage.models.efficientnet",
    "omnistage.models.vits",
    "omnistage.models.hifigan",
)
PR_SET_PDEATHSIG = 1

logger = logging.getLogger(__name__)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies (Linux; elsewhere sockets tell)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == 1:
            os._exit(1)


class Nursery:
    def __init__(self, connection: socket.socket, run_dir: str) -> None:
        self._connection = connection
        self._run_dir = run_dir
        self._buffer = b""
        self._children: dict[int, str] = {}
        self._runs: dict[str, str] = {}  # worker -> run id, of every worker and guest ever started
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)

    def run(self) -> None:
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        with selectors.DefaultSelector() as selector:
            selector.register(self._connection, selectors.EVENT_READ)
            selector.register(self._wake_read, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select()}
                if self._wake_read in ready:
                    os.read(self._wake_read, 4096)
                    self._reap()
                if self._connection in ready and not self._read_commands():
                    break
        self._kill_all()

    def _read_commands(self) -> bool:
        """Handle complete lines.  False: the supervisor is gone."""
        try:
            data = self._connection.recv(65536)
        except ConnectionError:
            return False
        if not data:
            return False
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            command = json.loads(line)
            self._spawn(command["spawn"], command["config"])
        return True

    def _spawn(self, name: str, config: dict[str, object]) -> None:
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            logger.error("cannot fork worker %s: %s", name, error)
            self._tell({"exited": name, "pid": 0, "status": 1})
            return
        if pid == 0:
            self._become_worker(parent, config)
        self._children[pid] = name
        first = msgspec.convert(config, WorkerConfig)
        self._runs.update((worker.name, worker.run_id) for worker in (first, *first.guests))
        self._tell({"started": name, "pid": pid})

    def _become_worker(self, parent: int, config: dict[str, object]) -> None:
        status = 1
        try:
            die_with_parent()
            if os.getppid() != parent:
                os._exit(1)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._connection.close()
            os.close(self._wake_read)
            os.close(self._wake_write)
            from omnistage.stages.process import run_worker

            status = run_worker(config)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def _reap(self) -> None:
        for pid, status in _exited():
            name = self._children.pop(pid, None)
            if name is not None:
                self._tell({"exited": name, "pid": pid, "status": os.waitstatus_to_exitcode(status)})

    def _kill_all(self) -> None:
        for pid in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in list(self._children):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        for name, run_id in self._runs.items():
            remove_leftovers(run_id, name)
        shutil.rmtree(self._run_dir, ignore_errors=True)

    def _tell(self, event: dict[str, object]) -> None:
        with contextlib.suppress(ConnectionError):  # a vanished supervisor is seen by the next recv
            self._connection.sendall(json.dumps(event).encode() + b"\n")


def _exited() -> Iterator[tuple[int, int]]:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        # Inherited by the workers; unlike SIG_IGN not by the programs that a user's function runs.
        signal.signal(number, lambda *_: None)
    logging.basicConfig(level=os.environ.get("OMNISTAGE_LOG", "WARNING").upper())
    connection = socket.socket(fileno=int(sys.argv[1]))
    for module in PRELOAD:
        importlib.import_module(module)
    from omnistage.ops.native.library import library

    library()  # built once here, if this is the first start on this machine, and not by every worker
    Nursery(connection, sys.argv[2]).run()


if __name__ == "__main__":
    main()
