"""A real run of four steps."""

import shutil
from pathlib import Path

import pytest

import made_up


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory):
    """Its run directory, which no test changes."""
    return made_up.train(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture
def copy(tiny_run, tmp_path):
    """A copy of its run directory, to change."""
    return Path(shutil.copytree(tiny_run, tmp_path / "copy"))
