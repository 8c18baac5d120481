"""Import what an import path names: a user's mixer or task."""

from functools import partial
from importlib import import_module
from typing import Any

from dlrnn.common.untrusted import is_ours, user_import


def imported(path: str, what: str) -> Any:
    """The object at `path`, MODULE.NAME; errors begin with `what`, "the task 'my_tasks.Forecast'".

    Modules outside of dlrnn are found in the current folder, too.
    """
    module, _, attribute = path.rpartition(".")
    try:
        load = partial(import_module, module)
        return getattr(load() if is_ours(path) else user_import(load), attribute)
    except Exception as error:  # a user's module may raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, ModuleNotFoundError):
            reason += " in this folder or PYTHONPATH"
        raise ValueError(f"{what} cannot be imported: {reason}") from error
