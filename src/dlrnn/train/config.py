"""The configuration of a run: one typed object, from JSON or from the command line."""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from typing import Any, Literal, get_args, get_origin

from dlrnn import tasks
from dlrnn.common.suggestions import nearest
from dlrnn.common.untrusted import as_json, brief, expected, fit, fit_fields, hints_of, parse_json
from dlrnn.models import LanguageConfig, ModelConfig
from dlrnn.train.stages import Stage, check_stages, make_stages, scaled_length

LARGEST_SIZE = 2**31
"""The largest size that a model or a task may have."""


@dataclass(frozen=True)
class TaskConfig:
    """A task, `tasks.get(name, **settings)`; its seed is the run's unless the settings name one."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RunConfig:
    """Everything that determines a run; types and values are checked when it is made.

    Args:
        task: the task to learn.
        model: the model; a LanguageConfig for tasks of the kind "language".
        steps: updates of the parameters.
        batch_size: samples in a step, over all devices and micro-batches.
        lr: learning rate of AdamW.
        kernel_lr: learning rate of kernel parameters (lambda, W); None: lr.
        weight_decay: weight decay of all but kernel parameters.
        schedule: constant, or a cosine to 0; both after the warm-up.
        warmup: steps in which the rate rises linearly from 0.
        clip: the largest norm of the gradient; None: no limit.
        accumulate: micro-batches in a step; kernels are computed once for all of them.
        precision: fp32, or bf16 in autocast (kernels and states stay fp32).
        deterministic: PyTorch's kernels add in a fixed order, too; otherwise attention's gradients
            on a GPU vary between runs. An operation without such a kernel raises.
        log_every: steps between two records of the loss.
        eval_every: steps between two evaluations.
        eval_batches: batches in an evaluation (a set on disk is evaluated completely).
        checkpoint_every: steps between two checkpoints.
        seed: seed of the parameters, the data and the dropout.
        lengths: lengths of the task to train at, one after the other; the last is the task's own.
            Each has its own warm-up, schedule and optimizer. An evaluation before the last length
            is recorded as one of a "stage", and does not count as the best.
        stage_steps: steps at each length but the last, which takes the rest of `steps`; None: equal
            parts.
        stage_lr: learning rate at each length; None: lr. kernel_lr is changed in proportion.
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
    lengths: list[int] | None = None
    stage_steps: list[int] | None = None
    stage_lr: list[float] | None = None

    def __post_init__(self) -> None:
        types = hints_of(type(self))
        for name, value in vars(self).items():
            if name not in ("task", "model"):
                object.__setattr__(self, name, fit(value, types[name], name))
        self._check_values()
        model_class = type(self.model)
        if model_class not in (possible := _model_classes(self.task.name)):
            kinds = f"{possible[0].__name__}, not a {model_class.__name__}"
            raise ValueError(f"the model of {self.task.name} is a {kinds}")
        for part, kind in (("task", TaskConfig), ("model", model_class)):
            values = as_json(asdict(getattr(self, part)), part)  # as config.json gives them back
            _check_sizes(values, f"{part}.")
            object.__setattr__(self, part, fit(values, kind, part))
        if isinstance(self.model, ModelConfig):
            options = self.model.given_options()
            for name, kind in self.model.option_types().items():
                if name in options:
                    fit(options[name], kind, f"model.mixer_options.{name}")

    def _check_values(self) -> None:
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
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed must have 64 bits at most, and {self.seed} has more")
        if self.batch_size % self.accumulate:
            parts = f"{self.accumulate} micro-batches of one size"
            raise ValueError(f"batch_size {self.batch_size} cannot be divided into {parts}")
        if (self.lengths, self.stage_steps, self.stage_lr) != (None, None, None):
            check_stages(self.steps, self.lengths, self.stage_steps, self.stage_lr)

    def make_task(self) -> tasks.Task:
        """The task, with the run's seed; that of an import path is imported, which runs its code.

        Call `check_trusted` first for a configuration from a file.
        """
        task = tasks.get(self.task.name, **{"seed": self.seed, **self.task.settings})
        if (task.kind == "language") != isinstance(self.model, LanguageConfig):
            wrong = f"the kind {task.kind}, and its model is a {type(self.model).__name__}"
            cure = "begin with --task, or with a recipe of that kind"
            raise ValueError(f"{self.task.name} is a task of {wrong}: {cure}")
        own = getattr(task, "length", None)
        if self.lengths is not None and own != self.lengths[-1]:
            has = "no length" if own is None else f"length {own} (--task.settings.length)"
            raise ValueError(
                f"lengths must end with the length of the task, and {self.task.name} has {has}, not"
                f" {self.lengths[-1]}"
            )
        return task

    def stages(self) -> list[Stage]:
        """The stages of the run: lengths with their steps."""
        if self.lengths is None:
            return [Stage(None, 0, self.steps, 1.0)]
        return make_stages(self.steps, self.lr, self.lengths, self.stage_steps, self.stage_lr)

    def stage(self, step: int) -> int:
        """The number of the stage of step 0, 1, ..."""
        return sum(step >= stage.start for stage in self.stages()) - 1

    def rate(self, step: int) -> float:
        """The factor of the learning rate at step 0, 1, ..."""
        _, start, stop, factor = self.stages()[self.stage(step)]
        step, steps = step - start, stop - start
        if step < self.warmup:
            return factor * (step + 1) / self.warmup
        if self.schedule == "constant":
            return factor
        done = (step - self.warmup) / max(1, steps - self.warmup)
        return factor * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    def at_stage(self, number: int) -> "RunConfig":
        """The configuration of one stage alone: task and mixers have its length."""
        if self.lengths is None:
            return self
        inputs = []
        for length in (self.lengths[0], self.lengths[number], self.lengths[-1]):
            settings = {**self.task.settings, "length": length}
            inputs.append(tasks.get(self.task.name, **settings).input_length)
        settings = {**self.task.settings, "length": self.lengths[number]}
        alone = replace(self, lengths=None, stage_steps=None, stage_lr=None)
        model = self.model.with_lengths(lambda length: scaled_length(length, inputs))
        return replace(alone, task=replace(self.task, settings=settings), model=model)

    def to_json(self) -> str:
        """The complete configuration as indented JSON."""
        return in_json(asdict(self))

    def identity(self) -> dict[str, Any]:
        """The values that distinguish runs; later settings only where they are used."""
        values = asdict(self)
        if not self.deterministic:
            del values["deterministic"]
        for name in ("lengths", "stage_steps", "stage_lr"):
            if values[name] is None:
                del values[name]
        if "tape" not in self.model.mixer:
            values["model"].pop("tape_length", None)
        return values

    def digest(self) -> str:
        """SHA-256 of all that decides the run: not of the place where its data lies."""
        values = self.identity()
        values["task"]["settings"].pop("folder", None)
        return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def in_json(values: dict[str, Any]) -> str:
    """Values as indented JSON."""
    return json.dumps(values, indent=1) + "\n"


