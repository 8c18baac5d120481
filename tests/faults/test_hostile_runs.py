"""Untrusted run directories: nothing in their files is run, trusted or printed raw."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from hostile import (
    CHARACTERS,
    EVERYTHING,
    MIXER_PATH,
    RECIPE,
    RUN_IN_SWEEP,
    SMALL,
    WHERE,
    as_recipe,
    assert_refused,
    command_line,
    hostile_configs,
    plant_canary,
    python_in,
    run_command,
    side_files,
    stop,
    tree,
    watched,
)

from dlrnn.models import from_pretrained
from dlrnn.train import load_best, train

pytestmark = pytest.mark.usefixtures("unchecked")

TABLES = ("recipes", "reproduce", "sweep")
STATUS = dict.fromkeys(
    ("eval", "export", "generate", "resume", "report", "results", *TABLES), 2
)  # of every command on a hostile config.json
IMPORTS_MIXER = ("eval", "export", "resume")  # the others have no use for the class


def arguments(command, base):
    """The command line that reads the run in `base`, and writes to `base`/out at most."""
    table = ["--scale", "tiny", "--out", base / "runs"]
    tables = {
        "recipes": ["recipes", RECIPE, *table],
        "reproduce": ["reproduce", "table1", "--only", "shift/dlr-1", *table, "--device", "cpu"],
        "sweep": ["sweep", RECIPE, *table, "--device", "cpu"],
    }
    return tables.get(command) or command_line(command, base / "run", base / "out")


def place(command, base):
    """Where a command looks for the run."""
    return base / "runs" / RUN_IN_SWEEP if command in TABLES else base / "run"


@pytest.fixture(scope="module")
def done(trained, tmp_path_factory):
    path = Path(shutil.copytree(trained, tmp_path_factory.mktemp("runs") / "run"))
    assert run_command(["eval", path, "--device", "cpu"], seconds=60).status == 0
    return path


@pytest.fixture
def base(tmp_path, monkeypatch):
    """The current folder; a module that must not be imported lies in it."""
    plant_canary(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def copied(command, base, done, request):
    """The run that a command is tried on: complete, but stopped for commands that continue it."""
    source = request.getfixturevalue("language") if command == "generate" else done
    run = Path(shutil.copytree(source, place(command, base)))
    if command in TABLES:
        as_recipe(run)
    return run


def row_of(output):
    """What a table says of the run, from its JSON."""
    [row] = [row for row in json.loads(output) if RECIPE in (row.get("name"), row.get("recipe"))]
    return f"{row.get('said') or ''} {row['status']}".strip()


@pytest.mark.parametrize("command", STATUS)
def test_a_valid_run_is_read(command, base, done, request):
    """Without this, every refusal below could be of something else."""
    run = copied(command, base, done, request)
    if command == "resume":
        stop(run)
    extra = ["--json"] if command in TABLES else []
    outcome = run_command([*arguments(command, base), *extra], seconds=60)
    assert outcome.status == 0, outcome
    assert command not in TABLES or row_of(outcome.out) == "done"
    assert not outcome.faults()


def refused(command, outcome):
    """What is wrong with the answer to a hostile config.json; "" if nothing is."""
    if outcome.status != STATUS[command]:
        return f"exit status {outcome.status}, not {STATUS[command]}"
    if command in TABLES and outcome.out.strip():
        said = row_of(outcome.out)
        if said in ("done", "not run") or said.endswith(" steps"):
            return f"the table says {said!r}"
        return "the sentence is too long" if len(said) > 1000 else ""
    lines = [line for line in outcome.err.splitlines() if line.strip()]
    if len(lines) != 1:
        return f"{len(lines)} lines on stderr"
    if len(lines[0]) > 1000:
        return "the sentence is too long"
    return (
        ""
        if "config.json" in lines[0] or "/run" in lines[0]
        else f"the file is not named: {lines[0][:200]}"
    )


@pytest.mark.parametrize("command", STATUS)
def test_hostile_configurations_are_refused_in_one_sentence(command, base, done, request):
    run = copied(command, base, done, request)
    if command in ("resume", "reproduce", "sweep"):
        stop(run)  # a command that accepts the configuration would train
    valid = json.loads((run / "config.json").read_text())
    marker, failures, count = base / "instantiated", [], 0
    offset = list(STATUS).index(command)  # the short form: a third, another one for each command
    extra = ["--json"] if command in TABLES else []
    before = tree(run)
    del before["config.json"]
    for number, (name, content) in enumerate(hostile_configs(valid, marker)):
        if not EVERYTHING and (number + offset) % 3:
            continue
        count += 1
        (run / "config.json").write_bytes(content)
        outcome = run_command([*arguments(command, base), *extra])
        wrong = outcome.faults()
        if not name.startswith(MIXER_PATH):
            wrong += [refused(command, outcome)]
        elif command in IMPORTS_MIXER:
            wrong += [refused(command, outcome), untrusted(name, outcome)]
        if marker.exists() or (base / "imported").exists():
            wrong += ["it ran"]
            marker.unlink(missing_ok=True)
            (base / "imported").unlink(missing_ok=True)
        after = tree(run)
        after.pop("config.json", None)
        if after != before:
            changed = sorted(k for k in before | after if before.get(k) != after.get(k))
            wrong += [f"the run was written to: {changed}"]
            shutil.rmtree(run)
            copied(command, base, done, request)
            if command in ("resume", "reproduce", "sweep"):
                stop(run)
            before = tree(run)
            del before["config.json"]
        if wrong := [each for each in wrong if each]:
            failures.append(f"{name}: {'; '.join(wrong)}")
    assert count >= 60
    outcome = "\n".join(failures)
    assert not failures, f"dlrnn {command}: {len(failures)} of {count} configurations\n{outcome}"


def untrusted(name, outcome):
    """A refusal to import names the path and the flag, if the path is not in dlrnn."""
    path = name.removeprefix(MIXER_PATH)
    foreign = path in ("os.system", "subprocess.Popen", "canary.Layer", "torch.hub.load")
    named = path in outcome.err and "--trust" in outcome.err
    return "" if named or not foreign else "the refusal names not both the path and --trust"


@pytest.mark.parametrize("command", TABLES)
def test_tables_print_hostile_text_as_text(command, base, done, request):
    run = copied(command, base, done, request)
    stop(run)
    valid, failures = json.loads((run / "config.json").read_text()), []
    for name, mark in CHARACTERS.items():
        for where in ("task", "mixer", "key"):
            config = json.loads(json.dumps(valid))
            if where == "task":
                config["task"]["name"] = f"shift{mark}"
            elif where == "mixer":
                config["model"]["mixer"] = f"dlr{mark}"
            else:
                config[f"seed{mark}"] = 1
            (run / "config.json").write_text(json.dumps(config))
            outcome = run_command(arguments(command, base))
            wrong = outcome.faults()
            if outcome.status != STATUS[command]:
                wrong.append(f"exit status {outcome.status}")
            if wrong:
                failures.append(f"{name} in the {where}: {'; '.join(wrong)}")
    assert not failures, "\n".join(failures)


# ---------------------------------------------------------------------------------- other files

READERS = ("report", "results", "eval", "resume", "recipes", "export")
READ_BY = {
    "eval": ("result.json", "records.jsonl", "test.json", "eval-test.json"),
    "resume": ("result.json", "environment.json", "records.jsonl", "timing.jsonl"),
    "recipes": ("result.json", "records.jsonl", "test.json"),
    "export": ("result.json", "records.jsonl", "test.json"),
}
SHORT_FORM = {"eval": 29, "report": 7, "resume": 5, "results": 5, "recipes": 1, "export": 2}
"""The short form takes every N-th file: each is no multiple of the period of the corpus."""


@pytest.mark.parametrize("command", READERS)
def test_hostile_side_files_give_no_traceback(command, base, done, request):
    original = copied(command, base / "original", done, request)
    if command == "resume":
        stop(original)
    failures = []
    every = [each for each in side_files(done) if each[0] in READ_BY.get(command, (each[0],))]
    for name, what, content in every if EVERYTHING else every[:: SHORT_FORM[command]]:
        run = place(command, base)
        shutil.copytree(original, run, dirs_exist_ok=True)
        (run / name).write_bytes(content)
        outcome = run_command(arguments(command, base))
        wrong = outcome.faults()
        if not isinstance(outcome.status, str) and outcome.status not in (0, 2):
            wrong.append(f"exit status {outcome.status}: {outcome.text[-200:]}")
        if (base / "imported").exists():
            wrong.append("it ran")
        if wrong:
            failures.append(f"{name}, {what}: {'; '.join(wrong)}")
        shutil.rmtree(run)
        shutil.rmtree(base / "out", ignore_errors=True)
    outcome = "\n".join(failures)
    assert not failures, f"dlrnn {command}: {len(failures)} files\n{outcome}"


NAMES = [f"a{mark}" for mark in CHARACTERS.values() if "/" not in mark] + ["a[/foo]", "[red]"]


@pytest.mark.parametrize("command", ["eval", "export", "resume", "report", "results", "recipes"])
def test_names_of_folders_are_printed_without_control_characters(command, base, done, request):
    failures = []
    for name in NAMES[::4] if command == "eval" and not EVERYTHING else NAMES:
        here = base / name
        run = copied(command, here, done, request)
        if command == "resume":
            stop(run)
        outcome = run_command(arguments(command, here), seconds=60)
        if outcome.status != 0 or outcome.faults():
            failures.append(f"{name!r}: exit status {outcome.status}, {outcome.faults()}")
        (run / "config.json").write_text('{"task": 3}')
        outcome = run_command(arguments(command, here))
        if outcome.status != STATUS[command] or outcome.faults():
            failures.append(f"{name!r}, damaged: exit status {outcome.status}, {outcome.faults()}")
        shutil.rmtree(run)
        outcome = run_command(arguments(command, here))
        if outcome.faults():
            failures.append(f"{name!r}, absent: {outcome.faults()}")
    assert not failures, "\n".join(failures)


# ---------------------------------------------------------------------------------- trust

LAYER = """
import torch


