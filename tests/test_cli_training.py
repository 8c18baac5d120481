"""`dlrnn train`, `eval`, `recipes`, `reproduce`, `sweep`: output and errors."""

import json
import shutil
import sys

import numpy as np
import pytest
import torch
from support import DEVICE

from dlrnn.cli import main
from dlrnn.paper import recipes
from dlrnn.tasks import ListOpsSubTrees, PathfinderSegmentation
from dlrnn.tasks.atomic.tasks import Shift
from dlrnn.train import RunDirectory, evaluation
from dlrnn.train.checkpoint import read_header, save_best
from dlrnn.train.evaluation import draw, read_test

SMALL = ["--scale", "tiny", "--steps", "4", "--batch_size", "2", "--eval_batches", "1"]
WHERE = ["--writer", "none", "--device", DEVICE.type]


def train(out, *arguments, recipe="table1/shift/dlr-1"):
    return main(["train", recipe, *SMALL, "--out", str(out), *WHERE, *arguments])


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "run"
    assert train(path) == 0
    return path


MINE = """
import torch

class Narrow(torch.nn.Module):
    def __init__(self, d_model):
        super().__init__()
        self.map = torch.nn.Linear(d_model - 1, d_model)

    def forward(self, x):
        return self.map(x)

class Lost(Narrow):
    def forward(self, x):
        return {}["nothing"]

class Unmade(Narrow):
    def __init__(self, d_model):
        raise TypeError("I cannot be")

class Demanding(Narrow):
    def forward(self, x, lengths):
        return x
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A module of a user's mixers."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)


@pytest.mark.parametrize(
    ("mixer", "status", "said"),
    [
        ("Narrow", 1, "RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
        ("Lost", 1, "KeyError: 'nothing' (mine.py, line 14)"),
        ("Unmade", 2, "the mixer 'mine.Unmade' cannot be made: I cannot be (mine.py, line 18)"),
        ("Demanding", 2, "Demanding.forward needs lengths, and may be given x alone: make it "),
    ],
)
@pytest.mark.usefixtures("unchecked", "mine")
def test_errors_in_a_users_mixer_name_its_line(mixer, status, said, tmp_path, capsys):
    assert train(tmp_path / "run", "--model.mixer", f"mine.{mixer}") == status
    [line] = [each for each in capsys.readouterr().err.splitlines() if "dlrnn train: " in each]
    assert line.startswith(f"dlrnn train: {said}")
    assert mixer != "Narrow" or line.endswith(" (mine.py, line 10)")


def test_bugs_of_dlrnn_show_a_traceback(monkeypatch):
    monkeypatch.setattr(recipes, "get", None)
    with pytest.raises(TypeError):
        main(["train", "table1/shift/dlr-1"])


def test_another_task_does_not_inherit_settings(tmp_path, capsys):
    assert train(tmp_path / "run", "--task.name", "cumsum", "--task.settings.length", "16") == 0
    note = "note: cumsum does not inherit the settings of shift (length, copies); --task.settings."
    assert note in capsys.readouterr().err


def test_several_nodes_need_a_launcher(tmp_path, capsys):
    said = refused(capsys, tmp_path / "a", "--nodes", "2")
    assert said.endswith("torchrun --nnodes 2 ..., or srun")


def sentence(capsys, *arguments):
    """The one line that a wrong command prints, with exit status 2."""
    capsys.readouterr()
    assert main(list(map(str, arguments))) == 2
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line.startswith("dlrnn ")]
    assert len(lines) == 1, captured.err
    assert "Traceback" not in captured.err
    return lines[0]


def refused(capsys, out, *wrong, recipe="table1/shift/dlr-1"):
    """The one line that a wrong `dlrnn train` prints; it makes no folder."""
    said = sentence(capsys, "train", recipe, *SMALL, "--out", out, *WHERE, *wrong)
    assert not out.exists()
    return said


def test_train_prints_the_result(tmp_path, capsys):
    assert train(tmp_path / "a", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["steps"] == 4
    assert result["run"] == str(tmp_path / "a")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "a").iterdir()}
    assert main(["train", "--resume", str(tmp_path / "a"), "--early-stop", *WHERE]) == 0
    printed = capsys.readouterr()
    assert "R2" in printed.out
    said = f"{tmp_path / 'a'} is complete already, after 4 steps: nothing was done"
    assert printed.err == f"dlrnn train: {said}\n"
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "a").iterdir()}


README_MIXER = """
import torch


