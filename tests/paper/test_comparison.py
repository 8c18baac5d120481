"""The paper's numbers beside measured ones: means, verdicts, columns and the nearest recipe."""

from dataclasses import replace
from pathlib import Path

import pytest

import made_up
from dlrnn.paper import recipes
from dlrnn.paper.comparison import (
    difference,
    fall_text,
    seeds_text,
    settings_text,
    state_text,
)
from dlrnn.paper.counts import count_table, count_text, counts, not_run, run_in_part
from dlrnn.paper.nearest import nearest_recipe
from dlrnn.paper.numbers import number, signed
from dlrnn.paper.results import Results, read_results
from dlrnn.paper.store import add
from dlrnn.paper.tables import make_tables
from dlrnn.paper.user_runs import user_results
from dlrnn.report.markdown import markdown
from dlrnn.report.table_page import table_page
from made_up import SHIFT

LISTOPS = "table3/listops-subtrees/dlr"
STOPPED = "early after 20000 of 40000 steps: R2 within 0.01 of 1 for the last half of them"


def table_of(*records, curves=None):
    """The table of the first record."""
    tables = make_tables([Results("ours", list(records), curves or {})])
    return tables[int(records[0].recipe[5]) - 1]


def cell_of(*records, curves=None):
    """The cell of the first record."""
    return table_of(*records, curves=curves).cells[records[0].recipe]


def means(cell):
    """The mean of each column."""
    return {column: next(iter(found.values())).mean for column, found in cell.found.items()}


def seeds(*values, **fields):
    return [made_up.record(seed=k, value=value, **fields) for k, value in enumerate(values)]


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


def test_counts_of_verdicts():
    values = {"shift": 0.99, "cumsum": 0.2, "reverse": 0.9, "solve": 0.01, "sort": 0.5}
    table = table_of(*(made_up.record(f"table1/{t}/dlr-1", value=v) for t, v in values.items()))
    told = "5 of 66 cells measured: 2 as in the paper, 2 better, 1 worse. Strictly"
    assert count_text(table).startswith(told)
    assert counts(table).different == 3


def test_counts_of_runs_with_fewer_steps():
    records = [
        made_up.record(),
        made_up.record("table1/cumsum/dlr-1", steps=5000),
        made_up.record("table1/cummax/dlr-1", steps=20000, stopped=STOPPED, value=0.52),
    ]
    table = table_of(*records)
    found = counts(table)
    assert (found.measured, found.near, found.open, found.stopped) == (3, 2, 1, 1)
    assert count_text(table) == (
        "3 of 66 cells measured: 2 as in the paper, 1 without a verdict (fewer steps, another size"
        " or schedule). Strictly (seed 0, last evaluation), 0 are. Of 21 informative cells (.02 <"
        " paper < .98), 1 are as in the paper, strictly 0. 1 stopped early at 0 or 1."
    )
    assert run_in_part(table) == "CumSum (DLR, 1 layer, L 4096)"
    text = markdown([Results("ours", records)])
    assert "| ≈ −0.010 |  | 40000 of 40000 |" in text
    assert "| −0.010 |  | 5000 of 40000 |" in text
    assert "| ≈ 0.000 |  | 20000 of 40000, stopped early |" in text


@pytest.mark.parametrize(
    ("values", "verdict", "strict"),
    [
        ((0.755, 0.682), "apart", None),  # the paper has .72, and so has their mean
        ((0.755, 0.69), "near", "better"),
        ((0.74, 0.69), "near", "near"),
        ((0.74, 0.9), "better", "near"),
        ((0.5, 0.72), "worse", "worse"),
    ],
)
def test_a_cell_is_as_in_the_paper_only_if_a_seed_is(values, verdict, strict):
    records = seeds(*values, recipe="table1/select-fixed/attention-1")
    curves = {r.stem: {"validation R2": [(40000, r.value)]} for r in records}
    table = table_of(*records, curves={} if strict is None else curves)
    cell = table.cells[records[0].recipe]
    alone = cell.ours["R2"].strictly(0.72)
    assert (cell.verdict(), alone and alone.verdict) == (verdict, strict)
    found = counts(table)
    assert (found.near, found.strict) == (verdict == "near", strict == "near")
    assert (found.apart, found.different) == (verdict == "apart", verdict != "near")
    assert ("≠" in markdown([Results("ours", records)]).split("## Table 1")[1]) == found.apart