class MyLayer(torch.nn.Linear):
    def __init__(self, d_model):
        super().__init__(d_model, d_model)
"""
OWN = "canary_mixer.MyLayer"  # which `watched` reports


@pytest.fixture
def user_run(base):
    """A run of a user's mixer, which is not imported any more."""
    (base / "canary_mixer.py").write_text(LAYER)
    at = next(place for place, each in enumerate(SMALL) if "d_state" in each)
    given = [*SMALL[:at], *SMALL[at + 2 :]]
    command = ["train", RECIPE, *given, "--out", base / "run", *WHERE, "--model.mixer", OWN]
    outcome = run_command(command, seconds=60)
    assert outcome.status == 0, "what is typed on the command line needs no flag"
    assert f"import {OWN.partition('.')[0]}" in outcome.events
    return base / "run"


@pytest.mark.parametrize("command", IMPORTS_MIXER)
def test_a_mixer_named_in_a_file_needs_trust(command, user_run, base):
    if command == "resume":
        stop(user_run)
    outcome = run_command(arguments(command, base))
    assert_refused(outcome, OWN, "--trust")
    outcome = run_command([*arguments(command, base), "--trust"], seconds=60)
    assert outcome.status == 0, outcome
    assert any("canary_mixer" in each for each in outcome.events)


