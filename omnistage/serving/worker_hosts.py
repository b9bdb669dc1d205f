"""Two ways to run a worker: in a process forked by the nursery, or in a thread of this process.

Both start workers by configuration and report each one's end through a callback on the event loop.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

if TYPE_CHECKING:
    from omnistage.stages.stage import Stage, StageContext
    from omnistage.transport import MemoryNetwork

logger = logging.getLogger(__name__)

OnExit = Callable[[str, int], None]  # worker's name, exit status (negative: killed by that signal)
BuildStage = Callable[["StageContext"], "Stage"]
NURSERY_EXIT_SECONDS = 5.0

# Threads of a stage that waits must sleep, or stages that share cores slow each other forty-fold;
# a short spin keeps the gaps inside one step cheap.
THREAD_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "20000",
    "KMP_BLOCKTIME": "0",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


async def exited(process: subprocess.Popen[bytes]) -> None:
    """Return when a child process has ended."""
    loop = asyncio.get_running_loop()
    if not hasattr(os, "pidfd_open"):  # not Linux
        await asyncio.to_thread(process.wait)
        return
    ended = asyncio.Event()
    descriptor = os.pidfd_open(process.pid)
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


class WorkerHost(Protocol):
    @property
    def shares_processes(self) -> bool:
        """Whether a worker's guests run in its process and end with it; otherwise spawn() is given none."""

    async def start(self, on_exit: OnExit) -> None: ...

    def spawn(self, config: msgspec.Struct, name: str) -> None:
        """Start a worker and its guests; their common end is reported even if they never say a word."""

    def pid_of(self, name: str) -> int: ...

    async def close(self) -> None:
        """End every worker that still runs."""


class NurseryHost:
    """Workers as processes: fast to start, dead with their parent, noticed at once when they die.

    A nursery is started with the first worker; one that dies takes its workers along, and another is
    started with the next worker.
    """

    shares_processes = True

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None  # None while no nursery takes commands
        self._keeping: asyncio.Task[None] | None = None
        self._on_exit: OnExit = lambda name, status: None
        self._pids: dict[str, int] = {}
        self._alive: set[str] = set()  # workers the present nursery was told to start
        self._unsent: dict[str, bytes] = {}  # worker -> command for the next nursery
        self._is_wanted = asyncio.Event()  # set once there is a command to send, or to end
        self._is_closing = False

    async def start(self, on_exit: OnExit) -> None:
        self._on_exit = on_exit
        self._keeping = asyncio.create_task(self._keep())

    async def _keep(self) -> None:
        """Run one nursery after another, each as long as it lives."""
        while not self._is_closing:
            if not self._unsent:
                self._is_wanted.clear()
                await self._is_wanted.wait()
                continue
            try:
                await self._serve(self._start_nursery())
            except OSError as error:
                logger.error("the worker nursery cannot be started: %s", error)
                self._alive, self._unsent = set(self._unsent), {}
            self._report_loss()

    def _report_loss(self) -> None:
        if not self._is_closing:
            logger.error("the worker nursery is gone, and its workers with it")
            for name in list(self._alive):
                self._ended(name, -signal.SIGKILL)

    def _start_nursery(self) -> socket.socket:
        """The connection to a nursery that is starting.  Raises OSError."""
        ours, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "omnistage.stages.nursery", str(theirs.fileno()), str(self._run_dir)],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env={**THREAD_ENVIRONMENT, **os.environ},
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        return ours

    async def _serve(self, connection: socket.socket) -> None:
        """Send commands and take in events until the nursery is gone; then reap it."""
        reader, writer = await asyncio.open_unix_connection(sock=connection)
        try:
            self._writer = writer
            self._alive, unsent, self._unsent = set(self._unsent), self._unsent, {}
            writer.writelines(unsent.values())
            while not self._is_closing and (line := await reader.readline()):
                event = json.loads(line)
                if "started" in event:
                    self._pids[event["started"]] = event["pid"]
                else:
                    self._ended(event["exited"], event["status"])
        except ConnectionError as error:  # it died with commands unread
            logger.info("the connection to the worker nursery broke: %s", error)
        finally:
            self._writer = None
            writer.close()  # tells a nursery that still lives to end
            await self._reap_nursery()

    def _ended(self, name: str, status: int) -> None:
        self._alive.discard(name)
        self._pids.pop(name, None)
        self._on_exit(name, status)

    def spawn(self, config: msgspec.Struct, name: str) -> None:
        command = {"spawn": name, "config": msgspec.to_builtins(config)}
        line = json.dumps(command).encode() + b"\n"
        if self._writer is None:
            self._unsent[name] = line
            self._is_wanted.set()
        else:  # if the nursery has just died, the worker is reported dead with it
            self._alive.add(name)
            self._writer.write(line)

    def pid_of(self, name: str) -> int:
        return self._pids.get(name, 0)

    async def close(self) -> None:
        self._is_closing = True
        self._is_wanted.set()
        if self._writer is not None:
            self._writer.close()
        if self._keeping is not None:
            await self._keeping

    async def _reap_nursery(self) -> None:
        assert self._process is not None
        process, self._process = self._process, None
        if not self._pids:
            process.kill()  # nothing to clean up; it may still be busy importing torch
        try:
            await asyncio.to_thread(process.wait, NURSERY_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait)


class ThreadHost:
    """Workers as threads over a memory network: for tests, debugging and notebooks.

    Everything but processes and sockets is as in production.  A worker that raises is reported as
    dead and restarted, but a crash of the interpreter takes all of them.  They share one process
    anyway: `colocate` makes no difference here, and a worker that raises takes no other one along.
    """

    shares_processes = False

    def __init__(self, network: MemoryNetwork, build: BuildStage | None = None) -> None:
        self._network = network
        self._build = build
        self._threads: dict[str, threading.Thread] = {}
        self._on_exit: OnExit = lambda name, status: None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._leases: Any = None

    async def start(self, on_exit: OnExit) -> None:
        from omnistage.stages.lease import LeaseGroup

        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._leases = LeaseGroup()

    def spawn(self, config: msgspec.Struct, name: str) -> None:
        thread = threading.Thread(target=self._run, args=(config, name), name=name, daemon=True)
        self._threads[name] = thread
        thread.start()

    def _run(self, config: Any, name: str) -> None:
        from omnistage.stages.factory import build_stage
        from omnistage.stages.lease import ThreadLease
        from omnistage.stages.process import serve_stage

        status = 1
        endpoint = self._network.endpoint(name)
        try:
            serve_stage(config, endpoint, ThreadLease(self._leases), self._build or build_stage)
            status = 0
        except Exception:  # the thread's boundary: whatever ended the worker is logged and reported
            logger.exception("worker %s failed", name)
        finally:
            endpoint.close()
            if self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._on_exit, name, status)

    def pid_of(self, name: str) -> int:
        return os.getpid()

    async def close(self) -> None:
        for thread in self._threads.values():
            await asyncio.to_thread(thread.join, NURSERY_EXIT_SECONDS)
