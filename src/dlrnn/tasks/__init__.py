"""The test-bed: what a sequence mixer can and cannot do, for any network.

task = tasks.get("shift", length=4096)
batch = task.sample(16, step=0, device="cuda")
loss = task.loss(model(batch.inputs), batch)
"""

import difflib
from dataclasses import fields
from typing import Any

from dlrnn.tasks.atomic import ATOMIC
from dlrnn.tasks.books import PG19
from dlrnn.tasks.listops_task import ListOps, ListOpsSubTrees
from dlrnn.tasks.pathfinder_task import Pathfinder, PathfinderSegmentation, PathX
from dlrnn.tasks.regression import RegressionTask
from dlrnn.tasks.retrieval import Retrieval
from dlrnn.tasks.sets import SetTask
from dlrnn.tasks.speech import SpeechCommands
from dlrnn.tasks.task import IGNORED, Batch, Task
from dlrnn.tasks.text import Text

__all__ = ["IGNORED", "TASKS", "Batch", "RegressionTask", "SetTask", "Task", "get"]

_ALL: tuple[type[Task], ...] = (
    *ATOMIC,
    *(ListOpsSubTrees, ListOps, PathfinderSegmentation, Pathfinder, PathX, Text, Retrieval, PG19),
    SpeechCommands,
)
TASKS = {task.name: task for task in _ALL}
"""Every task by its name."""


def get(name: str, **settings: Any) -> Task:
    """The task of that name, with the paper's settings or yours: `get("shift", length=512)`."""
    if name not in TASKS:
        raise ValueError(f"there is no task {name!r}{nearest(str(name), list(TASKS))}")
    known = [field.name for field in fields(TASKS[name])]
    for setting in settings:
        if setting not in known:
            hint = nearest(setting, known)
            raise ValueError(f"the task {name} has no setting {setting!r}{hint}")
    return TASKS[name](**settings)


def nearest(word: str, known: list[str]) -> str:
    """The end of a sentence about an unknown word: the one that was meant, or all of them."""
    near = difflib.get_close_matches(word.lower().replace("_", "-"), known, n=1)
    near = near or difflib.get_close_matches(word.lower(), known, n=1)
    return f": did you mean {near[0]!r}?" if near else f"; there are: {', '.join(known)}"
