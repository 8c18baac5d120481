"""Tasks of users, named by their import path: all commands, `--trust`, and wrong classes."""

import json
import re
import sys

import pytest
import torch
from runs import assert_same_run
from support import DEVICE

from dlrnn import tasks
from dlrnn.cli import main
from dlrnn.models import LanguageConfig, ModelConfig
from dlrnn.paper.results import read_results
from dlrnn.paper.tables import make_tables
from dlrnn.train import RunConfig, TaskConfig, default_run, from_json, load_best
from dlrnn.train.checkpoint import checkpoints

SOURCE = '''
from dataclasses import dataclass, field
import torch
from dlrnn.tasks import Batch, ClassificationTask, ClassTask, Random, RegressionTask, Task


@dataclass(frozen=True)
class Forecast(RegressionTask):
    """Predict the next value of a wave."""
    length: int = 16
    period: float = 5.0
    name = "forecast"
    on_device = False
    d_input = 1

    def make_batch(self, request):
        size = {"first": request.first, "count": request.batch_size, "device": "cpu"}
        start = Random(self.seed, request.split, request.step, **size).uniform(1)
        wave = (6.28 * (start + torch.arange(self.length + 1) / self.period)).sin().float()
        return Batch(wave[:, :-1, None], wave[:, 1:, None]).to(request.device)


@dataclass(frozen=True)
class Sign(ClassificationTask):
    """Whether a sum is positive."""
    name, causal, d_input, d_output, input_length = "sign", False, 1, 2, 9

    def make_batch(self, request):
        size = {"first": request.first, "count": request.batch_size, "device": request.device}
        x = Random(self.seed, request.split, request.step, **size).normal(9, 1).float()
        return Batch(x, (x.sum((1, 2)) > 0).long())


@dataclass(frozen=True)
class Letters(ClassTask):
    """Repeat one letter."""
    name, kind, causal, vocabulary, d_output, input_length = "letters", "language", True, 7, 7, 8

    def make_batch(self, request):
        size = {"first": request.first, "count": request.batch_size, "device": request.device}
        letter = Random(self.seed, request.split, request.step, **size).integer(7, 1).expand(-1, 8)
        return Batch(letter, letter)


class NoTask:
    pass

@dataclass(frozen=True)
class Bare(Task):
    name = "bare"

@dataclass(frozen=True)
class Idle(RegressionTask):
    name = "idle"

class Plain(Forecast):
    period: float = 3.0

@dataclass(frozen=True)
class Odd(Forecast):
    kind = "forecasting"

@dataclass(frozen=True)
class Unmeasured(Forecast):
    metric = "mae"

@dataclass(frozen=True)
class Demanding(Forecast):
    file: str = field(kw_only=True)

@dataclass(frozen=True)
class Unmade(Forecast):
    def __post_init__(self):
        raise TypeError("I cannot be")

@dataclass(frozen=True)
class Wide(Forecast):
    d_input = 3

@dataclass(frozen=True)
class Sizeless(Forecast):
    d_input = None

@dataclass(frozen=True)
class Noisy(Forecast):
    def make_batch(self, request):
        x = torch.randn(request.batch_size, self.length, 1)
        return Batch(x, x)

@dataclass(frozen=True)
class Broken(Forecast):
    def make_batch(self, request):
        return {}["nothing"]

@dataclass(frozen=True)
class Paired(Forecast):
    def make_batch(self, request):
        x = torch.zeros(request.batch_size, self.length, 1)
        return x, x

@dataclass(frozen=True)
class Endless(Forecast):
    def make_batch(self, request):
        x = torch.full((request.batch_size, self.length, 1), float("nan"))
        return Batch(x, x)

@dataclass(frozen=True)
class Somewhere(RegressionTask):
    name = "somewhere"
    make_batch = Forecast.make_batch
'''
OWN = "own_tasks.Forecast"
WHERE = ["--device", DEVICE.type, "--writer", "none"]
SIZES = ["--model.d_model", "8", "--model.layers", "1", "--model.mixer_options.d_state", "4"]
STEPS = ["--steps", "4", "--batch_size", "2", "--eval_batches", "1", "--checkpoint_every", "2"]
SMALL = [*SIZES, *STEPS]


