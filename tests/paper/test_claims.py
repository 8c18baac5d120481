"""Recipes of the text's claims, and of the runs that diverged: listed, built and started."""

import json
from dataclasses import replace

import pytest

import made_up
from dlrnn.cli import main
from dlrnn.paper.recipes import RECIPES
from dlrnn.train import RunDirectory

NEW = ("table1/cumsum/dlr-r-1", "table1/select-fixed/dlr-r-1", "table2/524288/dlr-prod")


@pytest.mark.parametrize("name", [*NEW, "table1/mips/attention-1"])
def test_claims_of_the_text_are_listed_and_train_at_the_tiny_scale(name, tmp_path, capsys):
    run = made_up.train(tmp_path / "run", recipe=name, steps=2)
    assert RunDirectory.open(run).result["steps"] == 2
    capsys.readouterr()
    assert main(["recipes", name, "--json"]) == 0
    [row] = json.loads(capsys.readouterr().out)
    assert (row["name"], row["metric"]) == (name, "R2")


def test_diverged_cells_are_listed(capsys):
    assert main(["recipes", "table5", "--json"]) == 0
    papers = {row["name"]: row["paper"] for row in json.loads(capsys.readouterr().out)}
    assert len(papers) == 10
    assert papers["table5/pg19/attention-64-post"] == "diverged"
    config = RECIPES["table5/pg19/attention-64-post"].config
    assert (config.model.mixer, config.model.experts, config.model.norm) == (
        "attention",
        64,
        "post",
    )


@pytest.mark.parametrize("task", ["cumsum", "select-fixed"])
def test_real_dlr_is_dlr_with_real_parameters(task):
    usual, real = (RECIPES[f"table1/{task}/{model}"].config for model in ("dlr-1", "dlr-r-1"))
    options = usual.model.mixer_options | {"real": True}
    assert real == replace(usual, model=replace(usual.model, mixer_options=options))
