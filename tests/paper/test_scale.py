"""Full, short and tiny runs of every recipe."""

import inspect
from dataclasses import asdict

import pytest
import torch

from dlrnn.paper.recipes import RECIPES, scaled
from dlrnn.train import make_model


def test_full_is_the_papers_run():
    assert all(scaled(recipe, "full") is recipe.config for recipe in RECIPES.values())


def test_short_has_a_tenth_of_the_steps_and_nothing_else():
    for recipe in RECIPES.values():
        short, full = asdict(scaled(recipe, "short")), asdict(recipe.config)
        assert short.pop("steps") == full.pop("steps") // 10
        assert short.pop("warmup") == full.pop("warmup") // 10
        assert short == full


def test_an_unknown_scale():
    with pytest.raises(ValueError, match="scale must be one of full, short, tiny, not 'small'"):
        inspect.unwrap(scaled)(RECIPES["table1/shift/dlr-1"], "small")  # the shape checker is first


@pytest.mark.parametrize("name", RECIPES)
def test_every_tiny_run_is_small_and_can_be_built(name):
    full, tiny = RECIPES[name].config, scaled(RECIPES[name], "tiny")
    task = tiny.make_task()
    with torch.device("meta"):
        model = make_model(tiny, task)
    assert sum(p.numel() for p in model.parameters()) < 600_000
    positions = tiny.steps * tiny.batch_size * task.input_length
    assert positions <= 2**21
    assert ("folder" in tiny.task.settings) == (not task.drawable)
    assert full.lr <= tiny.lr <= 1e-3
    assert (tiny.model.mixer, tiny.model.norm) == (full.model.mixer, full.model.norm)


@pytest.mark.parametrize("name", ["table1/shift/dlr-1", "table2/65536/dlr", "table1/cumsum/dlr-6"])
def test_tiny_keeps_what_a_model_remembers(name):
    """|lambda|^L and N / L are the paper's."""
    full, tiny = RECIPES[name].config, scaled(RECIPES[name], "tiny")

    def shares(config):
        length, options = config.task.settings["length"], config.model.mixer_options
        return length * options["dt_min"], options["d_state"] / length

    assert shares(tiny) == pytest.approx(shares(full))
