"""A measured number and its origin, as a line of JSON."""

import json
import math
import re
from dataclasses import asdict, dataclass
from typing import Any, Literal

from dlrnn.common.untrusted import fit, is_printable
from dlrnn.paper.recipes import TABLES

VERSION = 1
"""The version of the format: raised when older readers would misread a line."""

LARGEST = 2**53
"""Whole numbers up to here are exact in any reader of JSON."""

Split = Literal["train", "validation", "test"]
Size = Literal["full", "tiny", "changed"]
"""The size of the paper's runs, and the sizes of other runs."""
FULL: Size = "full"

LONGEST_STEM = 200
"""The most letters of a run's file names without suffix: file systems allow 255."""


@dataclass(frozen=True)
class Record:
    """One measured number and how it was measured.

    Attributes:
        recipe: `table/task/model`, "table1/shift/dlr-1".
        variant: "" for the recipe itself; else what differs, "my_package.MyLayer".
        seed: the seed of the run.
        metric: "R2", "accuracy", ...
        value: in the paper's units; None if the run diverged.
        split: the split that it was measured on.
        steps: steps of the run.
        steps_asked: steps of the paper's run; for a tiny run, of the recipe at that scale.
        commit: of the source; None if unknown.
        hardware: the name of the device.
        versions: of Python, torch and dlrnn.
        seconds_per_step: the median, without evaluations.
        wall_seconds: of the whole run, evaluations included.
        parameters: of the model.
        command: the command that repeats the run.
        differs: the settings that differ from the recipe's; "" if none do.
        note: free text.
        scale: "full" for the paper's sizes, "tiny", or "changed" for other sizes.
        stopped: why the run stopped early at 0 or 1; "" if it did not.
        version: of this format.
    """

    recipe: str
    variant: str
    seed: int
    metric: str
    value: float | None
    split: Split
    steps: int
    steps_asked: int
    commit: str | None
    hardware: str
    versions: dict[str, str]
    seconds_per_step: float | None
    wall_seconds: float | None
    parameters: int | None
    command: str
    differs: str = ""
    note: str = ""
    scale: Size = FULL
    stopped: str = ""
    version: int = VERSION

    @property
    def size(self) -> Size:
        """The scale; old records have it in the variant: "my_package.MyLayer, tiny"."""
        told = self.variant.rpartition(", ")[2]
        if self.scale == FULL and told in ("tiny", "changed"):
            return "tiny" if told == "tiny" else "changed"
        return self.scale

    @property
    def settings(self) -> str:
        """`differs` without the steps: runs with equal settings are one experiment."""
        told = self.differs.split(", ")
        return ", ".join(each for each in told if not each.startswith("steps "))

    @property
    def is_cut(self) -> bool:
        """Whether it has fewer steps than the paper's and did not stop early."""
        return self.steps < self.steps_asked and not self.stopped

    @property
    def is_longer(self) -> bool:
        """Whether it has more steps than the paper's."""
        return self.steps > self.steps_asked

    @property
    def is_untested(self) -> bool:
        """Whether it is not of the paper's split: validation for R2, test for other metrics."""
        return self.split != ("validation" if self.metric == "R2" else "test")

    @property
    def is_comparable(self) -> bool:
        """Whether it has the paper's sizes, steps and split, and can be compared."""
        steps = not self.is_cut and not self.is_longer
        return self.size == FULL and steps and not self.is_untested

    @property
    def key(self) -> tuple[str, str, int, str]:
        """The identity of a record: a folder keeps one of each key."""
        return self.recipe, self.variant, self.seed, self.metric

    @property
    def run(self) -> tuple[str, str, int]:
        """The identity of its run: the key without the metric."""
        return self.recipe, self.variant, self.seed

    @property
    def stem(self) -> str:
        """The name of the run's files without suffix: letters, digits, `-` and `_`."""
        return stem(self.recipe, self.variant, self.seed)

    def to_line(self) -> str:
        """The record as a line of JSON."""
        return json.dumps(asdict(self))


def stem(recipe: str, variant: str, seed: int) -> str:
    """The name of a run's files."""
    parts = [*recipe.split("/"), variant, f"seed-{seed}"]
    return "_".join(re.sub(r"[^A-Za-z0-9]+", "-", part).strip("-") for part in parts if part)


def parse_record(line: str) -> Record:
    """Parse a line of records.jsonl, or say in a sentence why it is not a record.

    Old lines lack the fields that were added later, which have their defaults.
    """
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("is not JSON") from None
    for name, value in values.items() if isinstance(values, dict) else ():
        if name == "version" and isinstance(value, int) and value > VERSION:
            raise ValueError(
                f"has version {value}, and this dlrnn reads up to {VERSION}: update it"
            )
        if isinstance(value, int) and abs(value) > LARGEST:
            raise ValueError(f"has a {name!r:.60} beyond 2**53")
    try:
        record: Record = fit(values, Record, "it")
    except ValueError as error:
        raise ValueError(f"is not a record: {error}") from None
    _check(record)
    return record


def _check(record: Record) -> None:
    """Check the values of the fields."""
    if not re.fullmatch(r"table\d/[^/]+/[^/]+", record.recipe):
        raise ValueError(f"has a recipe {record.recipe!r:.60}, which is not table/task/model")
    if (table := record.recipe.partition("/")[0]) not in TABLES:
        raise ValueError(f"has the table {table!r} instead of one of {', '.join(TABLES)}")
    if (letters := len(record.stem)) > LONGEST_STEM:
        many = f"has a recipe and a variant of {letters} letters"
        raise ValueError(f"{many}, and names of files have at most {LONGEST_STEM}")
    if record.steps < 0 or record.steps_asked < 1:
        raise ValueError(f"has {record.steps} of {record.steps_asked} steps")
    for name, value in asdict(record).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"has a {name} that is not finite: use null")
        if not _is_printable(value):
            raise ValueError(f"has a {name!r} with control characters")


def _is_printable(value: Any) -> bool:
    """Whether texts have no control characters except newlines and tabs, which notes may have."""
    if isinstance(value, dict):
        return all(map(_is_printable, (*value, *value.values())))
    return not isinstance(value, str) or is_printable(re.sub(r"[\n\t]", " ", value))
