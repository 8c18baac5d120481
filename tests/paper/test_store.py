"""`dlrnn results add`: which runs are added, replaced or kept, and what stays in the folder."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

import made_up
from dlrnn.cli import main
from dlrnn.paper.collect import collect
from dlrnn.paper.records import VERSION
from dlrnn.paper.results import read_results
from dlrnn.paper.store import add
from dlrnn.paper.user_runs import in_memory
from made_up import SHIFT, changed


def lines(folder):
    return (folder / "records.jsonl").read_text().splitlines()


def stored(folder, field):
    return [json.loads(line)[field] for line in lines(folder)]


def test_adding_twice_changes_nothing(tiny_run, tmp_path, capsys):
    into = ["--into", str(tmp_path / "results")]
    assert main(["results", "add", str(tiny_run), *into]) == 0
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "results").rglob("*")}
    assert main(["results", "add", str(tiny_run.parent), *into]) == 0
    *_, last, where = capsys.readouterr().out.splitlines()
    assert last.endswith("already there")
    assert where == f"the records are in {tmp_path / 'results' / 'records.jsonl'}"
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "results").rglob("*")}
    assert len(lines(tmp_path / "results")) == 1


def test_a_run_with_more_steps_replaces_a_shorter_one(tmp_path):
    with_picture = made_up.run(SHIFT, variant="x", pictures=made_up.picture())
    short = changed(with_picture, steps=10, value=0.1)
    long = changed(made_up.run(SHIFT, variant="x"), steps=20, value=0.2)
    add([short], tmp_path)
    picture = tmp_path / "pictures" / f"{short.stem}.png"
    assert picture.exists()
    assert "replaced" in add([long], tmp_path)[0]
    assert not picture.exists(), "the picture was of the run that is gone"
    assert "kept the one with 20 steps" in add([short], tmp_path)[0]
    assert stored(tmp_path, "steps") == [20]
    add([short], tmp_path, replace=True)
    assert stored(tmp_path, "steps") == [10]
    add([changed(short, note="why")], tmp_path)
    add([short], tmp_path)
    assert stored(tmp_path, "note") == ["why"]
    add([long], tmp_path)
    assert stored(tmp_path, "note") == [""], "the note was on another run"


def test_a_run_is_replaced_with_all_its_metrics(tmp_path):
    made = made_up.run("table5/pg19/dlr-16-pre")
    old, new, longer = (changed(made, steps=n, value=float(n)) for n in (10, 20, 30))
    assert [record.metric for record in old.records] == ["train_loss", "loss"]
    new = replace(new, records=new.records[1:])
    assert in_memory([old, new], "yours").records == new.records
    for run, said, values in (
        (old, "added", [10, 10]),
        (new, "replaced one with 10 steps", [20]),
        (old, "kept the one with 20 steps", [20]),
        (longer, "replaced one with 20 steps", [30, 30]),
    ):
        assert said in add([run], tmp_path)[0]
        assert stored(tmp_path, "value") == values
    add([replace(longer, records=longer.records[1:])], tmp_path / "more")
    assert "already there" in add([longer], tmp_path / "more")[0], "a further metric is added"
    assert set(stored(tmp_path / "more", "metric")) == {"train_loss", "loss"}


LISTOPS = "table3/listops-subtrees/dlr"
CUT = {"steps": 10, "differs": "steps 10 (40000)"}
OTHER = "kept the one with other settings (those of the recipe, here lr 0.3 (0.1)); --variant"


@pytest.mark.parametrize(
    ("recipe", "old", "new", "said"),
    [
        (SHIFT, CUT, {"steps": 20, "differs": "lr 0.3 (0.1)"}, OTHER),
        (SHIFT, CUT, {"steps": 30}, "replaced one with 10"),
        (SHIFT, {"value": 0.9}, {"value": 0.1}, "--replace takes this one"),
        (LISTOPS, {"steps": 9}, {"steps": 20, "split": "validation"}, "kept the one with 9 steps"),
        (SHIFT, {"steps": 40000}, {"steps": 80000}, "kept the one with 40000 steps"),
    ],
    ids=["other settings", "fewer steps", "no times", "not tested", "more than the paper's"],
)
def test_which_of_two_runs_is_kept(recipe, old, new, said, tmp_path):
    made = changed(made_up.run(recipe), wall_seconds=None)
    add([changed(made, **old)], tmp_path)
    assert said in add([changed(made, **new)], tmp_path)[0]
    kept = new if said.startswith("replaced") else old
    [record] = read_results(tmp_path, "ours").records
    assert all(getattr(record, name) == value for name, value in kept.items())


def test_the_same_run_read_again_replaces(tiny_run, tmp_path):
    add([collect(tiny_run)], tmp_path)
    again = changed(collect(tiny_run), value=0.123, split="test")
    assert add([again], tmp_path) == [
        "table1_shift_dlr-1_tiny_seed-0: 4 of 1000 steps of a tiny run, replaced one with 4 steps"
    ]
    (record,) = read_results(tmp_path, "ours").records
    assert (record.value, record.split) == (0.123, "test")


def test_a_run_of_another_commit_is_kept_unless_replace(tiny_run, tmp_path):
    here = collect(tiny_run)
    add([changed(here, commit="0" * 40, wall_seconds=1e3)], tmp_path)
    (said,) = add([here], tmp_path)
    assert "kept the one with 4 steps of commit 000000000; --replace takes this one" in said
    assert "replaced" in add([here], tmp_path, replace=True)[0]
    assert stored(tmp_path, "commit") == [here.records[0].commit]


def test_adding_from_several_threads_loses_nothing(tmp_path):
    seeds = range(6)
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda seed: add([made_up.run(SHIFT, seed)], tmp_path / "new"), seeds))
    assert stored(tmp_path / "new", "seed") == list(seeds)


def test_lines_that_cannot_be_read_are_kept(tmp_path):
    newer = json.dumps({"version": VERSION + 1, "anything": 1}).encode()
    unread = [newer, b"{broken", b'{"note": "caf\xe9"']
    (tmp_path / "records.jsonl").write_bytes(b"\n".join(unread) + b"\n")
    add([made_up.run(SHIFT)], tmp_path)
    assert (tmp_path / "records.jsonl").read_bytes().splitlines()[1:] == unread
    found = read_results(tmp_path, "ours")
    assert len(found.records) == 1
    assert [p.partition("line ")[2][:5] for p in found.problems] == ["2, ha", "3, is", "4, is"]


def test_a_run_whose_files_have_the_names_of_another_is_left_out(tmp_path):
    one, other = (made_up.run(SHIFT, variant=name) for name in ("fp32 phases", "fp32-phases"))
    add([one], tmp_path)
    (said,) = add([other], tmp_path)
    assert "left out: its files would replace those of fp32 phases, seed 0: give --variant" in said
    (record,) = read_results(tmp_path, "ours").records
    assert record.variant == "fp32 phases"
