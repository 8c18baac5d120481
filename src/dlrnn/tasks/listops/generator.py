"""Generate ListOps trees of MIN, MAX, MED and SM over digits, with the value of every node.

`[MAX 2 6 [MED [SM 3 1 6 ] 8 3 ] 4 5 ]` is 6, and its sub-trees are 0 (SM), 3 (MED) and 6 (MAX).
A tree is a function of (seed, split, index): that of the first attempt with a valid length.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
from jaxtyping import UInt8, UInt16

from dlrnn.tasks.base import check_number
from dlrnn.tasks.listops import trees
from dlrnn.tasks.listops.text import DIGIT, VOCABULARY
from dlrnn.tasks.storage.specs import GeneratedSet, Sample, list_of, schema_of

MAX_ATTEMPTS = 2**24
"""Attempts at a tree with a valid length, after which the settings are refused."""


class Expression(NamedTuple):
    """A tree of L tokens and O operators, which are in the order of their closing brackets."""

    tokens: UInt8[np.ndarray, " L"]
    values: UInt8[np.ndarray, " O"]
    heights: UInt8[np.ndarray, " O"]
    operators: UInt8[np.ndarray, " O"]  # their tokens, 11..14
    positions: UInt16[np.ndarray, " O"]  # of their closing brackets
    template: bytes  # a 128-bit hash of the expression without its digits
    attempt: int

    @property
    def value(self) -> int:
        """The value of the whole expression."""
        return int(self.values[-1]) if len(self.values) else int(self.tokens[0]) - DIGIT


SCHEMA = schema_of(
    tokens=pa.binary(),
    values=list_of(pa.uint8()),
    heights=list_of(pa.uint8()),
    operators=list_of(pa.uint8()),
    positions=list_of(pa.uint16()),
    label=pa.uint8(),  # the value of the expression
    template=pa.binary(16),
    attempt=pa.uint32(),
).with_metadata({"vocabulary": " ".join(VOCABULARY[1:])})  # tokens 1, 2, ...; 0 is padding
_LIMITS = {
    "max_depth": (1, 255),
    "max_args": (2, 255),
    "min_length": (0, 65_534),
    "max_length": (2, 65_536),
    "seed": (-(2**63), 2**64 - 1),
    "shard_rows": (1, 10**6),
}


@dataclass(frozen=True, kw_only=True)
class ListOpsGenerator(GeneratedSet):
    """A data set of trees with `min_length < length < max_length`, by default ListOps-SubTrees.

    A node less deep than `max_depth` (the root's depth is 1) is an operator with probability 1/4,
    else a digit; an operator has 2..`max_args` children. All trees have different templates.
    """

    name: str = "listops-subtrees"
    max_depth: int = 15
    max_args: int = 9
    min_length: int = 7000
    max_length: int = 8180
    counts: Mapping[str, int] = field(
        default_factory=lambda: {"train": 96_000, "validation": 2_000, "test": 2_000}
    )
    shard_rows: int = 1000

    group_rows: ClassVar[int] = 20
    schema: ClassVar[pa.Schema] = SCHEMA
    unique: ClassVar[str] = "template"
    writer: ClassVar = {
        "use_dictionary": [f"{name}.list.element" for name in ("values", "heights", "operators")],
        "column_encoding": {"positions.list.element": "DELTA_BINARY_PACKED"},
    }

    def __post_init__(self) -> None:
        for setting, limits in _LIMITS.items():
            check_number(f"{self.name}: {setting}", getattr(self, setting), *limits)
        if self.max_length - self.min_length < 2:
            between = f"no length lies between {self.min_length} and {self.max_length}"
            raise ValueError(f"{self.name}: {between}; max_length must be at least 2 more")

    @property
    def parameters(self) -> dict[str, Any]:
        """The settings that determine the trees, besides the seed."""
        names = ("max_depth", "max_args", "min_length", "max_length")
        return {name: getattr(self, name) for name in names}

    @property
    def bytes_per_sample(self) -> int:
        """An upper estimate of the size on disk."""
        return 128 + 3 * self.max_length // 4

    def draw(self, split: str, index: int, attempt: int = 0) -> Expression:
        """Return tree `index` of a split: that of the first valid attempt from `attempt` on."""
        limits = self.max_depth, self.max_args, self.min_length, self.max_length
        attempts = attempt, attempt + MAX_ATTEMPTS
        drawn = trees.draw(*self.stream(split, index), attempts, limits)
        found, tokens, nodes, positions, low, high = drawn
        if found < 0:
            lengths = f"{self.min_length} < length < {self.max_length}"
            shape = f"depth {self.max_depth} and at most {self.max_args} children"
            raise ValueError(f"no tree of {shape} with {lengths} in {MAX_ATTEMPTS} attempts")
        template = int(low).to_bytes(8, "little") + int(high).to_bytes(8, "little")
        return Expression(tokens, nodes[0], nodes[1], nodes[2], positions, template, found)

    def sample(self, split: str, index: int, attempt: int = 0) -> Sample:
        """Return the columns of a tree."""
        tree = self.draw(split, index, attempt)
        return {**tree._asdict(), "label": tree.value}


def subtrees(**settings: Any) -> ListOpsGenerator:
    """ListOps-SubTrees: 7000 < length < 8180, depth up to 15, up to 9 children."""
    return ListOpsGenerator(**settings)


def lra(**settings: Any) -> ListOpsGenerator:
    """ListOps of the Long Range Arena: 500 < length < 2000, depth up to 10, up to 10 children."""
    limits = {"max_depth": 10, "max_args": 10, "min_length": 500, "max_length": 2000}
    return ListOpsGenerator(**{"name": "listops", **limits, **settings})
