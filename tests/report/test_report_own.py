"""Columns beside the paper's: ours and others', and which numbers are held against the paper."""

import json
import re
from dataclasses import replace
from pathlib import Path

import made_up
import pytest

from dlrnn.cli import main
from dlrnn.paper import recipes
from dlrnn.report import add, read_results
from dlrnn.report.book import counts, difference, number, signed
from dlrnn.report.cells import dialog, fall_text, seeds_text, settings_text, state_text
from dlrnn.report.layouts import make_tables
from dlrnn.report.markdown import markdown
from dlrnn.report.origin import origin_of
from dlrnn.report.own import own_results
from dlrnn.report.pages import listops, runs_with
from dlrnn.report.results import Results
from dlrnn.report.site import write_site
from dlrnn.report.tables import count_text

SHIFT = "table1/shift/dlr-1"
TINY = {"scale": "tiny", "steps_asked": 1000}
STOPPED = "early after 20000 of 40000 steps: R2 within 0.01 of 1 for the last half of them"


def cell_of(*records):
    return make_tables([Results("ours", list(records))])[0].cells[SHIFT]


def test_differences():
    assert difference("R2", 0.98, 1.0).verdict == "near"
    assert difference("R2", 0.97, 1.0).verdict == "near"
    assert difference("R2", 0.969, 1.0).verdict == "worse"
    assert difference("accuracy", 87.3, 85.7).verdict == "better"
    assert difference("accuracy", 84.2, 85.7).verdict == "near"
    assert difference("loss", 2.9, 2.8).verdict == "worse"
    assert difference("loss", 2.7, 2.8).verdict == "better"
    assert signed("R2", -0.0001) == "0.000"
    assert signed("accuracy", 1.26) == "+1.3"
    assert number("R2", -0.5) == "−0.500"
    assert number("R2", -0.0001) == "0.000"


def test_seeds_and_spread():
    values = (0.5, 0.7)
    records = [made_up.record(seed=k, value=value) for k, value in enumerate(values)]
    cell = make_tables([Results("ours", records)])[0].cells["table1/shift/dlr-1"]
    assert cell.ours["R2"].mean == pytest.approx(0.6)
    assert cell.ours["R2"].spread == pytest.approx(0.2)
    assert cell.verdict == "worse"
    assert seeds_text(cell.ours["R2"]) == "2 seeds, 0.500 to 0.700"
    assert seeds_text(cell_of(records[0]).ours["R2"]) == ""
    records.append(made_up.record(seed=2, value=None))
    cell = make_tables([Results("ours", records)])[0].cells["table1/shift/dlr-1"]
    assert cell.ours["R2"].mean is None, "one that diverged is not averaged away"
    assert seeds_text(cell.ours["R2"]) == "3 seeds"


@pytest.mark.parametrize(
    ("changed", "verdict", "value"),
    [
        ({}, "near", -0.01),
        ({"steps": 39999}, None, -0.01),
        ({"steps": 20000, "stopped": STOPPED}, "near", -0.01),
        ({"scale": "tiny"}, None, None),
        ({"scale": "changed"}, None, None),
    ],
)
def test_what_is_held_against_the_paper(changed, verdict, value):
    cell = cell_of(made_up.record(**changed))
    found = cell.difference("R2")
    assert cell.verdict == verdict
    assert (None if found is None else round(found.value, 6)) == value


@pytest.mark.parametrize("scale", ["tiny", "changed"])
def test_one_of_another_size_is_not_averaged_away(scale):
    assert cell_of(made_up.record(), made_up.record(seed=1, scale=scale)).verdict is None


