"""Every recipe against the paper: its numbers, its hyper-parameters, its parameter counts."""

import inspect
import math
from dataclasses import asdict, replace

import pytest
import torch
from support import run_python

from dlrnn.paper import recipes
from dlrnn.paper.numbers import METRICS, as_in_paper, published, row_of, short, table
from dlrnn.paper.recipes import RECIPES, TABLES, scaled, table1, table2, table3, table4
from dlrnn.train import make_model

HYPER = published()["hyperparameters"]
ATOMIC, HIGHER, CLASSES = (rows for name, rows in HYPER.items() if "5" not in name)
ATOMIC_COLUMNS = {
    "table1_atomic": table1.COLUMNS,
    "table6_param_tied": table1.COLUMNS_OF_TABLE_6,
}
WORKS = "table1/select-fixed/dlr-1-works"
LONGER = "table1/mips/attention-1-longer"
CLAIMS = {
    "table1/cumsum/dlr-r-1": {"R2": 1.0},
    "table1/select-fixed/dlr-r-1": {"R2": 0.0},
    "table2/524288/dlr-prod": {"R2": 1.0},
}
"""Claims of the paper's text without a table."""
[STATED_LANGUAGE] = HYPER["language model (table 5)"]
LANGUAGE = table("table5_language_model")["rows"]


def language_name(row, norm):
    mixer = {"DLR": "dlr", "Transformer": "attention"}[row["model"]]
    return f"table5/pg19/{mixer}-{row['experts']}-{norm}"


def ours(names, title):
    """Our name of a title of the paper."""
    return next(name for name, known in names.items() if title in (known, known[0]))


def published_r2():
    """The paper's R2 by the name of the recipe: Tables 1, 2 and 6."""
    found = {WORKS: {"R2": 0.97}, LONGER: {"R2": 0.9}, **CLAIMS}
    for key, columns in ATOMIC_COLUMNS.items():
        for column, values in zip(columns, table(key)["columns"], strict=True):
            for task, value in values["R2"].items():
                found[f"{key[:6]}/{ours(table1.TASKS, task)}/{column}"] = {"R2": value}
    for row in table("table2_shift_scale")["rows"]:
        for length, value in row["R2"].items():
            found[f"table2/{length}/{ours(table2.MODELS, row['model'])}"] = {"R2": value}
    return found


def published_metrics():
    """The paper's other metrics by the name of the recipe: Tables 3, 4 and 5."""
    found = {}
    for row in table("table3_higher_order")["rows"]:
        for task in table("table3_higher_order")["columns"]:
            if values := row[task]:
                scores = {key: values[key] for key in values if key != "relative_time"}
                found[f"table3/{task.lower()}/{ours(table3.MODELS, row['model'])}"] = scores
    for row in table("table4_classification")["rows"]:
        for task, title in table4.TASKS.items():
            if (value := row[title]) is not None:
                found[f"table4/{task}/{ours(table4.MODELS, row['model'])}"] = {"accuracy": value}
    for row in LANGUAGE:
        for norm in ("pre", "post"):
            losses = row[f"{norm}_norm"] or (math.inf, math.inf)  # it diverged
            found[language_name(row, norm)] = dict(zip(("train_loss", "loss"), losses, strict=True))
    return found


def test_every_number_of_the_paper_has_a_recipe():
    numbers = published_r2() | published_metrics()
    assert {name: recipe.paper for name, recipe in RECIPES.items()} == numbers
    assert all(name.startswith(f"{key}/") for key, names in TABLES.items() for name in names)
    assert "table4/path-x/attention" not in numbers, "the Transformer failed"
    diverged = [each for each in numbers if math.inf in numbers[each].values()]
    assert diverged == [f"table5/pg19/attention-{experts}-post" for experts in (1, 16, 64)]


# ---------------------------------------------------------------------------------- settings


def settings(config):
    """A run in the words of the paper's tables."""
    options = config.model.mixer_options
    return {
        "L": config.make_task().input_length,
        "layers": config.model.layers,
        "H": config.model.d_model,
        "N": options.get("d_state"),
        "dt_min": options.get("dt_min"),
        "dt_max": options.get("dt_max"),
        "lr": config.lr,
        "batch": config.batch_size,
        "steps": config.steps,
        "wd": config.weight_decay,
        "kernel": options.get("kernel_length"),
        "dropout": options.get("dropout", 0),
    }


def assert_as_published(config, row):
    ours = settings(config)
    for name in row.keys() & ours.keys():
        assert ours[name] == pytest.approx(row[name], rel=1e-12), name


@pytest.mark.parametrize("column", table1.COLUMNS)
@pytest.mark.parametrize("task", table1.TASKS)
def test_table_1_has_the_papers_settings(task, column):
    config = RECIPES[f"table1/{task}/{column}"].config
    model = {"dlr": "DLR", "dss": "DSS-exp", "attention": "Attention"}[config.model.mixer]
    length = config.task.settings["length"]
    [row] = [dict(row) for row in ATOMIC if (row["model"], row["L"]) == (model, length)]
    assert str(config.model.layers) in str(row.pop("layers")).split("/")
    row.pop("L")  # the input of some tasks is longer
    if task == "mips":
        row["batch"] = 4
        if model == "Attention":
            row["lr"] = 1e-4
            row["steps"] = 172_800 if column == "attention-1" else row["steps"]
    assert_as_published(config, row)
    assert (config.model.norm, config.schedule, config.weight_decay) == ("post", "constant", 0)


