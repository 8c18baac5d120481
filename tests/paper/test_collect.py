"""From run directories to records: metrics, origin, early stops, and damaged files."""

import json
import math
import shlex
import shutil

import pytest
from support import DEVICE, tiny_books

from dlrnn.analysis.snapshot import snapshot
from dlrnn.cli import main
from dlrnn.models import LanguageConfig, ModelConfig, build_model
from dlrnn.paper import recipes
from dlrnn.paper.collect import collect
from dlrnn.paper.results import read_results
from dlrnn.paper.tables import make_tables
from dlrnn.report.site import write_site
from dlrnn.train import RunConfig, RunDirectory, TaskConfig, from_json, with_overrides
from dlrnn.train import train as run_training
from dlrnn.train.early_stopping import LEVELS
from made_up import SHIFT, SILENT, jsonl, train

LISTOPS = "table3/listops-subtrees/dlr"
DSS = ("--model.mixer", "dss", "--model.mixer_options.d_state", "64")


def changed_json(path, **values):
    """Change values in a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_run_becomes_a_record(tiny_run):
    run = collect(tiny_run)
    (record,) = run.records
    lines = [json.loads(line) for line in (tiny_run / "records.jsonl").read_text().splitlines()]
    last = [line for line in lines if line["split"] == "validation"][-1]
    assert (record.recipe, record.variant) == (SHIFT, "tiny")
    assert record.value == pytest.approx(last["R2"], rel=1e-5)
    assert (record.split, record.steps, record.steps_asked) == ("validation", 4, 1000)
    assert record.seconds_per_step > 0
    assert record.wall_seconds > 0
    assert "steps 4 (" in record.differs
    assert [step for step, _ in run.files["curves"]["validation R2"]] == [2, 4]


def test_the_command_repeats_the_run(tiny_run, tmp_path):
    run = collect(tiny_run)
    dlrnn, *words = shlex.split(run.records[0].command)
    assert [dlrnn, *words[:2]] == ["dlrnn", "train", SHIFT]
    assert main([*words, "--out", str(tmp_path / "again"), *SILENT]) == 0
    again = collect(tmp_path / "again")
    assert again.records[0].value == run.records[0].value
    assert again.files == run.files


def test_the_command_drops_options_that_the_run_does_not_have(copy):
    """Options of the mixer and settings of the task: neither is given as null."""
    values = json.loads((copy / "config.json").read_text())
    del values["model"]["mixer_options"]["dt_min"], values["task"]["settings"]["length"]
    values["model"]["mixer_options"]["d_state"] = 3
    (copy / "config.json").write_text(json.dumps(values))
    words = shlex.split(collect(copy, recipe=SHIFT).records[0].command)
    assert "--model.mixer_options.d_state" not in words, "all options are given at once"
    scale = words[words.index("--scale") + 1] if "--scale" in words else "full"
    rest = words[words.index("--seed") :]
    config = with_overrides(recipes.scaled(recipes.get(SHIFT), scale), rest)
    assert config == from_json(json.dumps(values))


def test_times_of_a_resumed_run(copy):
    sessions = [(0, 1, 5), (0, 2, 10), (2, 3, 20), (2, 4, 40), (2, 3, 50), (2, 4, 70)]
    times = [{"from": f, "step": step, "seconds": s, "memory": None} for f, step, s in sessions]
    jsonl(copy / "timing.jsonl", times)
    record = collect(copy).records[0]
    with open(copy / "timing.jsonl", "a") as file:
        file.write('{"from": 2, "st\n')  # truncated by a full disk
    assert collect(copy).records[0] == record
    assert record.wall_seconds == 10 + 40 + 70
    assert record.seconds_per_step == 20, "the median of 5, 20 and 20"


def test_a_run_that_is_not_complete(tiny_run, copy, tmp_path, capsys):
    (copy / "result.json").unlink()
    shutil.copytree(tiny_run, tmp_path / "both" / "good")
    shutil.copytree(copy, tmp_path / "both" / "stopped")
    for arguments, status, said in (
        ([copy], 2, "is not complete: 4 of 4 steps"),
        ([tmp_path / "both"], 0, "left out: "),
        ([copy, "--unfinished"], 0, ""),
        ([tmp_path / "results"], 2, "there is no run in"),
        ([copy, "--recipe", "table1/shfit"], 2, "did you mean"),
    ):
        into = ["--into", str(tmp_path / "results")]
        assert main(["results", "add", *map(str, arguments), *into]) == status
        assert said in capsys.readouterr().err


def test_the_test_of_the_best_checkpoint_counts(tmp_path, capsys):
    path = train(tmp_path / "run", recipe=LISTOPS, steps=2)
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
    changed_json(path / "result.json", best_step=77)
    with pytest.raises(ValueError, match="was trained and not evaluated yet: run `dlrnn eval"):
        collect(path)  # the tested checkpoint is not the best one any more
    assert "breakdowns" not in collect(path, unfinished=True).files
    rows = [{"step": k, "split": "validation", "loss": 1.0, "accuracy": k / 10} for k in (1, 3, 2)]
    jsonl(path / "records.jsonl", rows)
    (path / "test.json").unlink()
    (record,) = collect(path, unfinished=True).records
    assert (record.value, record.steps, record.split) == (30, 3, "validation")


def test_a_language_model_has_two_losses(tmp_path):
    sizes = {"layers": 1, "d_model": 8, "d_state": 4, "d_embedding": 4, "d_ff": 8}
    model = LanguageConfig(**sizes, vocabulary=32, dt_min=0.05, dt_max=0.5, kernel_length=32)
    task = TaskConfig("pg19", {"length": 32, "folder": str(tiny_books(tmp_path))})
    config = RunConfig(task, model, steps=2, batch_size=2, log_every=1, eval_batches=1)
    run = tmp_path / "run"
    run_training(run, config, device=DEVICE.type, show=False, writer="none")
    stopped = collect(run, unfinished=True).records
    lines = RunDirectory(run).records()
    evaluation = {"step": 2, "split": "validation", "perplexity": 9.0}
    jsonl(run / "records.jsonl", [*lines, *(evaluation | {"loss": v} for v in (5.0, 3.0, 4.0))])
    best = collect(run, unfinished=True).records[-1].value
    assert best == min(3.0, stopped[-1].value), "the least loss"
    jsonl(run / "records.jsonl", lines)
    assert main(["eval", str(run), "--device", DEVICE.type]) == 0
    found = collect(run)
    last = [each["loss"] for each in lines if each["split"] == "train"][-1]
    for records in (stopped, found.records):
        assert [record.metric for record in records] == ["train_loss", "loss"]
        assert records[0].value == pytest.approx(last, rel=1e-5)
    ((_, loss),) = found.files["curves"]["validation loss"]
    ((_, perplexity),) = found.files["curves"]["validation perplexity"]
    assert perplexity == pytest.approx(math.exp(loss)), "not a percentage"


def test_commits_of_a_run(tiny_run, copy):
    assert collect(tiny_run, commit="abc").records[0].commit != "abc", "the run recorded its own"
    environment = copy / "environment.json"
    changed_json(environment, git=None)
    assert collect(copy).records[0].commit is None
    assert collect(copy, commit="abc").records[0].commit == "abc"
    then = [{"git": git, "changed": git == "c"} for git in ("b", "b", "c")]
    environment.write_text(json.dumps({"git": "a", "then": then}))
    assert collect(copy).records[0].commit == "a, then b, then c with changes"


def test_pictures_and_snapshots_are_collected(tmp_path):
    path = train(tmp_path / "run", recipe="table3/pathfinder-segmentation-128/dlr", steps=2)
    assert main(["eval", str(path), "--device", DEVICE.type]) == 0
    model = build_model(ModelConfig("dlr", {"d_state": 8}, 4), d_input=1, d_output=1)
    with open(path / "snapshots.jsonl", "a") as file:
        for step in range(40):
            file.write(json.dumps(snapshot(model, step, 64)) + "\n")
        file.write('{"step": 40, "lay')  # killed here
    assert main(["results", "add", str(path), "--into", str(tmp_path / "results")]) == 0
    found = read_results(tmp_path / "results", "ours")
    (name,) = found.pictures
    assert {record.metric for record in found.records} == {"macro_f1", "macro_accuracy"}
    steps = [each["step"] for each in found.snapshots[name]]
    assert (len(steps), steps[0], steps[-1]) == (16, 0, 39)


@pytest.mark.parametrize("content", [b"[1, 2]", b"{", b"\xff\xfe", b"3"], ids=repr)
def test_damaged_files_without_numbers_are_reported(tiny_run, copy, tmp_path, content):
    others = {"environment.json", "timing.jsonl", "eval-test.json", "snapshots.jsonl"}
    for name in others:
        (copy / name).write_bytes(content + b"\n")
    found = collect(copy)
    assert found.records[0].value == collect(tiny_run).records[0].value
    names = {p.split(" cannot be read")[0].removeprefix(f"{copy}/") for p in found.problems}
    cut = {"timing.jsonl"} if content == b"{" else set()  # a truncated line of times is ignored
    assert names == others - cut
    if content != b"3":
        return  # once is enough: pages take a second
    assert main(["report", "--runs", str(copy), "--out", str(tmp_path / "site")]) == 0
    assert f"{copy}/environment.json cannot be read" in (tmp_path / "site/index.html").read_text()


@pytest.mark.parametrize("content", ["[1, 2]", "{", "3"])
def test_a_damaged_result_is_refused(copy, tmp_path, content, capsys):
    (copy / "result.json").write_text(content)
    assert main(["results", "add", str(copy), "--into", str(tmp_path / "results")]) == 2
    again = f"remove it and `dlrnn train --resume {copy}`"
    assert f"{copy / 'result.json'} is damaged: {again}" in capsys.readouterr().err
    assert main(["train", "--resume", str(copy), "--device", "cpu"]) == 2


@pytest.mark.parametrize(
    ("lines", "said"),
    [(1, r"is damaged: it ends at step \d, and the run"), (0, "no record of a complete run")],
)
def test_records_that_end_before_their_run_are_refused(lines, said, copy):
    path = copy / "records.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:lines]))
    with pytest.raises(ValueError, match=said):
        collect(copy, unfinished=True)


def test_a_recipe_of_another_task_is_refused(tiny_run, tmp_path, capsys):
    into = ["results", "add", str(tiny_run), "--into", str(tmp_path / "results"), "--recipe"]
    assert main([*into, "table1/cumsum/dlr-1"]) == 2
    said = f"{tiny_run} is a run on shift, and table1/cumsum/dlr-1 is not"
    assert said in capsys.readouterr().err
    assert main([*into, "table1/shift/dlr-9"]) == 0
    assert "there is no recipe table1/shift/dlr-9: the tables show it" in capsys.readouterr().err


def test_a_seed_of_the_data_is_recorded(tmp_path):
    path = train(tmp_path / "run", "--task.settings.seed", "77", steps=2)
    (record,) = collect(path).records
    assert "task.settings.seed 77 (null)" in record.differs
    assert "--task.settings.seed 77" in record.command


def test_the_path_names_the_recipe_if_its_task_is_the_same(tiny_run, tmp_path):
    for place, name in (("table1/cumsum/dlr-1", SHIFT), ("table1/shift/dlr-6",) * 2):
        shutil.copytree(tiny_run, tmp_path / place / "seed-0")
        assert collect(tmp_path / place / "seed-0").records[0].recipe == name


def test_a_name_and_a_variant_can_be_given(tiny_run, tmp_path, capsys):
    into = ["--into", str(tmp_path), "--variant", "fp32 phases"]
    for more in (["--recipe", "table2/256/dlr"], []):
        assert main(["results", "add", str(tiny_run), *into, *more]) == 0
    said = "_fp32-phases_seed-0: 4 of 1000 steps of a tiny run, added\n"
    assert said in capsys.readouterr().out
    found = read_results(tmp_path, "ours")
    assert {(each.recipe, each.variant) for each in found.records} == {
        ("table2/256/dlr", "fp32 phases"),
        (SHIFT, "fp32 phases"),
    }
    sizes = {(each.size, each.steps_asked) for each in found.records}
    assert sizes == {("tiny", 1000)}, "those of the tiny scale"
    assert make_tables([found])[0].cells[SHIFT].difference("R2", "ours, fp32 phases") is None


# ---------------------------------------------------------------------------------- early stops


def made_run(
    tiny_run, path, values, *, steps, every=1000, recipe=SHIFT, overrides=(), scale="full"
):
    """A run of a recipe that went as far as `steps`, with these evaluations."""
    path.mkdir(parents=True)
    shutil.copy(tiny_run / "environment.json", path)
    config = with_overrides(recipes.scaled(recipes.get(recipe), scale), list(overrides))
    (path / "config.json").write_text(config.to_json())
    first, last = (
        {"step": step, "split": "train", "loss": 0.1, "lr": 0.1} for step in (every, steps + 50)
    )
    evaluations = [
        {"step": every * k, "split": "validation", "R2": value, "loss": 0.1}
        for k, value in enumerate(values, start=1)
    ]
    jsonl(path / "records.jsonl", [first, *evaluations, last])
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
        ([0.0] * 19, None),  # it may rise: half of the steps are needed
    ],
)
def test_a_run_that_stayed_at_0_or_1_stopped_early(values, level, tiny_run, tmp_path, capsys):
    steps = 1000 * len(values)
    run = made_run(tiny_run, tmp_path / "run", values, steps=steps)
    with pytest.raises(ValueError, match=f"{steps + 50} of 40000 steps; --unfinished records"):
        collect(run)
    (record,) = collect(run, unfinished=True).records
    assert (record.variant, record.scale, record.steps) == ("", "full", steps)
    assert record.value == pytest.approx(max(values))
    if level is None:
        assert record.stopped == ""
    else:
        least, most = LEVELS[level]
        near = f"R2 between {least} and {most} for the last half of them"
        assert record.stopped == f"early after 20000 of 40000 steps: {near}"
    assert record.is_cut == (level is None)
    into = ["--into", str(tmp_path / "results")]
    assert main(["results", "add", str(run), "--unfinished", *into]) == 0
    said = f"{steps} of 40000 steps{'' if level is None else ', stopped early'}, added\n"
    assert said in capsys.readouterr().out
    found = read_results(tmp_path / "results", "ours")
    assert found.records == [record]
    write_site(tmp_path / "site", [found], tmp_path)
    page = (tmp_path / "site" / "table1.html").read_text()
    text = f"{steps} of 40000 steps</span>"
    assert (f">stopped early: {text}" in page) == (level is not None)
    assert (f">{text}" in page) == (level is None)
    coloured = level == 1 or record.value >= 1  # complete, or at the paper's number already
    assert ('class="near"' in page) == coloured
    assert ("stopped early at 0 or 1" in page) == (level is not None)


def test_a_short_run_has_fewer_steps_than_the_paper(tiny_run, tmp_path):
    run = made_run(tiny_run, tmp_path / "run", [0.9] * 8, steps=4000, every=500, scale="short")
    (record,) = collect(run, unfinished=True).records
    assert (record.variant, record.size, record.steps_asked) == ("", "full", 40000)
    assert (record.is_cut, record.differs) == (True, "steps 4000 (40000)")
    assert "--scale short" in record.command


@pytest.mark.parametrize(
    ("changes", "stopped"),
    [("", True), ("--schedule cosine", False), ("--warmup 100", False), ("--lr 1", True)],
)
def test_a_run_with_another_schedule_did_not_stop_early(changes, stopped, tiny_run, tmp_path):
    changed = {"steps": 20000, "overrides": changes.split()}
    run = made_run(tiny_run, tmp_path / "run", [0.995] * 20, **changed)
    (record,) = collect(run, unfinished=True).records
    assert bool(record.stopped) == stopped


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
def test_changed_sizes_are_recorded(changed, variant, size, tiny_run, tmp_path):
    run = made_run(tiny_run, tmp_path / "run", [0.99] * 40, steps=40000, overrides=changed)
    (record,) = collect(run, recipe=SHIFT, unfinished=True).records
    assert (record.variant, record.size) == (variant, size)
    (named,) = collect(run, recipe=SHIFT, variant="mine", unfinished=True).records
    kept = "full" if "--model.mixer_options.dt_min" in changed else size
    assert named.size == kept, "the name of a variant does not hide its size"


def test_a_folder_of_many_runs(tiny_run, tmp_path, capsys):
    for task in ("shift", "cumsum", "sort"):
        for seed in ("0", "1"):
            path = tmp_path / "runs" / "full" / "table1" / task / "dlr-1" / f"seed-{seed}"
            settings = {"recipe": f"table1/{task}/dlr-1", "overrides": ["--seed", seed]}
            made_run(tiny_run, path, [0.5] * 40, steps=40000, **settings)
    shutil.copytree(tiny_run, tmp_path / "runs" / "other")
    (tmp_path / "runs" / "other" / "config.json").write_text("{")
    into = ["--unfinished", "--into", str(tmp_path / "results")]
    assert main(["results", "add", str(tmp_path / "runs"), *into]) == 0
    said = capsys.readouterr()
    assert said.out.count("40000 of 40000 steps, added") == 6
    assert said.err.count("left out: ") == 1
    assert len(read_results(tmp_path / "results", "ours").records) == 6


def test_a_tiny_run_that_stopped_early_says_so(tmp_path, capsys):
    out, small = tmp_path / "run", ["--scale", "tiny", "--eval_batches", "1", "--eval_every", "20"]
    more = ["--early-stop", *SILENT, "--out", str(out)]
    assert main(["train", SHIFT, *small, "--steps", "3000", "--lr", "1e-3", *more]) == 0
    assert "stopped after" in capsys.readouterr().out
    (record,) = collect(out).records
    assert record.stopped.startswith(f"early after {record.steps} of 3000 steps: R2 between 0.99")
    assert record.command.endswith("--early-stop")
    assert record.scale == "tiny"