def test_one_that_was_cut_does_not_count_beside_one_that_was_not():
    whole, cut = made_up.record(value=0.96), made_up.record(seed=1, steps=33000, value=0.99)
    found = cell_of(whole, cut)
    assert (found.ours["R2"].mean, found.ours["R2"].spread, found.verdict) == (0.96, None, "worse")
    assert state_text(found.ours["R2"]) == ""
    row = next(line for line in markdown([Results("ours", [cut, whole])]).splitlines()
               if line.startswith("| Shift | DLR, 1 layer"))  # fmt: skip
    assert "| 0.960 | ▼ −0.040 |  | 40000 of 40000 | 1 |" in row
    table = make_tables([Results("ours", [whole, cut])])[0]
    text = dialog(table, table.cells[SHIFT], [])
    assert "<dt>Not in the mean</dt><dd>seed 1: cut short</dd>" in text
    assert "at step 33000, before its end: the command goes on to 40000" in text
    assert cell_of(cut).ours["R2"].mean == 0.99, "alone it is what there is"
    two = cell_of(cut, made_up.record(seed=2, steps=34000, value=0.97))
    assert (two.ours["R2"].mean, two.verdict) == (pytest.approx(0.98), None)
    diverged = cell_of(whole, made_up.record(seed=1, steps=33000, value=None))
    assert diverged.ours["R2"].mean is None, "one that diverged is not averaged away"


@pytest.mark.parametrize(
    ("recipe", "metric", "value", "verdict"),
    [
        ("table1/cummax/dlr-1", "R2", 0.519, None),  # the paper has .52
        ("table1/cummax/dlr-1", "R2", 0.52, "near"),
        ("table1/cummax/dlr-1", "R2", 0.56, "better"),
        ("table1/sort/dlr-1", "R2", 0.02, None),  # 0 is what every run begins with
        ("table5/pg19/dlr-16-pre", "loss", 2.89, None),  # 2.88
        ("table5/pg19/dlr-16-pre", "loss", 2.88, "near"),
        ("table5/pg19/dlr-16-pre", "loss", 2.80, "better"),
    ],
)
def test_what_was_cut_is_judged_if_it_has_reached_the_paper(recipe, metric, value, verdict):
    split = "validation" if metric == "R2" else "test"
    record = made_up.record(recipe, metric=metric, value=value, steps=100, split=split)
    records = [record]
    if metric == "loss":  # the cell has two
        records.append(replace(record, metric="train_loss", value=value - 0.17))
    table = make_tables([Results("ours", records)])[int(recipe[5]) - 1]
    assert table.cells[recipe].verdict == verdict
    found = counts(table)
    assert (found.near, found.better) == (verdict == "near", verdict == "better")
    assert (found.worse_at_the_end, found.cut) == (0, verdict is None)
    not_tested = replace(record, metric="accuracy", split="validation", value=100.0)
    listops = replace(not_tested, recipe="table3/listops-subtrees/dlr")
    cell = make_tables([Results("ours", [listops])])[2].cells[listops.recipe]
    assert cell.verdict is None, "what was not tested is not judged"


@pytest.mark.parametrize(
    ("f1", "accuracy", "steps", "verdict"),
    [
        (98.0, 90.0, 100, None),  # the paper has 96.8 and 97.7
        (98.0, 98.0, 100, "near"),
        (98.0, 90.0, 150000, "worse"),
        (90.0, 99.9, 150000, "worse"),
        (99.9, 98.0, 150000, "near"),
        (99.9, 99.9, 150000, "better"),
        (None, 97.7, 150000, None),
        (98.0, "missing", 150000, None),
    ],
)
def test_a_cell_is_as_good_as_the_worst_of_its_metrics(f1, accuracy, steps, verdict):
    name = "table3/pathfinder-segmentation-128/dlr"
    records = [
        made_up.record(name, metric=metric, value=value, steps=steps, split="test")
        for metric, value in (("macro_f1", f1), ("macro_accuracy", accuracy))
        if value != "missing"
    ]
    assert make_tables([Results("ours", records)])[2].cells[name].verdict == verdict


def test_more_steps_than_the_paper_s_are_another_experiment(tmp_path):
    longer = made_up.record(steps=400000, value=0.998, differs="steps 400000 (40000)")
    assert cell_of(longer).verdict is None
    assert state_text(cell_of(longer).ours["R2"]) == "400000 of 40000 steps"
    both = cell_of(replace(longer, seed=0), made_up.record(seed=1, value=0.5))
    means = {source: found["R2"].mean for source, found in both.found.items()}
    assert means == {"ours": 0.5, "ours, 400000 steps": 0.998}
    run = made_up.run(SHIFT)
    whole, more = (
        replace(run, records=[replace(run.records[0], steps=n, wall_seconds=n / 9)])
        for n in (40000, 80000)
    )
    add([whole], tmp_path)
    assert "kept the one with 40000 steps" in add([more], tmp_path)[0]


