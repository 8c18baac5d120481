"""Pathfinder: settings of other resolutions, and settings that are refused."""

import math

import pytest

from dlrnn.tasks import pathfinder
from dlrnn.tasks.storage.build import build_set


def test_settings_of_other_resolutions_are_scaled():
    spec = pathfinder.segmentation(192, continuity=2)
    assert (spec.margins, spec.seed_distance, spec.paddle_length) == ((3.0,), 20.25, 6.0)
    assert (spec.contour_length, spec.continuity, spec.antialias_scale) == (16, 2, 2)
    assert pathfinder.segmentation(64).margins == (1, 1.5)  # as near to 32: the larger decides
    assert pathfinder.segmentation(1024).paddle_length == 44
    for resolution in (*range(32, 512), 700, 1023, 1024):
        assert pathfinder.segmentation(resolution).resolution == resolution


@pytest.mark.parametrize(
    ("settings", "keywords"),
    [
        *(({"resolution": size}, f"^resolution .* not {size}$") for size in (4, 8, 24, 31, 1025)),
        ({"seed_distance": 32}, "128 is too small for its seed_distance: more than 4 . 32"),
        ({"contour_length": True}, "contour_length must be a whole number, not True"),
        ({"continuity": math.nan}, "continuity .* not nan"),
        ({"margins": ()}, "margins must be a tuple of numbers"),
        ({"margins": (0.5, 2)}, "too small for its dashes: 5 pixels with gaps of 1.0"),
        ({"paddle_thickness": 0.4}, "paddle_thickness must be at least 1 / 2"),
        ({"padding": 1.5}, "padding must be a whole number, not 1.5"),
        ({"resolution": 128.0}, "resolution must be a whole number, not 128.0"),
        ({"continuity": "1"}, "continuity must be a number, not '1'"),
        ({"margins": 3}, "margins must be a tuple of numbers .* not 3"),
        ({"margins": ("2",)}, "margins must be a tuple of numbers .* not .'2',"),
    ],
)
def test_invalid_settings_are_refused(settings, keywords, unchecked):
    with pytest.raises(ValueError, match=keywords):
        pathfinder.segmentation(**settings)


def test_paths_without_room_are_refused_before_the_build(tmp_path):
    spec = pathfinder.segmentation(seed_distance=31.5, counts={"train": 2})
    with pytest.raises(ValueError, match="14 dashes of 5 pixels found no room at resolution 128"):
        build_set(spec, tmp_path / "set")
    assert not (tmp_path / "set").exists()
    with pytest.raises(ValueError, match=r"split .* not 'dev'"):
        spec.draw("dev", 0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'gap'"):
        pathfinder.segmentation(gap=3)
