"""`dlrnn report`: what it is given, what it says, what it writes."""

import json

import pytest

import made_up
from dlrnn.cli import main
from dlrnn.paper.counts import counts
from dlrnn.paper.results import PNG, Results, read_results
from dlrnn.paper.store import add
from dlrnn.paper.tables import make_tables
from dlrnn.report.markdown import markdown
from dlrnn.report.picture import table1_figure, table1_png

NO_LENGTHS = (
    "ime against length is not shown: there is no docs/measured/lengths.json here; a clone of dlrnn"
    " has ours, and `dlrnn bench lengths --json` prints yours for --lengths FILE"
)


def test_no_results_at_all(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["report"]) == 0
    out, err = capsys.readouterr()
    nothing, no_lengths = err.splitlines()
    assert nothing == (
        "dlrnn report: nothing is recorded in results: every number of ours says “not run”"
    )
    assert no_lengths == f"dlrnn report: t{NO_LENGTHS}"
    before, command, after = NO_LENGTHS.split("`")
    page = (tmp_path / "out" / "report" / "speed.html").read_text()
    assert f"<p>T{before}<code>{command}</code>{after}.</p>" in page
    assert "out/report/index.html" in out
    page = (tmp_path / "out" / "report" / "index.html").read_text()
    assert "No run of ours is recorded here: every number of ours says “not run”." in page
    assert "could not be read" not in page, "nothing is broken"
    (tmp_path / "file").write_text("")
    capsys.readouterr()
    assert main(["report", "--out", "file"]) == 2
    assert capsys.readouterr().err == "dlrnn report: file is a file; a folder was expected\n"