def test_a_number_of_another_split_is_not_judged():
    assert cell_of(made_up.record(split="train")).verdict is None
    assert cell_of(made_up.record(split="validation")).verdict == "near"


def test_one_that_diverged_has_no_spread():
    records = [made_up.record(seed=k, value=v) for k, v in enumerate((0.98, 0.99, None))]
    assert cell_of(*records).ours["R2"].spread is None


def test_the_run_that_others_must_be_like_is_a_tested_one():
    """Whichever has the lower seed."""
    name = "table3/listops-subtrees/dlr"
    records = [
        made_up.record(name, metric="accuracy", value=v, split=split, seed=k)
        for k, (v, split) in enumerate(((90.0, "validation"), (80.0, "test")))
    ]
    found = make_tables([Results("ours", records)])[2].cells[name].found
    means = {source: by_metric["accuracy"].mean for source, by_metric in found.items()}
    assert means == {"ours, not tested": 90.0, "ours": 80.0}


def test_what_was_not_as_in_the_recipe_stands_in_its_cell():
    told = 'lr 0.002 (0.0008), task.settings.folder null (data/x), model.x {"a": 1, "b": 2} (3)'
    seeds = cell_of(made_up.record(differs=f"steps 5 (6), {told}")).ours["R2"]
    assert settings_text(seeds) == "other lr, folder, x"
    alone = cell_of(made_up.record(differs="steps 5 (6), model.precision bf16 (fp32)")).ours["R2"]
    assert settings_text(alone) == "precision bf16"
    told = 'task.settings.folder "a (b)/x" (data/y)'
    assert settings_text(cell_of(made_up.record(differs=told)).ours["R2"]) == "other folder"
    assert settings_text(cell_of(made_up.record()).ours["R2"]) == ""


def test_losses_are_better_when_they_are_less():
    for metric in ("loss", "train_loss"):
        assert difference(metric, 2.0, 2.5).verdict == "better"
        assert difference(metric, 3.0, 2.5).verdict == "worse"


def test_the_last_evaluation_stands_beside_the_best():
    """CumMax's run ends far below its best, Shift's does not."""
    cummax = "table1/cummax/dlr-1"
    records = [made_up.record(value=0.99), made_up.record(cummax, value=0.51)]
    ends = dict(zip((record.stem for record in records), (0.985, 0.42), strict=True))
    curves = {stem: {"validation R2": [(1000, 0.1), (40000, end)]} for stem, end in ends.items()}
    results = [Results("ours", records, curves)]
    table = make_tables(results)[0]
    assert [table.cells[name].ours["R2"].last for name in (SHIFT, cummax)] == [0.985, 0.42]
    assert [fall_text(table.cells[n].ours["R2"]) for n in (SHIFT, cummax)] == [
        "",
        "0.420 at the end",
    ]
    found = counts(table)
    assert (found.measured, found.near, found.worse, found.worse_at_the_end) == (2, 2, 0, 1)
    told = "cells measured: 2 as in the paper; 1 worse by their last evaluation instead of the best"
    assert told in count_text(table)
    assert "| 0.510 | ≈ −0.010 | 0.420 | 40000 of 40000 |" in markdown(results)
    assert "at the last evaluation 0.420" in dialog(table, table.cells[cummax], results)
    seeds = [made_up.record(seed=k, value=0.9) for k in (0, 1)]
    one = {seeds[0].stem: {"validation R2": [(40000, 0.8)]}}
    assert cell_of(*seeds).ours["R2"].last is None
    half = make_tables([Results("ours", seeds, one)])[0].cells[SHIFT]
    assert half.ours["R2"].last is None, "of one of two is no mean"
    nan = {each.stem: {"validation R2": [(39000, 0.9)]} for each in seeds}  # at 40000: left out
    ended = make_tables([Results("ours", seeds, nan)])[0].cells[SHIFT]
    assert ended.ours["R2"].last is None, "it is not known to have ended well"
    other = made_up.record("table3/listops-subtrees/dlr", metric="accuracy", split="test")
    curve = {other.stem: {"validation accuracy": [(1, 0.5)], "validation R2": [(1, 0.5)]}}
    table3 = make_tables([Results("ours", [other], curve)])[2]
    assert table3.cells[other.recipe].ours["accuracy"].last is None, "it is tested"


