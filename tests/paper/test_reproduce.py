"""From a recipe to a line of the table, and what can go wrong on the way."""

import json
import math
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from support import DEVICE, tiny_books

from dlrnn.paper import recipes
from dlrnn.paper.recipes import recipe as scales
from dlrnn.paper.reproduce import listing, make_row, reproduce, select
from dlrnn.paper.runs import Outcome, evaluate_best, measured, outcomes, run_of
from dlrnn.train import RunDirectory, load_best
from dlrnn.train.step import held_out, scores
from made_up import jsonl

MODULE = import_module("dlrnn.paper.reproduce")
SEGMENTATION = "pathfinder-segmentation"
SHIFT, MAX = "table1/shift/dlr-1", "table1/cummax/attention-1"


@pytest.fixture
def few_steps(monkeypatch):
    """Tiny runs of six steps."""
    tiny = scales.tiny

    def shorter(config):
        return replace(tiny(config), steps=6, eval_every=3, eval_batches=2, checkpoint_every=3)

    monkeypatch.setattr(scales, "tiny", shorter)


def run(tmp_path, only, table="table1", **options):
    where = {"scale": "tiny", "out": tmp_path, "show": False, "writer": "none"}
    return reproduce(table, only=only, **where, **options)


def status_of(recipe, out, scale):
    return make_row(recipe, outcomes(recipe, out, scale)).status


def trained(monkeypatch):
    """The folders that are trained from now on."""
    calls, train = [], MODULE.train

    def noted(path, *arguments, **options):
        calls.append(path)
        return train(path, *arguments, **options)

    monkeypatch.setattr(MODULE, "train", noted)
    return calls


def test_a_table_is_trained_written_and_not_trained_again(tmp_path, few_steps, monkeypatch):
    calls = trained(monkeypatch)
    [row] = run(tmp_path, "shift/dlr-1", seeds=(0, 1))
    assert (row.recipe, row.paper, row.seeds, row.status) == (SHIFT, {"R2": 1.0}, 2, "done")
    results = [RunDirectory(tmp_path / "tiny" / SHIFT / f"seed-{k}").result for k in (0, 1)]
    values = [result["best"] for result in results]
    assert row.yours["R2"] == pytest.approx(sum(values) / 2)
    assert row.spread["R2"] == pytest.approx(abs(values[0] - values[1]))
    text = (tmp_path / "tiny" / "table1.md").read_text()
    yours, spread = round(row.yours["R2"], 3), round(row.spread["R2"], 3)
    assert f"| {SHIFT} | R2 | 1 | {yours:g} | 2 | {spread:g} | done |" in text
    assert f"| {MAX} | R2 | 1 | - | 0 | - | not run |" in text
    assert f"| shift | 1 / {yours:g} | 0.99 / - |" in text
    assert len(calls) == 2
    assert run(tmp_path, "shift/dlr-1", seeds=(0, 1)) == [row]
    assert len(calls) == 2


def test_the_result_of_a_regression_is_its_best_validation(tmp_path, few_steps):
    """NaN is never the best; before the first record of a loss there is none."""
    run(tmp_path, "shift/dlr-1")
    folder = RunDirectory(run_of(recipes.get(SHIFT), tmp_path, "tiny").path)
    validations = [
        {"step": step, "split": "validation", "loss": 1.0, "R2": R2}
        for step, R2 in enumerate((math.nan, 0.625, 0.75, 0.5, math.nan), start=7)
    ]
    jsonl(folder.path / "records.jsonl", validations)
    assert measured(folder, folder.config.make_task()) == ("validation", {"R2": 0.75, "loss": 1.0})
    training = {"step": 12, "split": "train", "loss": 0.5}
    jsonl(folder.path / "records.jsonl", [*validations, training])
    assert measured(folder, folder.config.make_task())[1]["train_loss"] == 0.5