def test_recipes_show_what_is_recorded(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def line(name):
        assert main(["recipes", "--json"]) == 0
        rows = {row.pop("name"): row for row in json.loads(capsys.readouterr().out)}
        return rows[name]

    recipe = "table1/shift/dlr-1"
    assert main(["recipes", recipe]) == 0
    assert "'ours' is empty" in capsys.readouterr().err
    assert line(recipe)["ours"] is None
    lines = [made_up.record(recipe, seed=seed, value=value) for seed, value in ((0, 0.9), (1, 1.0))]
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "records.jsonl").write_text("".join(f"{r.to_line()}\n" for r in lines))
    shown = line(recipe)
    assert (shown["paper"], shown["ours"], shown["yours"]) == ("1", "0.950 (0.900 to 1.000)", None)
    assert line("table1/shift/dss-1")["ours"] is None
    cut = made_up.record("table1/shift/dss-1", value=0.5, steps=3)
    with (tmp_path / "results" / "records.jsonl").open("a") as records:
        records.write(f"{cut.to_line()}\n")
    assert line("table1/shift/dss-1")["ours"] == "0.500*"
    assert main(["recipes", "table1/shift"]) == 0
    assert "*: fewer steps than the paper's" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nowhere", "there are no results in {}: it does not exist"),
        ("file", "there are no results in {}: it is not a folder"),
        ("empty", "there are no results in {}: it has no records.jsonl"),
        ("blank", "no record in {} can be read, so no page is written"),
        ("newer", "no record in {} can be read, so no page is written"),
    ],
)
def test_wrong_results_write_nothing(name, sentence, tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    add([made_up.run("table1/shift/dlr-1")], tmp_path / "good")
    for folder, text in (("empty", None), ("blank", "\n"), ("newer", '{"version": 99}\n{\n')):
        (tmp_path / folder).mkdir()
        if text is not None:
            (tmp_path / folder / "records.jsonl").write_text(text)
    out = ["--out", str(tmp_path / "site"), "--markdown", str(tmp_path / "docs" / "x.md")]
    wrong = str(tmp_path / name)
    assert main(["report", "--results", wrong, *out]) == 2
    said = capsys.readouterr()
    assert not said.out
    *broken, last = said.err.splitlines()
    assert last.startswith(f"dlrnn report: {sentence.format(wrong)}")
    parts = [line.partition("jsonl, ")[2][:10] for line in broken]
    assert parts == (["line 1, ha", "line 2, is"] if name == "newer" else [])
    beside = main(["report", "--results", wrong, str(tmp_path / "nowhere"), *out])
    assert (beside, (tmp_path / "site").exists(), (tmp_path / "docs").exists()) == (2, False, False)
    shown = main(["report", "--results", str(tmp_path / "good"), wrong, *out])
    assert shown == (0 if name in ("blank", "newer") else 2), "something is shown"


def test_damaged_default_results_are_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "records.jsonl").write_text("{\n")
    assert main(["report"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "dlrnn report: results/records.jsonl, line 1, is not JSON",
        "dlrnn report: no record in results can be read, so no page is written",
    ]
    assert not (tmp_path / "out").exists()
    assert main(["report", "--lengths", "nowhere.json"]) == 2
    assert "there is no file nowhere.json" in capsys.readouterr().err


def test_runs_that_cannot_be_read_are_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{")
    assert main(["report", "--runs", "run"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("dlrnn report: run/config.json is not JSON")
    assert not (tmp_path / "out").exists()


def test_each_problem_is_one_sentence(tmp_path, capsys):
    results, lost, cut = tmp_path / "results", made_up.record(), made_up.run("table1/shift/dss-1")
    cut.files["pictures"] = made_up.picture()
    add([made_up.run("table1/shift/dlr-1"), cut], results)
    snapshots = [json.dumps(each) for each in made_up.snapshots()[:2]]
    damaged = {
        "records.jsonl": (results / "records.jsonl").read_bytes()
        + b'{oops\n{"version": 99}\n\n\xff\xfe\n',
        "notes.json": b'{"table1/shift/dlr-1": "fine", "table1/shfit": "x"}',
        "step-times.json": b'{"models": 3}',
        f"breakdowns/{lost.stem}.json": b"{}",
        f"snapshots/{lost.stem}.jsonl": f"{snapshots[0]}\n{{\n{snapshots[1]}".encode(),
        f"pictures/{cut.stem}.png": made_up.picture()[:9000],
        f"curves/{cut.stem}.csv": b"step,validation R2\n1,0.5\n",
    }
    for name, content in damaged.items():
        (results / name).parent.mkdir(exist_ok=True)
        (results / name).write_bytes(content)
    (results / "curves" / f"{lost.stem}.csv").unlink()
    (tmp_path / "lengths.json").write_text('{"cases": [{"L": "x", "fused": "y"}]}')
    options = ["--results", str(results), "--lengths", str(tmp_path / "lengths.json")]
    assert main(["report", *options, "--out", str(tmp_path / "site")]) == 0
    said = capsys.readouterr().err.splitlines()
    for words in (
        "line 3, is not JSON",
        "line 4, has version 99",
        "line 6, is not JSON",
        f"the curve {results}/curves/{lost.stem}.csv is missing",
        f"curves/{cut.stem}.csv ends at step 1, and its run has ",
        "has a note on 'table1/shfit', which is no recipe",
        "step-times.json cannot be read",
        f"breakdowns/{lost.stem}.json cannot be read",
        f"snapshots/{lost.stem}.jsonl, line 2, is not a snapshot",
        f"pictures/{cut.stem}.png cannot be read: a picture is a PNG",
        "lengths.json cannot be read",
    ):
        assert sum(words in line for line in said) == 1, (words, said)
    assert len(said) == 11
    page = (tmp_path / "site" / "table1.html").read_text()
    assert "11 problems with files that could not be read; the rest is shown" in page
    assert "Its curve is missing." in page
    assert "<strong>Finding: </strong>fine" in page
    assert counts(make_tables([read_results(results, "ours")])[0]).measured == 2


def test_lengths_are_found_in_docs(tmp_path, capsys, monkeypatch):
    made_up.write(tmp_path)
    (tmp_path / "docs" / "measured").mkdir(parents=True)
    (tmp_path / "lengths.json").rename(tmp_path / "docs" / "measured" / "lengths.json")
    monkeypatch.chdir(tmp_path)
    assert main(["report"]) == 0
    assert capsys.readouterr().err == ""
    assert "not shown" not in (tmp_path / "out" / "report" / "speed.html").read_text()
    (tmp_path / "none.json").write_text('{"device": "x", "cases": []}')
    assert main(["report", "--lengths", "none.json"]) == 0
    page = (tmp_path / "out" / "report" / "speed.html").read_text()
    assert "Time against length is not shown: none.json holds none;" in page


def test_folders_with_equal_names_are_told_apart(tmp_path, capsys):
    folders = [tmp_path / name for name in ("mine", "a/results", "b/results", "x/b/results")]
    for seed, folder in enumerate(folders):
        add([made_up.run("table1/shift/dlr-1", seed=seed)], folder)
    out = ["--out", str(tmp_path / "site")]
    assert main(["report", "--results", *map(str, folders[:3]), *out]) == 0
    page = (tmp_path / "site" / "table1.html").read_text()
    for column in ("a/results", "b/results"):
        assert f'<button type="button">{column}' in page
    assert main(["report", "--results", *map(str, folders), *out]) == 2
    assert "two folders of results are named b/results" in capsys.readouterr().err
    for name in ("ours", "yours"):
        add([made_up.run("table1/shift/dlr-1")], tmp_path / name)
        assert main(["report", "--results", str(folders[0]), str(tmp_path / name), *out]) == 2
        assert f"cannot be named {name}" in capsys.readouterr().err


def test_the_markdown_alone(tmp_path, capsys):
    results = made_up.write(tmp_path)
    options = ["--results", str(results), "--markdown", str(tmp_path / "results.md")]
    assert main(["report", *options]) == 0
    drawn = tmp_path / "pictures" / "table1.png"
    assert capsys.readouterr().out == f"written: {tmp_path / 'results.md'}\nwritten: {drawn}\n"
    assert drawn.read_bytes().startswith(PNG)
    assert "](pictures/table1.png)" in (tmp_path / "results.md").read_text()
    text = (tmp_path / "results.md").read_text()
    assert text == markdown([read_results(results, "ours")])
    assert sum("| ≈ " in line for line in text.splitlines()) > 50
    assert "## Table 6" in text


def texts(figure):
    (axes,) = figure.axes
    return [each.get_text() for each in axes.texts]


def test_the_picture_of_table_1():
    nothing = texts(table1_figure([Results("ours")]))
    assert nothing.count("not run") == 66
    assert nothing.count("paper") == nothing.count("ours") == 6
    assert nothing.count("0.52") == 1, "the paper's, in its own half alone"
    records = [
        made_up.record(value=0.5),
        made_up.record("table1/shift/dss-1", value=0.991, steps=10),
        made_up.record("table1/cummax/dlr-1", value=None),
        made_up.record("table1/cumsum/dlr-1", value=0.3, variant="tiny", scale="tiny"),
    ]
    figure = table1_figure([Results("ours", records)])
    shown = texts(figure)
    assert shown.count("not run") == 63, "a tiny run is none of Table 1"
    assert [shown.count(text) for text in ("0.50", "0.99*", "diverged")] == [2, 1, 1]
    below = figure.axes[0].get_xlabel().replace("\n", " ")
    assert "* fewer steps than the recipe's. Framed: not as in the paper" in below
    assert table1_png([Results("ours", records)]) == table1_png([Results("ours", records)])