def test_only_what_is_alike_is_averaged():
    """Other settings, and what was not tested, have columns of their own."""
    bf16 = {"differs": "steps 5 (6), precision bf16 (fp32)"}
    cell = cell_of(
        *(made_up.record(seed=k, value=value) for k, value in enumerate((0.9, 1.0))),
        *(made_up.record(seed=k, value=0.5, **bf16) for k in (2, 3)),
    )
    means = {source: found["R2"].mean for source, found in cell.found.items()}
    assert means == {"ours": pytest.approx(0.95), "ours, precision bf16 (fp32)": 0.5}
    alone = cell_of(made_up.record(**bf16), made_up.record(seed=1, **bf16))
    assert list(alone.found) == ["ours"]


def test_what_is_not_tested_is_not_judged():
    def table3(*records):
        return make_tables([Results("ours", list(records))])[2].cells["table3/listops-subtrees/dlr"]

    tested, not_tested = (
        made_up.record(
            "table3/listops-subtrees/dlr", metric="accuracy", value=v, split=split, seed=k
        )
        for k, (v, split) in enumerate(((80.0, "test"), (90.0, "validation")))
    )
    assert table3(tested).verdict == "worse"
    alone, both = table3(not_tested), table3(not_tested, tested)
    assert (alone.verdict, alone.difference("accuracy").verdict) == (None, None)
    assert state_text(alone.ours["accuracy"]) == "validation, not tested"
    means = {source: found["accuracy"].mean for source, found in both.found.items()}
    assert means == {"ours": 80.0, "ours, not tested": 90.0}


@pytest.mark.parametrize("variant", ["tiny", "my.Layer, tiny", "changed", "my.Layer, changed"])
def test_a_variant_tells_its_size(variant):
    """Records that were written before they had a scale."""
    assert not made_up.record(variant=variant).is_comparable
    assert made_up.record(variant="my.Layer").is_comparable


def test_what_is_better_is_not_told_as_what_is_the_same():
    values = {"shift": 0.99, "cumsum": 0.2, "reverse": 0.9, "solve": 0.01, "sort": 0.5}
    records = [made_up.record(f"table1/{task}/dlr-1", value=v) for task, v in values.items()]
    table = make_tables([Results("ours", records)])[0]
    assert count_text(table) == "5 of 66 cells measured: 2 as in the paper, 2 better, 1 worse."


def test_what_was_cut_or_stopped_is_counted():
    names = [f"table1/{task}/dlr-1" for task in ("shift", "cumsum", "cummax")]
    changes = [{}, {"steps": 5000}, {"steps": 20000, "stopped": STOPPED, "value": 0.52}]
    records = [made_up.record(n, **c) for n, c in zip(names, changes, strict=True)]
    table = make_tables([Results("ours", records)])[0]
    found = counts(table)
    assert (found.measured, found.near, found.cut, found.stopped) == (3, 2, 1, 1)
    assert count_text(table) == (
        "3 of 66 cells measured: 2 as in the paper; 1 cut short of the paper's steps, and not"
        " judged; 1 stopped early, plainly at 0 or 1."
    )
    text = markdown([Results("ours", records)])
    rows = [line for line in text.splitlines() if line.startswith("| ") and " of 40000" in line]
    assert [row.split(" | ")[5:8:2] for row in rows] == [
        ["≈ −0.010", "40000 of 40000"],
        ["−0.010", "5000 of 40000"],
        ["≈ 0.000", "20000 of 40000, stopped early"],
    ]


