"""ListOps expressions as text: tokens, and the values of expressions in both notations."""

from statistics import median
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8

OPERATORS = ("MIN", "MAX", "MED", "SM")
VOCABULARY = ("", *"0123456789", *(f"[{name}" for name in OPERATORS), "]")
"""The text of each token: 0 padding, 1..10 digits, 11..14 `[MIN` `[MAX` `[MED` `[SM`, 15 `]`."""
PADDING, DIGIT, OPERATOR, CLOSE = 0, 1, 11, 15
NO_LABEL = 255
"""The label of a token that is not a closing bracket."""


def to_text(tokens: UInt8[np.ndarray, " L"]) -> str:
    """Return an expression like `[MAX 2 6 [MED [SM 3 1 6 ] 8 3 ] 4 5 ]`, without the padding."""
    return " ".join(VOCABULARY[token] for token in tokens if token != PADDING)


def from_text(text: str) -> UInt8[np.ndarray, " L"]:
    """Return the tokens of an expression, without its parentheses."""
    words = [word for word in text.split() if word not in "()"]
    for word in words:
        _check_word(word)
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
    words = text.split()
    if not words:
        raise ValueError("the expression is empty; one like [MAX 2 6 ] was expected")
    binary = "(" in words or ")" in words
    stack: list[str | int | _Open] = []  # items that do not yet belong to an operator
    closed: list[int] = []
    for place, word in enumerate(words, start=1):
        if word == "(":
            stack.append(word)
        elif word == ")":
            _join(stack, closed, place)
        elif word == "]" and not binary:
            _close(stack, closed, place)
        else:
            _check_word(word)
            item = _Open(word[1:], []) if word[0] == "[" else word if word == "]" else int(word)
            _push(stack, item, binary)
    if len(stack) != 1 or not isinstance(stack[0], int):
        what = "goes on after its end" if isinstance(stack[0], int) else "is not closed"
        raise ValueError(f"the expression {what}; exactly one expression was expected")
    return closed or [stack[0]]


class _Open(NamedTuple):
    operator: str
    values: list[int]


def _check_word(word: str) -> None:
    if word not in VOCABULARY[1:]:
        known = "a digit, [MIN, [MAX, [MED, [SM or ]"
        raise ValueError(f"{word[:20]!r} is not a word of an expression; expected {known}")


def _push(stack: list[str | int | _Open], item: str | int | _Open, binary: bool) -> None:
    if isinstance(item, int) and not binary and stack and isinstance(stack[-1], _Open):
        stack[-1].values.append(item)
    else:
        stack.append(item)


def _close(stack: list[str | int | _Open], closed: list[int], place: int) -> None:
    """Handle `]` in the notation without parentheses."""
    top = stack.pop() if stack else None
    if not isinstance(top, _Open):
        raise ValueError(f"word {place} closes an operator, but none is open")
    closed.append(_apply(top, place))
    _push(stack, closed[-1], binary=False)


def _join(stack: list[str | int | _Open], closed: list[int], place: int) -> None:
    """Handle `)`: an operator takes one more value, or is closed."""
    pair = "an operator and a value, or an operator and ]"
    wrong = ValueError(f"word {place}, a closing parenthesis, does not end {pair}")
    if len(stack) < 3:
        raise wrong
    item, operator, opened = stack.pop(), stack.pop(), stack.pop()
    if opened != "(" or not isinstance(operator, _Open):
        raise wrong
    if isinstance(item, int):
        operator.values.append(item)
        stack.append(operator)
    elif item == "]":
        closed.append(_apply(operator, place))
        stack.append(closed[-1])
    else:
        raise wrong


def _apply(operator: _Open, place: int) -> int:
    name, values = operator
    if not values:
        raise ValueError(f"word {place} closes [{name}, which has no values; it needs at least one")
    if name == "MED":
        return int(median(values))
    return sum(values) % 10 if name == "SM" else min(values) if name == "MIN" else max(values)
