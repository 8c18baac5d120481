"""Counts of the cells that are as in the paper, strictly and not, and who has a verdict."""

from dataclasses import replace

import pytest
from cells import LISTOPS, STOPPED, cell_of, seeds, table_of

import made_up
from dlrnn.paper import recipes
from dlrnn.paper.comparison import state_text
from dlrnn.paper.counts import count_table, count_text, counts, not_run, run_in_part
from dlrnn.paper.results import Results
from dlrnn.paper.tables import make_tables
from dlrnn.report.markdown import markdown


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
