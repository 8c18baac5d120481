"""The test-bed: 20 tasks that measure what a sequence mixer can do, for any network.

task = tasks.get("shift", length=4096)
batch = task.sample(16, step=0, device="cuda")
loss = task.loss(model(batch.inputs), batch)
"""

from dataclasses import fields
from typing import Any

from dlrnn.common.suggestions import suggestion
from dlrnn.tasks.atomic import ATOMIC, RegressionTask
from dlrnn.tasks.base import IGNORED, Batch, ClassificationTask, ClassTask, Task
from dlrnn.tasks.listops import ListOps, ListOpsSubTrees
from dlrnn.tasks.pathfinder import Pathfinder, PathfinderSegmentation, PathX
from dlrnn.tasks.pg19 import PG19
from dlrnn.tasks.speech import SpeechCommands
from dlrnn.tasks.storage.sets import SetTask
from dlrnn.tasks.text import Retrieval, Text

__all__ = [
    "IGNORED",
    "TASKS",
    "Batch",
    "ClassTask",
    "ClassificationTask",
    "RegressionTask",
    "SetTask",
    "Task",
    "get",
]

_ALL: tuple[type[Task], ...] = (
    *ATOMIC,
    *(ListOpsSubTrees, ListOps, PathfinderSegmentation, Pathfinder, PathX, Text, Retrieval, PG19),
    SpeechCommands,
)
TASKS = {task.name: task for task in _ALL}
"""Every task by its name."""


def get(name: str, **settings: Any) -> Task:
    """Return a task with the paper's settings, or with yours: `get("shift", length=512)`."""
    if name not in TASKS:
        advice = suggestion(name, TASKS, f"there are: {', '.join(TASKS)}")
        raise ValueError(f"there is no task {name!r}: {advice}")
    known = [field.name for field in fields(TASKS[name])]
    for setting in settings:
        if setting not in known:
            advice = suggestion(setting, known, f"its settings are {', '.join(known)}")
            raise ValueError(f"the task {name} has no setting {setting!r}: {advice}")
    return TASKS[name](**settings)
