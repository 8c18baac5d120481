"""Tasks of users, named by their import path: what such a class must have (docs/your-task.md)."""

import inspect
from dataclasses import MISSING, fields
from typing import Any, get_args

import torch

from dlrnn.common.untrusted import imported
from dlrnn.tasks.base import Batch, Kind, Task

ATTRIBUTES = ("name", "kind", "metric", "metric_names", "causal")
GUIDE = "see docs/your-task.md"


def imported_task(path: str) -> type[Task]:
    """The task class at an import path, checked."""
    what = f"the task {path!r}"
    found = imported(path, what)
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise ValueError(f"{what} must be a class derived from dlrnn.tasks.Task: {GUIDE}")
    missing = [each for each in ATTRIBUTES if not hasattr(found, each)]
    if missing := [*missing, *sorted(found.__abstractmethods__)]:
        raise ValueError(f"{what} lacks {', '.join(missing)}: {GUIDE}")
    kinds, metrics = get_args(Kind), ("loss", *found.metric_names)
    if found.kind not in kinds:
        raise ValueError(f"{what}: kind must be one of {', '.join(kinds)}, not {found.kind!r}")
    if found.metric not in metrics:
        one = f"metric must be one of {', '.join(metrics)}"
        raise ValueError(f"{what}: {one}, the metric_names, not {found.metric!r}")
    order = found.__mro__
    own = next(each for each in order if "make_batch" in vars(each))
    said = next(each for each in order if "on_device" in vars(each))
    if found.on_device and order.index(said) > order.index(own):
        cure = "on_device = False if make_batch reads files or uses NumPy, or True if it does not"
        raise ValueError(f"{what} must say {cure}: {GUIDE}")
    hints = inspect.get_annotations(found)
    settings = [name for name, hint in hints.items() if "ClassVar" not in str(hint)]
    if settings and "__dataclass_fields__" not in vars(found):
        cure = "decorate the class with @dataclass(frozen=True)"
        raise ValueError(f"{what} has the settings {', '.join(settings)} without effect: {cure}")
    return found


def make_imported(path: str, kind: type[Task], settings: dict[str, Any]) -> Task:
    """A user's task; errors of its constructor and of its sizes become a ValueError."""
    for each in fields(kind):
        has_default = each.default is not MISSING or each.default_factory is not MISSING
        if each.init and not has_default and each.name not in settings:
            how = f"--task.settings.{each.name} VALUE"
            raise ValueError(f"the task {path!r} needs the setting {each.name}: {how}")
    try:
        task = kind(**settings)
        sizes = (task.d_input, task.vocabulary)
    except ValueError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"the task {path!r} cannot be made: {reason}") from error
    if sizes.count(None) != 1:
        both = "d_input (features of a position) or vocabulary (tokens), one of them"
        raise ValueError(f"the task {path!r} needs {both}: {GUIDE}")
    return task


def check_batches(task: Task) -> None:
    """Refuse a task whose batches have other shapes than it says, or vary between calls."""
    try:
        batch: Any = task.sample(2)
    except (ValueError, OSError):
        raise
    except Exception as error:  # a user's code may raise anything
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(f"{task.name}: make_batch failed with {reason}") from error
    if not isinstance(batch, Batch):
        kind = type(batch).__name__
        raise ValueError(f"{task.name}: make_batch must return a dlrnn.tasks.Batch, not a {kind}")
    shape, features = list(batch.inputs.shape), task.d_input
    if features is not None:
        sequences = [2] if not task.pair else [2, 2]
        expected = [*sequences, task.input_length, features]
    else:
        expected = [2, 2, *shape[2:3]] if task.pair else [2, *shape[1:2]]
    if shape != expected:
        sizes = "batch_size, input_length, d_input" if features else "batch_size, input_length"
        raise ValueError(
            f"{task.name}: the inputs of 2 samples must have the shape {expected} ({sizes}),"
            f" not {shape}"
        )
    if features is None and batch.inputs.dtype != torch.int64:
        raise ValueError(f"{task.name}: tokens must be int64, not {batch.inputs.dtype}")
    for part, values in zip(Batch._fields, batch, strict=True):
        if values is not None and not values.isfinite().all():
            raise ValueError(f"{task.name}: the {part} must be finite numbers, without NaN")
    for one, other in zip(batch, task.sample(2), strict=True):
        if one is not None and (other is None or not torch.equal(one, other)):
            cure = "draw with dlrnn.tasks.Random, whose numbers depend on the request alone"
            raise ValueError(
                f"{task.name}: two calls with one request gave two batches, so a run could not be"
                f" resumed exactly: {cure}"
            )
