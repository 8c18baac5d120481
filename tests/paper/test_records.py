"""Records: lines that are read, refused and kept; runs that become records."""

import json
import math
import re
import shlex
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

import pytest
from support import DEVICE, tiny_books

import made_up
from dlrnn.analysis.snapshot import snapshot
from dlrnn.cli import main
from dlrnn.models import LanguageConfig, ModelConfig, build_model
from dlrnn.paper import recipes
from dlrnn.paper.collect import collect
from dlrnn.paper.records import VERSION, parse_record, stem
from dlrnn.paper.results import curve_bytes, read_curve, read_results
from dlrnn.paper.store import add
from dlrnn.paper.user_runs import in_memory
from dlrnn.report.site import write_site
from dlrnn.train import RunConfig, RunFolder, TaskConfig, from_json, with_overrides
from dlrnn.train import train as run_training

SHIFT = "table1/shift/dlr-1"
SMALL = ["--scale", "tiny", "--batch_size", "2", "--eval_batches", "1", "--eval_every", "2"]
WHERE = ["--writer", "none", "--device", DEVICE.type]


def train(out, *arguments, recipe=SHIFT, steps=4):
    many = ["--steps", str(steps), "--log_every", "1", "--out", str(out)]
    assert main(["train", recipe, *SMALL, *many, *WHERE, *arguments]) == 0
    return out


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    return train(tmp_path_factory.mktemp("runs") / "run")


def lines(folder):
    return (folder / "records.jsonl").read_text().splitlines()


def test_a_line_and_back():
    made = made_up.record(variant="é|<b>", note="a\nb", commit=None)
    assert parse_record(made.to_line()) == made
    assert parse_record(replace(made, value=None).to_line()).value is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": VERSION + 1}, "has version 2, and this dlrnn reads up to 1"),
        ({"value": "1"}, "'value'"),
        ({"value": True}, "'value'"),
        ({"value": math.nan}, "not finite"),
        ({"recipe": "../../etc"}, "not table/task/model"),
        ({"steps": 1.5}, "'steps'"),
        ({"versions": {"torch": 2}}, "'versions'"),
        ({"colour": 1}, "unknown field 'colour'"),
    ],
)
def test_lines_that_are_no_records(change, said):
    line = json.dumps(json.loads(made_up.record().to_line()) | change)
    with pytest.raises(ValueError, match=said):
        parse_record(line)
    for broken, why in (("{", "not JSON"), ("[]", "not a JSON object"), ("{}", "has no")):
        with pytest.raises(ValueError, match=why):
            parse_record(broken)


def test_names_of_files_are_tame():
    assert stem("table1/shift/dlr-1", "", 3) == "table1_shift_dlr-1_seed-3"
    assert stem("table1/../x", "a/b <c>", 0) == "table1__x_a-b-c_seed-0"


def test_curves_and_back():
    curve = {"train loss": [(1, 0.5), (2, 0.25)], "validation R2": [(2, 0.125)]}
    assert read_curve(curve_bytes(curve)) == curve


def test_a_run_becomes_a_record(done):
    run = collect(done)
    (record,) = run.records
    lines = [json.loads(line) for line in (done / "records.jsonl").read_text().splitlines()]
    last = [line for line in lines if line["split"] == "validation"][-1]
    assert record.recipe == SHIFT
    assert record.variant == "tiny"
    assert record.value == pytest.approx(last["R2"], rel=1e-5)
    assert (record.split, record.steps, record.steps_asked) == ("validation", 4, 1000)
    assert record.seconds_per_step > 0
    assert record.wall_seconds > 0
    assert "steps 4 (" in record.differs
    assert [step for step, _ in run.curve["validation R2"]] == [2, 4]


def test_the_command_makes_the_run_again(done, tmp_path):
    run = collect(done)
    words = run.records[0].command.split()
    assert words[:3] == ["dlrnn", "train", SHIFT]
    assert main([*words[1:], "--out", str(tmp_path / "again"), *WHERE]) == 0
    again = collect(tmp_path / "again")
    assert again.records[0].value == run.records[0].value
    assert again.curve == run.curve