@pytest.mark.parametrize("command", ["report", "results"])
def test_a_run_is_reported_without_importing_its_mixer(command, user_run, base):
    outcome = run_command(arguments(command, base))
    assert outcome.status in (0, 2)
    assert not outcome.faults()


def test_python_needs_trust_too(user_run, base):
    assert run_command(["export", user_run, base / "model", "--trust"], seconds=60).status == 0
    for read in (
        lambda **how: load_best(user_run, torch.device("cpu"), **how),
        lambda **how: from_pretrained(base / "model", **how),
        lambda **how: train(stop(user_run), device="cpu", show=False, writer="none", **how),
    ):
        with watched() as events, pytest.raises(ValueError, match=r"(?i)trust") as caught:
            read()
        assert not events
        assert OWN in str(caught.value)
        with watched() as events:
            assert read(trust=True)
        assert events


# ---------------------------------------------------------------------------------- current folder

SHADOWS = ("torch", "numpy", "json", "rich", "safetensors", "dlrnn")


def shadowed(folder, *given):
    """Run the command in a folder with modules that have the names of installed ones."""
    for name in SHADOWS:
        text = f"open({str(folder / 'shadowed')!r}, 'a').write({name!r})\nraise SystemExit(77)\n"
        (folder / f"{name}.py").write_text(text)
    code = "import sys; from dlrnn.cli import main; sys.exit(main())"
    printed = python_in(folder, code, *given, silent=False)
    shadow = folder / "shadowed"
    assert not shadow.exists(), f"{shadow.read_text()} of the current folder was run"
    return printed


def test_the_current_folder_shadows_no_installed_package(tmp_path):
    assert "not run" in shadowed(tmp_path, "recipes", RECIPE, "--scale", "tiny")


def test_processes_of_a_sweep_are_not_shadowed_either(tmp_path):
    few = [*SMALL, "--steps", "1", "--out", tmp_path / "runs", "--device", "cpu", "--json"]
    [row] = json.loads(shadowed(tmp_path, "sweep", RECIPE, *few))
    assert row["status"] == "done", row


def test_a_command_leaves_the_current_folder_off_the_front_of_the_path(base, monkeypatch):
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    assert run_command(["recipes", RECIPE, "--scale", "tiny"]).status == 0
    first = [Path(each or ".").resolve() for each in sys.path[:1]]
    assert first != [base.resolve()]
