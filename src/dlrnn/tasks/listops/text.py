"""ListOps expressions as text: tokens, and the values of expressions in both notations."""

from statistics import median
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8

OPERATORS = ("MIN", "MAX", "MED", "SM")
VOCABULARY = ("", *"0123456789", *(f"[{name}" for name in OPERATORS), "]")
"""The text of each token: 0 padding, 1..10 digits, 11..14 `[MIN` `[MAX` `[MED` `[SM`, 15 `]`."""
PADDING, DIGIT, OPERATOR, CLOSE = 0, 1, 11, 15


def to_text(tokens: UInt8[np.ndarray, " L"]) -> str:
    """Return an expression like `[MAX 2 6 [MED [SM 3 1 6 ] 8 3 ] 4 5 ]`, without the padding."""
    return " ".join(VOCABULARY[token] for token in tokens if token != PADDING)


def from_text(text: str) -> UInt8[np.ndarray, " L"]:
    """Return the tokens of an expression, without its parentheses."""
    words = _without_parentheses(text.split())
    return np.array([VOCABULARY.index(word) for word in words], dtype=np.uint8)


def evaluate(text: str) -> int:
    """Return the value of an expression.

    It is written without parentheses, `[SM 3 1 6 ]`, or with those of Nangia and Bowman (2018),
    which make the tree binary: `( ( ( ( [SM 3 ) 1 ) 6 ) ] )`. MED is the median truncated to an
    integer, SM is the sum modulo 10.
    """
    return sub_values(text)[-1]


def sub_values(text: str) -> list[int]:
    """Return the value of every sub-tree in the order of the closing brackets, the whole last."""
    return [tree.value for tree in sub_trees(text)] or [int(text)]


class SubTree(NamedTuple):
    """One operator of an expression: the tokens `start .. stop - 1`, its depth and value."""

    start: int
    stop: int
    depth: int
    operator: str
    value: int


def sub_trees(text: str) -> list[SubTree]:
    """Return the operators of an expression in the order of their closing brackets."""
    words = text.split()
    plain = _without_parentheses(words)
    if not plain:
        raise ValueError("the expression is empty; one like [MAX 2 6 ] was expected")
    closed: list[SubTree] = []
    opened: list[tuple[int, int, list[int]]] = []  # place in `plain` and in `binary`, values
    binary: list[str] = []  # the expression with parentheses
    for place, word in enumerate(plain):
        if place and not opened and word != "]":
            raise ValueError("the expression goes on after its end; one was expected")
        if word[0] == "[":
            opened.append((place, len(binary), []))
            binary.append(word)
            continue
        binary.append(word)
        if word == "]":
            if not opened:
                raise ValueError(f"word {place + 1} closes an operator, but none is open")
            start, name, values = opened.pop()
            value = _apply(plain[start][1:], values, place)
            closed.append(SubTree(start, place + 1, len(opened), plain[start][1:], value))
            binary[name] = "( " * (len(values) + 1) + binary[name]
            binary.append(")")
        else:
            value = int(word)
        if opened:
            opened[-1][2].append(value)
            binary.append(")")
    if opened:
        raise ValueError("the expression is not closed; a ] was expected at its end")
    if len(words) != len(plain) and " ".join(words) != " ".join(binary):
        pairs = "an operator and a value, or an operator and ]"
        raise ValueError(f"its parentheses do not enclose pairs: {pairs}")
    return closed


def _without_parentheses(words: list[str]) -> list[str]:
    plain = [word for word in words if word not in ("(", ")")]
    for word in plain:
        if word not in VOCABULARY[1:]:
            known = "a digit, [MIN, [MAX, [MED, [SM or ]"
            raise ValueError(f"{word[:20]!r} is not a word of an expression; expected {known}")
    return plain


def _apply(name: str, values: list[int], place: int) -> int:
    """Return the value of an operator, which the word at a place closes."""
    if not values:
        closes = f"word {place + 1} closes [{name}, which has no values"
        raise ValueError(f"{closes}; it needs at least one")
    if name == "MED":
        return int(median(values))
    return {"MIN": min(values), "MAX": max(values), "SM": sum(values) % 10}[name]