@pytest.mark.parametrize("name", TABLES["table6"])
def test_table_6_is_trained_as_attention_is(name):
    config = RECIPES[name].config
    twin = "attention-1" if config.task.settings["length"] == 4096 else "attention-2-512"
    other = RECIPES[f"table1/{name.split('/')[1]}/{twin}"].config
    for field in ("task", "steps", "batch_size", "lr", "schedule", "weight_decay"):
        assert getattr(config, field) == getattr(other, field), field
    assert config.model.mixer_options == {"heads": 4, "d_ff": 2048}
    assert config.model.layers == other.model.layers


def test_select_fixed_has_the_stated_recipe_and_one_that_works():
    stated, works = RECIPES["table1/select-fixed/dlr-1"], RECIPES[WORKS]
    assert (stated.config.lr, works.config.lr) == (1e-4, 4e-5)
    assert stated.paper == works.paper
    assert WORKS in stated.note
    assert "not the stated rate" in works.note


def test_mips_has_the_steps_of_the_authors_program():
    """64000 samples an epoch, nine tenths of them for training, in batches of 4, 12 epochs."""
    recipe, longer = RECIPES["table1/mips/attention-1"], RECIPES[LONGER]
    assert recipe.config.steps == 64_000 * 9 // 10 // recipe.config.batch_size * 12
    assert recipe.config.precision == "fp32"
    assert longer.config == replace(recipe.config, steps=160_000)
    assert "172800" in recipe.note


@pytest.mark.parametrize("name", TABLES["table2"])
def test_table_2_has_the_papers_settings(name):
    config = RECIPES[name].config
    _, length, model = name.split("/")
    row = row_of("table2_shift_scale", table2.MODELS[model][0])
    expected = {"L": int(length), "layers": 1, "H": 32, "batch": 4, "steps": 86_000, "wd": 0}
    if model != "sgconv":
        expected["N"] = 512 if model == "dlr-n512" else 4096
    if "dlr" in model:
        expected |= {"dt_min": 1e-5, "dt_max": 1e-5}
    assert_as_published(config, {**expected, "lr": row["lr"]})
    assert (config.model.norm, config.schedule) == ("post", "constant")
    options = config.model.mixer_options
    assert options.get("cast", "real") == ("prod" if model == "dlr-prod" else "real")
    assert options.get("real", False) == (model == "dlr-r")
    if model == "sgconv":
        assert options == {"length": int(length), "d_kernel": 4096, "decay": 1.0}
    if model == "dss":
        assert (options["dt_min"], options["dt_max"]) == (1e-4, 1e-2)


@pytest.mark.parametrize("row", HIGHER, ids=lambda row: row["task"])
def test_table_3_has_the_papers_settings(row):
    task = row["task"].lower()
    assert_as_published(RECIPES[f"table3/{task}/dlr"].config, row)
    rates = {"listops-subtrees": 1e-3, "pathfinder-segmentation-128": 1e-3}
    dss = {"lr": rates.get(task, 5e-4), "dt_min": 1e-4, "dt_max": 1e-2}
    assert_as_published(RECIPES[f"table3/{task}/dss"].config, {**row, **dss})
    warmups = {"listops-subtrees": 5000, "pathfinder-segmentation-128": 3000}
    warmups |= {"pathfinder-segmentation-256": 1000, "pathfinder-segmentation-512": 200}
    listops = task == "listops-subtrees"
    for config in (RECIPES[name].config for name in TABLES["table3"] if f"/{task}/" in name):
        options, chunk = config.model.mixer_options, 1024 if listops else 4096
        assert (config.warmup, options["glu"]) == (warmups[task], True)
        assert config.model.norm == ("post" if listops else "pre")
        assert options.get("bidirectional", False) == (not listops)
        assert options.get("chunk", chunk) == chunk
        assert config.eval_every == row["steps"] // row["epochs"]