def test_a_stopped_run_is_resumed(tmp_path, few_steps, monkeypatch):
    calls, [row] = trained(monkeypatch), run(tmp_path, "shift/dlr-1")
    folder = run_of(recipes.get(SHIFT), tmp_path, "tiny").path
    (folder / "result.json").unlink()
    (folder / "step-000000006.safetensors").unlink()
    assert status_of(recipes.get(SHIFT), tmp_path, "tiny") == "6 of 6 steps"
    assert run(tmp_path, "shift/dlr-1") == [row]
    assert calls == [folder, folder]
    steps = [record["step"] for record in RunDirectory(folder).records()]
    assert steps == sorted(steps)


def test_tagging_is_tested_and_shown_in_percent(tmp_path, few_steps):
    [row] = run(tmp_path, "pathfinder-segmentation-128/dlr", table="table3")
    assert row.status == "done"
    folder = run_of(recipes.get(row.recipe), tmp_path, "tiny").path
    test = json.loads((folder / "test.json").read_text())
    model, task, config, _ = load_best(folder, torch.device("cpu"))
    by_hand = scores(model, task, held_out(task, config, "test", torch.device("cpu")))
    assert test.pop("step") == RunDirectory(folder).result["best_step"]
    assert test == by_hand
    assert test != scores(model, task, held_out(task, config, "validation", torch.device("cpu")))
    assert row.yours == {name: 100 * test[name] for name in ("macro_f1", "macro_accuracy")}
    assert row.paper == {"macro_f1": 96.8, "macro_accuracy": 97.7}
    assert "| 96.8 / 97.7 |" in (tmp_path / "tiny" / "table3.md").read_text()
    (folder / "test.json").unlink()
    assert status_of(recipes.get(row.recipe), tmp_path, "tiny") == "trained, not tested"


def test_a_broken_run_is_reported_and_the_others_are_trained(tmp_path, few_steps, monkeypatch):
    train = MODULE.train

    def fails_once(path, *arguments, **options):
        if "shift" in str(path):
            raise FloatingPointError("step 3: the gradient of W is not finite\nand more")
        return train(path, *arguments, **options)

    monkeypatch.setattr(MODULE, "train", fails_once)
    rows = run(tmp_path, "[cs][hu]*/attention-1")
    found = {row.recipe.split("/")[1]: row for row in rows}
    assert sorted(found) == ["cummax", "cumsum", "shift"]
    problem = "broken: step 3: the gradient of W is not finite"
    assert (found["shift"].status, found["shift"].yours) == (problem, {})
    assert found["cummax"].status == found["cumsum"].status == "done"
    assert problem in (tmp_path / "tiny" / "table1.md").read_text()


@pytest.mark.parametrize("stopped", [False, True])
def test_a_folder_of_other_settings_is_not_used(stopped, tmp_path, few_steps, monkeypatch):
    run(tmp_path, "shift/dlr-1")
    folder = run_of(recipes.get(SHIFT), tmp_path, "tiny").path
    config = json.loads((folder / "config.json").read_text())
    config["model"]["mixer_options"]["d_state"] = 99
    (folder / "config.json").write_text(json.dumps(config))
    if stopped:
        (folder / "result.json").unlink()
    before, calls = sorted(folder.iterdir()), trained(monkeypatch)
    [row] = run(tmp_path, "shift/dlr-1")
    said = f"{folder} is not of this recipe: its model.mixer_options.d_state is 99, not 128"
    assert row.status.startswith(f"broken: {said}")
    assert (row.yours, calls) == ({}, [])
    assert status_of(recipes.get(SHIFT), tmp_path, "tiny").startswith(said)
    assert sorted(folder.iterdir()) == before


def test_options_reach_the_training(tmp_path, few_steps, monkeypatch):
    given = []
    monkeypatch.setattr(MODULE, "train", lambda *_, **options: given.append(options))
    monkeypatch.setattr(MODULE, "evaluate_best", lambda *_: None)
    for wanted in (True, False):
        run(tmp_path, "shift/dlr-1", early_stop=wanted)
    assert [each["early_stop"] for each in given] == [True, False]


