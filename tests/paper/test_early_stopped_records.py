"""`dlrnn results add`: runs that were cut, stopped early, read twice, or made at another commit."""

import json
import shutil

import pytest
from support import DEVICE

import made_up
from dlrnn.cli import main
from dlrnn.paper import recipes
from dlrnn.paper.collect import collect
from dlrnn.paper.records import parse_record
from dlrnn.paper.results import read_results
from dlrnn.paper.store import add
from dlrnn.paper.tables import make_tables
from dlrnn.report.site import write_site
from dlrnn.train import with_overrides
from dlrnn.train.plain import PLAIN

SHIFT = "table1/shift/dlr-1"
DSS = ("--model.mixer", "dss", "--model.mixer_options.d_state", "64")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A real run."""
    out = tmp_path_factory.mktemp("runs") / "tiny"
    small = ["--scale", "tiny", "--batch_size", "2", "--eval_batches", "1", "--eval_every", "2"]
    where = ["--writer", "none", "--device", DEVICE.type]
    assert main(["train", SHIFT, *small, "--steps", "4", "--out", str(out), *where]) == 0
    return out


def folder_of(tiny, path, values, *, steps, every=1000, recipe=SHIFT, overrides=(), scale="full"):
    """A run of a recipe as it is, as far as `steps`, whose evaluations gave `values`."""
    path.mkdir(parents=True)
    shutil.copy(tiny / "environment.json", path)
    config = with_overrides(recipes.scaled(recipes.get(recipe), scale), list(overrides))
    (path / "config.json").write_text(config.to_json())
    lines = [{"step": every, "split": "train", "loss": 0.1, "lr": 0.1}]
    lines += [
        {"step": every * k, "split": "validation", "R2": value, "loss": 0.1}
        for k, value in enumerate(values, start=1)
    ]
    lines.append({"step": steps + 50, "split": "train", "loss": 0.1, "lr": 0.1})
    (path / "records.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    return path


@pytest.mark.parametrize(
    ("values", "level"),
    [
        ([0.1] * 9 + [0.995] * 11, 1),
        ([0.1] * 9 + [0.001, -0.004] * 5 + [0.0], 0),
        ([0.1] * 10 + [0.98] + [1.0] * 9, None),
        ([0.995] * 19 + [0.5], None),
        ([0.3] * 20, None),
        ([1.0] * 2, None),
    ],
)
def test_a_run_that_was_stopped(values, level, tiny, tmp_path, capsys):
    steps = 1000 * len(values)
    run = folder_of(tiny, tmp_path / "run", values, steps=steps)
    with pytest.raises(ValueError, match=f"{steps + 50} of 40000 steps; --unfinished records"):
        collect(run)
    (record,) = collect(run, unfinished=True).records
    assert (record.variant, record.scale, record.steps) == ("", "full", steps)
    assert record.value == pytest.approx(max(values))
    if level is None:
        assert record.stopped == ""
        assert record.is_cut
    else:
        least, most = PLAIN[level]
        near = f"R2 between {least} and {most} for the last half of them"
        assert record.stopped == f"early after 20000 of 40000 steps: {near}"
        assert not record.is_cut
    into = ["--into", str(tmp_path / "results")]
    assert main(["results", "add", str(run), "--unfinished", *into]) == 0
    said = f"{steps} of 40000 steps{'' if level is None else ', stopped early'}, added\n"
    assert said in capsys.readouterr().out
    (again,) = read_results(tmp_path / "results", "ours").records
    assert again == record
    write_site(tmp_path / "site", [read_results(tmp_path / "results", "ours")], tmp_path)
    page = (tmp_path / "site" / "table1.html").read_text()
    text = f"{steps} of 40000 steps</span>"
    assert (f">stopped early: {text}" in page) == (level is not None)
    assert (f">{text}" in page) == (level is None)
    coloured = level == 1 or record.value >= 1  # complete, or at the paper's number already
    assert ('class="near"' in page) == coloured
    assert ("stopped early at 0 or 1" in page) == (level is not None)


def test_a_tenth_of_the_steps_is_a_cut(tiny, tmp_path):
    run = folder_of(tiny, tmp_path / "run", [0.9] * 8, steps=4000, every=500, scale="short")
    (record,) = collect(run, unfinished=True).records
    assert (record.variant, record.size, record.steps_asked) == ("", "full", 40000)
    assert record.is_cut
    assert record.differs == "steps 4000 (40000)"
    assert "--scale short" in record.command


@pytest.mark.parametrize(
    ("changes", "plain"),
    [
        ([], True),
        (["--schedule", "cosine"], False),
        (["--warmup", "100"], False),
        (["--lr", "1"], True),
    ],
)
def test_only_what_had_the_rate_of_the_recipe_may_stop(changes, plain, tiny, tmp_path):
    """A rate that fell sooner, or began later, is another run's."""
    values = [0.995] * 20
    run = folder_of(tiny, tmp_path / "run", values, steps=20000, overrides=changes)
    (record,) = collect(run, unfinished=True).records
    assert bool(record.stopped) == plain


