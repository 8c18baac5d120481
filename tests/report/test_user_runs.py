"""Pages with the user's runs beside ours."""

import json
import re
from pathlib import Path

import pytest

import made_up
from dlrnn.cli import main
from dlrnn.paper.results import Results, read_results
from dlrnn.paper.store import add
from dlrnn.paper.tables import make_tables
from dlrnn.report.pages import listops, runs_with
from dlrnn.report.site import write_site
from made_up import SHIFT, train

TINY = {"scale": "tiny", "steps_asked": 1000}
STOPPED = "early after 20000 of 40000 steps: R2 within 0.01 of 1 for the last half of them"


def test_a_mixer_of_the_user_becomes_a_column(tmp_path, capsys, monkeypatch):
    """As in the README: train with a layer of one's own, then `report --runs`."""
    (tmp_path / "somebodys_package.py").write_text(
        "import torch\n\n\n"
        "class MyLayer(torch.nn.Linear):\n"
        "    def __init__(self, d_model):\n"
        "        super().__init__(d_model, d_model)\n"
    )
    monkeypatch.chdir(tmp_path)
    for task in ("shift", "cumsum"):
        mixer = ["--model.mixer", "somebodys_package.MyLayer"]
        train(f"my/{task}", *mixer, recipe=f"table1/{task}/dlr-1", steps=2)
    (tmp_path / "my" / "broken").mkdir()
    (tmp_path / "my" / "broken" / "config.json").write_text("{")
    add([made_up.run(SHIFT)], "results")
    assert main(["report", "--runs", "my", "--out", "site"]) == 0
    assert "config.json is not JSON" in capsys.readouterr().err
    page = (tmp_path / "site" / "table1.html").read_text()
    column = "yours: somebodys_package.MyLayer, tiny"
    assert page.count(f'<button type="button">{column}') == 2, "in the grid and in the list"
    assert make_tables([read_results("results", "ours")])[0].sources == []
    assert main(["report", "--runs", "nowhere"]) == 2
    assert "there is no run in nowhere" in capsys.readouterr().err


def test_two_runs_of_one_recipe_and_seed_have_two_columns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for out, rate in (("A/run", "0.001"), ("B/run", "0.1")):
        train(out, "--lr", rate, steps=2)
    assert main(["report", "--runs", "A", "B", "A/run", str(tmp_path / "A"), "--out", "site"]) == 0
    page = (tmp_path / "site" / "table1.html").read_text()
    for column in ("yours, A: tiny", "yours, B: tiny"):
        assert f'<button type="button">{column}' in page
        assert f'data-n="{column}, seed 0"' in page, "a curve each"


def test_a_run_is_read_without_its_mixer(tmp_path, capsys):
    """Numbers of a run directory from another machine need no source."""
    path = train(tmp_path / "run", steps=2) / "config.json"
    config = json.loads(path.read_text())
    config["model"] |= {"mixer": "gone_package.MyLayer", "mixer_options": {"width": 3}}
    path.write_text(json.dumps(config))
    site = ["--out", str(tmp_path / "site")]
    assert main(["report", "--runs", str(tmp_path / "run"), *site]) == 0
    assert "yours: gone_package.MyLayer, tiny" in (tmp_path / "site" / "table1.html").read_text()
    capsys.readouterr()
    assert main(["eval", str(tmp_path / "run"), "--device", "cpu"]) == 2
    assert "if you trust it, say --trust" in capsys.readouterr().err


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


