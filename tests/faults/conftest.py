"""What the tests damage: a run with its export and results, a data set, a language model."""

import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
from damage import TABLES, as_recipe, make_run, run_below, stop
from harness import run_well
from support import tiny_books

from dlrnn.models import LanguageConfig
from dlrnn.train import RunConfig, TaskConfig, train


@pytest.fixture(autouse=True)
def as_for_a_user(unchecked):
    """The shape checker of the tests would refuse some hostile values first."""


@pytest.fixture
def case():
    """Collect the failures of many cases: `with case(name): assert ...`."""
    names, failures = [], []

    @contextmanager
    def case(name):
        names.append(name)
        try:
            yield
        except (Exception, pytest.fail.Exception) as error:
            failures.append(f"{name}: {type(error).__name__}: {str(error)[:400]}")

    yield case
    assert names
    assert not failures, f"{len(failures)} of {len(names)} cases:\n" + "\n".join(failures[:40])


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """A complete run of 6 steps that was evaluated, its export and its results; a data set."""
    base = tmp_path_factory.mktemp("made")
    run = make_run(base / "run")
    run_well(["eval", run, "--device", "cpu"])
    run_well(["export", run, base / "export"])
    run_well(["results", "add", run, "--into", base / "results"])
    size = ["--samples", "6", "--workers", "1"]
    run_well(["data", "build", "listops", *size, "--out", base / "set"])
    return base


@pytest.fixture(scope="session")
def language(tmp_path_factory):
    """A complete run of a language model of 2 steps."""
    folder = tmp_path_factory.mktemp("language")
    data = tiny_books(folder)
    sizes = {"layers": 1, "d_model": 16, "d_state": 8, "d_embedding": 8, "d_ff": 16}
    model = LanguageConfig(**sizes, vocabulary=32, dt_min=0.05, dt_max=0.5, kernel_length=32)
    task = TaskConfig("pg19", {"length": 32, "folder": str(data)})
    config = RunConfig(task, model, steps=2, batch_size=4, lr=1e-2, eval_every=2)
    train(folder / "run", config, device="cpu", show=False, writer="none")
    return folder / "run"


@pytest.fixture
def run(made, tmp_path):
    """A copy of the complete run."""
    return Path(shutil.copytree(made / "run", tmp_path / "run"))


@pytest.fixture
def copied(made, request):
    """Copy a complete run to where a command looks for it; the commands `stopped` continue it."""

    def copied(command, base, stopped=("resume",)):
        source = request.getfixturevalue("language") if command == "generate" else made / "run"
        run = Path(shutil.copytree(source, run_below(base, command)))
        if command in TABLES:
            as_recipe(run)
        return stop(run) if command in stopped else run

    return copied


@pytest.fixture
def language_run(language, tmp_path):
    """A copy of the language model's run."""
    return Path(shutil.copytree(language, tmp_path / "run"))
