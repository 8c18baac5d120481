"""Settings of a run from the command line; a wrong value is told in a plain sentence."""

import argparse
import re
from collections.abc import Sequence
from itertools import pairwise
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from dlrnn.train import RunConfig

WORDS = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    NoneType: "null",
}


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
        expected = _expected(kind) if option == f"--{named[1]}" else "a value"  # one inside it
        what = "and nothing was given" if value is None else f"not {value!r}"
        raise ValueError(f"{option} takes {expected}, {what}") from error


def _kind(config: "RunConfig", name: str) -> Any:
    """The type of a setting, None if it has none."""
    *inside, last = name.split(".")
    owner: Any = config
    for part in inside:
        owner = getattr(owner, part, None)
    return get_type_hints(type(owner)).get(last)


def _expected(kind: Any) -> str:
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(_expected, get_args(kind))))
    if get_origin(kind) is Literal:
        return " or ".join(map(str, get_args(kind)))
    return WORDS.get(kind, "a JSON object")


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
