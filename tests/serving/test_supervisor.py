"""The supervisor against workers that say, fail and die as the test wants: no process, no socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from omnistage.errors import ReplayExhausted, RequestFailed, WeightsError
from omnistage.graph import Graph, PipelineSpec
from omnistage.serving.replicas import ReplicaState
from omnistage.transport.messages import (
    Configure,
    Finished,
    Heartbeat,
    LoadFailed,
    PeerGone,
    Ready,
    Shutdown,
    StepReport,
    Submit,
)
from omnistage.types import StageTiming
from tests.serving.fake_workers import error_of, opened_sites, until


def one_llm(**settings) -> PipelineSpec:
    graph = Graph("one", model="model")
    graph.output(text=graph.llm("llm", **settings))
    return graph.build()


@pytest.fixture
async def open_site(monkeypatch) -> AsyncIterator:
    async with opened_sites(monkeypatch) as start:
        yield lambda spec=None, **options: start(spec or one_llm(), **options)


async def test_a_worker_is_configured_and_serves(open_site):
    site = await open_site()
    await site.hello("llm-0-1")
    assert site.replica().state is ReplicaState.LOADING
    assert isinstance(site.hub.last("@llm-0-1"), Configure)
    await site.hub.say("@llm-0-1", Ready(worker="llm-0-1", info={"max_model_len": 8}))
    await site.supervisor.wait_ready()
    site.submit()
    assert isinstance(site.hub.last("@llm-0-1"), Submit)


async def test_a_worker_that_dies_right_after_its_hello_does_not_stop_the_supervisor(open_site):
    """Its configuration cannot be sent any more: only the exit counts, and the next one is served."""
    site = await open_site()
    site.hub.gone.add("@llm-0-1")
    await site.hello("llm-0-1")
    site.host.exit("llm-0-1", -9)
    await site.spawned(2)
    await site.ready("llm-0-2")
    assert site.replica().state is ReplicaState.READY


async def test_last_words_of_a_dead_worker_change_nothing(open_site):
    site = await open_site()
    await site.ready("llm-0-1")
    site.host.exit("llm-0-1", -9)
    await site.spawned(2)
    for is_gone in (False, True):
        site.hub.gone = {"@llm-0-1"} if is_gone else set()
        await site.hello("llm-0-1")
    assert isinstance(site.hub.last("@llm-0-1"), Shutdown)
    await site.hub.say("@llm-0-1", Ready(worker="llm-0-1", info={}))
    assert site.replica().state is ReplicaState.STARTING
    assert "@llm-0-1" not in site.orchestrator.replicas.by_address
    await site.ready("llm-0-2")
    assert site.replica().state is ReplicaState.READY
    assert list(site.orchestrator.replicas.by_address) == ["@llm-0-2"]


async def test_requests_wait_while_the_only_worker_restarts(open_site):
    site = await open_site()
    await site.ready("llm-0-1")
    site.host.exit("llm-0-1", -9)
    site.submit()
    assert site.orchestrator.is_ready
    assert site.orchestrator.gauges()["orchestrator"]["waiting_requests"] == 1
    await site.spawned(2)
    await site.ready("llm-0-2")
    assert isinstance(site.hub.last("@llm-0-2"), Submit)


async def test_workers_that_die_together_cost_a_request_one_replay(open_site):
    """Both replicas are gone: it must not be placed on the one whose death is reported second."""
    site = await open_site(one_llm(replicas=2))
    await site.ready("llm-0-1")
    await site.ready("llm-1-1")
    site.submit()
    first, second = ("llm-0-1", "llm-1-1") if site.replica(index=0).held else ("llm-1-1", "llm-0-1")
    site.host.exit(first, -9)
    site.host.exit(second, -9)
    await site.spawned(4)
    await site.ready("llm-0-2")
    submits = [message for sent in site.hub.sent.values() for message in sent if isinstance(message, Submit)]
    assert [submit.key.attempt for submit in submits] == [0, 1]
    assert site.orchestrator.num_replays == 1


async def test_the_others_are_told_of_a_death(open_site):
    site = await open_site(one_llm(replicas=2))
    await site.ready("llm-0-1")
    await site.ready("llm-1-1")
    site.host.exit("llm-0-1", -9)
    assert site.hub.last("@llm-1-1") == PeerGone(address="@llm-0-1")


async def test_a_worker_that_never_serves_is_given_up(open_site):
    site = await open_site()
    stream = site.submit()
    for count in range(1, 7):
        await site.spawned(count)
        site.host.exit(f"llm-0-{count}", 1)
    with pytest.raises(WeightsError, match=r"'llm' does not start: llm.0 died 6 times .* with status 1 "):
        await site.supervisor.wait_ready()
    assert isinstance(await error_of(stream), RequestFailed)
    with pytest.raises(RequestFailed, match="stage 'llm' is down"):
        site.submit()
    assert not site.orchestrator.is_ready
    assert len(site.host.spawned) == 6
    assert site.replica().restarts == 5


async def test_deaths_that_requests_cause_end_those_requests_and_not_the_stage(open_site):
    site = await open_site()
    for count in range(1, 13):
        await site.spawned(count)
        await site.ready(f"llm-0-{count}")
        if count % 3 == 1:
            stream = site.submit(f"poison-{count}")
        site.host.exit(f"llm-0-{count}", -11)
        if count % 3 == 0:
            assert isinstance(await error_of(stream), ReplayExhausted)
    await site.spawned(13)
    assert site.replica().state is ReplicaState.STARTING


async def test_a_model_that_cannot_be_loaded_is_not_tried_again(open_site):
    site = await open_site()
    await site.hello("llm-0-1")
    failed = LoadFailed(worker="llm-0-1", kind="WeightsError", text="model.safetensors is damaged")
    await site.hub.say("@llm-0-1", failed)
    with pytest.raises(WeightsError, match=r"^model.safetensors is damaged$"):
        await site.supervisor.wait_ready()
    site.host.exit("llm-0-1", 1)
    await asyncio.sleep(0.01)
    assert site.host.spawned == ["llm-0-1"]
    assert site.replica().state is ReplicaState.FAILED


async def test_a_broken_supervisor_fails_requests_rather_than_leave_them_hanging(open_site, monkeypatch):
    site = await open_site()
    await site.ready("llm-0-1")
    stream = site.submit()
    monkeypatch.setattr(site.orchestrator, "_on_report", lambda replica, report: 1 / 0)
    await site.hub.say("@llm-0-1", StepReport(worker="llm-0-1"))
    assert "the supervisor broke" in str(await error_of(stream))


# --- workers that join ------------------------------------------------------------------------------


async def test_a_place_is_taken_by_one_and_free_again_when_its_connection_breaks(open_site):
    site = await open_site(one_llm(placement="remote"))
    assert site.host.spawned == []
    await site.ready("a")
    stream = site.submit()
    await site.hello("b")
    assert isinstance(site.hub.last("@b"), Shutdown)
    site.hub.gone.add("@a")  # no heartbeat has noticed it yet
    await site.ready("c")
    assert isinstance(site.hub.last("@c"), Submit)
    assert site.hub.last("@c").key.attempt == 1
    assert site.replica().worker == "c"
    assert site.replica().restarts == 1
    await stream.aclose()


async def test_silence_and_broken_connections_are_noticed_by_heartbeats(open_site):
    site = await open_site(one_llm(placement="remote"), heartbeat_seconds=0.01, silence_seconds=0.1)
    await site.ready("a")
    await until(lambda: site.replica().state is not ReplicaState.READY)
    assert Heartbeat(worker="a") in site.hub.sent["@a"]
    await site.ready("b")
    site.hub.gone.add("@b")
    await until(lambda: site.replica().state is not ReplicaState.READY)
    assert site.replica().restarts == 2


async def test_a_worker_that_is_heard_stays(open_site):
    site = await open_site(one_llm(placement="remote"), heartbeat_seconds=0.01, silence_seconds=0.2)
    await site.ready("a")
    for _ in range(30):
        await asyncio.sleep(0.01)
        await site.hub.say("@a", Heartbeat(worker="a"))
    assert site.replica().state is ReplicaState.READY


async def test_one_that_cannot_load_leaves_the_place_to_others(open_site):
    site = await open_site(one_llm(placement="remote"))
    await site.hello("a")
    await site.hub.say("@a", LoadFailed(worker="a", kind="WeightsError", text="there is no model here"))
    await site.ready("b")
    async with asyncio.timeout(5):
        await site.supervisor.wait_ready()
    assert site.replica().worker == "b"


async def test_a_finished_request_frees_its_place(open_site):
    """Held attempts are given back by reports, and those of the dead with their death."""
    site = await open_site()
    await site.ready("llm-0-1")
    site.submit("a")
    site.submit("b")
    [key, other] = sorted(site.replica().held)
    finished = Finished(key, StageTiming(stage="llm", received=0.0), error=("RequestFailed", "no", "x", None))
    await site.hub.say("@llm-0-1", StepReport(worker="llm-0-1", finished=(finished,)))
    assert site.replica().held == {other}
    site.host.exit("llm-0-1", -9)
    assert site.replica().held == set()
