"""The paper's numbers beside measured ones: means, verdicts, columns and the nearest recipe."""

from dataclasses import replace
from pathlib import Path

import pytest
from cells import LISTOPS, STOPPED, cell_of, seeds, table_of

import made_up
from dlrnn.paper import recipes
from dlrnn.paper.comparison import (
    difference,
    fall_text,
    seeds_text,
    settings_text,
    state_text,
)
from dlrnn.paper.counts import count_text, counts
from dlrnn.paper.nearest import nearest_recipe
from dlrnn.paper.numbers import number, signed
from dlrnn.paper.results import Results, read_results
from dlrnn.paper.store import add
from dlrnn.paper.tables import make_tables
from dlrnn.paper.user_runs import user_results
from dlrnn.report.markdown import markdown
from dlrnn.report.table_page import table_page
from made_up import SHIFT


def means(cell):
    """The mean of each column."""
    return {column: next(iter(found.values())).mean for column, found in cell.found.items()}


@pytest.mark.parametrize(
    ("metric", "ours", "paper", "verdict"),
    [
        ("R2", 0.98, 1.0, "near"),
        ("R2", 0.97, 1.0, "near"),
        ("R2", 0.969, 1.0, "worse"),
        ("accuracy", 87.3, 85.7, "better"),
        ("accuracy", 84.2, 85.7, "near"),
        ("loss", 2.9, 2.8, "worse"),
        ("loss", 2.7, 2.8, "better"),
        ("train_loss", 2.0, 2.5, "better"),
        ("train_loss", 3.0, 2.5, "worse"),
    ],
)
def test_the_verdict_of_a_difference(metric, ours, paper, verdict):
    assert difference(metric, ours, paper).verdict == verdict


def test_numbers_as_text():
    assert (signed("R2", -0.0001), signed("accuracy", 1.26)) == ("0.000", "+1.3")
    assert (number("R2", -0.5), number("R2", -0.0001)) == ("−0.500", "0.000")


@pytest.mark.parametrize(
    ("values", "mean", "spread", "text"),
    [
        ((0.5,), 0.5, None, ""),
        ((0.5, 0.7), 0.6, 0.2, "2 seeds, 0.500 to 0.700"),
        ((0.5, 0.7, None), None, None, "3 seeds"),  # a run that diverged is not averaged away
    ],
)
def test_mean_and_spread_over_seeds(values, mean, spread, text):
    found = cell_of(*seeds(*values)).ours["R2"]
    assert found.mean == (mean if mean is None else pytest.approx(mean))
    assert found.spread == (spread if spread is None else pytest.approx(spread))
    assert seeds_text(found) == text


@pytest.mark.parametrize(
    ("changed", "verdict", "value"),
    [
        ({}, "near", -0.01),
        ({"steps": 39999}, None, -0.01),
        ({"steps": 20000, "stopped": STOPPED}, "near", -0.01),
        ({"steps": 400000}, None, -0.01),
        ({"split": "train"}, None, -0.01),
        ({"scale": "tiny"}, None, None),
        ({"scale": "changed"}, None, None),
    ],
)
def test_only_comparable_runs_have_a_verdict(changed, verdict, value):
    cell = cell_of(made_up.record(**changed))
    found = cell.difference("R2")
    assert cell.verdict() == verdict
    assert (None if found is None else round(found.value, 6)) == value
    if "scale" in changed:
        assert cell_of(made_up.record(), made_up.record(seed=1, **changed)).verdict() is None


def test_a_run_with_fewer_steps_does_not_count_beside_a_whole_one():
    whole, cut = made_up.record(value=0.96), made_up.record(seed=1, steps=33000, value=0.99)
    found = cell_of(whole, cut)
    assert (found.ours["R2"].mean, found.ours["R2"].spread) == (0.96, None)
    assert (found.verdict(), state_text(found.ours["R2"])) == ("worse", "")
    text = markdown([Results("ours", [cut, whole])])
    assert " | 0.960 | ▼ −0.040 |  | 40000 of 40000 | 1 |" in text
    text = table_page(table_of(whole, cut), [])
    assert "<dt>Not in the mean</dt><dd>seed 1: cut short</dd>" in text
    assert "at step 33000, before its end: the command goes on to 40000" in text
    assert cell_of(cut).ours["R2"].mean == 0.99, "alone it counts"
    two = cell_of(cut, made_up.record(seed=2, steps=34000, value=0.97))
    assert (two.ours["R2"].mean, two.verdict()) == (pytest.approx(0.98), None)
    diverged = cell_of(whole, replace(cut, value=None))
    assert diverged.ours["R2"].mean is None