@pytest.mark.parametrize(
    ("changed", "variant", "size"),
    [
        (["--lr", "0.5"], "", "full"),
        (["--model.mixer_options.dt_min", "0.1"], "changed", "changed"),
        (["--model.mixer_options.d_state", "64"], "changed", "changed"),
        (["--task.settings.length", "64"], "changed", "changed"),
        ([*DSS], "dss", "full"),
        ([*DSS, "--task.settings.length", "64"], "dss, changed", "changed"),
    ],
)
def test_sizes_that_are_not_the_recipes(changed, variant, size, tiny, tmp_path):
    run = folder_of(tiny, tmp_path / "run", [0.99] * 40, steps=40000, overrides=changed)
    (record,) = collect(run, recipe=SHIFT, unfinished=True).records
    assert (record.variant, record.size) == (variant, size)
    (named,) = collect(run, recipe=SHIFT, variant="mine", unfinished=True).records
    kept = "full" if "--model.mixer_options.dt_min" in changed else size
    assert named.size == kept, "a name does not hide its size"


def test_a_tiny_run_by_another_name(tiny, tmp_path, capsys):
    into = ["--into", str(tmp_path / "results")]
    assert main(["results", "add", str(tiny), "--variant", "mine", *into]) == 0
    assert "_mine_seed-0: 4 of 1000 steps of a tiny run, added\n" in capsys.readouterr().out
    found = read_results(tmp_path / "results", "ours")
    assert found.records[0].size == "tiny"
    cell = make_tables([found])[0].cells[SHIFT]
    assert cell.difference("R2", "ours, mine") is None


def test_lines_without_the_later_fields():
    values = json.loads(made_up.record().to_line())
    del values["scale"], values["stopped"]
    assert parse_record(json.dumps(values)) == made_up.record()
    values["scale"] = 3
    with pytest.raises(ValueError, match="'scale'"):
        parse_record(json.dumps(values))


def test_the_same_run_twice_replaces(tiny, tmp_path):
    first = collect(tiny)
    add([first], tmp_path)
    again = collect(tiny)
    again.records[0] = made_up.replace(again.records[0], value=0.123, split="test")
    assert add([again], tmp_path) == [
        "table1_shift_dlr-1_tiny_seed-0: 4 of 1000 steps of a tiny run, replaced one with 4 steps"
    ]
    (record,) = read_results(tmp_path, "ours").records
    assert (record.value, record.split) == (0.123, "test")


def test_a_run_of_another_commit(tiny, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(tiny, copy)
    environment = json.loads((copy / "environment.json").read_text()) | {"git": "0" * 40}
    (copy / "environment.json").write_text(json.dumps(environment | {"changed": False}))
    timing = [json.loads(line) for line in (copy / "timing.jsonl").read_text().splitlines()]
    slower = [each | {"seconds": 2 * each["seconds"] + 1} for each in timing]
    (copy / "timing.jsonl").write_text("".join(json.dumps(each) + "\n" for each in slower))
    here, there = collect(tiny), collect(copy)
    assert there.records[0].commit == "0" * 40
    add([there], tmp_path / "results")
    (said,) = add([here], tmp_path / "results")
    assert "kept the one with 4 steps of commit 000000000; --replace takes this one" in said
    assert "replaced" in add([here], tmp_path / "results", replace=True)[0]
    (record,) = read_results(tmp_path / "results", "ours").records
    assert record.commit == here.records[0].commit


def test_a_folder_of_many_runs(tiny, tmp_path, capsys):
    for task in ("shift", "cumsum", "sort"):
        for seed in ("0", "1"):
            path = tmp_path / "runs" / "full" / "table1" / task / "dlr-1" / f"seed-{seed}"
            own = {"recipe": f"table1/{task}/dlr-1", "overrides": ["--seed", seed]}
            folder_of(tiny, path, [0.5] * 40, steps=40000, **own)
    shutil.copytree(tiny, tmp_path / "runs" / "other")
    (tmp_path / "runs" / "other" / "config.json").write_text("{")
    into = ["--unfinished", "--into", str(tmp_path / "results")]
    assert main(["results", "add", str(tmp_path / "runs"), *into]) == 0
    said = capsys.readouterr()
    assert said.out.count("40000 of 40000 steps, added") == 6
    assert said.err.count("left out: ") == 1
    assert len(read_results(tmp_path / "results", "ours").records) == 6


def test_what_stopped_by_itself_says_so_at_every_size(tmp_path, capsys):
    out, small = tmp_path / "run", ["--scale", "tiny", "--eval_batches", "1", "--eval_every", "20"]
    more = ["--until-plain", "--writer", "none", "--device", DEVICE.type, "--out", str(out)]
    assert main(["train", SHIFT, *small, "--steps", "3000", "--lr", "1e-3", *more]) == 0
    assert "stopped after" in capsys.readouterr().out
    (record,) = collect(out).records
    assert record.stopped.startswith(f"early after {record.steps} of 3000 steps: R2 between 0.99")
    assert record.command.endswith("--until-plain")
    assert record.scale == "tiny"


def test_nought_after_a_few_steps_is_not_plain_yet(tiny, tmp_path):
    """It may rise: half of the steps are asked for."""
    run = folder_of(tiny, tmp_path / "run", [0.0] * 19, steps=19000)
    (record,) = collect(run, unfinished=True).records
    assert record.stopped == ""
    assert record.is_cut
