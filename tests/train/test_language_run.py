"""Runs of language models: training, exact resume, evaluation, generation, export."""

import json
import math
from dataclasses import replace

import pytest
import torch
from runs import QUIET, TINY_LANGUAGE, language_run, refused, weights
from support import DEVICE, tiny_books, tiny_tokenizer

from dlrnn.cli import main
from dlrnn.models import LanguageModel, ModelConfig, causal, from_pretrained
from dlrnn.train import (
    RunConfig,
    RunDirectory,
    TaskConfig,
    from_json,
    load_best,
    make_model,
    train,
    with_overrides,
)
from dlrnn.train.evaluation import generate_text
from dlrnn.train.step import held_out, scores


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_books(tmp_path_factory.mktemp("data"))


@pytest.fixture
def config(folder):
    rates = {"steps": 30, "kernel_lr": 1e-3, "weight_decay": 0.1}
    return language_run(folder, **rates, log_every=5, eval_every=15, checkpoint_every=10)


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    """A trained run."""
    path = tmp_path_factory.mktemp("runs") / "run"
    train(path, language_run(folder, steps=150, batch_size=8, eval_every=75), **QUIET)
    return path


def test_training_lowers_the_loss_and_keeps_the_best(run):
    records = RunDirectory.open(run).records()
    evaluations = [record for record in records if record["split"] == "validation"]
    assert evaluations[-1]["loss"] < 0.6 * math.log(32)
    assert evaluations[-1]["perplexity"] == pytest.approx(math.exp(evaluations[-1]["loss"]))
    result = RunDirectory.open(run).result
    assert result["metric"] == "loss"
    assert result["best"] == min(record["loss"] for record in evaluations)
    assert (run / "tokenizer.json").read_bytes() == tiny_tokenizer()