@pytest.mark.parametrize(
    ("recipe", "metric", "value", "verdict"),
    [
        ("table1/cummax/dlr-1", "R2", 0.519, None),  # the paper has .52
        ("table1/cummax/dlr-1", "R2", 0.52, "near"),
        ("table1/cummax/dlr-1", "R2", 0.56, "better"),
        ("table1/sort/dlr-1", "R2", 0.02, None),  # every run begins with 0
        ("table5/pg19/dlr-16-pre", "loss", 2.89, None),  # 2.88
        ("table5/pg19/dlr-16-pre", "loss", 2.88, "near"),
        ("table5/pg19/dlr-16-pre", "loss", 2.80, "better"),
    ],
)
def test_fewer_steps_have_a_verdict_if_they_reach_the_paper(recipe, metric, value, verdict):
    records = [made_up.record(recipe, metric=metric, value=value, steps=100)]
    if metric == "loss":  # the cell has two
        records.append(replace(records[0], metric="train_loss", value=value - 0.17))
    table = table_of(*records)
    assert table.cells[recipe].verdict() == verdict
    found = counts(table)
    assert (found.near, found.better) == (verdict == "near", verdict == "better")
    assert found.open == (verdict is None)


@pytest.mark.parametrize(
    ("f1", "accuracy", "steps", "verdict"),
    [
        (98.0, 90.0, 100, None),  # the paper has 96.8 and 97.7
        (98.0, 98.0, 100, "near"),
        (98.0, 90.0, 150000, "worse"),
        (90.0, 99.9, 150000, "worse"),
        (99.9, 98.0, 150000, "better"),  # a difference like any other
        (97.0, 98.0, 150000, "near"),
        (99.9, 99.9, 150000, "better"),
        (None, 97.7, 150000, None),
        (98.0, "missing", 150000, None),
    ],
)
def test_the_verdict_of_a_cell_is_that_of_the_metric_that_differs(f1, accuracy, steps, verdict):
    records = [
        made_up.record(
            "table3/pathfinder-segmentation-128/dlr", metric=metric, value=value, steps=steps
        )
        for metric, value in (("macro_f1", f1), ("macro_accuracy", accuracy))
        if value != "missing"
    ]
    assert cell_of(*records).verdict() == verdict


def test_runs_that_were_not_tested_have_a_column_and_no_verdict():
    tested = made_up.record(LISTOPS, metric="accuracy", value=80.0, seed=1)
    others = [replace(tested, value=90.0, split="validation", seed=seed) for seed in (0, 2)]
    assert cell_of(tested).verdict() == "worse"
    alone = cell_of(others[0])
    assert (alone.verdict(), alone.difference("accuracy").verdict) == (None, None)
    assert state_text(alone.ours["accuracy"]) == "validation, not tested"
    for other in others:  # whichever seed is lower
        assert means(cell_of(tested, other)) == {"ours": 80.0, "ours, not tested": 90.0}
    reached = replace(others[0], value=100.0, steps=100)
    assert cell_of(reached).verdict() is None


def test_only_runs_with_equal_settings_are_averaged():
    bf16 = {"differs": "steps 5 (6), precision bf16 (fp32)"}
    others = [made_up.record(seed=k, value=0.5, **bf16) for k in (2, 3)]
    found = means(cell_of(*seeds(0.9, 1.0), *others))
    assert found == {"ours": pytest.approx(0.95), "ours, precision bf16 (fp32)": 0.5}
    assert list(cell_of(*others).found) == ["ours"]
    longer = made_up.record(steps=400000, value=0.998, differs="steps 400000 (40000)")
    assert state_text(cell_of(longer).ours["R2"]) == "400000 of 40000 steps"
    both = cell_of(longer, made_up.record(seed=1, value=0.5))
    assert means(both) == {"ours": 0.5, "ours, 400000 steps": 0.998}


@pytest.mark.parametrize(
    ("differs", "text"),
    [
        (
            "steps 5 (6), lr 0.002 (0.0008), task.settings.folder null (data/x),"
            ' model.x {"a": 1, "b": 2} (3)',
            "other lr, folder, x",
        ),
        ("steps 5 (6), model.precision bf16 (fp32)", "precision bf16"),
        ('task.settings.folder "a (b)/x" (data/y)', "other folder"),
        ("", ""),
    ],
)
def test_settings_that_differ_as_text(differs, text):
    assert settings_text(cell_of(made_up.record(differs=differs)).ours["R2"]) == text


