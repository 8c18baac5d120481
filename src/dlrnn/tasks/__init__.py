"""The test-bed: 20 tasks that measure what a sequence mixer can do, for any network.

task = tasks.get("shift", length=4096)
batch = task.sample(16, step=0, device="cuda")
loss = task.loss(model(batch.inputs), batch)
"""

from dataclasses import fields
from typing import Any

from dlrnn.common.suggestions import suggestion
from dlrnn.common.untrusted import is_ours
from dlrnn.tasks.atomic import ATOMIC, RegressionTask
from dlrnn.tasks.base import IGNORED, Batch, ClassificationTask, ClassTask, Request, Task
from dlrnn.tasks.imported import check_batches, imported_task, make_imported
from dlrnn.tasks.listops import ListOps, ListOpsSubTrees
from dlrnn.tasks.pathfinder import Pathfinder, PathfinderSegmentation, PathX
from dlrnn.tasks.pg19 import PG19
from dlrnn.tasks.random import Random
from dlrnn.tasks.speech import SpeechCommands
from dlrnn.tasks.storage.sets import SetTask
from dlrnn.tasks.text import Retrieval, Text

__all__ = [
    "IGNORED",
    "TASKS",
    "Batch",
    "ClassTask",
    "ClassificationTask",
    "Random",
    "RegressionTask",
    "Request",
    "SetTask",
    "Task",
    "check_batches",
    "get",
    "is_built_in",
    "task_class",
]

_ALL: tuple[type[Task], ...] = (
    *ATOMIC,
    *(ListOpsSubTrees, ListOps, PathfinderSegmentation, Pathfinder, PathX, Text, Retrieval, PG19),
    SpeechCommands,
)
TASKS = {task.name: task for task in _ALL}
"""Every task by its name. Others are named by their import path, `my_tasks.Forecast`."""


def is_built_in(name: str) -> bool:
    """Whether a name means a task of dlrnn, or none; an import path of a user's class does not."""
    return name in TASKS or "." not in name or is_ours(name)


def task_class(name: str) -> type[Task]:
    """The class of a task, by its name or its import path, which is imported."""
    if name in TASKS:
        return TASKS[name]
    if "." in str(name):
        return imported_task(name)
    advice = suggestion(name, TASKS, f"there are: {', '.join(TASKS)}")
    yours = "a task of yours has an import path, my_tasks.Forecast"
    raise ValueError(f"there is no task {name!r}: {advice} ({yours})")


def get(name: str, **settings: Any) -> Task:
    """Return a task with the paper's settings, or with yours: `get("shift", length=512)`.

    A task of yours is named by its import path: `get("my_tasks.Forecast", window=64)`.
    """
    kind = task_class(name)
    known = [field.name for field in fields(kind) if field.init]
    for setting in settings:
        if setting not in known:
            advice = suggestion(setting, known, f"its settings are {', '.join(known)}")
            raise ValueError(f"the task {name} has no setting {setting!r}: {advice}")
    return kind(**settings) if name in TASKS else make_imported(name, kind, settings)
