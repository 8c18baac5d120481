"""Which recipe departs from the paper's text, and in which line of docs/reproduction.md it says so.

The page has a line for each name here, and a table of departures that concern all recipes.
"""

from fnmatch import fnmatchcase

PATTERNS: dict[str, tuple[str, ...]] = {
    "exact-phases": ("*/dlr*",),
    "learned-gain": ("*/dlr*", "*/dss*", "*/sgconv", "table4/*/s4*"),
    "one-lambda": ("table3/pathfinder*/d*", "table4/*/dlr"),
    "attention-block": ("*attention*", "table6/*"),
    "dss-frequencies": ("*/dss*",),
    "sgconv-decay": ("*/sgconv",),
    "sgconv-parameters": ("*/sgconv",),
    "select-fixed-rate": ("table1/select-fixed/dlr-1", "table1/select-fixed/dlr-1-works"),
    "mips-batch": ("table1/mips/*",),
    "mips-steps": ("table1/mips/*",),
    "table6-rate": ("table6/*",),
    "claims-without-table": ("table1/*/dlr-r-1", "table2/524288/*"),
    "listops-length": ("table3/listops-subtrees/*",),
    "class-weights": ("table3/pathfinder*",),
    "pathfinder-checkpoint": ("table3/pathfinder*",),
    "pathfinder-images": ("table3/pathfinder*", "table4/pathfinder/*", "table4/path-x/*"),
    "pathfinder-256-schedule": ("table3/pathfinder-segmentation-256/*",),
    "pathfinder-512-schedule": ("table3/pathfinder-segmentation-512/*",),
    "table3-other-models": ("table3/*/dss", "table3/*/local-attention"),
    "quoted-rows": ("table4/*/s4*", "table4/*/attention"),
    "unstated-warm-up": ("table4/*", "table5/*"),
    "steps-from-epochs": ("table4/text/*", "table4/speech-commands/*"),
    "speech-commands-clips": ("table4/speech-commands/*",),
    "language-model-training": ("table5/*",),
    "post-norm-transformer": ("table5/pg19/attention-*-post",),
}
"""By the name of a departure: patterns of the names of the recipes that depart."""


def departures_of(name: str) -> tuple[str, ...]:
    """The departures of the recipe of that name."""
    return tuple(
        departure
        for departure, patterns in PATTERNS.items()
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    )
