from __future__ import annotations

import os

import pytest

from omnistage.graph.machine import available_memory, machine_memory, measure_bandwidth

GIB = 1024**3


@pytest.fixture
def machine(tmp_path):
    """A machine with 10 GiB available, and this process in a group within a group."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text(
        f"MemTotal: {16 * GIB // 1024} kB\nMemFree: 1 kB\nMemAvailable: {10 * GIB // 1024} kB\n"
    )
    (tmp_path / "proc" / "self" / "cgroup").write_text("1:name=other:/x\n0::/outer/inner\n")
    (tmp_path / "groups" / "outer" / "inner").mkdir(parents=True)
    return tmp_path


def limit(folder, limit, used=0, cached=0):
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\nactive_file 7\n")


def available(machine):
    return available_memory(proc=machine / "proc", cgroups=machine / "groups")


def test_what_the_machine_has_available(machine):
    assert available(machine) == 10 * GIB


def test_the_strictest_group_counts_without_its_cached_files(machine):
    outer = machine / "groups" / "outer"
    limit(outer, 8 * GIB, used=3 * GIB, cached=GIB)
    assert available(machine) == 6 * GIB
    limit(outer / "inner", 4 * GIB, used=GIB)
    assert available(machine) == 3 * GIB
    limit(outer / "inner", "max", used=GIB)
    assert available(machine) == 6 * GIB
    limit(outer / "inner", GIB, used=2 * GIB)
    assert available(machine) == 0


def test_in_a_container_the_root_is_its_own_group(machine):
    (machine / "proc" / "self" / "cgroup").write_text("0::/\n")
    limit(machine / "groups", 2 * GIB, used=GIB)
    assert available(machine) == GIB
    (machine / "proc" / "self" / "cgroup").write_text("0::/elsewhere/unseen\n")
    assert available(machine) == GIB


def test_where_the_system_does_not_say_all_of_it_counts(tmp_path):
    assert available_memory(proc=tmp_path, cgroups=tmp_path) == machine_memory()


def test_this_machine():
    assert 0 < available_memory() <= machine_memory()
    assert machine_memory() == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_bandwidth_is_measured():
    assert 1e8 < measure_bandwidth(4 * 1024**2) < 1e13
