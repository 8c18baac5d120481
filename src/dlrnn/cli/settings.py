"""Settings of a run from the command line; a wrong value is told in a plain sentence."""

import argparse
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, get_type_hints

from dlrnn.common.untrusted import expected as words_of

if TYPE_CHECKING:
    from dlrnn.train import RunConfig


def overridden(config: "RunConfig", arguments: Sequence[str]) -> "RunConfig":
    """`with_overrides`; jsonargparse speaks of its keys and Python's types, we of options."""
    from dlrnn.train import with_overrides

    try:
        return with_overrides(config, arguments)
    except ValueError as error:
        named = re.match(r'(?:Parser key "|argument --)([\w.]+)', str(error))
        if named is None or not isinstance(error.__cause__, argparse.ArgumentError):
            raise
        kind, typed = _kind(config, named[1]), _typed(named[1], arguments)
        if kind is None or typed is None:
            raise
        option, value = typed
        expected = words_of(kind) if option == f"--{named[1]}" else "a value"  # one inside it
        what = "and nothing was given" if value is None else f"not {value!r}"
        raise ValueError(f"{option} takes {expected}, {what}") from error


def _kind(config: "RunConfig", name: str) -> Any:
    """The type of a setting, None if it has none."""
    *inside, last = name.split(".")
    owner: Any = config
    for part in inside:
        owner = getattr(owner, part, None)
    return get_type_hints(type(owner)).get(last)


def _typed(name: str, arguments: Sequence[str]) -> tuple[str, str | None] | None:
    """The option, or one inside it, that lacks a value, else the option as it was typed last."""
    last = None
    for word, after in pairwise([*arguments, "--"]):
        option, has_value, value = word.partition("=")
        if not has_value and after.startswith("--") and f"{option}.".startswith(f"--{name}."):
            return option, None
        if option == f"--{name}":
            last = option, value if has_value else after
    return last
