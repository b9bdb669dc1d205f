"""How a process with several workers ends, seen from its parent: each case in a fork, as the nursery's."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest

# A fork of pytest itself would copy its threads' locks; this interpreter has none and imports torch once.
PROGRAM = textwrap.dedent(
    """
    import json, os, signal, sys, threading
    from omnistage.errors import WeightsError
    from omnistage.stages import process

    closed = []
    has_closed = threading.Condition()

    class FakeEndpoint:
        def __init__(self, *, name, **options):
            self.name = name

        def close(self):
            with has_closed:
                closed.append(self.name)
                has_closed.notify_all()

    class FakeWorkers:
        '''What each worker does is in its stage's name; `last` waits for all others to have ended.'''

        def __init__(self):
            self.is_building = threading.Lock()
            self.built = []

        def serve(self, config, endpoint, lease=None, build=None):
            build(config.name)
            match config.stage:
                case "forever":
                    threading.Event().wait()
                case "last":
                    with has_closed:
                        has_closed.wait_for(lambda: len(closed) == 2)
                case "refused":
                    raise WeightsError("there is no such part")
                case "broken":
                    raise ZeroDivisionError("a bug")

        def build(self, name):
            assert self.is_building.acquire(blocking=False), "two stages are built at once"
            threading.Event().wait(0.05)
            self.is_building.release()

    def status_of(*stages):
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            workers = FakeWorkers()
            process.ZmqEndpoint, process.serve_stage = FakeEndpoint, workers.serve
            process.build_stage = workers.build
            configs = [
                {"name": f"w{index}", "stage": stage, "run_id": "r", "control": "c"}
                for index, stage in enumerate(stages)
            ]
            status = 99
            try:
                returned = process.run_worker({**configs[0], "guests": configs[1:]})
                assert returned or len(closed) == len(stages), "a worker still runs"
                status = returned
            except ZeroDivisionError:
                status = 2
            finally:
                os._exit(status)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    print(json.dumps([status_of(*stages) for stages in json.loads(sys.argv[1])]))
    """
)

CASES = {
    ("well", "well", "well"): 0,
    ("well", "last", "well"): 0,  # the process waits for guests that still serve
    ("last", "well", "well"): 0,
    ("forever", "forever", "broken"): 1,
    ("forever", "refused", "forever"): 1,
    ("refused", "forever", "forever"): 1,
    ("broken", "forever", "forever"): 2,  # as a worker alone: the exception is the caller's
    ("refused",): 1,
    ("well",): 0,
}


@pytest.fixture(scope="module")
def ended() -> dict[tuple[str, ...], int]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(list(CASES))],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(CASES, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("stages", CASES, ids="-".join)
def test_exit_status(ended, stages):
    assert ended[stages] == CASES[stages]