def test_the_command_of_a_run_without_an_option_of_its_recipe(done, tmp_path):
    """Nor with the recipe's length: neither is said as null."""
    copy = tmp_path / "copy"
    shutil.copytree(done, copy)
    values = json.loads((copy / "config.json").read_text())
    del values["model"]["mixer_options"]["dt_min"], values["task"]["settings"]["length"]
    values["model"]["mixer_options"]["d_state"] = 3
    (copy / "config.json").write_text(json.dumps(values))
    words = shlex.split(collect(copy, recipe=SHIFT).records[0].command)
    assert "--model.mixer_options.d_state" not in words, "all options are said at once"
    scale = words[words.index("--scale") + 1] if "--scale" in words else "full"
    rest = words[words.index("--seed") :]
    config = with_overrides(recipes.scaled(recipes.get(SHIFT), scale), rest)
    assert config == from_json(json.dumps(values))


def test_the_time_of_a_run_that_was_resumed(done, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(done, copy)
    sessions = [(0, 1, 5), (0, 2, 10), (2, 3, 20), (2, 4, 40), (2, 3, 50), (2, 4, 70)]
    told = [{"from": f, "step": step, "seconds": s, "memory": None} for f, step, s in sessions]
    (copy / "timing.jsonl").write_text("".join(json.dumps(each) + "\n" for each in told))
    record = collect(copy).records[0]
    with open(copy / "timing.jsonl", "a") as file:
        file.write('{"from": 2, "st\n')  # cut by a full disk
    assert collect(copy).records[0] == record
    assert record.wall_seconds == 10 + 40 + 70
    assert record.seconds_per_step == 20, "of 5, 20 and 20"


def test_adding_twice_changes_nothing(done, tmp_path, capsys):
    into = ["--into", str(tmp_path / "results")]
    assert main(["results", "add", str(done), *into]) == 0
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "results").rglob("*")}
    assert main(["results", "add", str(done.parent), *into]) == 0
    *_, last, where = capsys.readouterr().out.splitlines()
    assert last.endswith("already there")
    assert where == f"the records are in {tmp_path / 'results' / 'records.jsonl'}"
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "results").rglob("*")}
    assert len(lines(tmp_path / "results")) == 1


def test_more_steps_replace(tmp_path):
    long, short = (made_up.run(SHIFT, variant="x", picture=p) for p in (None, made_up.picture()))
    short = replace(short, records=[replace(r, steps=10, value=0.1) for r in short.records])
    long = replace(long, records=[replace(r, steps=20, value=0.2) for r in long.records])
    add([short], tmp_path)
    picture = tmp_path / "pictures" / f"{short.stem}.png"
    assert picture.exists()
    assert "replaced" in add([long], tmp_path)[0]
    assert not picture.exists(), "the picture was of the run that is gone"
    assert "kept the one with 20 steps" in add([short], tmp_path)[0]
    assert [json.loads(line)["steps"] for line in lines(tmp_path)] == [20]
    add([short], tmp_path, replace=True)
    assert [json.loads(line)["steps"] for line in lines(tmp_path)] == [10]
    add([replace(short, records=[replace(r, note="why") for r in short.records])], tmp_path)
    add([short], tmp_path)
    assert [json.loads(line)["note"] for line in lines(tmp_path)] == ["why"]
    add([long], tmp_path)
    assert [json.loads(line)["note"] for line in lines(tmp_path)] == [""], "it was said of another"


def test_a_run_is_replaced_with_all_its_metrics(tmp_path):
    made = made_up.run("table5/pg19/dlr-16-pre")
    old, new, longer = (
        replace(made, records=[replace(r, steps=n, value=float(n)) for r in made.records])
        for n in (10, 20, 30)
    )
    assert [record.metric for record in old.records] == ["train_loss", "loss"]
    new = replace(new, records=new.records[1:])
    add([old], tmp_path)
    assert "replaced one with 10 steps" in add([new], tmp_path)[0]
    assert [json.loads(line)["value"] for line in lines(tmp_path)] == [20]
    assert [record.value for record in in_memory([old, new], "yours").records] == [20]
    assert "kept the one with 20 steps" in add([old], tmp_path)[0]
    assert "replaced one with 20 steps" in add([longer], tmp_path)[0]
    assert [json.loads(line)["value"] for line in lines(tmp_path)] == [30, 30]


