from __future__ import annotations

import pytest

from omnistage.graph import PipelineSpec, StageSpec, load_pipeline
from omnistage.graph.budget import ranks_on
from omnistage.graph.validate import find_problems
from omnistage.types import StageKind

GIB = 1024**3


def stage(name: str, kind: str = "llm", **settings) -> StageSpec:
    return StageSpec(name=name, kind=StageKind(kind), **settings)


def messages(*stages: StageSpec, **settings) -> list[str]:
    """Problems of devices alone: the stages are not connected."""
    spec = PipelineSpec(
        name="p", model="m", stages={s.name: s for s in stages}, outputs={"text": stages[0].name}, **settings
    )
    found = [".".join(p.path) + ": " + p.message for p in find_problems(spec)]
    return [line for line in found if "no output is reached" not in line and "vocoder needs" not in line]


@pytest.mark.parametrize(
    ("settings", "groups"),
    [
        ({}, [("cpu",)]),
        ({"replicas": 2}, [("cpu",), ("cpu",)]),
        ({"tensor_parallel": 2}, [("cpu", "cpu")]),
        ({"devices": ["cuda:0", "cuda:1"], "tensor_parallel": 2}, [("cuda:0", "cuda:1")]),
        ({"devices": ["cuda:0", "cuda:1"], "replicas": 2}, [("cuda:0",), ("cuda:1",)]),
        (
            {"devices": ["cuda:0", "cuda:1", "cuda:2", "cuda:3"], "replicas": 2, "tensor_parallel": 2},
            [("cuda:0", "cuda:1"), ("cuda:2", "cuda:3")],
        ),
        (
            {"devices": ["cuda:0", "cuda:1"], "replicas": 2, "tensor_parallel": 2},
            [("cuda:0", "cuda:1"), ("cuda:0", "cuda:1")],
        ),
    ],
)
def test_devices_are_dealt_to_replicas(settings, groups):
    one = stage("a", **settings)
    assert messages(one) == []
    assert [one.devices_of(replica) for replica in range(one.replicas)] == groups


def test_ranks_are_counted_over_all_replicas():
    one = stage("a", devices=["cuda:0", "cuda:1"], replicas=2, tensor_parallel=2)
    assert ranks_on(one, "cuda:0") == 2
    assert ranks_on(one, "cuda:7") == 0


@pytest.mark.parametrize("device", ["cuda", "cuda0", "cuda:-1", "cuda:01", "gpu", "CPU", "cuda:1 "])
def test_other_device_names_are_refused(device):
    (line,) = messages(stage("a", devices=[device]))
    assert line == f"stages.a.devices: must be a device, cpu or cuda:N, not {device!r}"


@pytest.mark.parametrize(
    ("stages", "start"),
    [
        (
            [stage("a", devices=["cuda:0", "cuda:1", "cuda:2"], tensor_parallel=2)],
            "stages.a.devices: 3 devices for tensor_parallel 2 and 1 replicas; list 2",
        ),
        (
            [stage("a", devices=["cuda:0", "cuda:1", "cuda:2"], replicas=2)],
            "stages.a.devices: 3 devices for tensor_parallel 1 and 2 replicas; list 1 (shared by its"
            " replicas) or 2 (a group for each)",
        ),
        (
            [stage("a", devices=["cuda:0", "cuda:0"], tensor_parallel=2)],
            "stages.a.devices: group cuda:0, cuda:0 names a device twice",
        ),
        (
            [stage("a", devices=["cpu", "cuda:0"], tensor_parallel=2)],
            "stages.a.devices: group cpu, cuda:0 mixes",
        ),
        (
            [
                stage("a", devices=["cuda:0", "cuda:1"], tensor_parallel=2),
                stage("b", devices=["cuda:1", "cuda:2"], tensor_parallel=2),
            ],
            "stages.b.devices: group cuda:1, cuda:2 shares only part of a's group cuda:0, cuda:1",
        ),
        (
            [stage("a", kv_cache=2 * GIB, memory=GIB)],
            "stages.a.kv_cache: 2GiB leaves nothing for weights in memory 1GiB; lower kv_cache or",
        ),
        (
            [stage("a", max_num_seqs=64, max_num_batched_tokens=32)],
            "stages.a.max_num_batched_tokens: 32 is less than max_num_seqs 64",
        ),
        ([stage("a"), stage("e", "encoder", colocate="b")], "stages.e.colocate: unknown stage 'b'"),
        ([stage("a"), stage("e", "encoder", colocate="e")], "stages.e.colocate: a stage always shares"),
        (
            [stage("a"), stage("d", "encoder", colocate="a"), stage("e", "encoder", colocate="d")],
            "stages.e.colocate: d itself shares the processes of a; name that",
        ),
        (
            [stage("a", replicas=2), stage("e", "encoder", colocate="a")],
            "stages.e.colocate: replicas 1 here, 2 at a; make them equal",
        ),
        (
            [stage("a", threads=2), stage("e", "encoder", colocate="a")],
            "stages.e.colocate: threads left out here, 2 at a; make them equal",
        ),
        *(
            (
                [stage("a", placement=host), stage("e", "encoder", colocate="a", placement=guest)],
                "stages.e.colocate: a worker that joins serves one stage, and a or this one is placed",
            )
            for host, guest in (("remote", "remote"), ("remote", "local"), ("local", "remote"))
        ),
        (
            [stage("a", devices=["cuda:0"]), stage("e", "encoder", colocate="a")],
            "stages.e.colocate: cpu is not among the devices of a (cuda:0); use those",
        ),
    ],
)
def test_each_clash_is_named(stages, start):
    (line,) = messages(*stages)
    assert line.startswith(start)


def test_equal_or_single_device_groups_may_share():
    pair = ["cuda:0", "cuda:1"]
    assert (
        messages(
            stage("a", devices=pair, tensor_parallel=2),
            stage("b", devices=pair, tensor_parallel=2),
            stage("v", "encoder", devices=["cuda:0"]),
        )
        == []
    )


def test_budgets_are_added_up_per_device():
    stages = [
        stage("a", devices=["cuda:0"], memory="40GiB", kv_cache="30GiB"),
        stage("b", devices=["cuda:0"], kv_cache="30GiB", replicas=2),
        stage("c", devices=["cuda:1"], memory="60GiB", kv_cache="1GiB"),
    ]
    assert messages(*stages, device_memory={"cuda:0": "100GiB", "cuda:1": "80GiB"}) == []
    assert messages(*stages, device_memory={"cuda:0": "99GiB"}) == [
        "device_memory.cuda:0: the stages ask for 100GiB of cuda:0 (a 40GiB, b 60GiB), which has 99GiB;"
        " lower their memory or kv_cache, or move a stage"
    ]


def test_a_given_device_size_overrides_the_files():
    spec = load_pipeline("starter", overrides=["device_memory.cpu=1GiB"])
    assert find_problems(spec) == []
    (problem,) = find_problems(spec, device_memory={"cpu": 200 * 1024**2})
    assert "ask for 256MiB of cpu (thinker 256MiB), which has 200MiB" in problem.message
