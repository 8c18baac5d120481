"""A value that no longer changes: plainly at 0, or at 1, for the last half of the steps."""

from collections.abc import Sequence

PLAIN = {0: (-0.005, 0.002), 1: (0.99, 1.0)}
"""From, to. Below 0 is chance; what creeps up from there was at .0025 and ended at .045."""
EVALUATIONS = 3  # at least so many

Judged = tuple[int, float]
"""A step, and the value of its evaluation."""


def plain_level(judged: Sequence[Judged], steps: int) -> int | None:
    """0 or 1, if every evaluation of the last half of `steps` is plainly there."""
    values = [value for step, value in judged if 2 * step >= steps]
    for level, (least, most) in PLAIN.items():
        if len(values) >= EVALUATIONS and all(least <= value <= most for value in values):
            return level
    return None


def may_stop(judged: Sequence[Judged], steps: int, asked: int) -> bool:
    """After `steps` of those `asked` for. What is at 0 may still rise: it is given half of them."""
    level = plain_level(judged, steps)
    return level == 1 or (level == 0 and 2 * steps >= asked)


def in_words(metric: str, level: int) -> str:
    """What is said of such a run."""
    least, most = PLAIN[level]
    return f"{metric} between {least} and {most} for the last half of them"
