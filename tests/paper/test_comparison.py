"""Columns beside the paper's: ours and others', and which numbers are held against the paper."""

from dataclasses import replace
from pathlib import Path

import pytest

import made_up
from dlrnn.paper import recipes
from dlrnn.paper.comparison import (
    count_text,
    counts,
    difference,
    fall_text,
    seeds_text,
    settings_text,
    state_text,
)
from dlrnn.paper.nearest import nearest_recipe
from dlrnn.paper.numbers import number, signed
from dlrnn.paper.results import Results, read_results
from dlrnn.paper.store import add
from dlrnn.paper.tables import make_tables
from dlrnn.paper.user_runs import user_results
from dlrnn.report.markdown import markdown
from dlrnn.report.table_page import table_page

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
    text = table_page(table, [], [])
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
    assert "at the last evaluation 0.420" in table_page(table, results, [])
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
        "3 of 66 cells measured: 2 as in the paper; 1 without a verdict: fewer steps or another"
        " size; 1 stopped early at 0 or 1."
    )
    text = markdown([Results("ours", records)])
    rows = [line for line in text.splitlines() if line.startswith("| ") and " of 40000" in line]
    assert [row.split(" | ")[5:8:2] for row in rows] == [
        ["≈ −0.010", "40000 of 40000"],
        ["−0.010", "5000 of 40000"],
        ["≈ 0.000", "20000 of 40000, stopped early"],
    ]


def columns_of(given, *found):
    """The folders of runs by column; a run is its folder, its task and its seed."""
    runs = {}
    for path, task, seed in found:
        run = made_up.run(f"table1/{task}/dlr-1", seed)
        runs[Path(path)] = replace(run, records=[replace(r, note=path) for r in run.records])
    shown = user_results(runs, [Path(each) for each in given])
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


def test_several_results(tmp_path):
    add([made_up.run("table1/shift/dlr-1")], tmp_path / "a")
    add([made_up.run("table1/shift/dlr-1", seed=1)], tmp_path / "b")
    found = [read_results(tmp_path / "a", "ours"), read_results(tmp_path / "b", "b")]
    table = make_tables(found)[0]
    assert table.sources == ["b"]
    cell = table.cells["table1/shift/dlr-1"]
    assert [len(cell.found[column]["R2"].records) for column in ("ours", "b")] == [1, 1]


def test_where_a_set_lies_makes_no_difference(tmp_path):
    recipe = recipes.get("table4/text/dlr").config
    settings = {**recipe.task.settings, "folder": "/somewhere/else"}
    config = replace(recipe, task=replace(recipe.task, settings=settings))
    name, nearest = nearest_recipe(tmp_path, config, None)
    assert (name, nearest.differs, nearest.variant) == ("table4/text/dlr", "", "")
    assert "somewhere" not in nearest.command(config)