def test_strictly_seed_0_counts_and_no_other():
    """Test metrics have no last evaluation; R2 has none without its curve."""
    cell = cell_of(made_up.record(seed=1))
    assert cell.verdict() == "near"
    assert not cell.is_strictly_near
    tested = [made_up.record(LISTOPS, metric="accuracy", value=v, seed=k)
              for k, v in enumerate((85.0, 70.0))]  # fmt: skip
    assert cell_of(*tested).is_strictly_near
    assert not cell_of(*(replace(each, seed=1 - each.seed) for each in tested)).is_strictly_near


@pytest.mark.parametrize(
    ("differs", "verdict"),
    [
        ("lr 0.002 (0.0008)", None),
        ("warmup 900 (5000)", None),
        ("steps 45600 (300000)", None),
        ("precision bf16 (fp32), task.settings.folder null (data/x)", "near"),
    ],
)
def test_runs_under_another_schedule_are_not_judged(differs, verdict):
    record = made_up.record(LISTOPS, metric="accuracy", value=86.0, differs=differs)
    table = table_of(record)
    assert table.cells[LISTOPS].verdict() == verdict
    assert (counts(table).open, counts(table).strict) == (verdict is None, verdict == "near")
    atomic = made_up.record(differs="lr 0.002 (0.0001)")
    assert cell_of(atomic).verdict() == "near", "a constant rate is a setting, no schedule"


@pytest.mark.parametrize(
    ("loss", "steps", "verdict", "shown"),
    [
        (None, 700, "near", "| diverged | diverged | ≈ 0.00 |"),
        (3.0, 60000, "better", "| diverged | 3.00 | ▲ |"),
        (3.0, 700, None, "| diverged | 3.00 |  |"),
    ],
)
def test_a_run_that_diverges_agrees_with_a_paper_that_diverged(loss, steps, verdict, shown):
    name = "table5/pg19/attention-16-post"
    metrics = ("train_loss", "loss")
    records = [made_up.record(name, metric=m, value=loss, steps=steps) for m in metrics]
    assert cell_of(*records).verdict() == verdict
    assert shown in markdown([Results("ours", records)])
    other = made_up.record("table5/pg19/attention-16-pre", metric="loss", value=None)
    assert cell_of(other).verdict() is None


def test_claims_of_the_text_are_rows_and_no_cells():
    claims = ("table1/cumsum/dlr-r-1", "table1/select-fixed/dlr-r-1", "table2/524288/dlr-prod")
    tables = make_tables([Results("ours", [made_up.record(name) for name in claims])])
    assert [(counts(t).cells, counts(t).measured) for t in tables[:2]] == [(66, 0), (21, 0)]
    text = markdown([Results("ours", [made_up.record(name) for name in claims])])
    for title in (
        "DLR-R, 1 layer, L 4096 (text) | R² | 1.00 | 0.990",
        "L 524288 (text) | DLR-prod",
    ):
        assert title in text


def test_an_old_run_has_fewer_steps_where_the_recipe_now_has_more():
    """MIPS was recorded when its recipe had 40000 steps."""
    found = cell_of(made_up.record("table1/mips/attention-1", steps=40000, steps_asked=40000))
    assert state_text(found.ours["R2"]) == "40000 of 172800 steps"
    tiny = made_up.record("table1/mips/attention-1", steps_asked=100, steps=100, scale="tiny")
    assert state_text(cell_of(tiny).ours["R2"]) == "tiny"


def test_what_was_not_run_in_words():
    names = [name for name in recipes.TABLES["table2"] if not name.startswith("table2/1048576")]
    records = [made_up.record(name) for name in names if name != "table2/262144/dss"]
    tables = make_tables([Results("ours", records)])
    assert not_run(tables[1]) == "L 262144 (DSS-exp), all of L 1048576"
    assert not_run(tables[0]) == "all of it"
    row = "| 2 | 21 | 15 |"
    assert row in count_table(tables)


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
