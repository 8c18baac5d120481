"""Table 5: its numbers, its settings, its parameter counts, and all of it in small."""

import math
from dataclasses import replace

import pytest
import torch
from support import DEVICE, tiny_books

from dlrnn.paper.numbers import as_in_paper, published, short, table
from dlrnn.paper.recipes import RECIPES, TABLES
from dlrnn.paper.recipes import scale as scales
from dlrnn.paper.reproduce import reproduce
from dlrnn.train import make_model

[STATED] = published()["hyperparameters"]["language model (table 5)"]
ROWS = table("table5_language_model")["rows"]
OURS = {"DLR": "dlr", "Transformer": "attention"}


def name(row, norm):
    return f"table5/pg19/{OURS[row['model']]}-{row['experts']}-{norm}"


def test_every_number_has_a_recipe():
    stated = {
        name(row, norm): {"train_loss": losses[0], "loss": losses[1]}
        for row in ROWS
        for norm in ("pre", "post")
        if (losses := row[f"{norm}_norm"]) is not None
    }
    assert {name: RECIPES[name].paper for name in TABLES["table5"]} == stated
    assert not any("attention" in each and "post" in each for each in stated)  # diverged


@pytest.mark.parametrize("name", TABLES["table5"])
def test_the_papers_settings(name):
    recipe = RECIPES[name]
    config, model = recipe.config, recipe.config.model
    ours = {
        "L": config.make_task().input_length,
        "layers": model.layers,
        "H": model.d_model,
        "N": model.d_state,
        "dt_min": model.dt_min,
        "dt_max": model.dt_max,
        "lr": config.lr,
        "dlr_lr": config.kernel_lr,
        "batch": config.batch_size,
        "steps": config.steps,
        "wd": config.weight_decay,
        "kernel": model.kernel_length,
        "dropout": model.dropout,
        "embedding": model.d_embedding,
        "transformer_heads": f"{model.heads}x{model.d_head}",
    }
    stated = {key: value for key, value in STATED.items() if key in ours}
    assert ours == stated
    assert STATED.keys() - ours.keys() == {"task", "epochs", "tied"}
    assert config.eval_every == config.steps // STATED["epochs"]
    assert model.router == "top"
    assert 60 < recipe.cost < 60 * 24 * 7


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['model']}-{row['experts']}")
def test_parameter_counts(row):
    config = RECIPES[name(row, "pre")].config
    with torch.device("meta"):
        count = sum(p.numel() for p in make_model(config, config.make_task()).parameters())
    number, unit = float(row["params"][:-1]), {"M": 1e6, "B": 1e9}[row["params"][-1]]
    value = count / unit * (10 if unit == 1e9 else 1)
    assert number * (10 if unit == 1e9 else 1) in (round(value), math.floor(value))


def test_losses_are_shown_as_they_are():
    assert as_in_paper("loss", 2.5) == 2.5
    assert as_in_paper("perplexity", 12.0) == 12.0
    assert short({"train_loss": 2.714, "loss": 2.876}) == "2.71 / 2.88"


def test_all_of_it_in_small(tmp_path, monkeypatch):
    """`dlrnn reproduce table5 --scale tiny`, with a set of a language of 30 words in data/pg19."""
    monkeypatch.chdir(tmp_path)
    options = {"scale": "tiny", "out": "runs", "device": DEVICE.type}
    options |= {"show": False, "writer": "none"}
    [row] = reproduce("table5", only="dlr-16-pre", **options)
    make = "`dlrnn data import pg19 PATH`"
    assert row.status == f"broken: there is no data/pg19: make it with {make}"
    (tmp_path / "data").mkdir()
    tiny_books(tmp_path, length=128, words=2000).rename(tmp_path / "data" / "pg19")
    tiny = scales.tiny

    def shorter(config):
        few = {"steps": 4, "eval_every": 2, "checkpoint_every": 4}
        return replace(tiny(config), **few, model=replace(tiny(config).model, vocabulary=32))

    assert tiny(RECIPES["table5/pg19/dlr-16-pre"].config).task.settings["held_out"] == 64
    monkeypatch.setattr(scales, "tiny", shorter)
    for only in ("dlr-16-post", "attention-1-pre"):
        [row] = reproduce("table5", only=only, **options)
        assert row.status == "done"
        assert 0 < row.yours["loss"] < 2 * math.log(32)
    text = (tmp_path / "runs" / "tiny" / "table5.md").read_text()
    assert "| table5/pg19/dlr-16-post | train_loss / loss | 2.7 / 2.86 | " in text