@pytest.mark.parametrize("row", CLASSES, ids=lambda row: row["task"])
def test_table_4_has_the_papers_settings(row):
    task = ours(table4.TASKS, row["task"])
    only_epochs = {"text": 22_538 // 128 * 200, "speech-commands": 30_769 // 20 * 200}
    row = {"steps": only_epochs.get(task), **row}
    dlr = RECIPES[f"table4/{task}/dlr"].config
    assert_as_published(dlr, row)
    for recipe in (RECIPES[name] for name in TABLES["table4"] if f"/{task}/" in name):
        config, options = recipe.config, recipe.config.model.mixer_options
        assert (config.model.norm, config.model.pooling) == (row.get("norm", "pre"), "max")
        assert (options["bidirectional"], options["glu"]) == (True, True)
        assert (config.schedule, config.eval_every) == ("cosine", row["steps"] // row["epochs"])
        for field in ("task", "steps", "batch_size", "lr", "weight_decay", "warmup"):
            assert getattr(config, field) == getattr(dlr, field), field
        assert ("quotes" in recipe.note) == (config.model.mixer != "dlr")


# ---------------------------------------------------------------------------------- the models


def parameters(config):
    with torch.device("meta"):
        return sum(p.numel() for p in make_model(config, config.make_task()).parameters())


def stated(count, text):
    """Is a number what the paper writes as 83K, 1.1M or 920K: rounded, or (2.2M) cut?"""
    decimals = len(text[:-1].partition(".")[2]) - text[:-1].endswith("0")
    printed = float(text[:-1]) * 10**decimals
    value = count / {"K": 1e3, "M": 1e6, "B": 1e9}[text[-1]] * 10**decimals
    return printed in (round(value), math.floor(value))


@pytest.mark.parametrize("name", RECIPES)
def test_every_model_can_be_built_and_has_a_cost(name):
    recipe = RECIPES[name]
    assert parameters(recipe.config) > 1000
    assert 0 < recipe.cost < math.inf
    assert recipe.paper.keys() <= METRICS.keys()


COUNTS = [
    (f"{key[:6]}/{task}/{column}", paper["params"])
    for key, task in (  # attention's counts are those of tasks with one output
        ("table1_atomic", "cumsum"),
        ("table6_param_tied", "solve"),
    )
    for column, paper in zip(ATOMIC_COLUMNS[key], table(key)["columns"], strict=True)
]
COUNTS += [
    (f"table2/{256 if name == 'dlr-r' else 262144}/{name}", row["params"])
    for row in table("table2_shift_scale")["rows"]
    for name, (title, *_) in table2.MODELS.items()
    if title == row["model"]
]
COUNTS += [(language_name(row, "pre"), row["params"]) for row in LANGUAGE]


@pytest.mark.parametrize(("name", "text"), COUNTS)
def test_parameter_counts(name, text):
    count = parameters(RECIPES[name].config)
    assert stated(count, text), count


# ---------------------------------------------------------------------------------- Table 5


@pytest.mark.parametrize("name", TABLES["table5"])
def test_table_5_has_the_papers_settings(name):
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
    stated = {key: value for key, value in STATED_LANGUAGE.items() if key in ours}
    assert ours == stated
    assert STATED_LANGUAGE.keys() - ours.keys() == {"task", "epochs", "tied"}
    assert config.eval_every == config.steps // STATED_LANGUAGE["epochs"]
    assert model.router == "top"
    assert 60 < recipe.cost < 60 * 24 * 7


# ---------------------------------------------------------------------------------- scales


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
    assert parameters(tiny) < 600_000
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


# ---------------------------------------------------------------------------------- the catalogue


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("table1/shfit/dlr", "no recipe 'table1/shfit/dlr': did you mean 'table1/shift/"),
        ("table1/shift/d", "no recipe 'table1/shift/d': did you mean 'table1/shift/dlr-1'"),
        ("nothing", "no recipe 'nothing': `dlrnn recipes` lists them"),
    ],
)
def test_get_names_the_nearest(wrong, said):
    with pytest.raises(ValueError, match=said):
        recipes.get(wrong)


def test_only_accuracies_and_f1_are_in_percent():
    metrics = ("R2", "macro_f1", "loss", "perplexity")
    assert [as_in_paper(metric, 0.5) for metric in metrics] == [0.5, 50.0, 0.5, 0.5]
    assert short({"train_loss": 2.714, "loss": 2.876}) == "2.71 / 2.88"
    assert short({"train_loss": math.inf, "loss": math.inf}) == "diverged"


def test_importing_the_recipes_builds_none():
    """A recipe's run is built once, when it is asked for."""
    made = run_python("""
from dlrnn.train import RunConfig
made, check = [], RunConfig.__post_init__
def noted(self):
    made.append(self)
    check(self)
RunConfig.__post_init__ = noted
from dlrnn.paper import recipes
recipe = recipes.get("table1/shift/dlr-1")
print(len(recipes.RECIPES), len(made), recipe.config is recipe.config, recipe.cost > 0, len(made))
""")
    assert made.split() == [str(len(RECIPES)), "0", "True", "True", "1"]


def test_a_language_recipe_builds_its_layers_on_meta_only():
    made = run_python("""
import torch
import dlrnn.train
made, own = set(), torch.nn.Parameter.__new__
def noted(kind, data=None, *rest, **named):
    made.add("meta" if data is not None and data.is_meta else "real")
    return own(kind, data, *rest, **named)
torch.nn.Parameter.__new__ = noted
from dlrnn.paper import recipes
print(sum(bool(recipe.config) for recipe in recipes.RECIPES.values()), sorted(made))
""")
    assert made.split() == [str(len(RECIPES)), "['meta']"]


def test_reproduce_and_sweep_are_part_of_the_recipes():
    from dlrnn.paper.reproduce import reproduce
    from dlrnn.paper.sweep import sweep

    assert (recipes.reproduce, recipes.sweep) == (reproduce, sweep)
    with pytest.raises(AttributeError, match="no attribute 'reproduced'"):
        recipes.reproduced  # noqa: B018
