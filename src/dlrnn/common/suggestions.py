"""Suggest a known name for a misspelt one."""

from collections.abc import Iterable
from difflib import SequenceMatcher

LEAST_LIKENESS = 0.6
LONGEST = 200
"""Characters of a name that is compared: a file may hold one of megabytes."""


def nearest(wrong: object, known: Iterable[str]) -> str | None:
    """The known name that is most like a wrong one; None if none is similar.

    Upper and lower case are equal, and so are `-` and `_`. Names with dots are also compared by
    their last part: `d_state` finds `model.mixer_options.d_state`.
    """
    typed = _normalized(str(wrong))
    if len(typed) > LONGEST:
        return None
    rated = [(_likeness(typed, _normalized(each)), each) for each in known]
    (best, _), name = max(rated, default=((0.0, 0.0), ""), key=lambda each: each[0])
    return name if best >= LEAST_LIKENESS else None


def suggestion(wrong: object, known: Iterable[str], otherwise: str) -> str:
    """`did you mean 'NAME'?`, or `otherwise` if no known name is similar."""
    near = nearest(wrong, known)
    return otherwise if near is None else f"did you mean {near!r}?"


def _normalized(name: str) -> str:
    return name.lower().replace("_", "-")


def _likeness(typed: str, known: str) -> tuple[float, float]:
    """The larger likeness of the last parts and of the whole names, then that of the whole."""
    pairs = ((typed.rpartition(".")[2], known.rpartition(".")[2]), (typed, known))
    last, whole = (SequenceMatcher(None, *pair).ratio() for pair in pairs)
    return max(last, whole), whole
