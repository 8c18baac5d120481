"""Untrusted run directories: nothing in their files is run, trusted or printed raw."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from corpus import CHARACTERS, MIXER_PATH, hostile_configs, marked, plant_canary, side_files
from damage import (
    EVERYTHING,
    RECIPE,
    SMALL,
    TABLES,
    WHERE,
    command_line,
    edit,
    plant,
    run_below,
    stop,
    tree,
)
from harness import assert_refused, run_command, run_well, watched

import dlrnn
from dlrnn.models import from_pretrained
from dlrnn.train import load_best, train

COMMANDS = ("eval", "export", "generate", "resume", "report", "results", *TABLES)
FOREIGN = ("os.system", "subprocess.Popen", "canary.Layer", "torch.hub.load")  # mixers
IMPORTS_MIXER = ("eval", "export", "resume")  # the others have no use for the class
STOPPED = ("resume", "reproduce", "sweep")  # if these accept a configuration, they train


@pytest.fixture
def base(tmp_path, monkeypatch):
    """The current folder; a module that must not be imported lies in it."""
    plant_canary(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def with_json(command, base):
    """The arguments of a command, whose table is JSON."""
    return [*command_line(command, base), *(["--json"] if command in TABLES else [])]


def row_of(output):
    """What a table says of the run, from its JSON."""
    [row] = [row for row in json.loads(output) if RECIPE in (row.get("name"), row.get("recipe"))]
    return f"{row.get('said') or ''} {row['status']}".strip()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_valid_run_is_read(command, base, copied):
    """Without this, every refusal below could be of something else."""
    copied(command, base)
    outcome = run_well(with_json(command, base))
    assert command not in TABLES or row_of(outcome.out) == "done"


# ---------------------------------------------------------------------------------- config.json


def assert_answer(command, outcome):
    """The answer to a hostile config.json is one sentence, or a row of a table."""
    assert (outcome.status, outcome.faults()) == (2, []), outcome
    if command in TABLES and outcome.out.strip():
        said = row_of(outcome.out)
        assert said not in ("done", "not run")
        assert not said.endswith(" steps")
    else:
        [said] = [line for line in outcome.err.splitlines() if line.strip()]
        assert "config.json" in said or "/run" in said, "the file is not named"
    assert len(said) <= 1000


@pytest.mark.parametrize("command", COMMANDS)
def test_hostile_configurations_are_refused_in_one_sentence(command, base, copied, case):
    run = copied(command, base, STOPPED)
    config, marker = run / "config.json", base / "instantiated"
    every = list(hostile_configs(json.loads(config.read_text()), marker))
    if not EVERYTHING:  # a third, another one for each command
        every = [each for k, each in enumerate(every) if (k + COMMANDS.index(command)) % 3 == 0]
    assert len(every) >= 60
    config.unlink()
    before = tree(run)
    for name, content in every:
        with case(name):
            config.write_bytes(content)
            outcome = run_command(with_json(command, base))
            config.unlink()
            assert tree(run) == before, "the run was written to"
            assert not marker.exists()
            assert not (base / "imported").exists()
            assert not outcome.faults(), outcome
            path = name.removeprefix(MIXER_PATH)
            if path == name or command in IMPORTS_MIXER:
                assert_answer(command, outcome)
            if path in FOREIGN and command in IMPORTS_MIXER:
                assert path in outcome.err
                assert "--trust" in outcome.err


@pytest.mark.parametrize("command", TABLES)
def test_tables_print_hostile_text_as_text(command, base, copied, case):
    config = copied(command, base, TABLES) / "config.json"
    valid = config.read_text()
    for place, value in marked("model.mixer_options"):
        with case(f"{place} {value}"):
            config.write_text(valid)
            edit(config, place, value)
            outcome = run_command(command_line(command, base))
            assert (outcome.status, outcome.faults()) == (2, []), outcome


@pytest.mark.parametrize("command", ["eval", "export", "resume", "report", "results"])
@pytest.mark.parametrize("kind", ["folder", "pipe", "device"])
def test_a_config_that_is_no_file_is_refused(command, kind, base, copied):
    path = plant(copied(command, base, ()) / "config.json", kind)
    fifo = path if kind == "pipe" else None
    assert_refused(run_command(command_line(command, base), fifo=fifo), "config.json")


# ---------------------------------------------------------------------------------- other files

READ_BY = {
    "eval": ("result.json", "records.jsonl", "test.json", "eval-test.json"),
    "resume": ("result.json", "environment.json", "records.jsonl", "timing.jsonl"),
    "recipes": ("result.json", "records.jsonl", "test.json"),
    "export": ("result.json", "records.jsonl", "test.json"),
}
SHORT_FORM = {"eval": 29, "report": 7, "resume": 5, "results": 5, "recipes": 1, "export": 2}
"""The short form takes every N-th file: each is no multiple of the period of the corpus."""


@pytest.mark.parametrize("command", SHORT_FORM)
def test_hostile_side_files_give_no_traceback(command, base, made, copied, case):
    original, run = copied(command, base / "original"), run_below(base, command)
    every = side_files(made / "run")
    every = [each for each in every if each[0] in READ_BY.get(command, (each[0],))]
    for name, what, content in every if EVERYTHING else every[:: SHORT_FORM[command]]:
        with case(f"{name}, {what}"):
            shutil.copytree(original, run, dirs_exist_ok=True)
            (run / name).write_bytes(content)
            outcome = run_command(command_line(command, base))
            shutil.rmtree(run)
            shutil.rmtree(base / "out", ignore_errors=True)
            assert not outcome.faults(), outcome
            assert outcome.status in (0, 2), outcome
            assert not (base / "imported").exists()


NAMES = [f"a{mark}" for mark in CHARACTERS.values() if "/" not in mark] + ["a[/foo]", "[red]"]


@pytest.mark.parametrize("command", SHORT_FORM)
def test_names_of_folders_are_printed_without_control_characters(command, base, copied, case):
    for name in NAMES[::4] if command == "eval" and not EVERYTHING else NAMES:
        with case(repr(name)):
            run, arguments = copied(command, base / name), command_line(command, base / name)
            run_well(arguments)
            (run / "config.json").write_text('{"task": 3}')
            outcome = run_command(arguments)
            assert (outcome.status, outcome.faults()) == (2, []), outcome
            shutil.rmtree(run)
            assert not run_command(arguments).faults()


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
    assert_refused(run_command(command_line(command, base)), OWN, "--trust")
    outcome = run_command([*command_line(command, base), "--trust"], seconds=60)
    assert outcome.status == 0, outcome
    assert any("canary_mixer" in each for each in outcome.events)


@pytest.mark.parametrize("command", ["report", "results"])
def test_a_run_is_reported_without_importing_its_mixer(command, user_run, base):
    outcome = run_command(command_line(command, base))
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


def python_in(folder, code, *arguments):
    """What code prints when it runs in a folder, which is not on the import path."""
    source = str(Path(dlrnn.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, *map(str, arguments)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout.strip(), done.stderr


NUMBA = "import dlrnn.tasks, numba; print(numba.config.CACHE_DIR, numba.config.DEBUG)"
FIGURE = (
    "from dlrnn.common.figures import new_figure; new_figure(1, 1); import matplotlib;"
    "print(matplotlib.rcParams['text.usetex'])"
)
SETTINGS = [
    (".numba_config.yaml", "cache_dir: here\ndebug: 1\n", NUMBA, "0"),
    (".numba_config.yaml", "debug: 1\n", f"{NUMBA}; import yaml; yaml.safe_load('a: 1')", "0"),
    ("matplotlibrc", "text.usetex: True\n", FIGURE, "False"),
]


@pytest.mark.parametrize(("name", "settings", "code", "expected"), SETTINGS)
def test_libraries_read_no_settings_of_the_current_folder(name, settings, code, expected, tmp_path):
    """They could name the folder of numba's cache, which holds pickles, or run LaTeX."""
    (tmp_path / name).write_text(settings)
    assert python_in(tmp_path, code) == (expected, "")