class MyLayer(torch.nn.Module):
    def __init__(self, d_model, taps=4):
        super().__init__()
        self.taps = torch.nn.Conv1d(d_model, d_model, taps, groups=d_model)
        self.mix = torch.nn.Linear(d_model, d_model)

    def forward(self, x):
        past = torch.nn.functional.pad(x.mT, (self.taps.kernel_size[0] - 1, 0))
        return self.mix(torch.nn.functional.gelu(self.taps(past).mT))
"""


def test_a_users_mixer_trains(tmp_path, monkeypatch, capsys):
    """The example of the README."""
    (tmp_path / "readers_package.py").write_text(README_MIXER)
    monkeypatch.chdir(tmp_path)
    options = ["--model.mixer", "readers_package.MyLayer", "--model.mixer_options.taps", "3"]
    assert train(tmp_path / "own", *options) == 0
    told = capsys.readouterr()
    assert "R2" in told.out
    note = "readers_package.MyLayer does not inherit the settings of dlr (d_state, dt_min, dt_max)"
    assert note in told.err


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--stepps", "3"], "train: there is no setting --stepps: did you mean --steps?"),
        (["--steps", "few"], "train: --steps must be a whole number, not 'few'"),
        (["extra"], "got 'extra', without --"),
        (["--model.mixer_options.bidirectional", "true"], "from left to right"),
        (["--task.settings.length", "17"], "multiple of the 8 copies"),
        (["--task.settings.lenth", "16"], "did you mean 'length'"),
        (["--model.mixer", "attention", "--model.d_model", "30"], "heads"),
    ],
)
def test_wrong_settings_make_no_folder(wrong, said, tmp_path, capsys):
    assert said in refused(capsys, tmp_path / "a", *wrong)


def test_a_mixer_that_cannot_ignore_padding_makes_no_folder(mine, tmp_path, capsys, monkeypatch):
    batch = ListOpsSubTrees.sample

    def padded(self, *arguments, **options):
        made = batch(self, *arguments, **options)
        return made._replace(lengths=torch.full(made.inputs.shape[:1], made.inputs.shape[1]))

    monkeypatch.setattr(ListOpsSubTrees, "sample", padded)
    mixer, recipe = ("--model.mixer", "mine.Narrow"), "table3/listops-subtrees/dlr"
    said = refused(capsys, tmp_path / "a", *mixer, recipe=recipe)
    assert "it takes no lengths=; make it Narrow.forward(self, x, *, lengths=None)" in said


def test_wrong_sweeps_begin_nothing(tmp_path, capsys):
    command = ["sweep", "table1/cum*/dlr-1", "--out", tmp_path / "a", *WHERE[2:]]
    for wrong, said in (
        (["--stepz", "5"], "did you mean --steps"),
        (["--steps", "abc"], "--steps must be a whole number, not 'abc'"),
        (["--seed", "3"], "a sweep has --seeds N"),
        (["--seed=3"], "a sweep has --seeds N"),
    ):
        assert said in sentence(capsys, *command, *wrong)
    said = sentence(capsys, "sweep", "--steps", "3", "table1/cum*/dlr-1", *WHERE[2:])
    assert "there is no recipe '3'" in said
    assert said.endswith("recipes come first: dlrnn sweep RECIPE ... --steps 100")
    assert "come first" not in sentence(capsys, "sweep", "table1/cun*", *WHERE[2:])
    assert not (tmp_path / "a").exists()


def test_a_sweep_notes_once_what_a_mixer_does_not_inherit(tmp_path, capsys, monkeypatch):
    sent, row = {}, {"recipe": "table1/cumsum/dlr-1", "status": "done"}
    monkeypatch.setattr("dlrnn.paper.sweep.sweep", lambda *_, **how: sent.update(how) or [row])
    changes = ["--model.mixer", "attention", "--lr", "1e-4"]
    assert main(["sweep", "table1/cum*/dlr-1", *changes, *WHERE[2:]]) == 0
    notes = [n for n in capsys.readouterr().err.splitlines() if n.startswith("note: attention")]
    assert len(notes) == 1
    assert sent["overrides"] == changes


def test_wrong_runs_raise(done, tmp_path, capsys):
    copy, torn = (shutil.copytree(done, tmp_path / name) for name in ("copy", "torn"))
    for path in torn.glob("step-*"):
        path.write_bytes(path.read_bytes()[:100])
    (torn / "result.json").unlink()
    (torn / "best.safetensors").unlink()
    several = "table1/shift is several recipes: table1/shift/dlr-1, table1/shift/dss-1,"
    for said, *command in (
        ("a run that is complete", "train", "table1/shift/dlr-1", *SMALL, "--out", copy, *WHERE),
        (f"has no config.json; below it there is {done}", "train", "--resume", done.parent),
        (f"there is no folder {tmp_path}/nowhere", "train", "--resume", tmp_path / "nowhere"),
        ("did you mean", "train", "table1/shift/dlr-9"),
        (several, "train", "table1/shift"),
        ("`dlrnn sweep` trains several recipes", "train", "table1/*/dlr-1"),
        ("name a recipe", "train"),
        ("begin a new run", "train", "--resume", copy, "--steps", "9", *WHERE),
        ("is damaged", "train", "--resume", torn, *WHERE),
        ("there is no such file", "eval", torn, *WHERE[2:]),
    ):
        assert said in sentence(capsys, *command)


def test_doctor_reads_the_best_model_of_a_run(done, capsys):
    assert len(list(done.glob("*.safetensors"))) > 1
    assert main(["doctor", str(done), "--length", "8", "--json"]) == 0
    assert all(row["ok"] for row in json.loads(capsys.readouterr().out)["layers"])


def test_recipes_names_unreadable_results(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "records.jsonl").write_text("{oops\n")
    assert main(["recipes", "table1/shift"]) == 0
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "dlrnn recipes: results/records.jsonl, line 1, is not JSON"


def test_eval_prints_metrics_and_draws_predictions(done, capsys):
    assert main(["eval", str(done), "--json", *WHERE[2:]]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["metrics"].keys() == {"loss", "R2"}
    assert (done / "eval-test.png").stat().st_size > 5000
    assert main(["eval", str(done), *WHERE[2:]]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == f"test, at its best checkpoint (step {result['step']})"


def test_eval_marks_an_incomplete_run(done, tmp_path, capsys):
    copy = shutil.copytree(done, tmp_path / "run")
    (copy / "result.json").unlink()
    assert main(["eval", str(copy), *WHERE[2:]]) == 0
    assert ", so far: the run is not complete)" in capsys.readouterr().out.splitlines()[0]


def test_eval_prints_metrics_when_the_disk_is_full(done, capsys, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dlrnn.train.evaluation.write_whole", full)
    assert main(["eval", str(done), *WHERE[2:]]) == 0
    printed = capsys.readouterr()
    assert "R2" in printed.out
    said = f"dlrnn eval: nothing was written into {done}: No space left on device\n"
    assert printed.err == said


def test_a_run_with_a_similar_name_is_suggested(done, tmp_path, capsys):
    shutil.copytree(done, tmp_path / "seed-0-951a2bf6")
    assert main(["eval", str(tmp_path / "seed-0")]) == 2
    assert "; beside it there is seed-0-951a2bf6" in capsys.readouterr().err


def test_eval_reports_listops_by_height_and_operator_and_draws_segmentations(tmp_path, capsys):
    for recipe in ("listops-subtrees", "pathfinder-segmentation-128"):
        run = tmp_path / recipe
        assert train(run, recipe=f"table3/{recipe}/dlr") == 0
        assert main(["eval", str(run), *WHERE[2:]]) == 0
        out = capsys.readouterr().out
        assert ("by height" in out and "MED" in out) == (recipe == "listops-subtrees")
    assert (run / "eval-test.png").stat().st_size > 5000


def test_pictures_show_inputs_targets_and_predictions():
    images = PathfinderSegmentation(resolution=32)
    batch, logits = images.sample(4), torch.randn(4, 32 * 32, 3)
    shown = [axes.images[0].get_array() for axes in draw(images, batch, logits).axes]
    rows = batch.inputs[..., 0], batch.targets, logits.argmax(-1)
    wanted = [values[k].view(32, 32) for values in rows for k in range(4)]
    assert all((torch.tensor(have) == want).all() for have, want in zip(shown, wanted, strict=True))

    curves = Shift(length=16, copies=2)
    batch = curves.sample(4)
    output = torch.randn(4, curves.output_length + 5, curves.d_output)
    axes = np.array(draw(curves, batch, output).axes).reshape(curves.d_output, 4)
    predicted = output[:, -curves.output_length :]
    for k in range(4):
        for column, line in ((batch.targets[k], 0), (predicted[k], 1)):
            lines = [panel.lines[line].get_ydata() for panel in axes[:, k]]
            assert np.array_equal(np.stack(lines, axis=1), column)


def test_test_metrics_belong_to_the_evaluated_model(done, tmp_path, monkeypatch):
    """A better model that is saved during the evaluation is not the evaluated one."""
    run = shutil.copytree(done, tmp_path / "run")
    (run / "result.json").unlink()
    (run / "test.json").unlink(missing_ok=True)
    before = read_header(run / "best.safetensors")["step"]
    original = evaluation.scores

    def meanwhile(*given):
        config = read_header(run / "best.safetensors")["config"]
        told = {"config": config, "metric": "R2", "files": {}, "value": 1.0}
        save_best(run, before + 1000, {}, told)
        return original(*given)

    monkeypatch.setattr(evaluation, "scores", meanwhile)
    assert evaluation.evaluate_run(run, device=WHERE[3])["step"] == before
    assert json.loads((run / "test.json").read_text())["step"] == before
    assert read_test(RunDirectory(run)) == {}, "the better one was not tested"


def test_recipes_lists_and_shows_recipes(capsys, tmp_path):
    assert main(["recipes", "--json", "--out", str(tmp_path)]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["status"] for row in rows} == {"not run"}
    assert len(rows) > 100
    for asked, count in ((["table1/shift"], 6), (["table1/*/dlr-1", "table1/shift/dlr-1"], 11)):
        assert main(["recipes", *asked, "--json", "--scale", "tiny"]) == 0
        rows = json.loads(capsys.readouterr().out)
        assert len(rows) == count
        assert "minutes" not in rows[0]
    assert "did you mean 'table1/shift/*'" in sentence(capsys, "recipes", "table1/shfit/*")
    assert main(["recipes", "--show", "table1/shift/dlr-1"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 40000


def test_wrong_tables_raise(capsys):
    assert "there is no 'table9'" in sentence(capsys, "reproduce", "table9")
    only = ["reproduce", "table1", "--only", "shfit/dlr-1"]
    assert "did you mean 'shift/dlr-1'" in sentence(capsys, *only)


def reviews(root):
    for split in ("train", "test"):
        for label, word in (("pos", "good "), ("neg", "bad ")):
            folder = root / "aclImdb" / split / label
            folder.mkdir(parents=True)
            for k in range(20):
                (folder / f"{k}_{7 if label == 'pos' else 2}.txt").write_text(word * (k + 3))
    return root / "aclImdb"


def pairs(root):
    root.mkdir()
    for split in ("train", "eval", "test"):
        lines = [f'{k % 2}.0\t{k}\t{k + 1}\t"first text {k}"\t"second {k}"' for k in range(8)]
        (root / f"new_aan_pairs.{split}.tsv").write_text("\n".join(lines) + "\n")
    return root


@pytest.mark.parametrize(("name", "made"), [("text", reviews), ("retrieval", pairs)])
def test_imported_data_can_be_trained_on(name, made, tmp_path, capsys):
    folder = str(tmp_path / "set")
    assert main(["data", "import", name, str(made(tmp_path / "source")), "--out", folder]) == 0
    assert main(["data", "verify", folder]) == 0
    assert "there is no" in refused(capsys, tmp_path / "a", recipe=f"table4/{name}/dlr")
    settings = ["--task.settings.folder", folder, "--task.settings.length", "32"]
    assert train(tmp_path / "run", *settings, recipe=f"table4/{name}/dlr") == 0
    assert "accuracy" in capsys.readouterr().out


def test_wrong_imports_raise(tmp_path, capsys):
    wrong = sentence(capsys, "data", "import", "txt", str(tmp_path))
    assert "did you mean 'text'?" in wrong
    nothing = str(tmp_path / "nothing")
    assert "nothing" in sentence(capsys, "data", "import", "text", nothing)


@pytest.mark.parametrize("complete", [False, True])
def test_an_interrupted_run_names_the_command_that_resumes_it(
    complete, tmp_path, capsys, monkeypatch
):
    """With the options that no file stores; a run that became complete needs no command."""
    run = tmp_path / "run"

    def interrupted(path, *_, **__):
        run.mkdir()
        for name in ("config.json", *(["result.json"] if complete else [])):
            (run / name).write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr("dlrnn.train.train", interrupted)
    options = ["--device", "cpu", "--writer", "none", "--early-stop"]
    recipe = ["table1/shift/dlr-1", "--scale", "tiny", "--out", str(run)]
    assert main(["train", *recipe, *options]) == 130
    printed = capsys.readouterr().err
    command = f"dlrnn train --resume {run} --device cpu --writer none --early-stop"
    assert (command in printed) != complete
    assert ("complete" in printed) == complete