def test_evaluation_is_the_mean_over_all_tokens(run, capsys):
    """The last batch is smaller and has less weight."""
    model, task, config, _ = load_best(run, DEVICE)
    assert main(["eval", str(run), "--json", "--device", DEVICE.type]) == 0
    found = json.loads(capsys.readouterr().out)["metrics"]
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    batch = task.sample(21, split="test", device=DEVICE)
    logits = model(batch.inputs)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
    assert found["loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert 21 % config.batch_size


def test_the_causal_router_has_nearly_the_same_loss(run):
    """The thresholds learned with "top" choose about as many tokens."""
    model, task, config, _ = load_best(run, DEVICE)
    losses = []
    for each in (model, causal(model)):
        assert each.causal == (each is not model)
        losses.append(scores(each, task, held_out(task, config, "test", DEVICE))["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=0.1)


@pytest.mark.parametrize("change", [{"accumulate": 2}, {"precision": "bf16"}])
def test_micro_batches_and_bf16_change_little(config, tmp_path, change):
    losses, tensors = [], []
    for name, changes in (("plain", {}), ("changed", change)):
        train(tmp_path / name, replace(config, steps=3, **changes), **QUIET)
        losses.append([r["loss"] for r in RunDirectory.open(tmp_path / name).records()])
        tensors.append(weights(tmp_path / name))
    if "accumulate" in change:
        plain, changed = (each["model.decoder.weight"] for each in tensors)
        assert (plain - changed).abs().max() < 1e-5
    assert losses[1] == pytest.approx(losses[0], rel=1e-5 if "accumulate" in change else 0.01)
    assert losses[0] != losses[1]
    assert all(tensor.dtype == torch.float32 for tensor in tensors[1].values())


# ---------------------------------------------------------------------------------- configuration


def test_the_configuration_of_a_language_model(config):
    assert from_json(config.to_json()) == config
    changed = with_overrides(config, ["--model.experts", "2", "--model.router", "threshold"])
    assert changed.model == replace(TINY_LANGUAGE, experts=2, router="threshold")
    assert isinstance(make_model(changed, changed.make_task()), LanguageModel)
    with pytest.raises(ValueError, match="shift needs another kind of model than pg19"):
        with_overrides(config, ["--task.name", "shift"])
    with pytest.raises(ValueError, match="model of pg19 is a LanguageConfig, not a ModelConfig"):
        replace(config, model=ModelConfig("dlr", {"d_state": 4}))
    with pytest.raises(ValueError, match="mixer_options"):
        with_overrides(config, ["--model.mixer_options.d_state", "4"])


def test_a_vocabulary_that_is_too_small_raises(config, tmp_path):
    small = replace(config, model=replace(TINY_LANGUAGE, vocabulary=31))
    refused(tmp_path / "run", r"has 32 tokens, more than .* 31: say --model\.vocabulary 32", small)


# ---------------------------------------------------------------------------------- generation


def test_generate_prints_the_text(run, tmp_path, capsys):
    said = list(generate_text(run, "w0 w1 w4", tokens=8, temperature=0.0, device=DEVICE.type))
    assert len(said) == 8
    assert all(piece.startswith(" ") for piece in said)
    where = ["--device", DEVICE.type]
    assert main(["generate", str(run), "--prompt", "w0 w1 w4", "--tokens", "8", *where]) == 0
    first = capsys.readouterr().out
    assert first.startswith("w0 w1 w4 w")
    assert len(first.split()) <= 11
    options = ["--seed", "0", "--temperature", "1", "--top-p", "1"]
    main(["generate", str(run), "--prompt", "w0 w1 w4", "--tokens", "8", *where, *options])
    assert capsys.readouterr().out == first


def test_generate_needs_no_data_set(run, tmp_path):
    """The run directory contains the tokenizer."""
    there = RunDirectory.open(run)
    settings = json.loads((there.path / "config.json").read_text())
    settings["task"]["settings"]["folder"] = str(tmp_path / "gone")
    copy = tmp_path / "run"
    copy.mkdir()
    (copy / "config.json").write_text(json.dumps(settings))
    for name in ("best.safetensors", "tokenizer.json"):
        (copy / name).write_bytes((run / name).read_bytes())
    assert list(generate_text(copy, "w0", tokens=3)) == list(generate_text(run, "w0", tokens=3))


def sentence(capsys, *arguments):
    capsys.readouterr()
    assert main(["generate", *map(str, arguments), "--device", "cpu"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    return line.removeprefix("dlrnn generate: ")


def test_generate_refuses_wrong_arguments(run, config, tmp_path, capsys):
    ask = ("--prompt", "w1")
    assert sentence(capsys, run, "--prompt", " ") == "the prompt is empty: give at least one word"
    said = sentence(capsys, run, *ask, "--top-p", "1.5")
    assert said == "top_p must be above 0 and at most 1, not 1.5"
    assert "not -1.0" in sentence(capsys, run, *ask, "--temperature", "-1")
    assert "is not the folder of a run" in sentence(capsys, tmp_path, *ask)
    shift = RunConfig(TaskConfig("shift"), ModelConfig("dlr", {"d_state": 4}))
    (tmp_path / "config.json").write_text(shift.to_json())
    assert "is not a language model: it was trained on shift" in sentence(capsys, tmp_path, *ask)
    (tmp_path / "config.json").write_text(config.to_json())
    assert "has no tokenizer.json" in sentence(capsys, tmp_path, *ask)
    (tmp_path / "tokenizer.json").write_bytes(tiny_tokenizer())
    assert "best.safetensors: there is no such file" in sentence(capsys, tmp_path, *ask)


def test_export_writes_a_folder_for_from_pretrained(run, tmp_path, capsys):
    assert main(["export", str(run), str(tmp_path / "model")]) == 0
    assert capsys.readouterr().out == f"the model is in {tmp_path / 'model'}\n"
    model, task, _, _ = load_best(run, torch.device("cpu"))
    tokens = task.sample(2, split="test").inputs
    assert torch.equal(from_pretrained(tmp_path / "model")(tokens), model(tokens))
    assert (tmp_path / "model" / "tokenizer.json").read_bytes() == tiny_tokenizer()
    with pytest.raises(ValueError, match="model is an exported model; name the run that it was"):
        generate_text(tmp_path / "model", "a")
    assert main(["eval", str(tmp_path / "model")]) == 2
    assert "model is an exported model; name the run" in capsys.readouterr().err
    card = (tmp_path / "model" / "README.md").read_text()
    assert "| metric | loss |" in card
    assert '"name": "pg19"' in card
