"""The supervisor and stages that share a process: they start, serve, die and restart together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from omnistage.errors import ReplayExhausted, RequestFailed, WeightsError
from omnistage.graph import Graph, PipelineSpec
from omnistage.serving.processes import share_processes
from omnistage.serving.replicas import ReplicaState, ReplicaTable
from omnistage.transport.messages import LoadFailed, Ready, Shutdown, Submit
from tests.serving.fake_workers import error_of, opened_sites

FIRST, GUEST, OTHER = "thinker-0-1", "vision-0-1", "hearing-0-1"


def omni(*, replicas: int = 1, **settings) -> PipelineSpec:
    """Text alone runs the thinker; the encoders share its process.  The guests stand before their host."""
    graph = Graph("omni", model="model", **settings)
    vision = graph.encoder("vision", colocate="thinker", replicas=replicas)
    hearing = graph.encoder("hearing", colocate="thinker", replicas=replicas)
    thinker = graph.llm("thinker", replicas=replicas)
    graph.connect(vision, thinker)
    graph.connect(hearing, thinker)
    graph.output(text=thinker)
    return graph.build()


@pytest.fixture
async def open_site(monkeypatch) -> AsyncIterator:
    async with opened_sites(monkeypatch) as start:
        yield start


def stage_of(worker: str) -> str:
    return worker.partition("-")[0]


async def all_ready(site, count=1):
    for stage in ("thinker", "vision", "hearing"):
        await site.ready(f"{stage}-0-{count}", stage)


def states(site):
    return {name: replicas[0].state for name, replicas in site.orchestrator.replicas.by_stage.items()}


async def fail_to_load(site, worker):
    await site.hello(worker, stage_of(worker))
    await site.hub.say(f"@{worker}", LoadFailed(worker=worker, kind="WeightsError", text="no such part"))


async def test_guests_start_with_their_host_replica_by_replica(open_site):
    site = await open_site(omni(replicas=2))
    assert site.host.guests == {
        FIRST: [GUEST, OTHER],
        "thinker-1-1": ["vision-1-1", "hearing-1-1"],
    }


async def test_a_host_of_threads_gets_no_guests(open_site):
    site = await open_site(omni(), shares_processes=False)
    assert site.host.guests == {GUEST: [], OTHER: [], FIRST: []}
    await all_ready(site)
    site.host.exit(FIRST, 1)
    assert states(site) == {
        "thinker": ReplicaState.STARTING,
        "vision": ReplicaState.READY,
        "hearing": ReplicaState.READY,
    }


async def test_none_serves_before_all_have_loaded(open_site):
    site = await open_site(omni())
    await site.ready(FIRST, "thinker")
    await site.ready(OTHER, "hearing")
    stream = site.submit()
    assert ReplicaState.READY not in states(site).values()
    assert not isinstance(site.hub.last(f"@{FIRST}"), Submit)
    await site.ready(GUEST, "vision")
    assert set(states(site).values()) == {ReplicaState.READY}
    assert isinstance(site.hub.last(f"@{FIRST}"), Submit)
    await stream.aclose()


async def test_they_die_and_restart_together(open_site):
    site = await open_site(omni())
    await all_ready(site)
    stream = site.submit()
    site.host.exit(FIRST, -9)
    assert set(states(site).values()) == {ReplicaState.STARTING}
    assert site.orchestrator.replicas.by_address == {}
    await site.spawned(2)
    assert site.host.guests["thinker-0-2"] == ["vision-0-2", "hearing-0-2"]
    await all_ready(site, 2)
    assert site.hub.last("@thinker-0-2").key.attempt == 1
    assert site.orchestrator.num_replays == 1
    assert [replica.restarts for replica in site.orchestrator.replicas.all()] == [1, 1, 1]
    await stream.aclose()


async def test_last_words_of_a_guest_whose_process_has_died_change_nothing(open_site):
    site = await open_site(omni())
    await site.hello(GUEST, "vision")
    site.host.exit(FIRST, -9)
    site.hub.gone.clear()
    await site.hub.say(f"@{GUEST}", Ready(worker=GUEST, info={}))
    await site.hello(OTHER, "hearing")
    assert isinstance(site.hub.last(f"@{OTHER}"), Shutdown)
    await site.spawned(2)
    await site.ready("thinker-0-2", "thinker")
    await site.ready("hearing-0-2", "hearing")
    assert ReplicaState.READY not in states(site).values()


async def test_quick_deaths_are_those_of_the_process(open_site):
    """Six, not two with three stages each; then all its stages are down."""
    site = await open_site(omni())
    for count in range(1, 7):
        await site.spawned(count)
        site.host.exit(f"thinker-0-{count}", 1)
    why = r"thinker.0 with vision.0 and hearing.0 died 6 times .* with status 1 "
    with pytest.raises(WeightsError, match=rf"'thinker' does not start: {why}"):
        await site.supervisor.wait_ready()
    assert len(site.host.spawned) == 6
    assert set(states(site).values()) == {ReplicaState.FAILED}
    with pytest.raises(RequestFailed, match="stage 'thinker' is down"):
        site.submit()


async def test_a_death_while_a_guest_loads_is_quick(open_site):
    site = await open_site(omni())
    for count in range(1, 7):
        await site.spawned(count)
        await site.ready(f"thinker-0-{count}", "thinker")
        stream = site.submit(f"waiting-{count}")
        site.host.exit(f"thinker-0-{count}", -11)
    assert isinstance(await error_of(stream), RequestFailed)
    assert len(site.host.spawned) == 6


async def test_deaths_that_requests_cause_end_those_requests_and_not_the_stages(open_site):
    site = await open_site(omni())
    for count in range(1, 13):
        await site.spawned(count)
        await all_ready(site, count)
        if count % 3 == 1:
            stream = site.submit(f"poison-{count}")
        site.host.exit(f"thinker-0-{count}", -11)
        if count % 3 == 0:
            assert isinstance(await error_of(stream), ReplayExhausted)
    await site.spawned(13)
    assert set(states(site).values()) == {ReplicaState.STARTING}


async def test_a_guest_that_cannot_be_loaded_is_left_out_of_the_next_process(open_site):
    site = await open_site(omni())
    await site.ready(FIRST, "thinker")
    await fail_to_load(site, GUEST)
    with pytest.raises(WeightsError, match=r"^no such part$"):
        await site.supervisor.wait_ready()
    site.host.exit(FIRST, 1)
    await site.spawned(2)
    assert site.host.guests["thinker-0-2"] == ["hearing-0-2"]
    await site.ready("thinker-0-2", "thinker")
    await site.ready("hearing-0-2", "hearing")
    assert states(site) == {
        "thinker": ReplicaState.READY,
        "hearing": ReplicaState.READY,
        "vision": ReplicaState.FAILED,
    }
    assert site.replica("vision").failure == "no such part"
    site.submit()
    assert isinstance(site.hub.last("@thinker-0-2"), Submit)


async def test_guests_of_a_host_that_cannot_be_loaded_go_on_without_it(open_site):
    site = await open_site(omni())
    await fail_to_load(site, FIRST)
    site.host.exit(FIRST, 1)
    await site.spawned(2)
    assert site.host.guests["vision-0-2"] == ["hearing-0-2"]
    site.host.exit("vision-0-2", -9)
    await site.spawned(3)
    assert states(site)["thinker"] is ReplicaState.FAILED


async def test_a_process_whose_stages_are_all_given_up_is_not_started_again(open_site):
    site = await open_site(omni())
    for worker in (FIRST, GUEST, OTHER):
        await fail_to_load(site, worker)
    site.host.exit(FIRST, 1)
    await asyncio.sleep(0.01)
    assert site.host.spawned == [FIRST]


async def test_every_worker_of_a_process_is_told_to_end(open_site):
    site = await open_site(omni())
    await all_ready(site)
    await site.supervisor.close()
    for worker in (FIRST, GUEST, OTHER):
        assert isinstance(site.hub.last(f"@{worker}"), Shutdown)


async def test_shared_memory_of_all_of_them_is_removed(open_site, monkeypatch):
    site = await open_site(omni())
    removed = []
    monkeypatch.setattr(site.supervisor, "_remove_leftovers", removed.append)
    await all_ready(site)
    site.host.exit(FIRST, -9)
    assert removed == [FIRST, GUEST, OTHER]


def test_processes_by_name():
    table = ReplicaTable(omni(replicas=2).stages.values())
    together = [process.name for process in share_processes(table, with_guests=True)]
    assert together == [f"thinker.{i} with vision.{i} and hearing.{i}" for i in range(2)]
    alone = [process.name for process in share_processes(table, with_guests=False)]
    assert alone == [replica.name for replica in table.all()]