SHADOWS = ("torch", "numpy", "json", "rich", "safetensors", "dlrnn")


@pytest.fixture
def shadowed(tmp_path):
    """Run the command in a folder with modules that have the names of installed ones."""
    shadow = tmp_path / "shadowed"
    for name in SHADOWS:
        text = f"open({str(shadow)!r}, 'a').write({name!r})\nraise SystemExit(77)\n"
        (tmp_path / f"{name}.py").write_text(text)

    def shadowed(*given):
        code = "import sys; from dlrnn.cli import main; sys.exit(main())"
        printed, _ = python_in(tmp_path, code, *given)
        assert not shadow.exists(), f"{shadow.read_text()} of the current folder was run"
        return printed

    return shadowed


def test_the_current_folder_shadows_no_installed_package(shadowed):
    assert "not run" in shadowed("recipes", RECIPE, "--scale", "tiny")


def test_processes_of_a_sweep_are_not_shadowed_either(shadowed, tmp_path):
    few = [*SMALL, "--steps", "1", "--out", tmp_path / "runs", "--device", "cpu", "--json"]
    [row] = json.loads(shadowed("sweep", RECIPE, *few))
    assert row["status"] == "done", row


def test_a_command_leaves_the_current_folder_off_the_front_of_the_path(base, monkeypatch):
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    run_well(["recipes", RECIPE, "--scale", "tiny"])
    first = [Path(each or ".").resolve() for each in sys.path[:1]]
    assert first != [base.resolve()]