def from_json(text: str | bytes, where: str = "the configuration") -> RunConfig:
    """The configuration that `to_json` wrote; untrusted text: no class is imported or called."""
    content = text.encode() if isinstance(text, str) else text
    values = parse_json(content, where)
    if not isinstance(values, dict):
        raise ValueError(f"{where} must be a JSON object, not {values!r:.60}")
    task = fit(values.get("task"), TaskConfig, f"{where}: task")
    given = values["model"] if isinstance(values.get("model"), dict) else {}
    possible = _model_classes(task.name)
    fitting = (each for each in possible if given.keys() <= hints_of(each).keys())
    schema = {**hints_of(RunConfig), "model": next(fitting, possible[0])}
    try:
        return RunConfig(**fit_fields(values, schema, where, needed=("task", "model")))
    except ValueError as error:
        named = "" if where in str(error) else f"{where}: "
        raise ValueError(f"{named}{brief(error)}") from error


def _check_sizes(values: dict[str, Any], inside: str) -> None:
    """Refuse sizes that would only exhaust the memory."""
    for name, value in values.items():
        if isinstance(value, dict):
            _check_sizes(value, f"{inside}{name}.")
        if isinstance(value, int) and value > LARGEST_SIZE and name != "seed":
            raise ValueError(f"{inside}{name} must be at most {LARGEST_SIZE}, not {value}")