def test_a_metric_more_of_the_same_run(tmp_path):
    run = made_up.run("table5/pg19/dlr-16-pre")
    run = replace(run, records=[replace(r, steps=10) for r in run.records])
    add([replace(run, records=run.records[1:])], tmp_path)
    assert "already there" in add([run], tmp_path)[0]
    assert {json.loads(line)["metric"] for line in lines(tmp_path)} == {"train_loss", "loss"}


def test_a_longer_run_with_other_settings_replaces_nothing(tmp_path):
    made = made_up.run(SHIFT)
    short, other, long = (
        replace(made, records=[replace(r, steps=n, differs=text) for r in made.records])
        for n, text in ((10, "steps 10 (40000)"), (20, "lr 0.3 (0.1)"), (30, ""))
    )
    add([short], tmp_path)
    said = "kept the one with other settings (those of the recipe, here lr 0.3 (0.1)); --variant"
    assert said in add([other], tmp_path)[0]
    assert "replaced one with 10 steps" in add([long], tmp_path)[0]


def test_two_that_add_at_once_lose_nothing(tmp_path):
    seeds = range(6)
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda seed: add([made_up.run(SHIFT, seed)], tmp_path / "new"), seeds))
    assert [json.loads(line)["seed"] for line in lines(tmp_path / "new")] == list(seeds)


def test_lines_of_others_are_kept(tmp_path):
    newer = json.dumps({"version": VERSION + 1, "anything": 1})
    (tmp_path / "records.jsonl").write_text(f"{newer}\n{{broken\n")
    add([made_up.run(SHIFT)], tmp_path)
    assert lines(tmp_path)[1:] == [newer, "{broken"]
    found = read_results(tmp_path, "ours")
    assert len(found.records) == 1
    assert [p.partition("line ")[2][:5] for p in found.problems] == ["2, ha", "3, is"]


