"""Runs that tests copy and damage."""

import pytest
from hostile import make_language_run, make_run


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A complete run of 6 steps."""
    return make_run(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="session")
def language(tmp_path_factory):
    """A complete run of a language model."""
    return make_language_run(tmp_path_factory.mktemp("language"))
