"""For the tests of kernels."""

import os
import platform
import shutil

import pytest
from emulator import emulate


@pytest.fixture
def emulated(monkeypatch, tmp_path_factory):
    """The CUDA kernels run on a CPU, as long as the test does; the folder of what is compiled."""
    if platform.machine() != "x86_64" or shutil.which("g++") is None:
        required = os.environ.get("DLRNN_EMULATED_TESTS") == "required"
        (pytest.fail if required else pytest.skip)("needs g++ on x86-64, which has _Float16")
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "emulated"
    folder.mkdir(exist_ok=True)
    emulate(monkeypatch, folder)
    return folder