def test_the_last_evaluation_beside_the_best():
    """CumMax's run ends far below its best, Shift's does not."""
    cummax = "table1/cummax/dlr-1"
    records = [made_up.record(value=0.99), made_up.record(cummax, value=0.51)]
    shift, other = (record.stem for record in records)
    ends = {shift: [(1000, 0.1), (40000, 0.985)], other: [(1000, 0.1), (40000, 0.42)]}
    curves = {stem: {"validation R2": points} for stem, points in ends.items()}
    table = table_of(*records, curves=curves)
    found = [table.cells[name].ours["R2"] for name in (SHIFT, cummax)]
    assert [each.last for each in found] == [0.985, 0.42]
    assert [fall_text(each) for each in found] == ["", "0.420 at the end"]
    count = counts(table)
    assert (count.measured, count.near, count.strict, count.different) == (2, 2, 1, 0)
    assert (count.informative, count.informative_near, count.informative_strict) == (21, 1, 0)
    told = "cells measured: 2 as in the paper. Strictly (seed 0, last evaluation), 1 is."
    assert told in count_text(table)
    text = markdown([Results("ours", records, curves)])
    assert "| 0.510 | ≈ −0.010 | 0.420 | 40000 of 40000 |" in text
    assert "at the last evaluation 0.420" in table_page(table, [])


def test_the_last_evaluation_is_unknown_without_whole_curves():
    two = seeds(0.9, 0.9)
    one = {two[0].stem: {"validation R2": [(40000, 0.8)]}}
    nan = {each.stem: {"validation R2": [(39000, 0.9)]} for each in two}  # curves leave NaN out
    for curves in ({}, one, nan):
        assert cell_of(*two, curves=curves).ours["R2"].last is None
    tested = made_up.record(LISTOPS, metric="accuracy")
    curve = {tested.stem: {"validation accuracy": [(1, 0.5)], "validation R2": [(1, 0.5)]}}
    assert cell_of(tested, curves=curve).ours["accuracy"].last is None


@pytest.mark.parametrize("variant", ["tiny", "my.Layer, tiny", "changed", "my.Layer, changed"])
def test_old_records_have_their_size_in_the_variant(variant):
    assert not made_up.record(variant=variant).is_comparable
    assert made_up.record(variant="my.Layer").is_comparable


BOTH = [("A/shift/0", "shift", 0), ("A/shift/1", "shift", 1), ("B/shift/0", "shift", 0)]


@pytest.mark.parametrize(
    ("given", "runs", "columns"),
    [
        (
            ["A", "B"],
            [("A/x", "shift", 0), ("A/y", "shift", 1), ("B", "cumsum", 0)],
            {"yours": ["A/x", "A/y", "B"]},
        ),
        (
            ["A", "B", "C"],
            [*BOTH, ("C", "shift", 2)],
            {"yours, A": ["A/shift/0", "A/shift/1"], "yours, B": ["B/shift/0"], "yours": ["C"]},
        ),
        (
            ["."],
            BOTH,
            {"yours, A": ["A/shift/0"], "yours": ["A/shift/1"], "yours, B": ["B/shift/0"]},
        ),
        (
            ["A", "B"],
            [("A/x", "shift", 0), ("A/x/y", "shift", 0), ("B/z", "shift", 0)],
            {"yours, A, x": ["A/x"], "yours, A, x/y": ["A/x/y"], "yours, B": ["B/z"]},
        ),
    ],
)
def test_runs_that_are_alike_have_columns_by_folder(given, runs, columns):
    """A run is its folder, its task and its seed."""
    collected = {
        Path(path): made_up.changed(made_up.run(f"table1/{task}/dlr-1", seed), note=path)
        for path, task, seed in runs
    }
    shown = user_results(collected, list(map(Path, given)))
    assert {one.name: [record.note for record in one.records] for one in shown} == columns


def test_other_results_have_a_column(tmp_path):
    for seed, name in enumerate(("a", "b")):
        add([made_up.run(SHIFT, seed=seed)], tmp_path / name)
    found = [read_results(tmp_path / "a", "ours"), read_results(tmp_path / "b", "b")]
    table = make_tables(found)[0]
    assert table.sources == ["b"]
    found = table.cells[SHIFT].found
    assert [len(found[column]["R2"].records) for column in ("ours", "b")] == [1, 1]


def test_the_path_of_a_data_set_is_no_difference(tmp_path):
    recipe = recipes.get("table4/text/dlr").config
    settings = {**recipe.task.settings, "folder": "/somewhere/else"}
    config = replace(recipe, task=replace(recipe.task, settings=settings))
    name, nearest = nearest_recipe(tmp_path, config, None)
    assert (name, nearest.differs, nearest.variant) == ("table4/text/dlr", "", "")
    assert "somewhere" not in nearest.command