# ---------------------------------------------------------------------------------- command line


def with_overrides(config: RunConfig, arguments: Sequence[str]) -> RunConfig:
    """`--steps 100 --model.mixer_options.d_state 64 --task.settings.length 512`, checked by type.

    Values are JSON, or text: `--task.settings.name 7` is a number, `'"7"'` is text. Another mixer,
    or another task, does not inherit the options of the one that it replaces.
    """
    values, given = asdict(config), list(_given(config, arguments))
    for part, name, options in (("task", "name", "settings"), ("model", "mixer", "mixer_options")):
        before = values[part][name]
        if options in values[part] and dict(given).get(f"{part}.{name}", before) != before:
            values[part][options] = {}
    for name, value in given:
        *inside, last = name.split(".")
        reduce(_inside, inside, values)[last] = value
    task, model, model_class = values.pop("task"), values.pop("model"), type(config.model)
    if model_class not in _model_classes(task["name"]):
        other = f"{task['name']} needs another kind of model than {config.task.name}"
        raise ValueError(f"{other}: begin with a recipe of it")
    return RunConfig(task=TaskConfig(**task), model=model_class(**model), **values)


def _inside(values: dict[str, Any], name: str) -> dict[str, Any]:
    """The values in a group; the options of one of several mixers may be a new group."""
    group: dict[str, Any] = values.setdefault(name, {})
    return group


def _given(config: RunConfig, arguments: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """The names and values of `--name value` and `--name=value`, in order."""
    types, words = _setting_types(config), iter(arguments)
    of_mixers = ("model.mixer_options.",) if isinstance(config.model, ModelConfig) else ()
    free = ("task.settings.", *of_mixers)
    for word in words:
        option, has_value, text = word.partition("=")
        name = option.removeprefix("--")
        if not word.startswith("--"):
            raise ValueError(f"a setting is written as --steps 100; got {word!r}, without --")
        if name not in types and not name.startswith(free):
            near = nearest(name, types)
            advice = f"did you mean --{near}?" if near else "see `dlrnn recipes --show RECIPE`"
            raise ValueError(f"there is no setting --{name}: {advice}")
        kind = types.get(name, Any)
        text = text if has_value else next(words, "--")
        if not has_value and text.startswith("--"):
            wanted = "a value" if kind is Any else expected(kind)
            raise ValueError(f"{option} must be {wanted}, and nothing was given")
        value = fit(_parsed(text, kind), kind, option)
        if name in ("task", "model"):
            yield from ((f"{name}.{key}", each) for key, each in value.items())
        else:
            yield name, value


def _setting_types(config: RunConfig) -> dict[str, Any]:
    """The types of all settings by name; options of mixers and tasks are checked later."""
    types = hints_of(RunConfig) | {"task": dict[str, Any], "model": dict[str, Any]}
    for part in ("task", "model"):
        hints = hints_of(type(getattr(config, part)))
        types |= {f"{part}.{name}": kind for name, kind in hints.items()}
    if isinstance(config.model, ModelConfig):
        types |= {f"model.mixer_options.{name}": Any for name in config.model.option_types()}
    return types | {f"task.settings.{name}": Any for name in config.task.settings}


def _parsed(text: str, kind: Any) -> Any:
    """The value of an argument for a setting of this type."""
    if kind is str or get_origin(kind) is Literal:
        return text
    with suppress(ValueError):
        return json.loads({"True": "true", "False": "false"}.get(text, text))
    if kind in (float, float | None):
        with suppress(ValueError):
            return float(text)  # .5 is not JSON
    if any(get_origin(each) is list for each in get_args(kind)):
        with suppress(ValueError):
            return json.loads(f"[{text}]")  # 32,64,128
    return text


def _model_classes(task: str | None) -> tuple[type[ModelConfig] | type[LanguageConfig], ...]:
    """The classes that may configure models of a task; unknown tasks raise when they are made.

    There are two for an import path: what it names is not imported here.
    """
    known = tasks.TASKS.get(task or "")
    if known is None and "." in str(task):
        return ModelConfig, LanguageConfig
    return (LanguageConfig,) if known is not None and known.kind == "language" else (ModelConfig,)
