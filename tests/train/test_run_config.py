"""The configuration of a run: JSON, the command line, checks."""

import hashlib
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from runs import QUIET, TEXTS, Own, config, own_mixer, refused

from dlrnn.models import ModelConfig
from dlrnn.paper import recipes
from dlrnn.paper.runs import changed_path
from dlrnn.train import TaskConfig, from_json, train, with_overrides


def test_learning_rate_schedules():
    constant, cosine = config(warmup=4), config(schedule="cosine", warmup=4)
    assert [constant.rate(k) for k in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    assert cosine.rate(4) == 1
    assert cosine.rate(8) == pytest.approx(0.5)
    assert cosine.rate(11) == pytest.approx(0.5 * (1 + math.cos(math.pi * 7 / 8)))
    assert config(schedule="cosine").rate(0) == 1


def test_each_length_has_its_own_warm_up_schedule_and_rate():
    stages = {"lengths": [4, 8, 16], "stage_steps": [3, 4], "stage_lr": [1e-2, 5e-3, 1e-3]}
    run = config(warmup=2, schedule="cosine", **stages)
    assert [run.stage(k) for k in range(12)] == [0] * 3 + [1] * 4 + [2] * 5
    assert run.rate(0) == run.rate(3) * 2 == run.rate(7) * 10 == 0.5
    assert run.rate(2) == 1
    assert run.rate(6) == pytest.approx(0.5 * 0.5)
    assert [stage.start for stage in config(lengths=[4, 8, 16]).stages()] == [0, 4, 8]


def test_mixers_have_lengths_in_proportion_to_the_input():
    tied, free = {"length": 64}, {"length": 10}
    run = config(
        task=TaskConfig("reverse", {"length": 32}),
        model=ModelConfig(
            "tape,sgconv,dlr", {"tape": tied, "sgconv": free, "dlr": {"d_state": 4}}, layers=3
        ),
        lengths=[8, 24, 32],
    )
    stage = run.at_stage(1)
    assert stage.task.settings == {"length": 24}
    assert stage.model.mixer_options["tape"] == {"length": 48}
    assert stage.model.mixer_options["sgconv"] == free  # the shortest input is longer
    assert run.at_stage(2).model == run.model


def test_lengths_are_lists_on_the_command_line():
    given = ["--lengths", "4,8,16", "--stage_steps", "[3,4]", "--stage_lr", "1e-2,.005,1e-3"]
    with pytest.raises(ValueError, match="stage_lr"):
        with_overrides(config(), given)
    run = with_overrides(config(), [*given[:-1], "1e-2,5e-3,1e-3"])
    assert run.lengths == [4, 8, 16]
    assert (run.stage_steps, run.stage_lr) == ([3, 4], [1e-2, 5e-3, 1e-3])
    assert with_overrides(run, ["--lengths", "null", "--stage_steps", "null", "--stage_lr", "null"])


@pytest.mark.usefixtures("unchecked")
def test_configuration_survives_json():
    tuples = TaskConfig("shift", {"length": 16, "other": (1, 2)})
    run = config(kernel_lr=np.float64(1e-5), clip=1, task=tuples)
    assert from_json(run.to_json()) == run
    assert type(run.kernel_lr) is type(run.clip) is float
    assert run.task.settings["other"] == [1, 2], "as a resumed run reads it"
    with pytest.raises(ValueError, match="stepps"):
        from_json(json.dumps({**json.loads(run.to_json()), "stepps": 3}))
    with pytest.raises(ValueError, match="is not JSON"):
        from_json("{")


def test_overrides_change_settings():
    run = config()
    changed = with_overrides(
        run, ["--steps", "7", "--task.settings.length", "32", "--model.mixer_options.d_state", "5"]
    )
    assert changed.steps == 7
    assert changed.task.settings == {"length": 32}
    assert changed.model.mixer_options == {"d_state": 5, "dt_min": 0.01, "dt_max": 0.01}
    other = with_overrides(run, ["--model.mixer", "attention", "--model.mixer_options.heads", "2"])
    assert other.model.mixer_options == {"heads": 2}
    both = ["--model.mixer", "tape,dlr", "--model.layers", "2"]
    tape, dlr = "--model.mixer_options.tape.length", "--model.mixer_options.dlr.d_state"
    stacked = with_overrides(run, [*both, tape, "16", dlr, "5"])
    assert stacked.model.mixer_options == {"tape": {"length": 16}, "dlr": {"d_state": 5}}
    assert with_overrides(stacked, [dlr, "6"]).model.mixer_options["dlr"] == {"d_state": 6}
    with pytest.raises(ValueError, match=r"mixer_options\.tape\.length must be a whole number"):
        with_overrides(stacked, [tape, "long"])


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (["--stepps", "3"], "there is no setting --stepps: did you mean --steps?"),
        (["--xyzzy", "3"], "no setting --xyzzy: see `dlrnn recipes --show RECIPE`"),
        (["--modle.mixer=dss"], "no setting --modle.mixer: did you mean --model.mixer?"),
        (["--d_state", "8"], "did you mean --model.mixer_options.d_state?"),
        (["--model.glu", "true"], "did you mean --model.mixer_options.glu?"),
        (["--bidirectionl", "1"], "did you mean --model.mixer_options.bidirectional?"),
        (["--length", "8"], "did you mean --task.settings.length?"),
        (["--steps", "few"], "--steps must be a whole number, not 'few'"),
        (["--steps=1.5"], "--steps must be a whole number, not 1.5"),
        (["--steps", "--lr", "1"], "--steps must be a whole number, and nothing was given"),
        (["--lr", "fast"], "--lr must be a number, not 'fast'"),
        (["--clip", "none"], "--clip must be a number or null, not 'none'"),
        (["--schedule", "linear"], "--schedule must be constant or cosine, not 'linear'"),
        (["--model.layers", "two"], "--model.layers must be a whole number, not 'two'"),
        (["--task", "3", "--task.name", "shift"], "--task must be a JSON object, not 3"),
        (["--task.settings", "[1]"], "--task.settings must be a JSON object, not [1]"),
        (["--task.settings.length"], "--task.settings.length must be a value, and nothing"),
        (["--steps", "0"], "steps must be at least 1, not 0"),
        (["--lr", "-1"], "lr must be more than 0 and finite, not -1.0"),
        (["--accumulate", "3"], "cannot be divided into 3 micro-batches"),
        (["--model.mixer", "dlrr"], "did you mean 'dlr'"),
        (["--model.mixer_options.d_sate", "3"], "did you mean 'd_state'"),
    ],
)
def test_wrong_overrides_raise(wrong, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        with_overrides(config(), wrong)


def test_options_that_are_text_stay_text():
    run = own_mixer(Own, TEXTS)
    assert from_json(run.to_json()) == run
    assert with_overrides(run, ["--steps", "9"]).model.mixer_options == TEXTS
    given = ["--model.mixer_options.order", '"7"', "--model.mixer_options.rate=2"]
    assert with_overrides(run, given).model.mixer_options == TEXTS | {"order": "7", "rate": 2}


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"steps": 3.0}, "steps"),
        ({"schedule": "linear"}, "schedule"),
        ({"precision": "fp16"}, "precision"),
        ({"task": TaskConfig("shift", {"seed": Path("a")})}, "is not JSON"),
        ({"task": TaskConfig("shift", {"length": math.nan})}, "not a finite number"),
        ({"seed": 2**63}, "seed must have 64 bits at most"),
        ({"lr": math.inf}, "lr must be"),
        ({"weight_decay": math.nan}, "weight_decay must be"),
        ({"deterministic": "yes"}, "deterministic must be true or false"),
        ({"deterministic": 1}, "deterministic must be true or false"),
        ({"lengths": [8, 32]}, r"length 16 \(--task.settings.length\), not 32"),
        ({"lengths": [16, 8]}, "lengths must be whole numbers of at least 1 that grow"),
        ({"lengths": []}, "lengths must be whole numbers of at least 1 that grow"),
        ({"stage_lr": [1e-3]}, "set lengths too"),
        ({"lengths": [8, 16], "stage_steps": [3, 9]}, "stage_steps must be 1 numbers"),
        ({"lengths": [8, 16], "stage_steps": [12]}, "leave some of the 12 steps"),
        ({"lengths": [8, 16], "stage_lr": [1e-3, 0.0]}, "stage_lr must be 2 finite numbers"),
        ({"lengths": [8, 16], "steps": 1}, "steps must be at least 2"),
        ({"model": ModelConfig("dlr", {"d_state": "4"})}, "d_state must be a whole number"),
        ({"model": ModelConfig("dlr", {"d_state": 2**40})}, "d_state must be at most"),
    ],
    ids=str,
)
def test_wrong_settings_make_no_folder(wrong, sentence, tmp_path, unchecked):
    with pytest.raises(ValueError, match=sentence):
        train(tmp_path / "run", config(**wrong), **QUIET)
    assert not (tmp_path / "run").exists()


def test_configurations_without_the_setting_deterministic_are_read():
    """Older configurations lack it; digests and names of folders must stay the same."""
    run = config(deterministic=True)
    free = replace(run, deterministic=False)
    complete = json.loads(free.to_json())
    assert complete.pop("deterministic") is False
    for later in ("lengths", "stage_steps", "stage_lr"):
        assert complete.pop(later) is None
    assert free.identity() == complete
    assert from_json(json.dumps(complete)) == from_json(free.to_json()) == free
    assert run.identity() == {**complete, "deterministic": True}
    assert from_json(run.to_json()) == run
    name = changed_path(recipes.get("table1/shift/attention-1"), "runs", "full", free).name
    digest = hashlib.sha256((json.dumps(complete, indent=1) + "\n").encode()).hexdigest()
    assert name == f"seed-0-{digest[:8]}"
    assert with_overrides(free, ["--deterministic", "true"]) == run
    assert with_overrides(run, ["--deterministic", "false"]) == free


def test_a_configuration_of_another_type_is_refused(tmp_path, unchecked):
    refused(tmp_path / "run", "RunConfig, as recipe.config is, not a dict", {"steps": 1})
