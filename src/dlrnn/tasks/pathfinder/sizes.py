"""The Pathfinder settings of each resolution, and checks of settings."""

from collections.abc import Mapping
from typing import Any

Number = int | float
LRA, SMALL, MIDDLE, LARGE = 32, 128, 256, 512
_SCALED = ("margins", "seed_distance", "marker_radius", "paddle_thickness", "paddle_length")
_RESOLUTIONS = (LRA, SMALL, MIDDLE, LARGE)
_SETTINGS: dict[str, tuple[Any, ...]] = {
    "margins": ((1,), (2, 3), (4,), (7,)),
    "seed_distance": (7, 22, 27, 40),
    "marker_radius": (1.5, 2.1, 4.2, 9),
    "contour_length": (14, 14, 16, 12),
    "paddle_thickness": (0.5, 1.5, 2, 6),
    "paddle_length": (2, 5, 8, 22),
    "antialias_scale": (2, 2, 2, 3),
    "continuity": (1.0, 1.8, 2.2, 2.5),
    "distractors": (5, 16, 16, 18),
    "distractor_length": (4, 4, 5, 4),
    "contrast": (1.5, 0.9, 1.0, 1.0),
}
"""Each setting at each of these resolutions."""
_WHOLE = {
    "resolution": (LRA, 4096),
    "contour_length": (2, 1000),
    "antialias_scale": (1, 8),
    "distractors": (0, 1000),
    "distractor_length": (1, 1000),
    "seed": (-(2**63), 2**64 - 1),
    "shard_rows": (1, 10**6),
}
_NUMBERS = {
    "seed_distance": (1, 1024),
    "marker_radius": (0.5, 1024),
    "paddle_thickness": (0.1, 1024),
    "paddle_length": (0, 1024),
    "continuity": (1, 100),  # with less, paths would turn by more than 90 degrees, into themselves
    "contrast": (0.05, 10),
    "padding": (0, 1024),
}


def sizes(resolution: int) -> dict[str, Any]:
    """Return the settings of a resolution; a shard has at most 1000 samples and 2^25 pixels.

    A resolution that is not in the table takes the settings of the nearest one (by ratio; of two
    equally near ones the larger), with lengths in pixels scaled and rounded to hundredths.
    """
    check_number("resolution", resolution)
    near = min(_RESOLUTIONS, key=lambda size: (max(size / resolution, resolution / size), -size))
    settings = {name: row[_RESOLUTIONS.index(near)] for name, row in _SETTINGS.items()}
    for key in _SCALED if near != resolution else ():
        values = settings[key] if key == "margins" else (settings[key],)
        scaled = tuple(round(value * resolution / near, 2) for value in values)
        settings[key] = scaled if key == "margins" else scaled[0]
    return {
        **settings,
        "resolution": resolution,
        "shard_rows": min(1000, max(1, 2**25 // resolution**2)),
    }


def check_number(setting: str, value: Any) -> None:
    """Refuse a setting that is not a number of the expected type and range."""
    whole = setting in _WHOLE
    least, most = _WHOLE[setting] if whole else _NUMBERS[setting]
    if isinstance(value, bool) or not isinstance(value, int if whole else Number):
        kind = "a whole number" if whole else "a number"
        raise ValueError(f"{setting} must be {kind}, not {value!r}")
    if not least <= value <= most:
        raise ValueError(f"{setting} must be from {least} to {most}, not {value}")


def check(settings: Mapping[str, Any]) -> None:
    """Refuse settings that are not numbers, or whose dashes or discs are invisible or never fit."""
    for setting in (*_WHOLE, *_NUMBERS):
        check_number(setting, settings[setting])
    margins, length = settings["margins"], settings["paddle_length"]
    numbers = isinstance(margins, tuple) and all(isinstance(each, Number) for each in margins)
    if not margins or not numbers or not 0 <= min(margins) <= max(margins) <= 1024:
        raise ValueError(f"margins must be a tuple of numbers from 0 to 1024, not {margins!r}")
    here, margin = f"resolution {settings['resolution']} is too small for", min(margins)
    if length < 2 or margin < 1:
        seen = f"{length} pixels with gaps of {2 * margin}; at least 2 and 2 are needed"
        raise ValueError(f"{here} its dashes: {seen}")
    if settings["resolution"] <= 4 * settings["seed_distance"]:
        needed = f"more than 4 * {settings['seed_distance']} pixels are needed"
        raise ValueError(f"{here} its seed_distance: {needed}")
    thickness, scale = settings["paddle_thickness"], settings["antialias_scale"]
    if thickness * scale < 1:
        needed = f"must be at least 1 / {scale}, 1 / antialias_scale, not {thickness}"
        raise ValueError(f"paddle_thickness {needed}")
    room = length + 2 * margin - thickness / 2
    if settings["marker_radius"] > room:
        most = f"must be at most {room:g} with these dashes, not {settings['marker_radius']}"
        raise ValueError(f"marker_radius {most}")
