"""Faults at file-system calls: a killed command, and one that met a full disk or an I/O error.

A killed and continued command ends with the bytes of an undisturbed one. An error ends in one
sentence with the file's name and loses nothing; a tolerated error does not change what is written.
With DLRNN_FAULTS=all a fault is injected at every call, otherwise at a few of them.
"""

import sys

import pytest
from injector import MODES, WORKLOADS, check

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc's LD_PRELOAD")


@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_fault_loses_nothing(workload, mode):
    count, failures = check(workload, mode)
    assert count > 0
    assert not failures, f"{len(failures)} of {count} trials:\n" + "\n".join(failures)