def test_a_run_that_is_not_complete(done, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(done, copy)
    (copy / "result.json").unlink()
    into = ["--into", str(tmp_path / "results")]
    assert main(["results", "add", str(copy), *into]) == 2
    assert "is not complete: 4 of 4 steps" in capsys.readouterr().err
    shutil.copytree(done, tmp_path / "both" / "good")
    shutil.copytree(copy, tmp_path / "both" / "stopped")
    assert main(["results", "add", str(tmp_path / "both"), *into]) == 0
    out, err = capsys.readouterr()
    assert "left out: " in err
    assert "added" in out
    assert main(["results", "add", str(copy), *into, "--unfinished"]) == 0
    assert main(["results", "add", str(tmp_path / "results"), *into]) == 2
    assert "there is no run in" in capsys.readouterr().err
    assert main(["results", "add", str(copy), *into, "--recipe", "table1/shfit"]) == 2
    assert "did you mean" in capsys.readouterr().err


def test_tasks_that_are_tested(tmp_path, capsys):
    path = train(tmp_path / "run", recipe="table3/listops-subtrees/dlr", steps=2)
    into = ["--into", str(tmp_path / "results")]
    assert main(["results", "add", str(path), *into]) == 2
    assert "run `dlrnn eval" in capsys.readouterr().err
    assert collect(path, unfinished=True).records[0].split == "validation"
    assert main(["eval", str(path), "--device", DEVICE.type]) == 0
    assert main(["results", "add", str(path), *into]) == 0
    found = read_results(tmp_path / "results", "ours")
    (record,) = found.records
    assert (record.split, record.metric) == ("test", "accuracy")
    metrics = json.loads((path / "eval-test.json").read_text())["metrics"]
    assert record.value == pytest.approx(100 * metrics["accuracy"], rel=1e-5)
    assert found.breakdowns[record.stem]["by operator"][0]["operator"] == "MIN"
    assert not found.problems
    result = json.loads((path / "result.json").read_text())
    (path / "result.json").write_text(json.dumps({**result, "best_step": 77}))
    with pytest.raises(ValueError, match="was trained and not evaluated yet: run `dlrnn eval"):
        collect(path)  # what was tested is not the best any more
    assert collect(path, unfinished=True).breakdown is None


def test_what_is_not_tested_is_its_best_validation(tmp_path):
    path = train(tmp_path / "run", recipe="table3/listops-subtrees/dlr", steps=2)
    told = [{"step": k, "split": "validation", "loss": 1.0, "accuracy": k / 10} for k in (1, 3, 2)]
    (path / "records.jsonl").write_text("".join(json.dumps(each) + "\n" for each in told))
    (record,) = collect(path, unfinished=True).records
    assert (record.value, record.steps, record.split) == (30, 3, "validation")


def test_a_language_model_that_was_examined(tmp_path):
    sizes = {"layers": 1, "d_model": 8, "d_state": 4, "d_embedding": 4, "d_ff": 8}
    model = LanguageConfig(**sizes, vocabulary=32, dt_min=0.05, dt_max=0.5, kernel_length=32)
    task = TaskConfig("pg19", {"length": 32, "folder": str(tiny_books(tmp_path))})
    config = RunConfig(task, model, steps=2, batch_size=2, log_every=1, eval_batches=1)
    run_training(tmp_path / "run", config, device=DEVICE.type, show=False, writer="none")
    stopped = collect(tmp_path / "run", unfinished=True).records
    path = tmp_path / "run" / "records.jsonl"
    before = path.read_text()
    told = [
        {"step": 2, "split": "validation", "loss": v, "perplexity": 9.0} for v in (5.0, 3.0, 4.0)
    ]
    path.write_text(before + "".join(json.dumps(each) + "\n" for each in told))
    best = collect(tmp_path / "run", unfinished=True).records[-1].value
    assert best == min(3.0, stopped[-1].value), "the least loss"
    path.write_text(before)
    assert main(["eval", str(tmp_path / "run"), "--device", DEVICE.type]) == 0
    found = collect(tmp_path / "run")
    last = [each for each in RunFolder(tmp_path / "run").records() if each["split"] == "train"][-1]
    for records in (stopped, found.records):
        assert [record.metric for record in records] == ["train_loss", "loss"]
        assert records[0].value == pytest.approx(last["loss"], rel=1e-5)
    ((_, loss),) = found.curve["validation loss"]
    ((_, perplexity),) = found.curve["validation perplexity"]
    assert perplexity == pytest.approx(math.exp(loss)), "no percentage"


def test_a_commit_for_a_run_outside_a_checkout(done, tmp_path):
    assert collect(done, commit="abc").records[0].commit != "abc", "it knows its own"
    copy = tmp_path / "copy"
    shutil.copytree(done, copy)
    environment = json.loads((copy / "environment.json").read_text())
    (copy / "environment.json").write_text(json.dumps(environment | {"git": None}))
    assert collect(copy).records[0].commit is None
    assert collect(copy, commit="abc").records[0].commit == "abc"
    then = [{"git": git, "changed": git == "c"} for git in ("b", "b", "c")]
    (copy / "environment.json").write_text(json.dumps({"git": "a", "then": then}))
    assert collect(copy).records[0].commit == "a, then b, then c with changes"


def test_pictures_and_layers_come_along(tmp_path):
    path = train(tmp_path / "run", recipe="table3/pathfinder-segmentation-128/dlr", steps=2)
    assert main(["eval", str(path), "--device", DEVICE.type]) == 0
    model = build_model(ModelConfig("dlr", {"d_state": 8}, 4), d_input=1, d_output=1)
    for step in range(40):
        with open(path / "snapshots.jsonl", "a") as file:
            file.write(json.dumps(snapshot(model, step, 64)) + "\n")
    with open(path / "snapshots.jsonl", "a") as file:
        file.write('{"step": 40, "lay')  # killed here
    assert main(["results", "add", str(path), "--into", str(tmp_path / "results")]) == 0
    found = read_results(tmp_path / "results", "ours")
    (name,) = found.pictures
    assert {record.metric for record in found.records} == {"macro_f1", "macro_accuracy"}
    steps = [each["step"] for each in found.snapshots[name]]
    assert len(steps) == 16
    assert (steps[0], steps[-1]) == (0, 39)


@pytest.mark.parametrize("content", [b"[1, 2]", b"{", b"\xff\xfe", b"3"], ids=repr)
def test_a_broken_file_beside_the_number_is_told_and_the_number_stays(done, tmp_path, content):
    """None of them is what is measured."""
    copy, side = tmp_path / "run", ["environment.json", "timing.jsonl", "eval-test.json"]
    shutil.copytree(done, copy)
    for name in (*side, "snapshots.jsonl"):
        (copy / name).write_bytes(content + b"\n")
    found = collect(copy)
    assert found.records[0].value == collect(done).records[0].value
    names = {p.split(" cannot be read")[0].removeprefix(f"{copy}/") for p in found.problems}
    cut = {"timing.jsonl"} if content == b"{" else set()  # a cut line of times is one less
    assert names == {*side, "snapshots.jsonl"} - cut
    if content != b"3":
        return  # once is enough: pages take a second
    assert main(["report", "--runs", str(copy), "--out", str(tmp_path / "site")]) == 0
    assert f"{copy}/environment.json cannot be read" in (tmp_path / "site/index.html").read_text()


@pytest.mark.parametrize("content", ["[1, 2]", "{", "3"])
def test_what_the_number_rests_on_is_named_where_it_is_damaged(done, tmp_path, content, capsys):
    copy = tmp_path / "run"
    shutil.copytree(done, copy)
    (copy / "result.json").write_text(content)
    assert main(["results", "add", str(copy), "--into", str(tmp_path / "results")]) == 2
    again = f"remove it and `dlrnn train --resume {copy}`"
    assert f"{copy / 'result.json'} is damaged: {again}" in capsys.readouterr().err
    assert main(["train", "--resume", str(copy), "--device", "cpu"]) == 2


def test_records_that_end_before_their_run_are_damaged(done, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(done, copy)
    first, *_ = (copy / "records.jsonl").read_text().splitlines(keepends=True)
    (copy / "records.jsonl").write_text(first)
    with pytest.raises(ValueError, match=r"is damaged: it ends at step \d, and the run"):
        collect(copy, unfinished=True)
    (copy / "records.jsonl").write_text("")
    with pytest.raises(ValueError, match="it has no record of a complete run"):
        collect(copy, unfinished=True)


def test_a_wrong_recipe_is_told(done, tmp_path, capsys):
    into = ["results", "add", str(done), "--into", str(tmp_path / "results"), "--recipe"]
    assert main([*into, "table1/cumsum/dlr-1"]) == 2
    assert f"{done} is a run on shift, and table1/cumsum/dlr-1 is not" in capsys.readouterr().err
    assert main([*into, "table1/shift/dlr-9"]) == 0
    assert (
        "there is no recipe table1/shift/dlr-9: the tables show it in its own row"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"recipe": "table9/x/y"}, "has the table 'table9' instead of one of table1, table2"),
        ({"split": "tset"}, "has the split 'tset' instead of one of train, validation, test"),
        ({"scale": "huge"}, "has the scale 'huge' instead of one of full, tiny, changed"),
        ({"steps": -3}, "has -3 of 40000 steps"),
        ({"steps_asked": 0}, "has 40000 of 0 steps"),
    ],
)
def test_records_that_cannot_be(changed, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        parse_record(json.dumps({**asdict(made_up.record()), **changed}))


def test_files_that_are_not_what_they_should_be(tmp_path):
    """Cut, or a folder in their place: a sentence each, and the rest is read."""
    made = made_up.run(SHIFT)
    made = replace(made, picture=made_up.picture(), snapshots=None)
    add([made], tmp_path)
    stem = made.stem
    assert read_results(tmp_path, "ours").problems == []
    picture, curve = tmp_path / "pictures" / f"{stem}.png", tmp_path / "curves" / f"{stem}.csv"
    picture.write_bytes(picture.read_bytes()[: picture.stat().st_size // 2])
    curve.write_text("".join(curve.read_text().splitlines(keepends=True)[:3]))
    (tmp_path / "snapshots" / f"{stem}.jsonl").mkdir(parents=True)
    (tmp_path / "step-times.json").mkdir()
    (tmp_path / "notes.json").write_text(json.dumps({SHIFT: "fine", "table1/shfit": "x"}))
    found = read_results(tmp_path, "ours")
    assert len(found.records) == len(made.records)
    assert found.notes[SHIFT] == "fine"
    for words in (
        f"{picture} cannot be read",
        f"{curve} ends at step",
        f"{stem}.jsonl cannot be read",
        "step-times.json cannot be read",
        "has a note on 'table1/shfit', which is no recipe",
    ):
        assert sum(words in problem for problem in found.problems) == 1, (words, found.problems)
    assert len(found.problems) == 5


def test_files_of_one_run_are_never_those_of_another(tmp_path):
    """Names that become the same when they are tamed."""
    one, other = (made_up.run(SHIFT, variant=name) for name in ("fp32 phases", "fp32-phases"))
    add([one], tmp_path)
    (said,) = add([other], tmp_path)
    assert "left out: its files would replace those of fp32 phases, seed 0: give --variant" in said
    (record,) = read_results(tmp_path, "ours").records
    assert record.variant == "fp32 phases"


def test_bytes_of_others_are_kept(tmp_path):
    (tmp_path / "records.jsonl").write_bytes(b'{"note": "caf\xe9"\n')
    add([made_up.run(SHIFT)], tmp_path)
    assert (tmp_path / "records.jsonl").read_bytes().endswith(b'{"note": "caf\xe9"\n')


def test_a_byte_that_is_no_text_costs_no_number(tmp_path):
    line = replace(made_up.record(), note="cafe").to_line().encode().replace(b"cafe", b"caf\xe9")
    (tmp_path / "records.jsonl").write_bytes(b"\xef\xbb\xbf" + line)  # and one that Windows wrote
    add([made_up.run(SHIFT, seed=1)], tmp_path)
    found = read_results(tmp_path, "ours")
    assert {record.seed: record.note for record in found.records} == {0: "caf\ufffd", 1: ""}
    write_site(tmp_path / "site", [found], tmp_path / "none")
    assert "caf\ufffd" in (tmp_path / "site" / "table1.html").read_text()


def test_two_runs_without_times_are_not_the_same(tmp_path):
    made = made_up.run(SHIFT)
    one, other = (
        replace(made, records=[replace(made.records[0], value=v, wall_seconds=None)])
        for v in (0.9, 0.1)
    )
    add([one], tmp_path)
    assert "--replace takes this one" in add([other], tmp_path)[0]
    assert read_results(tmp_path, "ours").records[0].value == 0.9


def test_a_later_run_that_was_not_tested_does_not_replace_a_tested_one(tmp_path):
    made = made_up.run("table3/listops-subtrees/dlr")
    tested, later = (
        replace(
            made, records=[replace(made.records[0], steps=n, split=split, wall_seconds=1.0 * n)]
        )
        for n, split in ((100, "test"), (200, "validation"))
    )
    add([tested], tmp_path)
    assert "kept the one with 100 steps" in add([later], tmp_path)[0]


def test_of_two_lines_of_one_run_the_later(tmp_path):
    lines_of = [replace(made_up.record(), value=value).to_line() for value in (0.1, 0.2)]
    (tmp_path / "records.jsonl").write_text("\n".join(lines_of))
    assert [record.value for record in read_results(tmp_path, "ours").records] == [0.2]


@pytest.mark.parametrize(
    "content",
    ["step,validation R2\n-5,0.1\n9,0.2\n", "step,validation R2\n1,1e308\n9,-1e308\n"],
)
def test_curves_that_cannot_be_drawn_stop_nothing(tmp_path, content):
    made = made_up.run(SHIFT)
    add([made], tmp_path)
    (tmp_path / "curves" / f"{made.stem}.csv").write_text(content)
    write_site(tmp_path / "site", [read_results(tmp_path, "ours")], tmp_path / "none")
    assert (tmp_path / "site" / "table1.html").exists()


def test_an_own_seed_of_the_data_is_told(done, tmp_path):
    path = train(tmp_path / "run", "--task.settings.seed", "77", steps=2)
    (record,) = collect(path).records
    assert "task.settings.seed 77 (null)" in record.differs
    assert "--task.settings.seed 77" in record.command


def test_the_name_of_a_folder_counts_if_its_task_does(done, tmp_path):
    """A run on Shift that lies where one on CumSum would."""
    place = tmp_path / "table1" / "cumsum" / "dlr-1" / "seed-0"
    shutil.copytree(done, place)
    assert collect(place).records[0].recipe == "table1/shift/dlr-1"
    named = tmp_path / "table1" / "shift" / "dlr-6" / "seed-0"
    shutil.copytree(done, named)
    assert collect(named).records[0].recipe == "table1/shift/dlr-6", "as its folder says"


def test_an_own_name_and_variant(done, tmp_path):
    into = ["--into", str(tmp_path), "--recipe", "table2/256/dlr", "--variant", "fp32 phases"]
    assert main(["results", "add", str(done), *into]) == 0
    (record,) = read_results(tmp_path, "ours").records
    assert (record.recipe, record.variant) == ("table2/256/dlr", "fp32 phases")
    assert record.steps_asked == 1000, "of the tiny scale"
