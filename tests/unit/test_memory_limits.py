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


def version_1(limit, usage, stat="", both=None):
    files = {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": usage, "memory.stat": stat}
    if both is not None:
        files |= {"memory.memsw.limit_in_bytes": both[0], "memory.memsw.usage_in_bytes": both[1]}
    return files


def version_2(limit, usage, stat="", swap=None):
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


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_of_the_own_cgroup_and_its_parents_counts(tmp_path, version):
    top = "sys/fs/cgroup/memory" if version == 1 else "sys/fs/cgroup"
    make, no_limit = (version_1, 2**63 - 4096) if version == 1 else (version_2, "max")
    make_tree(
        tmp_path,
        {
            "proc/meminfo": machine(1000 * MIB),
            "proc/self/cgroup": "9:cpu:/x\n4:memory:/pod/box\n" if version == 1 else "0::/pod/box\n",
            **under(f"{top}/pod/box", make(no_limit, 10 * MIB)),
            **under(f"{top}/pod", make(200 * MIB, 150 * MIB)),
            **(under(top, make(no_limit, 500 * MIB)) if version == 1 else {}),  # that of version 2 has no such files
        },
    )
    room = find_tightest(tmp_path)
    assert (room.limit, room.used, room.free) == (200 * MIB, 150 * MIB, 50 * MIB)
    assert room.whose.endswith(f"{top}/pod")


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("own", ["/", "/pod/box", "/../other"])
def test_a_container_sees_its_own_cgroup_at_the_top(tmp_path, version, own):
    """Its path is "/" in a cgroup namespace of its own, and otherwise that of the host."""
    top = "sys/fs/cgroup/memory" if version == 1 else "sys/fs/cgroup"
    make = version_1 if version == 1 else version_2
    make_tree(
        tmp_path,
        {
            "proc/meminfo": machine(1000 * MIB),
            "proc/self/cgroup": f"4:memory:{own}\n" if version == 1 else f"0::{own}\n",
            **under(top, make(64 * MIB, 4 * MIB)),
        },
    )
    assert find_tightest(tmp_path).free == 60 * MIB


@pytest.mark.parametrize("version", [1, 2])
def test_file_cache_does_not_count_as_used(tmp_path, version):
    prefix = "total_" if version == 1 else ""
    stat = f"{prefix}inactive_file {20 * MIB}\n{prefix}active_file {10 * MIB}\nshmem {40 * MIB}\n"
    top = "sys/fs/cgroup/memory" if version == 1 else "sys/fs/cgroup"
    make_tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/\n" if version == 1 else "0::/\n",
            **under(top, (version_1 if version == 1 else version_2)(100 * MIB, 80 * MIB, stat)),
        },
    )
    assert find_tightest(tmp_path).used == 50 * MIB


@pytest.mark.parametrize(
    ("version", "swap", "free"),
    [(1, None, 120), (1, (100, 80), 20), (1, (150, 90), 60), (2, None, 120), (2, (0, 0), 20), (2, ("max", 5), 120)],
)
def test_swap_counts_as_far_as_the_cgroup_may_use_it(tmp_path, version, swap, free):
    limits = None if swap is None else tuple(one * MIB if isinstance(one, int) else one for one in swap)
    top = "sys/fs/cgroup/memory" if version == 1 else "sys/fs/cgroup"
    files = version_1(100 * MIB, 80 * MIB, both=limits) if version == 1 else version_2(100 * MIB, 80 * MIB, swap=limits)
    make_tree(
        tmp_path,
        {
            "proc/meminfo": machine(1000 * MIB, swap=100 * MIB),
            "proc/self/cgroup": "4:memory:/\n" if version == 1 else "0::/\n",
            **under(top, files),
        },
    )
    assert find_tightest(tmp_path).free == free * MIB