def test_a_run_is_tested_once(tmp_path, few_steps, monkeypatch):
    run(tmp_path, "listops-subtrees/dlr", table="table3")
    monkeypatch.setattr("dlrnn.paper.runs.load_best", None)
    [row] = run(tmp_path, "listops-subtrees/dlr", table="table3")
    assert row.status == "done"
    evaluate_best(run_of(recipes.get(row.recipe), tmp_path, "tiny").path, "cpu")


@pytest.mark.parametrize(
    ("name", "content"),
    [("result.json", "5"), ("result.json", "{}"), ("records.jsonl", "5\n"), ("test.json", "[]")],
)
def test_a_damaged_run_directory_becomes_a_status(name, content, tmp_path, few_steps):
    run(tmp_path, "listops-subtrees/dlr", table="table3")
    recipe = recipes.get("table3/listops-subtrees/dlr")
    path = run_of(recipe, tmp_path, "tiny").path
    (path / name).write_text(content)
    assert str(path) in status_of(recipe, tmp_path, "tiny")


@pytest.mark.parametrize(
    ("table", "only", "command"),
    [
        ("table3", "pathfinder-segmentation-256/dss", f"build {SEGMENTATION} --resolution 256"),
        ("table5", "pg19/dlr-16-pre", "import pg19 PATH"),
    ],
)
def test_a_missing_data_set_is_named_first(table, only, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [row] = reproduce(table, only=only, out=tmp_path, show=False)
    folder = f"data/{only.split('/')[0]}"
    assert row.status == f"broken: there is no {folder}: make it with `dlrnn data {command}`"
    assert not run_of(recipes.get(row.recipe), tmp_path, "full").path.exists()


def test_recipes_of_a_table_can_be_selected():
    names = select("table1", "shift")
    assert names[0] == SHIFT
    assert len(names) == 6
    assert len(select("table1", "dlr-1")) == 11
    assert len(select("table1", "*-fixed/dlr-1*")) == 3
    with pytest.raises(ValueError, match="no 'table7' to reproduce; there are: table1, table2"):
        select("table7")
    with pytest.raises(ValueError, match="no recipe 'shfit/dlr-1': did you mean 'shift/dlr-1'"):
        select("table1", "shfit/dlr-1")


def test_the_listing_has_a_line_for_each_recipe(tmp_path):
    lines = listing(tmp_path, "full")
    assert [line["name"] for line in lines] == list(recipes.RECIPES)
    assert lines[0] == {
        "refused": False,
        "name": SHIFT,
        "metric": "R2",
        "paper": "1",
        "yours": None,
        "status": "not run",
        "minutes": 1,
    }


def test_the_status_names_each_seed():
    found = {0: Outcome("done", {"R2": 0.5}), 1: Outcome("300 of 40000 steps")}
    row = make_row(recipes.get(SHIFT), found)
    assert row.status == "seed 1: 300 of 40000 steps"
    assert (row.yours, row.seeds, row.spread) == ({"R2": 0.5}, 1, {})


def test_a_language_model_is_reproduced(tmp_path, monkeypatch):
    """`dlrnn reproduce table5 --scale tiny`, with a set of a language of 30 words in data/pg19."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    tiny_books(tmp_path, length=128, words=2000).rename(tmp_path / "data" / "pg19")
    tiny = scales.tiny

    def shorter(config):
        few = {"steps": 4, "eval_every": 2, "checkpoint_every": 4}
        return replace(tiny(config), **few, model=replace(tiny(config).model, vocabulary=32))

    assert tiny(recipes.RECIPES["table5/pg19/dlr-16-pre"].config).task.settings["held_out"] == 64
    monkeypatch.setattr(scales, "tiny", shorter)
    for only in ("dlr-16-post", "attention-1-pre"):
        [row] = run("runs", only, table="table5", device=DEVICE.type)
        assert row.status == "done"
        assert 0 < row.yours["loss"] < 2 * math.log(32)
    text = (tmp_path / "runs" / "tiny" / "table5.md").read_text()
    assert "| table5/pg19/dlr-16-post | train_loss / loss | 2.7 / 2.86 | " in text
