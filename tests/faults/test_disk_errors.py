"""A full disk and input/output errors end in one sentence with the file's name; nothing is lost.

An error that the command tolerates must not change what it writes. With DLRNN_FAULTS=all at every
call, else at a few of them.
"""

import sys

import pytest
from injector import ERRORS, WORKLOADS, check

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc's LD_PRELOAD")


@pytest.mark.parametrize("mode", ERRORS)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_disk_error_is_one_sentence_and_loses_nothing(workload, mode):
    count, failures = check(workload, mode)
    assert count > 0
    assert not failures, f"{len(failures)} of {count} trials:\n" + "\n".join(failures)
