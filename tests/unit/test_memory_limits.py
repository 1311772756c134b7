"""How much memory is left, read from trees of files as systems show them."""

from __future__ import annotations

import pytest

from envactors.system.choice import PORTABLE

if PORTABLE:
    pytest.skip("only Linux tells", allow_module_level=True)

from envactors.system.linux.memory_limits import find_tightest

MIB = 1 << 20


def make_tree(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(text))


def machine(available, swap=0):
    return f"MemTotal: {1 << 20} kB\nMemFree: 1 kB\nMemAvailable: {available // 1024} kB\nSwapFree: {swap // 1024} kB\n"


def cgroup(limit, usage, stat="", swap=None):
    files = {"memory.max": f"{limit}\n", "memory.current": f"{usage}\n", "memory.stat": stat}
    if swap is not None:
        files |= {"memory.swap.max": swap[0], "memory.swap.current": swap[1]}
    return files


def under(directory, files):
    return {f"{directory}/{name}": text for name, text in files.items()}


def test_without_cgroups_the_machine_is_the_limit(tmp_path):
    make_tree(tmp_path, {"proc/meminfo": machine(300 * MIB, swap=50 * MIB)})
    room = find_tightest(tmp_path)
    assert (room.whose, room.limit, room.free) == ("the machine", 1024 * MIB, 350 * MIB)


def test_a_system_without_information_sets_no_limit(tmp_path):
    assert find_tightest(tmp_path) is None
    make_tree(tmp_path, {"proc/meminfo": "rubbish\n", "proc/self/cgroup": ""})
    assert find_tightest(tmp_path) is None


def test_the_tightest_of_the_own_cgroup_and_its_parents_counts(tmp_path):
    make_tree(
        tmp_path,
        {
            "proc/meminfo": machine(1000 * MIB),
            "proc/self/cgroup": "0::/pod/box\n",
            **under("sys/fs/cgroup/pod/box", cgroup("max", 10 * MIB)),
            **under("sys/fs/cgroup/pod", cgroup(200 * MIB, 150 * MIB)),
        },
    )
    room = find_tightest(tmp_path)
    assert (room.limit, room.used, room.free) == (200 * MIB, 150 * MIB, 50 * MIB)
    assert room.whose.endswith("sys/fs/cgroup/pod")


@pytest.mark.parametrize("own", ["/", "/pod/box", "/../other"])
def test_a_container_sees_its_own_cgroup_at_the_top(tmp_path, own):
    """Its path is "/" in a cgroup namespace of its own, and otherwise that of the host."""
    make_tree(
        tmp_path,
        {
            "proc/meminfo": machine(1000 * MIB),
            "proc/self/cgroup": f"0::{own}\n",
            **under("sys/fs/cgroup", cgroup(64 * MIB, 4 * MIB)),
        },
    )
    assert find_tightest(tmp_path).free == 60 * MIB


def test_file_cache_does_not_count_as_used(tmp_path):
    stat = f"inactive_file {20 * MIB}\nactive_file {10 * MIB}\nshmem {40 * MIB}\n"
    files = under("sys/fs/cgroup", cgroup(100 * MIB, 80 * MIB, stat))
    make_tree(tmp_path, {"proc/self/cgroup": "0::/\n", **files})
    assert find_tightest(tmp_path).used == 50 * MIB


@pytest.mark.parametrize(("swap", "free"), [(None, 120), ((0, 0), 20), ((70 * MIB, 10 * MIB), 80), (("max", 5), 120)])
def test_swap_counts_as_far_as_the_cgroup_may_use_it(tmp_path, swap, free):
    make_tree(
        tmp_path,
        {
            "proc/meminfo": machine(1000 * MIB, swap=100 * MIB),
            "proc/self/cgroup": "0::/\n",
            **under("sys/fs/cgroup", cgroup(100 * MIB, 80 * MIB, swap=swap)),
        },
    )
    assert find_tightest(tmp_path).free == free * MIB