def test_user_runs_are_columns_of_the_grid(site, visit):
    page = visit("table1")
    heads, rows = grid(page)
    shown = [head.partition(" beside ")[0] for head in heads]
    assert shown[:5] == ["task", "DLR, 1 layer, L 4096", *COLUMNS]
    assert len(heads) == 7 + 3, "beside the column that they stand against, and no other"
    shift, cumsum, cummax, reverse, solve = (
        rows[task][:4] for task in ("Shift", "CumSum", "CumMax", "Reverse", "Solve")
    )
    kinds = ["near", "further near", "further unknown", "empty further"]
    assert [cell[1] for cell in shift] == kinds
    assert shift[0][2].startswith("paper 1.00 0.990 ≈ −0.010")
    assert shift[1][2].startswith("0.970 ≈ −0.030")
    assert shift[2][2] == "1.000 tiny, 200 of 1000 steps", "no difference, no colour"
    cut = "paper 1.00 0.980 −0.020 fewer steps, no verdict 5000 of 40000 steps"
    assert cumsum[0][1:] == ("unknown", cut)
    assert cummax[3][1:] == ("further unknown", "0.510 tiny")
    assert reverse[0][1] == "near"
    assert "stopped early: 20000 of 40000 steps" in reverse[0][2]
    assert solve[1][1] == "further unknown"
    assert "900 of 40000 steps" in solve[1][2]
    for cells in rows.values():
        for _, _, text in cells:
            assert not text.startswith("not run"), "the paper's number stands first"
            assert "not run" not in text or text.endswith("not run")
    listed = page.locator("table.list thead th").all_inner_texts()
    listed = [head.partition("↕")[0].strip() for head in listed]
    assert listed[3:] == ["paper", "ours", "difference", "steps", "seeds", *COLUMNS]


def test_user_runs_where_models_are_rows(site, visit):
    heads, rows = grid(visit("table3"))
    assert (heads[1], heads[2].partition(" beside ")[0]) == ("ListOps-SubTrees", COLUMNS[0])
    assert rows["DLR"][0][2] == "paper 85.7 not run"
    assert rows["DLR"][1][1] == "further worse"
    assert rows["DLR"][1][2].startswith("60.0 ▼ −25.7")


def test_the_shift_plot_notes_fewer_steps(tmp_path):
    record = made_up.record("table2/16384/dlr", steps=900)
    write_site(tmp_path, [Results("ours", [record])], Path("none"))
    said = "With fewer steps than the paper: DLR at 16384 (900 of 86000 steps)."
    for name in ("index", "table2"):
        assert said in (tmp_path / f"{name}.html").read_text()


def test_user_runs_in_a_dialog_and_on_the_overview(site, visit):
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
    own = visit("index").locator("ul.further li").all_inner_texts()
    assert own == [
        "yours: my.Layer: Table 1 (2 cells) Table 3 (1 cell)",
        "yours: my.Layer, tiny: Table 1 (1 cell)",
        "ours, tiny: Table 1 (1 cell)",
    ]


def test_titles_of_runs_have_their_variant():
    records = [made_up.record(variant=variant) for variant in ("", "my.Layer, tiny")]
    found = Results("yours", records, breakdowns={record.stem: {} for record in records})
    tables = make_tables([Results("ours"), found])
    names = [name for name, *_ in runs_with("breakdowns", [Results("ours"), found], tables)]
    assert names == [
        "Shift · DLR, 1 layer, L 4096, seed 0 (yours)",
        "Shift · DLR, 1 layer, L 4096, but my.Layer, tiny, seed 0 (yours)",
    ]


def test_bars_of_an_operator_are_in_one_group():
    """A run that lacks one has no bar there."""
    whole = made_up.breakdown(0.01)
    other = {**whole, "by operator": list(reversed(whole["by operator"]))[:-1]}
    records = [made_up.record("table3/listops-subtrees/dlr", seed=k) for k in (0, 1)]
    stems = [record.stem for record in records]
    found = Results("ours", records, breakdowns=dict(zip(stems, (whole, other), strict=True)))
    page = listops([found], make_tables([found]), [])
    bars = re.findall(r'data-t="([^"]*)"', page)
    for row in whole["by operator"][1:]:
        told = [bar for bar in bars if row["operator"] in bar]
        assert len(told) == 2
        assert len({bar.rpartition(row["operator"])[2] for bar in told}) == 1, "the same number"
    assert len([bar for bar in bars if whole["by operator"][0]["operator"] in bar]) == 1
