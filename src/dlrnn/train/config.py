"""A run is one complete typed configuration: nothing lives in shell history."""

import argparse
import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from difflib import SequenceMatcher
from typing import Any, Literal, get_type_hints

from jsonargparse import ArgumentParser

from dlrnn import tasks
from dlrnn.common.untrusted import brief, fit, fit_fields, parse_json
from dlrnn.models import LanguageConfig, ModelConfig

LARGEST_SIZE = 2**31
"""The largest size that a model or a task may have."""


@dataclass(frozen=True)
class TaskConfig:
    """`tasks.get(name, **settings)`; its seed is the run's, unless the settings say another."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RunConfig:
    """All that decides a run.

    Args:
        task: what is learnt.
        model: what learns it; a LanguageConfig where the task is of the kind "language".
        steps: updates of the parameters.
        batch_size: samples a step, over all devices and micro-batches.
        lr: AdamW's rate.
        kernel_lr: the rate of kernel parameters (lambda, W); none: lr.
        weight_decay: of all but kernel parameters.
        schedule: constant, or a cosine to 0; both after the warm-up.
        warmup: steps in which the rate rises linearly from 0.
        clip: the largest norm of the gradient; none: no limit.
        accumulate: micro-batches a step; kernels are computed once for all of them.
        precision: fp32, or bf16 in autocast (kernels and states stay fp32).
        deterministic: PyTorch's own kernels add in one order, too: attention's gradients on a GPU
            are else not the same twice. An operation that cannot is refused.
        log_every: steps between two records of the loss.
        eval_every: steps between two evaluations.
        eval_batches: batches an evaluation (all of it where the task has a set on disk).
        checkpoint_every: steps between two checkpoints.
        seed: of the parameters, the data and the dropout.
    """

    task: TaskConfig
    model: ModelConfig | LanguageConfig
    steps: int = 40_000
    batch_size: int = 16
    lr: float = 1e-3
    kernel_lr: float | None = None
    weight_decay: float = 0.0
    schedule: Literal["constant", "cosine"] = "constant"
    warmup: int = 0
    clip: float | None = None
    accumulate: int = 1
    precision: Literal["fp32", "bf16"] = "fp32"
    deterministic: bool = False
    log_every: int = 50
    eval_every: int = 1000
    eval_batches: int = 32
    checkpoint_every: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        counts = ("steps", "batch_size", "accumulate", "log_every", "eval_every", "eval_batches")
        for name in (*counts, "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name, most in (("batch_size", 2**24), ("eval_batches", 10**6), ("steps", 10**12)):
            if getattr(self, name) > most:
                raise ValueError(f"{name} must be at most {most}, not {getattr(self, name)}")
        for name in ("lr", "kernel_lr", "clip"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be more than 0 and finite, not {value}")
        for name in ("weight_decay", "warmup"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least 0, not {getattr(self, name)}")
        if not isinstance(self.deterministic, bool):
            raise ValueError(f"deterministic must be True or False, not {self.deterministic!r}")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed must have 64 bits at most, and {self.seed} has more")
        if self.batch_size % self.accumulate:
            parts = f"{self.accumulate} micro-batches of one size"
            raise ValueError(f"batch_size {self.batch_size} cannot be divided into {parts}")
        if not isinstance(self.model, wanted := _model_class(self.task.name)):
            kind = type(self.model).__name__
            raise ValueError(f"the model of {self.task.name} is a {wanted.__name__}, not a {kind}")

    def make_task(self) -> tasks.Task:
        """The task, with the run's seed."""
        return tasks.get(self.task.name, **{"seed": self.seed, **self.task.settings})

    def rate(self, step: int) -> float:
        """The share of the learning rate at step 0, 1, ..."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.schedule == "constant":
            return 1.0
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    def to_json(self) -> str:
        """Complete, readable."""
        return in_json(asdict(self))

    def identity(self) -> dict[str, Any]:
        """What tells runs apart: a setting that came later counts where it is not as before."""
        values = asdict(self)
        if not self.deterministic:
            del values["deterministic"]
        return values

    def digest(self) -> str:
        """SHA-256 of all that decides the run: not of the place where its data lies."""
        values = self.identity()
        values["task"]["settings"].pop("folder", None)
        return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def in_json(values: dict[str, Any]) -> str:
    """Readable."""
    try:
        return json.dumps(values, indent=1) + "\n"
    except TypeError as error:  # a Path, a number of numpy
        raise ValueError(f"a setting is no JSON: {error}") from error


_OPTIONS = (("task", "settings"), ("model", "mixer_options"))  # whose values are of any type


def from_json(text: str | bytes, where: str = "the configuration") -> RunConfig:
    """What `to_json` wrote; it may come from anybody, so nothing in it is imported or called."""
    content = text.encode() if isinstance(text, str) else text
    return _fitted(parse_json(content, where), where)


def _fitted(values: Any, where: str) -> RunConfig:
    """A configuration from plain values: known keys, the types of the fields, sizes in bounds."""
    if not isinstance(values, dict):
        raise ValueError(f"{where} must be a JSON object, not {values!r:.60}")
    task = fit(values.get("task"), TaskConfig, f"{where}: task")
    schema = {**get_type_hints(RunConfig), "model": _model_class(task.name)}
    try:
        found = fit_fields(values, schema, where, needed=("task", "model"))
        _check_option_types(found["model"], f"{where}: model: mixer_options")
        _check_bounds({part: values[part] for part in ("task", "model")})
        return RunConfig(**found)
    except ValueError as error:
        raise ValueError(
            brief(error) if where in str(error) else f"{where}: {brief(error)}"
        ) from error


def _check_option_types(model: ModelConfig | LanguageConfig, where: str) -> None:
    """Options of a built-in mixer have its types; their values stay as they are."""
    if isinstance(model, ModelConfig):
        for name, kind in model.option_types().items():
            if name in model.mixer_options:
                fit(model.mixer_options[name], kind, f"{where}: {name}")


def _check_bounds(values: Any, inside: str = "") -> None:
    """Whole numbers that no model or task has: they would only fill the memory."""
    for name, value in values.items() if isinstance(values, dict) else ():
        _check_bounds(value, f"{inside}{name}.")
        if isinstance(value, int) and value > LARGEST_SIZE and name != "seed":
            raise ValueError(f"{inside}{name} must be at most {LARGEST_SIZE}, not {value}")


def with_overrides(config: RunConfig, arguments: Sequence[str]) -> RunConfig:
    """`--steps 100 --model.mixer_options.d_state 64 --task.settings.length 512`, checked by type.

    Another mixer, or another task, does not inherit the options of the one that it replaces.
    """
    defaults, model = asdict(config), type(config.model)
    known = list(_names(defaults))
    if isinstance(config.model, ModelConfig):
        known += [f"model.mixer_options.{name}" for name in config.model.option_types()]
    _check_names(arguments, known)
    with _one_sentence():
        parser = _parser(model, deepcopy(defaults))
        values = parser.parse_args(list(arguments))
        if values.model.mixer != config.model.mixer and model is ModelConfig:
            defaults["model"]["mixer_options"] = {}
        if values.task.name != config.task.name:
            defaults["task"]["settings"] = {}
        if _model_class(values.task.name) is not model:
            other = f"{values.task.name} needs another kind of model than {config.task.name}"
            raise ValueError(f"{other}: begin with a recipe of it")
        parser = _parser(model, deepcopy(defaults))
        values = parser.parse_args(list(arguments))
    made = _fitted(values.as_dict(), "the settings")
    return _texts(made, defaults, arguments)


def _texts(config: RunConfig, known: dict[str, Any], arguments: Sequence[str]) -> RunConfig:
    """The parser reads a text among options, "1", as a number: those `known` are put back.

    In the arguments, which are texts all, one in double quotes stays one.
    """
    named = {argument.removeprefix("--").partition("=")[0] for argument in arguments}
    for part, name in _OPTIONS:
        owner = getattr(config, part)
        options = dict(getattr(owner, name, {}))
        before = known.get(part, {}).get(name) or {}
        for option, value in options.items() if f"{part}.{name}" not in named else ():
            if f"{part}.{name}.{option}" not in named:
                options[option] = before.get(option, value)
            elif isinstance(value, str) and len(value) > 1 and value[0] == value[-1] == '"':
                options[option] = value[1:-1]
        if options:
            config = replace(config, **{part: replace(owner, **{name: options})})
    return config


def _names(values: dict[str, Any], before: str = "") -> Iterator[str]:
    """`steps`, `model`, `model.mixer`, ..."""
    for name, value in values.items():
        yield before + name
        if isinstance(value, dict):
            yield from _names(value, f"{before}{name}.")


def _check_names(arguments: Sequence[str], known: list[str]) -> None:
    """A misspelt setting is told the nearest one; options of mixers and tasks are checked later."""
    for argument in arguments:
        name = argument.removeprefix("--").partition("=")[0]
        free = name.startswith(("model.mixer_options.", "task.settings."))
        if not argument.startswith("--") or free or name in known:
            continue
        near = max(known, key=lambda each: _likeness(name, each))
        advice = "`dlrnn recipes --show RECIPE` prints them all"
        if max(_likeness(name, near)) > 0.6:
            advice = f"did you mean --{near}?"
        raise ValueError(f"there is no setting --{name}: {advice}")


def _likeness(typed: str, known: str) -> tuple[float, float]:
    """Of their last words, or of all of them if that is more: `d_state` is found where it is."""
    pairs = ((typed.rpartition(".")[2], known.rpartition(".")[2]), (typed, known))
    last, whole = (SequenceMatcher(None, *pair).ratio() for pair in pairs)
    return max(last, whole), whole


def _model_class(task: str | None) -> type[ModelConfig] | type[LanguageConfig]:
    """What describes the model of a task; an unknown one is refused when it is made."""
    known = tasks.TASKS.get(task or "")
    return LanguageConfig if known is not None and known.kind == "language" else ModelConfig


def _parser(
    model: type[ModelConfig] | type[LanguageConfig], defaults: dict[str, Any] | None
) -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False, allow_abbrev=False)
    parser.add_class_arguments(RunConfig, skip={"model"})
    parser.add_class_arguments(model, "model")
    if defaults is not None:
        parser.set_defaults(defaults)
    return parser


@contextmanager
def _one_sentence() -> Iterator[None]:
    try:
        yield
    except argparse.ArgumentError as error:
        raise ValueError(" ".join(str(error).split())) from error