def test_own_mixers_beside_ours(tmp_path, capsys, monkeypatch):
    """The README's way: train with an own layer, then `report --runs`."""
    (tmp_path / "somebodys_package.py").write_text(
        "import torch\n\n\n"
        "class MyLayer(torch.nn.Module):\n"
        "    def __init__(self, d_model):\n"
        "        super().__init__()\n"
        "        self.mix = torch.nn.Linear(d_model, d_model)\n\n"
        "    def forward(self, x):\n"
        "        return self.mix(x)\n"
    )
    monkeypatch.chdir(tmp_path)
    small = ["--scale", "tiny", "--steps", "2", "--batch_size", "2", "--eval_batches", "1"]
    own = ["--model.mixer", "somebodys_package.MyLayer", "--writer", "none", "--device", "cpu"]
    for task in ("shift", "cumsum"):
        assert main(["train", f"table1/{task}/dlr-1", *small, "--out", f"my/{task}", *own]) == 0
    (tmp_path / "my" / "broken").mkdir()
    (tmp_path / "my" / "broken" / "config.json").write_text("{")
    add([made_up.run("table1/shift/dlr-1")], "results")
    assert main(["report", "--runs", "my", "--out", "site"]) == 0
    assert "config.json is not JSON" in capsys.readouterr().err
    page = (tmp_path / "site" / "table1.html").read_text()
    column = "yours: somebodys_package.MyLayer, tiny"
    assert page.count(f'<button type="button">{column}') == 2, "in the grid and in the list"
    table = make_tables([read_results("results", "ours")])[0]
    assert table.sources == []
    assert main(["report", "--runs", "nowhere"]) == 2
    assert "there is no run in nowhere" in capsys.readouterr().err


def columns_of(given, *found):
    """The folders of runs by column; a run is its folder, its task and its seed."""
    runs = {}
    for path, task, seed in found:
        run = made_up.run(f"table1/{task}/dlr-1", seed)
        runs[Path(path)] = replace(run, records=[replace(r, note=path) for r in run.records])
    shown = own_results(runs, [Path(each) for each in given])
    return {one.name: [record.note for record in one.records] for one in shown}


def test_runs_that_are_alike_have_columns_by_folder():
    alone = [("A/x", "shift", 0), ("A/y", "shift", 1), ("B", "cumsum", 0)]
    assert columns_of(["A", "B"], *alone) == {"yours": ["A/x", "A/y", "B"]}
    both = [("A/shift/0", "shift", 0), ("A/shift/1", "shift", 1), ("B/shift/0", "shift", 0)]
    assert columns_of(["A", "B", "C"], *both, ("C", "shift", 2)) == {
        "yours, A": ["A/shift/0", "A/shift/1"],
        "yours, B": ["B/shift/0"],
        "yours": ["C"],
    }
    assert columns_of(["."], *both) == {
        "yours, A": ["A/shift/0"],
        "yours": ["A/shift/1"],
        "yours, B": ["B/shift/0"],
    }
    inside = [("A/x", "shift", 0), ("A/x/y", "shift", 0), ("B/z", "shift", 0)]
    assert columns_of(["A", "B"], *inside) == {
        "yours, A, x": ["A/x"],
        "yours, A, x/y": ["A/x/y"],
        "yours, B": ["B/z"],
    }


