"""A recipe at three scales: full, short, and tiny for two CPU cores."""

from dataclasses import replace
from typing import Any, Literal, get_args

from dlrnn.models import LanguageConfig, ModelConfig
from dlrnn.paper.recipes.recipe import Recipe
from dlrnn.tasks import TASKS
from dlrnn.train import RunConfig, TaskConfig

Scale = Literal["full", "short", "tiny"]


def scaled(recipe: Recipe, scale: Scale) -> RunConfig:
    """The run of a recipe: the paper's ("full"), a tenth of its steps ("short"), or "tiny".

    A tiny run takes two CPU cores about a minute. Everything that is measured in positions shrinks
    with the length, so that a model remembers the same share of its input: there are fewer states,
    kernels and chunks are shorter, and decay is faster.
    """
    if scale not in get_args(Scale):
        raise ValueError(f"scale must be one of {', '.join(get_args(Scale))}, not {scale!r}")
    if scale == "full":
        return recipe.config
    return short(recipe.config) if scale == "short" else tiny(recipe.config)


def short(config: RunConfig) -> RunConfig:
    """The run with a tenth of its steps."""
    return replace(config, steps=max(1, config.steps // 10), warmup=config.warmup // 10)


def tiny(config: RunConfig) -> RunConfig:
    """The run with a small model, short inputs and few steps."""
    task = _tiny_task(config.task)
    length = replace(config, task=task).make_task().input_length
    share = length / config.make_task().input_length
    batch = min(config.batch_size, 16, max(2, 2**14 // length))
    language = isinstance(config.model, LanguageConfig)
    positions = 2**17 if language else 2**21  # a vocabulary costs more than a tiny model
    steps = min(config.steps, 1000, max(1, positions // (batch * length)))
    often = -(-steps // 4)
    return replace(
        config,
        task=task,
        model=_tiny_language(config.model, share)
        if isinstance(config.model, LanguageConfig)
        else _tiny_model(config.model, share, length),
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
    drawn = {"folder"} if TASKS[task.name].drawable else set()
    settings = {name: value for name, value in task.settings.items() if name not in drawn}
    smaller: dict[str, Any] = {
        "length": lambda length: min(1024, max(64, length // 32)),
        "resolution": lambda pixels: min(64, max(32, pixels // 4)),
        "marked": lambda count: count // 4,
    }
    changed = {name: smaller[name](value) for name, value in settings.items() if name in smaller}
    if TASKS[task.name].kind == "language":
        changed["held_out"] = 64
    return replace(task, settings={**settings, **changed})


def _tiny_model(model: ModelConfig, share: float, length: int) -> ModelConfig:
    d_model = min(model.d_model, 64)
    smaller: dict[str, Any] = {
        "d_state": lambda states: min(256, max(4, round(states * share))),
        "kernel_length": lambda taps: max(4, round(taps * share)),
        "d_kernel": lambda taps: max(4, round(taps * share)),
        "chunk": lambda positions: max(4, round(positions * share)),
        "length": lambda _: length,
        "dt_min": lambda dt: min(dt / share, 0.5),
        "dt_max": lambda dt: min(dt / share, 0.5),
        "d_ff": lambda width: width * d_model // model.d_model,
    }
    options = {
        name: smaller[name](value) if name in smaller else value
        for name, value in model.mixer_options.items()
    }
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
