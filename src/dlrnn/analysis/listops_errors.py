"""Error rates on ListOps-SubTrees by the height of a node and by its operator."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Integer

NAMES = ("MIN", "MAX", "MED", "SM")
_FIRST, _CLOSE = 11, 15  # tokens: `[MIN` ... `[SM`, then `]`


class Nodes(NamedTuple):
    """The sub-trees of one expression, in the order of their closing brackets."""

    positions: Integer[np.ndarray, " O"]
    heights: Integer[np.ndarray, " O"]
    operators: Integer[np.ndarray, " O"]  # 0 .. 3


def nodes(tokens: Integer[np.ndarray, " L"]) -> Nodes:
    """Parse the tokens of an expression; a digit has height 0."""
    opened: list[list[int]] = []  # operator and height so far
    found: list[tuple[int, int, int]] = []
    for place, token in enumerate(tokens.tolist()):
        if _FIRST <= token < _CLOSE:
            opened.append([token - _FIRST, 0])
        elif token == _CLOSE:
            operator, below = opened.pop()
            found.append((place, below + 1, operator))
            if opened:
                opened[-1][1] = max(opened[-1][1], below + 1)
    columns = np.array(found, dtype=np.int64).reshape(-1, 3).T
    return Nodes(*columns)


def error_rates(
    samples: Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]],
) -> dict[str, list[dict[str, Any]]]:
    """Rows by height and by operator, from (tokens, targets, predicted classes) of each sample."""
    parts = []
    for tokens, targets, predicted in samples:
        places, heights, operators = nodes(tokens)
        parts.append((heights, operators, predicted[places] != targets[places]))
    if not parts:
        return {"by height": [], "by operator": []}
    height, operator, wrong = (np.concatenate(each) for each in zip(*parts, strict=True))
    return {
        "by height": [{"height": int(h), **_rate(wrong[height == h])} for h in np.unique(height)],
        "by operator": [
            {"operator": name, **_rate(wrong[operator == place])}
            for place, name in enumerate(NAMES)
        ],
    }


def _rate(errors: np.ndarray) -> dict[str, Any]:
    count = len(errors)
    return {"nodes": count, "error": float(errors.mean()) if count else None}
