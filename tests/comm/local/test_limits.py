"""How many cores ranks share, and how many threads BLAS gets there."""

import json
import os
import subprocess
import sys

import pytest

from minidist.comm.local.limits import cores

V2 = {"cpu.max": "{} 100000\n"}
V1 = {"cpu/cpu.cfs_quota_us": "{}\n", "cpu/cpu.cfs_period_us": "100000\n"}
HERE = cores()


@pytest.mark.parametrize(
    "groups, files, quota, wanted",
    [
        ("0::/", V2, "max", HERE),
        ("0::/", V2, "150000", 1),
        ("0::/", V2, 100000 * HERE, HERE),
        ("0::/job/step", V2, "100000", 1),  # the quota of a group above
        ("0::/job", {f"job/{name}": text for name, text in V2.items()}, "100000", 1),
        ("4:cpu,cpuacct:/docker/1", V1, "100000", 1),  # what a container does not see
        ("4:cpu,cpuacct:/", V1, "-1", HERE),
        ("2:cpuacct:/\n1:name=systemd:/", V1, "100000", HERE),
    ],
)
def test_a_containers_quota_counts_like_its_cores(tmp_path, groups, files, quota, wanted):
    (mine := tmp_path / "cgroup").write_text(groups)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text.format(quota))
    assert cores(tmp_path, mine) == wanted


PROGRAM = """
import json, minidist, threadpoolctl
def threads(group):
    return max(library["num_threads"] for library in threadpoolctl.threadpool_info())
print(json.dumps([minidist.run(threads, 1, transport=t) for t in ("process", "thread")]))
with threadpoolctl.threadpool_limits(1):
    print(json.dumps(minidist.run(threads, 1, transport="thread")))
"""


@pytest.mark.skipif(HERE == 1, reason="one core: BLAS has one thread anyway")
def test_a_rank_gives_blas_no_more_threads_than_the_environment_or_the_caller():
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    environment = {key: value for key, value in os.environ.items() if key not in names}
    for more, wanted in ({"OPENBLAS_NUM_THREADS": "1"}, 1), ({}, HERE):
        command = [sys.executable, "-c", PROGRAM]
        printed = subprocess.check_output(command, env=environment | more, text=True, timeout=60)
        by_environment, by_caller = map(json.loads, printed.splitlines())
        assert by_environment == [[wanted], [wanted]] and by_caller == [1]