def forget():
    sys.modules.pop("own_tasks", None)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current folder, with a module of a user's tasks."""
    (tmp_path / "own_tasks.py").write_text(SOURCE)
    (tmp_path / "failing_tasks.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    forget()
    yield tmp_path
    forget()


def refused(capsys, *words):
    """The sentence of a refused command."""
    capsys.readouterr()
    assert main(list(words)) == 2
    said = capsys.readouterr().err
    [line] = [each for each in said.splitlines() if each.startswith("dlrnn ")]
    assert "Traceback" not in said
    return line


# ---------------------------------------------------------------------------------- commands


def stopped_copy(run, copy):
    """The run, as if it had been killed after its first checkpoint."""
    copy.mkdir()
    for path in run.iterdir():
        if path.is_file() and path != checkpoints(run)[-1] and path.name != "result.json":
            (copy / path.name).write_bytes(path.read_bytes())


def test_a_users_task_goes_through_every_command(here, capsys):
    settings = ["--task.settings.length", "12", *SMALL]
    assert main(["train", "--task", OWN, *settings, "--out", "run", *WHERE]) == 0
    printed = capsys.readouterr()
    assert '"name": "own_tasks.Forecast"' in printed.err, "the configuration is printed"
    config = from_json((here / "run" / "config.json").read_text())
    assert config.task == TaskConfig(OWN, {"length": 12})
    stopped_copy(here / "run", here / "stopped")
    commands = {
        "resume": ["train", "--resume", "stopped", *WHERE],
        "eval": ["eval", "run", "--device", DEVICE.type],
        "export": ["export", "run", "model"],
        "report": ["report", "--runs", "run", "--out", "site"],
        "results": ["results", "add", "run", "--into", "records"],
    }
    for name, words in commands.items():
        forget()
        said = refused(capsys, *words)
        assert "--trust" in said, name
        assert OWN in said, name
        assert "own_tasks" not in sys.modules, f"{name} imported it"
        assert main([*words, "--trust"]) == 0, name
    assert_same_run(here / "run", here / "stopped")
    assert (here / "run" / "eval-test.png").is_file()
    assert "own_tasks.Forecast · dlr" in (here / "site" / "table1.html").read_text()
    [record] = read_results("records", "ours").records
    assert (record.recipe, record.metric) == ("table1/own_tasks.Forecast/dlr", "R2")
    assert record.value is not None
    assert make_tables([read_results("records", "ours")])[0].cells[record.recipe].ours
    assert load_best("run", torch.device("cpu"), trust=True).task.length == 12
    words = record.command.split()
    assert words[:4] == ["dlrnn", "train", "--task", OWN]
    assert main([*words[1:], "--out", "again", *WHERE]) == 0
    assert_same_run(here / "run", here / "again")


def test_a_recipe_and_a_sweep_take_a_users_task(here, capsys):
    given = ["--task.name", OWN, *STEPS, "--model.d_model", "8", "--device", "cpu", "--json"]
    assert main(["sweep", "table1/cumsum/dlr-1", "--scale", "tiny", *given]) == 0
    [row] = json.loads(capsys.readouterr().out)
    assert (row["status"], row["said"]) == ("done", "")


def test_an_interrupted_run_names_trust(here, capsys, monkeypatch):
    def interrupted(path, *_, **__):
        path.mkdir()
        (path / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr("dlrnn.train.train", interrupted)
    assert main(["train", "--task", OWN, "--out", "run", *WHERE]) == 130
    assert "--resume run --device" in (said := capsys.readouterr().err)
    assert "--trust" in said


def test_tasks_that_do_not_read_from_left_to_right_get_a_bidirectional_dlr(here):
    assert main(["train", "--task", "own_tasks.Sign", *SMALL, "--out", "run", *WHERE]) == 0
    config = from_json((here / "run" / "config.json").read_text())
    assert config.model.mixer_options["bidirectional"]
    assert main(["eval", "run", "--trust", *WHERE[:2]]) == 0
    assert main(["results", "add", "run", "--into", "records", "--trust"]) == 0
    [record] = read_results("records", "ours").records
    assert (record.recipe[:6], record.metric, record.split) == ("table4", "accuracy", "test")


def test_a_language_task_has_a_language_model(here, capsys):
    sizes = ["--model.d_model", "8", "--model.d_ff", "8", "--model.layers", "1", *STEPS]
    assert main(["train", "--task", "own_tasks.Letters", *sizes, "--out", "run", *WHERE]) == 0
    model = from_json((here / "run" / "config.json").read_text()).model
    assert isinstance(model, LanguageConfig)
    assert model.vocabulary == 7
    assert main(["eval", "run", "--trust", *WHERE[:2]]) == 0
    assert "has no tokenizer.json" in refused(capsys, "generate", "run", "--prompt", "a", "--trust")
    wrong = RunConfig(TaskConfig("own_tasks.Letters"), ModelConfig("dlr", {"d_state": 4}))
    with pytest.raises(ValueError, match="is a task of the kind language, and its model is a Mod"):
        wrong.make_task()


def test_a_task_of_dlrnn_needs_no_recipe_and_no_trust(here):
    short = ["--task.settings.length", "8", *SMALL]
    assert main(["train", "--task", "cumsum", *short, "--out", "run", *WHERE]) == 0
    assert main(["eval", "run", *WHERE[:2]]) == 0
    assert default_run("listops").model.mixer_options["bidirectional"]


# ---------------------------------------------------------------------------------- wrong input


@pytest.mark.parametrize(
    ("name", "keywords"),
    [
        ("shfit", "no task 'shfit': did you mean 'shift'.*import path"),
        ("nowhere.Forecast", "'nowhere.Forecast' cannot be imported: No module .* this folder"),
        ("failing_tasks.Forecast", "cannot be imported: division by zero .failing_tasks.py, line"),
        ("own_tasks.Forcast", "cannot be imported: module 'own_tasks' has no attribute 'Forcast'"),
        ("own_tasks.NoTask", "must be a class derived from dlrnn.tasks.Task"),
        ("own_tasks.torch", "must be a class derived from dlrnn.tasks.Task"),
        (
            "own_tasks.Bare",
            "lacks kind, metric, metric_names, causal, d_output, input_length, loss",
        ),
        ("own_tasks.Idle", "idle: its class must define generate, or else make_batch"),
        ("own_tasks.Plain", "settings period without effect: .*@dataclass"),
        ("own_tasks.Odd", "kind must be one of regression, .* not 'forecasting'"),
        ("own_tasks.Unmeasured", "metric must be one of loss, R2, .* not 'mae'"),
        ("own_tasks.Demanding", "needs the setting file: --task.settings.file VALUE"),
        ("own_tasks.Unmade", "cannot be made: I cannot be .own_tasks.py, line"),
        ("own_tasks.Wide", r"must have the shape \[2, 16, 3\] .* not \[2, 16, 1\]"),
        ("own_tasks.Sizeless", "needs d_input .* or vocabulary"),
        ("own_tasks.Noisy", "two calls with one request gave two batches.*Random"),
        ("own_tasks.Broken", "make_batch failed with KeyError: 'nothing' .own_tasks.py, line"),
        ("own_tasks.Paired", "make_batch must return a dlrnn.tasks.Batch, not a tuple"),
        ("own_tasks.Endless", "the inputs must be finite numbers"),
        ("own_tasks.Somewhere", "must say on_device = False if"),
    ],
)
def test_wrong_tasks_are_refused_in_one_sentence(name, keywords, here, capsys, unchecked):
    said = refused(capsys, "train", "--task", name, *SMALL, "--out", "run", *WHERE)
    assert re.search(keywords, said), said
    assert not (here / "run").exists()


@pytest.mark.parametrize(
    ("words", "keywords"),
    [
        (["--task", OWN, "table1/shift/dlr-1"], "--task is instead of a recipe"),
        (["--task", OWN, "--scale", "tiny"], "--scale is for recipes"),
        (["--task", OWN, "--task.name", "shift"], "--task is own_tasks.Forecast, and --task.name"),
        (
            ["--task", OWN, "--task.settings.perod", "3"],
            "no setting 'perod': did you mean 'period'",
        ),
        (["--task", OWN, "--resume", "run"], "--resume cannot be combined with a recipe, --task"),
        (["--steps", "4"], "name the recipe first"),
        ([], "name a recipe .* a --task, or --resume"),
    ],
)
def test_wrong_commands_are_refused(words, keywords, here, capsys):
    assert re.search(keywords, refused(capsys, "train", *words))


def test_get_takes_an_import_path(here):
    task = tasks.get(OWN, seed=3, length=9)
    assert (task.name, task.length, task.seed) == ("forecast", 9, 3)
    with pytest.raises(ValueError, match="no setting 'perod': did you mean 'period'"):
        tasks.get(OWN, perod=4.0)
    assert tasks.get("dlrnn.tasks.atomic.tasks.Shift", length=16) == tasks.get("shift", length=16)
