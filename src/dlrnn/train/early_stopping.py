"""Early stopping: end a run whose metric has stayed near 0 or 1 for the last half of its steps."""

from collections.abc import Sequence

LEVELS = {0: (-0.005, 0.002), 1: (0.99, 1.0)}
"""The range of values that counts as 0, and as 1.

R2 below 0 is chance level. A run that rose late had 0.0025 there and ended at 0.045.
"""
MIN_EVALUATIONS = 3

Evaluation = tuple[int, float]
"""A step, and the value of the metric there."""


def constant_level(evaluations: Sequence[Evaluation], steps: int) -> int | None:
    """0 or 1, if every evaluation in the last half of `steps` is in that range; else None."""
    values = [value for step, value in evaluations if 2 * step >= steps]
    for level, (least, most) in LEVELS.items():
        if len(values) >= MIN_EVALUATIONS and all(least <= value <= most for value in values):
            return level
    return None


def should_stop(evaluations: Sequence[Evaluation], steps: int, planned: int) -> bool:
    """Whether a run may end after `steps` of its `planned` steps.

    A metric at 0 may still rise, so such a run gets at least half of its steps.
    """
    level = constant_level(evaluations, steps)
    return level == 1 or (level == 0 and 2 * steps >= planned)


def stop_reason(metric: str, level: int) -> str:
    """Why a run ended early, as `result.json` and the records state it."""
    least, most = LEVELS[level]
    return f"{metric} between {least} and {most} for the last half of them"
