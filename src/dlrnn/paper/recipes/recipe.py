"""A recipe, and its run at three scales: full, short, and tiny for two CPU cores."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, get_args

from dlrnn.models import LanguageConfig, ModelConfig
from dlrnn.paper.recipes.cost import minutes
from dlrnn.paper.recipes.departures import departures_of
from dlrnn.tasks import TASKS
from dlrnn.tasks import get as get_task
from dlrnn.train import RunConfig, TaskConfig

DSS_NOTE = "Lambda starts at the authors' program's frequencies, pi n; the paper's text has 2 pi n"

Scale = Literal["full", "short", "tiny"]


@dataclass(frozen=True)
class Recipe:
    """One number of the paper and the run that reproduces it.

    Attributes:
        name: `table/task/model`, "table1/shift/dlr-1".
        build: makes `config`.
        paper: the paper's values by metric, in the paper's units.
        note: what differs from the other recipes of the table; "" if nothing does.

    A loss of the paper that diverged is infinite.
    """

    name: str
    build: Callable[[], RunConfig]
    paper: dict[str, float]
    note: str = ""

    @property
    def departures(self) -> tuple[str, ...]:
        """The names of its lines in docs/reproduction.md, where it departs from the paper."""
        return departures_of(self.name)

    @cached_property
    def config(self) -> RunConfig:
        """The complete run, at the paper's sizes, built when it is first asked for."""
        return self.build()

    @cached_property
    def cost(self) -> float:
        """Expected minutes on one H200, an estimate."""
        return minutes(self.config)


def recipe(
    name: str, build: Callable[[], RunConfig], paper: dict[str, float], *notes: str
) -> Recipe:
    """A recipe with the notes that are not empty, and one on DSS's frequencies."""
    every = (*notes, DSS_NOTE if name.split("/")[2].startswith("dss") else "")
    return Recipe(name, build, paper, "; ".join(filter(None, every)))


def scaled(recipe: Recipe, scale: Scale) -> RunConfig:
    """The run of a recipe: the paper's ("full"), a tenth of its steps ("short"), or "tiny".

    A tiny run takes two CPU cores about a minute. Everything that is measured in positions shrinks
    with the length, so that a model remembers the same share of its input: there are fewer states,
    kernels and chunks are shorter, and decay is faster.
    """
    config = recipe.config
    if scale == "full":
        return config
    if scale == "short":
        return replace(config, steps=max(1, config.steps // 10), warmup=config.warmup // 10)
    if scale == "tiny":
        return tiny(config)
    raise ValueError(f"scale must be one of {', '.join(get_args(Scale))}, not {scale!r}")


def tiny(config: RunConfig) -> RunConfig:
    """The run with a small model, short inputs and few steps."""
    task = _tiny_task(config.task)
    length = get_task(task.name, **{"seed": config.seed, **task.settings}).input_length
    share = length / config.make_task().input_length
    batch = min(config.batch_size, 16, max(2, 2**14 // length))
    model: ModelConfig | LanguageConfig
    if isinstance(config.model, LanguageConfig):
        positions = 2**17  # a vocabulary costs more than a tiny model
        model = _tiny_language(config.model, share)
    else:
        positions, model = 2**21, _tiny_model(config.model, share, length)
    steps = min(config.steps, 1000, max(1, positions // (batch * length)))
    often = -(-steps // 4)
    return replace(
        config,
        task=task,
        model=model,
        steps=steps,
        batch_size=batch,
        accumulate=min(config.accumulate, 2),
        lr=min(1e-3, config.lr * config.steps / steps),  # fewer steps, larger ones
        warmup=config.warmup * steps // config.steps,
        eval_every=often,
        eval_batches=8,
        checkpoint_every=often,
    )


def _tiny_task(task: TaskConfig) -> TaskConfig:
    """A smaller task, which draws its samples during training where possible."""
    settings = dict(task.settings)
    if TASKS[task.name].drawable:
        settings.pop("folder", None)
    if "length" in settings:
        settings["length"] = min(1024, max(64, settings["length"] // 32))
    if "resolution" in settings:
        settings["resolution"] = min(64, max(32, settings["resolution"] // 4))
    if "marked" in settings:
        settings["marked"] //= 4
    if TASKS[task.name].kind == "language":
        settings["held_out"] = 64
    return replace(task, settings=settings)


def _tiny_model(model: ModelConfig, share: float, length: int) -> ModelConfig:
    d_model = min(model.d_model, 64)
    options = dict(model.mixer_options)
    for name in options.keys() & {"d_state", "kernel_length", "d_kernel", "chunk"}:
        options[name] = max(4, round(options[name] * share))
    for name in options.keys() & {"dt_min", "dt_max"}:
        options[name] = min(options[name] / share, 0.5)
    if "d_state" in options:
        options["d_state"] = min(256, options["d_state"])
    if "d_ff" in options:
        options["d_ff"] = options["d_ff"] * d_model // model.d_model
    if "length" in options:
        options["length"] = length
    return replace(model, mixer_options=options, d_model=d_model, layers=min(model.layers, 2))


def _tiny_language(model: LanguageConfig, share: float) -> LanguageConfig:
    return replace(
        model,
        experts=min(model.experts, 4),
        layers=2,
        d_model=64,
        d_state=max(4, round(model.d_state * share)),
        d_embedding=8,
        d_ff=4 * 64,
        dt_min=min(model.dt_min / share, 0.5),
        dt_max=min(model.dt_max / share, 0.5),
        kernel_length=model.kernel_length and round(model.kernel_length * share),
        heads=2,
        d_head=16,
    )
