"""Killed at a file-system call and continued, a command ends with the bytes of an undisturbed run.

With DLRNN_FAULTS=all at every call, else at a few of them.
"""

import sys

import pytest
from injector import KILLS, WORKLOADS, check

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc's LD_PRELOAD")


@pytest.mark.parametrize("mode", KILLS)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_killed_and_continued_ends_as_undisturbed(workload, mode):
    count, failures = check(workload, mode)
    assert count > 0
    assert not failures, f"{len(failures)} of {count} trials:\n" + "\n".join(failures)
