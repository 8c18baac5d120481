"""`functools.cache` with the types of the function that it wraps."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")


def cached(function: Callable[P, R]) -> Callable[P, R]:
    """Call the function once for each tuple of arguments, which may be classes.

    The type of `functools.cache` itself accepts no class with a metaclass of its own.
    """
    return cast("Callable[P, R]", functools.cache(function))
