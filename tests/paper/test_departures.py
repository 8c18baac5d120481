"""Every departure has a line in docs/reproduction.md, and each recipe names its own lines."""

import math
import re
from pathlib import Path

import pytest

from dlrnn.paper.recipes import RECIPES, TABLES, table4
from dlrnn.paper.recipes.departures import PATTERNS

CLAIMS = ("table1/cumsum/dlr-r-1", "table1/select-fixed/dlr-r-1", "table2/524288/dlr-prod")
PAGE = Path(__file__).parents[2] / "docs" / "reproduction.md"
LINE = re.compile(r'^\| <a id="([a-z0-9-]+)"></a>', re.MULTILINE)
GENERAL, SINGLE = "## Of all recipes and runs", "## Of single recipes"


def lines_of_the_page(title):
    """The names of the departures of a part of the page."""
    text = PAGE.read_text()
    return LINE.findall(text.split(f"{title}\n")[1].split("\n## ")[0])


def test_every_departure_is_reached_by_a_recipe_or_general():
    general, single = lines_of_the_page(GENERAL), lines_of_the_page(SINGLE)
    every = LINE.findall(PAGE.read_text())
    assert sorted(every) == sorted(general + single)
    assert len(set(every)) == len(every)
    named = {departure for recipe in RECIPES.values() for departure in recipe.departures}
    assert named == set(single) == PATTERNS.keys()
    assert len(general) > 5


def departures_by_settings(recipe):
    """What a recipe's run departs in, from its configuration alone."""
    config, model = recipe.config, recipe.config.model
    table_name, task, column = recipe.name.split("/")
    options = getattr(model, "mixer_options", {})
    kernels = ("dlr", "dss", "sgconv", "s4d", "s4")
    seg = config.task.name == "pathfinder-segmentation"
    drawn = seg or config.task.name in ("pathfinder", "path-x")
    tables45 = table_name in ("table4", "table5")
    found = {
        "exact-phases": model.mixer == "dlr",
        "learned-gain": model.mixer in kernels,
        "one-lambda": options.get("bidirectional", False) and model.mixer in ("dlr", "dss"),
        "attention-block": "attention" in model.mixer,
        "dss-frequencies": model.mixer == "dss",
        "sgconv-decay": model.mixer == "sgconv",
        "sgconv-parameters": model.mixer == "sgconv",
        "select-fixed-rate": task == "select-fixed" and "dlr" in column
        and (model.layers, options.get("real")) == (1, None) and table_name == "table1",
        "mips-batch": task == "mips",
        "mips-steps": task == "mips",
        "table6-rate": model.mixer == "attention-ff",
        "claims-without-table": recipe.name in CLAIMS,
        "listops-length": task == "listops-subtrees",
        "class-weights": seg,
        "pathfinder-checkpoint": seg,
        "pathfinder-images": drawn,
        "pathfinder-256-schedule": seg and config.task.settings["resolution"] == 256,
        "pathfinder-512-schedule": seg and config.schedule == "constant",
        "table3-other-models": table_name == "table3" and model.mixer != "dlr",
        "quoted-rows": table_name == "table4" and model.mixer != "dlr",
        "unstated-warm-up": tables45 and config.warmup == config.steps // 50,
        "steps-from-epochs": table_name == "table4" and task in table4.STEPS,
        "speech-commands-clips": task == "speech-commands",
        "language-model-training": table_name == "table5",
        "post-norm-transformer": table_name == "table5" and math.inf in recipe.paper.values(),
    }  # fmt: skip
    assert found.keys() == PATTERNS.keys()
    return {name for name, departs in found.items() if departs}


@pytest.mark.parametrize("table_name", TABLES)
def test_each_recipe_names_the_lines_where_it_departs(table_name):
    for recipe in (RECIPES[name] for name in TABLES[table_name]):
        assert set(recipe.departures) == departures_by_settings(recipe), recipe.name


def test_the_results_link_to_lines_that_exist():
    text = (PAGE.parent / "results.md").read_text()
    linked = set(re.findall(r"\]\(reproduction\.md#([a-z0-9-]+)\)", text))
    assert linked == PATTERNS.keys()
