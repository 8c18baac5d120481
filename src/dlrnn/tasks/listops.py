"""ListOps: trees of MIN, MAX, MED and SM over digits, drawn exactly, valued at every node.

`[MAX 2 6 [MED [SM 3 1 6 ] 8 3 ] 4 5 ]` is 6, and its sub-trees are 0 (SM), 3 (MED) and 6 (MAX).
A tree is a function of (seed, split, index, attempt): the first attempt whose length is right.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, ClassVar, NamedTuple, no_type_check

import numba
import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
from jaxtyping import UInt8, UInt16

from dlrnn.tasks.random import SPLITS

OPERATORS = ("MIN", "MAX", "MED", "SM")
VOCABULARY = ("", *"0123456789", *(f"[{name}" for name in OPERATORS), "]")
"""A token is an index here: 0 padding, 1..10 digits, 11..14 `[MIN` `[MAX` `[MED` `[SM`, 15 `]`."""
PADDING, DIGIT, OPERATOR, CLOSE = 0, 1, 11, 15
NO_LABEL = 255
"""The label of a token that closes no sub-tree."""

_ATTEMPTS = 2**24  # without a tree of the right length: then there is hardly one


class Expression(NamedTuple):
    """One tree of L tokens and O operators; operators in the order of their closing brackets."""

    tokens: UInt8[np.ndarray, "L"]
    values: UInt8[np.ndarray, "O"]
    heights: UInt8[np.ndarray, "O"]
    operators: UInt8[np.ndarray, "O"]  # their tokens, 11..14
    positions: UInt16[np.ndarray, "O"]  # of their closing brackets
    template: bytes  # 128 bits that stand for the expression without its digits
    attempt: int

    @property
    def labels(self) -> UInt8[np.ndarray, "L"]:
        """The value of the sub-tree that a token closes, elsewhere NO_LABEL."""
        labels = np.full(len(self.tokens), NO_LABEL, dtype=np.uint8)
        labels[self.positions] = self.values
        return labels


SCHEMA = pa.schema(
    [
        pa.field("tokens", pa.binary(), False, {"dtype": "uint8"}),
        pa.field("values", pa.list_(pa.field("element", pa.uint8(), False)), False),
        pa.field("heights", pa.list_(pa.field("element", pa.uint8(), False)), False),
        pa.field("operators", pa.list_(pa.field("element", pa.uint8(), False)), False),
        pa.field("positions", pa.list_(pa.field("element", pa.uint16(), False)), False),
        pa.field("label", pa.uint8(), False),  # the value of the whole
        pa.field("template", pa.binary(16), False),
        pa.field("attempt", pa.uint32(), False),
    ],
    {"vocabulary": " ".join(VOCABULARY[1:])},  # of the tokens from 1 on; 0 is padding
)


@dataclass(frozen=True)
class ListOps:
    """A set of trees with `min_length < length < max_length`; the defaults are ListOps-SubTrees.

    A node less deep than `max_depth` (the root's depth is 1) is an operator with probability 1/4,
    else a digit; an operator has 2..`max_args` children. No two trees share a template.
    """

    name: str = "listops-subtrees"
    max_depth: int = 15
    max_args: int = 9
    min_length: int = 7000
    max_length: int = 8180
    seed: int = 0
    counts: Mapping[str, int] = field(
        default_factory=lambda: {"train": 96_000, "validation": 2_000, "test": 2_000}
    )
    shard_rows: int = 1000

    group_rows: ClassVar[int] = 20
    unique: ClassVar[str] = "template"
    writer: ClassVar = {
        "use_dictionary": [f"{name}.list.element" for name in ("values", "heights", "operators")],
        "column_encoding": {"positions.list.element": "DELTA_BINARY_PACKED"},
    }

    def __post_init__(self) -> None:
        for setting, least, most in (
            ("max_depth", 1, 255),
            ("max_args", 2, 255),
            ("min_length", 0, 65_534),
            ("max_length", 2, 65_536),
            ("seed", -(2**63), 2**64 - 1),
            ("shard_rows", 1, 10**6),
        ):
            value = getattr(self, setting)
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"{self.name}: {setting} must be a whole number, not {value!r}")
            if not least <= value <= most:
                limits = f"must be from {least} to {most}, not {value}"
                raise ValueError(f"{self.name}: {setting} {limits}")
        if self.max_length - self.min_length < 2:
            between = f"no length lies between {self.min_length} and {self.max_length}"
            raise ValueError(f"{self.name}: {between}; max_length must be at least 2 more")

    @property
    def parameters(self) -> dict[str, Any]:
        """What decides the trees, besides the seed."""
        own = ("max_depth", "max_args", "min_length", "max_length")
        return {key: value for key, value in asdict(self).items() if key in own}

    @property
    def bytes_per_sample(self) -> int:
        """On the disk, rounded up."""
        return 128 + 3 * self.max_length // 4

    def draw(self, split: str, index: int, attempt: int = 0) -> Expression:
        """Tree `index` of a split: the first, from that attempt on, that has the right length."""
        if split not in SPLITS[:3]:
            raise ValueError(f"split must be train, validation or test, not {split!r}")
        seed, number = np.uint64(self.seed % 2**64), np.uint64(SPLITS.index(split))
        limits = self.max_depth, self.max_args, self.min_length, self.max_length
        drawn = _draw(seed, number, np.uint64(index), (attempt, attempt + _ATTEMPTS), limits)
        found, tokens, nodes, positions, low, high = drawn
        if found < 0:
            lengths = f"{self.min_length} < length < {self.max_length}"
            shape = f"depth {self.max_depth} and at most {self.max_args} children"
            raise ValueError(f"no tree of {shape} with {lengths} in {_ATTEMPTS} attempts")
        template = int(low).to_bytes(8, "little") + int(high).to_bytes(8, "little")
        return Expression(tokens, nodes[0], nodes[1], nodes[2], positions, template, found)

    def table(self, split: str, rows: range, attempts: Mapping[int, int]) -> pa.Table:
        """Trees of a split; `attempts` gives the first attempt of those that do not start at 0."""
        trees = [self.draw(split, index, attempts.get(index, 0)) for index in rows]
        columns = [
            pa.array([tree.tokens.tobytes() for tree in trees], pa.binary()),
            _lists([tree.values for tree in trees], pa.uint8()),
            _lists([tree.heights for tree in trees], pa.uint8()),
            _lists([tree.operators for tree in trees], pa.uint8()),
            _lists([tree.positions for tree in trees], pa.uint16()),
            pa.array([_root(tree) for tree in trees], pa.uint8()),
            pa.array([tree.template for tree in trees], pa.binary(16)),
            pa.array([tree.attempt for tree in trees], pa.uint32()),
        ]
        return pa.Table.from_arrays(columns, schema=SCHEMA)


def subtrees(**settings: Any) -> ListOps:
    """ListOps-SubTrees: 7000 < length < 8180, depth up to 15, up to 9 children."""
    return ListOps(**settings)


def lra(**settings: Any) -> ListOps:
    """ListOps of the Long Range Arena: 500 < length < 2000, depth up to 10, up to 10 children."""
    limits = {"max_depth": 10, "max_args": 10, "min_length": 500, "max_length": 2000}
    return ListOps(**{"name": "listops", **limits, **settings})


def _lists(rows: list[np.ndarray], kind: pa.DataType) -> pa.Array:
    offsets = np.cumsum([0] + [len(row) for row in rows], dtype=np.int32)
    values = pa.array(np.concatenate(rows), kind)
    of = pa.list_(pa.field("element", kind, False))
    return pa.ListArray.from_arrays(pa.array(offsets), values, type=of)


def _root(tree: Expression) -> int:
    return int(tree.values[-1]) if len(tree.values) else int(tree.tokens[0]) - DIGIT


# ---------------------------------------------------------------------------------- text


def to_text(tokens: UInt8[np.ndarray, "L"]) -> str:
    """`[MAX 2 6 [MED [SM 3 1 6 ] 8 3 ] 4 5 ]`: without parentheses; padding is left out."""
    return " ".join(VOCABULARY[token] for token in tokens if token != PADDING)


def from_text(text: str) -> UInt8[np.ndarray, "L"]:
    """The tokens of an expression; parentheses are left out."""
    words = [word for word in text.split() if word not in "()"]
    for word in words:
        _check_word(word)
    return np.array([VOCABULARY.index(word) for word in words], dtype=np.uint8)


def evaluate(text: str) -> int:
    """The value of an expression.

    Without parentheses, `[SM 3 1 6 ]`, or with those of Nangia and Bowman (2018), which make the
    tree binary: `( ( ( ( [SM 3 ) 1 ) 6 ) ] )`. MED is truncated to an integer, SM is the sum mod
    10.
    """
    return sub_values(text)[-1]


def sub_values(text: str) -> list[int]:
    """The value of every sub-tree in the order of their closing brackets, then of the whole."""
    words = text.split()
    if not words:
        raise ValueError("the expression is empty; one like [MAX 2 6 ] was expected")
    binary = "(" in words or ")" in words
    stack: list[str | int | _Open] = []  # what is not yet part of something larger
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
        raise ValueError(f"the expression {what}; one whole expression was expected")
    return closed or [stack[0]]


class _Open(NamedTuple):
    operator: str
    values: list[int]


def _check_word(word: str) -> None:
    if word not in VOCABULARY[1:]:
        known = "a digit, [MIN, [MAX, [MED, [SM or ]"
        raise ValueError(f"{word[:20]!r} is no part of an expression; it should be {known}")


def _push(stack: list[str | int | _Open], item: str | int | _Open, binary: bool) -> None:
    if isinstance(item, int) and not binary and stack and isinstance(stack[-1], _Open):
        stack[-1].values.append(item)
    else:
        stack.append(item)


def _close(stack: list[str | int | _Open], closed: list[int], place: int) -> None:
    """`]` without parentheses."""
    top = stack.pop() if stack else None
    if not isinstance(top, _Open):
        raise ValueError(f"word {place} closes an operator, but none is open")
    closed.append(_apply(top, place))
    _push(stack, closed[-1], binary=False)


def _join(stack: list[str | int | _Open], closed: list[int], place: int) -> None:
    """`)`: an operator takes one more value, or is closed."""
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


# ---------------------------------------------------------------------------------- drawing
#
# Why it is exact. An attempt is one unconditioned tree, level by level instead of depth first: the
# choices of a node (operator or digit, how many children, which name, which digit) do not depend on
# anything else, so the order in which they are drawn does not matter. A node is an operator if two
# fair bits are both 1: probability 1/4, 64 nodes from two words. The length, nodes + operators, is
# known from the shape alone and only grows, so an attempt that reaches max_length is given up at
# once, as it would be at its end; names and digits are drawn only for trees that are accepted.
# What is left is the distribution given that the length lies between its limits.
#
# `no_type_check` keeps the tests' shape checks, which numba cannot compile, out of the kernels.


def _compiled(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled once a machine, or once a process where no folder for the cache can be written."""
    try:
        compiled: Callable[..., Any] = numba.njit(cache=True)(kernel)
    except RuntimeError:
        compiled = numba.njit(kernel)
    return compiled


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_KEY, _DRAWN, _LANES, _LEFT = 0, 1, 2, 3  # a stream: its key, numbers drawn, 16-bit lanes, how many
_ZERO, _ONE, _U16 = np.uint64(0), np.uint64(1), np.uint64(16)


@_compiled
@no_type_check
def _mix(x):
    """SplitMix64's finaliser, as in `random.py`."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@_compiled
@no_type_check
def _start(stream, seed, split, index, attempt):
    """The stream of `Random(seed, split, step=attempt, first=index, count=1)`."""
    key = _mix(_mix(_mix(seed) ^ split) ^ np.uint64(attempt))
    stream[_KEY] = _mix(key + index * _GOLDEN)
    stream[_DRAWN] = stream[_LANES] = stream[_LEFT] = _ZERO


@_compiled
@no_type_check
def _bits(stream):
    """The next 64 bits of a stream."""
    stream[_DRAWN] += _ONE
    return _mix(stream[_KEY] + stream[_DRAWN] * _GOLDEN)


@_compiled
@no_type_check
def _below(stream, count):
    """Uniform in 0 .. count-1, exactly: 16 bits, drawn again where they would favour some."""
    count = np.uint64(count)
    fair = np.uint64(65536) - np.uint64(65536) % count
    while True:
        if stream[_LEFT] == _ZERO:
            stream[_LANES], stream[_LEFT] = _bits(stream), np.uint64(4)
        lane = stream[_LANES] & np.uint64(0xFFFF)
        stream[_LANES] >>= _U16
        stream[_LEFT] -= _ONE
        if lane < fair:
            return np.int64(lane % count)


@_compiled
@no_type_check
def _lowest(word):
    """The position of the lowest 1, by counting the zeros below it."""
    x = (word & (~word + _ONE)) - _ONE
    x -= (x >> _ONE) & np.uint64(0x5555555555555555)
    x = (x & np.uint64(0x3333333333333333)) + ((x >> np.uint64(2)) & np.uint64(0x3333333333333333))
    x = (x + (x >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((x * np.uint64(0x0101010101010101)) >> np.uint64(56))


@_compiled
@no_type_check
def _grow(stream, limits, where, arity):
    """The shape of one tree, level by level: how many nodes and operators; -1 when too long.

    Nodes are counted from the root on, level after level, siblings side by side. Operator j is node
    `where[j]` and has `arity[j]` children, which follow those of operator j - 1.
    """
    max_depth, max_args, _, max_length = limits
    first, nodes, operators = 0, 1, 0
    for _ in range(1, max_depth):  # the nodes of this level are first .. stop-1
        stop = nodes
        for start in range(first, stop, 64):
            word = _bits(stream) & _bits(stream)
            if stop - start < 64:
                word &= (_ONE << np.uint64(stop - start)) - _ONE
            while word != _ZERO:
                where[operators] = start + _lowest(word)
                word &= word - _ONE
                arity[operators] = 2 + _below(stream, max_args - 1)
                nodes += arity[operators]
                operators += 1
                if nodes + operators >= max_length:
                    return -1, -1
        first = stop
        if nodes == stop:
            break
    return nodes, operators


@_compiled
@no_type_check
def _value(operator, values, count):
    """MIN, MAX, MED or SM of a few digits, which it sorts."""
    if operator == 3:
        return values[:count].sum() % 10
    for i in range(1, count):
        value, j = values[i], i
        while j > 0 and values[j - 1] > value:
            values[j] = values[j - 1]
            j -= 1
        values[j] = value
    if operator == 0:
        return values[0]
    if operator == 1:
        return values[count - 1]
    return (values[(count - 1) // 2] + values[count // 2]) // 2


@_compiled
@no_type_check
def _hash(low, high, token):
    """Two hashes of a template, one token further."""
    word = np.uint64(token)
    return _mix(low + word * _GOLDEN), _mix((high ^ word) * _GOLDEN)


@_compiled
@no_type_check
def _write(stream, limits, size, where, arity):
    """Names and digits of a tree, depth first: tokens, what is known of operators, the template."""
    (max_depth, max_args, _, _), (nodes, operators) = limits, size
    tokens = np.empty(nodes + operators, np.uint8)
    known = np.empty((3, operators), np.uint8)  # value, height, token
    positions = np.empty(operators, np.uint16)
    operator_of = np.full(nodes, -1, np.int32)
    child = np.empty(operators, np.int32)  # the next one to write
    following = 1
    for j in range(operators):
        operator_of[where[j]], child[j] = j, following
        following += arity[j]
    # What is open, from the root down: the operator, its name, values so far, height so far.
    opened = np.empty(max_depth + 1, np.int32)
    name = np.empty(max_depth + 1, np.int64)
    values = np.empty((max_depth + 1, max_args), np.int64)
    count, height = np.empty(max_depth + 1, np.int64), np.empty(max_depth + 1, np.int64)
    depth, length, closed, node = -1, 0, 0, 0
    low, high = np.uint64(0x243F6A8885A308D3), np.uint64(0x13198A2E03707344)  # pi
    while True:
        j = operator_of[node]
        if j >= 0:
            depth += 1
            opened[depth], name[depth] = j, _below(stream, 4)
            count[depth], height[depth] = 0, 0
            tokens[length] = OPERATOR + name[depth]
            low, high = _hash(low, high, tokens[length])
            length += 1
        else:
            digit = _below(stream, 10)
            tokens[length] = DIGIT + digit
            length += 1
            if depth < 0:
                break
            values[depth, count[depth]] = digit
            count[depth] += 1
        while depth >= 0 and count[depth] == arity[opened[depth]]:
            value = _value(name[depth], values[depth], count[depth])
            known[0, closed], known[1, closed] = value, height[depth] + 1
            known[2, closed], positions[closed] = OPERATOR + name[depth], length
            tokens[length] = CLOSE
            low, high = _hash(low, high, CLOSE)
            length += 1
            closed += 1
            depth -= 1
            if depth >= 0:
                values[depth, count[depth]] = value
                count[depth] += 1
                height[depth] = max(height[depth], height[depth + 1] + 1)
        if depth < 0:
            break
        node = child[opened[depth]]
        child[opened[depth]] += 1
    return tokens, known, positions, low, high


@_compiled
@no_type_check
def _draw(seed, split, index, attempts, limits):
    """The first attempt of some with a tree of the right length, and that tree; or -1."""
    _, _, min_length, max_length = limits
    stream = np.empty(4, np.uint64)
    where = np.empty(max_length, np.int32)
    arity = np.empty(max_length, np.int32)
    for attempt in range(attempts[0], attempts[1]):
        _start(stream, seed, split, index, attempt)
        nodes, operators = _grow(stream, limits, where, arity)
        if nodes + operators > min_length:
            tree = _write(stream, limits, (nodes, operators), where, arity)
            return attempt, tree[0], tree[1], tree[2], tree[3], tree[4]
    empty = np.empty(0, np.uint8)
    return -1, empty, np.empty((3, 0), np.uint8), np.empty(0, np.uint16), _ZERO, _ZERO