def test_two_runs_of_one_recipe_and_seed(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = ["--scale", "tiny", "--steps", "2", "--batch_size", "2", "--eval_batches", "1"]
    for out, rate in (("A/run", "0.001"), ("B/run", "0.1")):
        how = ["--lr", rate, "--out", out, "--writer", "none", "--device", "cpu"]
        assert main(["train", SHIFT, *small, *how]) == 0
    assert main(["report", "--runs", "A", "B", "A/run", str(tmp_path / "A"), "--out", "site"]) == 0
    page = (tmp_path / "site" / "table1.html").read_text()
    for column in ("yours, A: tiny", "yours, B: tiny"):
        assert f'<button type="button">{column}' in page
        assert f'data-n="{column}, seed 0"' in page, "a curve each"


def test_several_results(tmp_path):
    add([made_up.run("table1/shift/dlr-1")], tmp_path / "a")
    add([made_up.run("table1/shift/dlr-1", seed=1)], tmp_path / "b")
    found = [read_results(tmp_path / "a", "ours"), read_results(tmp_path / "b", "b")]
    table = make_tables(found)[0]
    assert table.sources == ["b"]
    cell = table.cells["table1/shift/dlr-1"]
    assert [len(cell.found[column]["R2"].records) for column in ("ours", "b")] == [1, 1]


@pytest.fixture
def site(tmp_path):
    """Ours full, cut, stopped, tiny and not run; somebody's layer, tiny and full."""
    ours = Results("ours")
    ours.records = [
        made_up.record(SHIFT),
        made_up.record("table1/cumsum/dlr-1", steps=5000, value=0.98),
        made_up.record("table1/reverse/dlr-1", steps=20000, value=0.001, stopped=STOPPED),
        made_up.record("table1/cummax/dlr-1", value=0.51, variant="tiny", **TINY, steps=1000),
    ]
    layer = {"variant": "my.Layer"}
    yours = Results("yours")
    yours.records = [
        made_up.record(SHIFT, value=0.97, **layer),
        made_up.record("table1/solve/dlr-1", value=0.01, steps=900, **layer),
        made_up.record(SHIFT, value=1.0, variant="my.Layer, tiny", **TINY, steps=200),
        made_up.record("table3/listops-subtrees/dlr", metric="accuracy", value=60.0, **layer),
    ]
    write_site(tmp_path, [ours, yours], Path("none"))
    return tmp_path


COLUMNS = ["yours: my.Layer", "yours: my.Layer, tiny", "ours, tiny"]


def grid(page):
    """Rows of the grid by task: a list of (column, classes, text) each."""
    heads = page.locator("table.grid thead th").all_inner_texts()
    heads = [" ".join(head.partition("↕")[0].split()) for head in heads]
    rows = {}
    for row in page.locator("table.grid tbody tr").all():
        cells = row.locator("td").evaluate_all("all => all.map(c => [c.className, c.innerText])")
        known = zip(heads[1:], cells, strict=True)
        rows[row.locator("th").inner_text()] = [
            (head, kind, " ".join(text.split())) for head, (kind, text) in known
        ]
    return heads, rows


def test_own_runs_are_columns(site, visit):
    page = visit("table1")
    heads, rows = grid(page)
    shown = [head.partition(" beside ")[0] for head in heads]
    assert shown[:5] == ["task", "DLR, 1 layer, L 4096", *COLUMNS]
    assert len(heads) == 7 + 3, "beside the column that they stand against, and no other"
    shift, cumsum, cummax, reverse, solve = (
        rows[task][:4] for task in ("Shift", "CumSum", "CumMax", "Reverse", "Solve")
    )
    assert [cell[1] for cell in shift] == ["near", "own near", "own unknown", "empty own"]
    assert shift[0][2].startswith("paper 1.00 0.990 ≈ −0.010")
    assert shift[1][2].startswith("0.970 ≈ −0.030")
    assert shift[2][2] == "1.000 tiny, 200 of 1000 steps", "no difference, no colour"
    cut = "paper 1.00 0.980 −0.020 cut short, not judged 5000 of 40000 steps"
    assert cumsum[0][1:] == ("unknown", cut)
    assert cummax[3][1:] == ("own unknown", "0.510 tiny")
    assert reverse[0][1] == "near"
    assert "stopped early: 20000 of 40000 steps" in reverse[0][2]
    assert solve[1][1] == "own unknown"
    assert "900 of 40000 steps" in solve[1][2]
    for cells in rows.values():
        for _, _, text in cells:
            assert not text.startswith("not run"), "the paper's number stands first"
            assert "not run" not in text or text.endswith("not run")
    listed = page.locator("table.list thead th").all_inner_texts()
    listed = [head.partition("↕")[0].strip() for head in listed]
    assert listed[3:] == ["paper", "ours", "difference", "steps", "seeds", *COLUMNS]


def test_own_runs_where_models_are_rows(site, visit):
    heads, rows = grid(visit("table3"))
    assert heads[1] == "ListOps-SubTrees"
    assert heads[2].startswith("yours: my.Layer")
    assert rows["DLR"][0][2] == "paper 85.7 not run"
    assert rows["DLR"][1][1] == "own worse"
    assert rows["DLR"][1][2].startswith("60.0 ▼ −25.7")


def test_the_shift_plot_says_what_was_cut(tmp_path):
    record = made_up.record("table2/16384/dlr", steps=900)
    write_site(tmp_path, [Results("ours", [record])], Path("none"))
    said = "With fewer steps than the paper: DLR at 16384 (900 of 86000 steps)."
    for name in ("index", "table2"):
        assert said in (tmp_path / f"{name}.html").read_text()


def test_own_runs_in_a_cell_and_on_the_overview(site, visit):
    page = visit("table1#cell-table1-shift-dlr-1")
    values = page.locator("dialog[open] table.values tbody tr").all_inner_texts()
    assert [" ".join(each.split()) for each in values] == [
        "paper 1.00",
        "ours 0.990 ≈ −0.010 as in the paper",
        "yours: my.Layer 0.970 ≈ −0.030 as in the paper",
        "yours: my.Layer, tiny 1.000 tiny, 200 of 1000 steps",
    ]
    page = visit("table1#cell-table1-reverse-dlr-1")
    assert STOPPED in page.locator("dialog[open]").inner_text()
    own = visit("index").locator("ul.own li").all_inner_texts()
    assert own == [
        "yours: my.Layer: Table 1 (2 cells) Table 3 (1 cell)",
        "yours: my.Layer, tiny: Table 1 (1 cell)",
        "ours, tiny: Table 1 (1 cell)",
    ]


def test_where_a_set_lies_makes_no_difference(tmp_path):
    recipe = recipes.get("table4/text/dlr").config
    settings = {**recipe.task.settings, "folder": "/somewhere/else"}
    config = replace(recipe, task=replace(recipe.task, settings=settings))
    name, origin = origin_of(tmp_path, config, None)
    assert (name, origin.differs, origin.variant) == ("table4/text/dlr", "", "")
    assert "somewhere" not in origin.command(config)


def test_a_run_is_read_where_its_mixer_is_not(tmp_path, capsys):
    """A folder from another machine: numbers need no source."""
    small = ["--scale", "tiny", "--steps", "2", "--batch_size", "2", "--eval_batches", "1"]
    where = ["--writer", "none", "--device", "cpu", "--out", str(tmp_path / "run")]
    assert main(["train", SHIFT, *small, *where]) == 0
    path = tmp_path / "run" / "config.json"
    config = json.loads(path.read_text())
    config["model"] |= {"mixer": "gone_package.MyLayer", "mixer_options": {"width": 3}}
    path.write_text(json.dumps(config))
    site = ["--out", str(tmp_path / "site")]
    assert main(["report", "--runs", str(tmp_path / "run"), *site]) == 0
    assert "yours: gone_package.MyLayer, tiny" in (tmp_path / "site" / "table1.html").read_text()
    capsys.readouterr()
    assert main(["eval", str(tmp_path / "run"), "--device", "cpu"]) == 2
    said = "if you trust it, say --trust"
    assert said in capsys.readouterr().err


def test_another_layer_is_not_called_by_the_recipe_s_name_alone():
    records = [made_up.record(variant=variant) for variant in ("", "my.Layer, tiny")]
    found = Results("yours", records, breakdowns={record.stem: {} for record in records})
    tables = make_tables([Results("ours"), found])
    names = [name for name, *_ in runs_with("breakdowns", [Results("ours"), found], tables)]
    assert names == [
        "Shift · DLR, 1 layer, L 4096, seed 0 (yours)",
        "Shift · DLR, 1 layer, L 4096, but my.Layer, tiny, seed 0 (yours)",
    ]


def test_bars_stand_by_their_operators_whatever_their_order():
    """A run that lacks one has no bar there."""
    whole = made_up.breakdown(0.01)
    other = {**whole, "by operator": list(reversed(whole["by operator"]))[:-1]}
    records = [made_up.record("table3/listops-subtrees/dlr", seed=k) for k in (0, 1)]
    stems = [record.stem for record in records]
    found = Results("ours", records, breakdowns=dict(zip(stems, (whole, other), strict=True)))
    page = listops([found], make_tables([found]))
    bars = re.findall(r'data-t="([^"]*)"', str(page))
    for row in whole["by operator"][1:]:
        told = [bar for bar in bars if row["operator"] in bar]
        assert len(told) == 2
        assert len({bar.rpartition(row["operator"])[2] for bar in told}) == 1, "the same number"
    assert len([bar for bar in bars if whole["by operator"][0]["operator"] in bar]) == 1
