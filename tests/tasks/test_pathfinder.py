"""Pathfinder: its geometry, its stamps, its pixels, and its statistics against the authors'."""

import hashlib
import math
from dataclasses import replace

import numpy as np
import pytest
from pathfinder_measures import SPECS as PAPER
from pathfinder_measures import compare, measures, statistics

from dlrnn import tasks
from dlrnn.tasks import pathfinder
from dlrnn.tasks.pathfinder import generator, stamps
from dlrnn.tasks.pathfinder.stamps import Dash, disc_of, stamps_of
from dlrnn.tasks.storage import shards
from dlrnn.tasks.storage.build import build_set

SPECS = {
    **PAPER,
    "32": pathfinder.segmentation(32),
    "64": pathfinder.segmentation(64),
    "100": pathfinder.segmentation(100),
    "other": pathfinder.segmentation(
        150, margins=(2.5,), padding=6, continuity=1.2, contour_length=6, distractor_length=1
    ),
}


def scenes(spec, count, split="train"):
    return [spec.scene(split, index) for index in range(count)]


@pytest.fixture(params=SPECS, ids=str)
def spec(request):
    return SPECS[request.param]


def made(spec, margin):
    lengths = float(spec.paddle_length), float(spec.paddle_thickness), float(margin)
    return stamps_of(Dash(*lengths, spec.antialias_scale, float(spec.continuity), spec.clipped))


def angle(stamp, all_stamps):
    """The orientation of a dash."""
    if stamp < stamps.DEGREES:
        return math.radians(stamp - 180)
    return math.atan2(*all_stamps.tables[stamp, [stamps.HEAD_Y, stamps.HEAD_X]])


def up(place, length, facing):
    """The pixel after a step; coordinates are rounded up."""
    return np.ceil(place + length * np.array([math.sin(facing), math.cos(facing)])).astype(int)


def pivots(dashes, spec, margin):
    """The pivots of a path, and its orientations."""
    length, all_stamps = spec.paddle_length, made(spec, margin)
    facing = [angle(stamp, all_stamps) for stamp in dashes[:, 2]]
    back = facing[0] + (math.pi if facing[0] < 0 else -math.pi)
    found = [up(up(dashes[0, :2], length, facing[0]), length + margin, back)]
    for orientation in facing[:-1]:
        found.append(up(found[-1], length + 2 * margin, orientation))
    return np.array(found), np.array(facing)


# ---------------------------------------------------------------------------------- geometry


def test_paths_grow_from_pivot_to_pivot(spec):
    """Heads lie on the circle around the next pivot, and turns are bounded."""
    for scene in scenes(spec, 5):
        assert scene.margin in spec.margins
        assert scene.paths.max() == scene.distractors + 1 <= spec.distractors + 1
        for path in range(scene.distractors + 2):
            dashes = scene.dashes[scene.paths == path]
            assert len(dashes) == (spec.contour_length if path < 2 else spec.distractor_length)
            assert dashes[0, 2] < stamps.DEGREES <= dashes[1:, 2].min(initial=stamps.DEGREES)
            places, facing = pivots(dashes, spec, scene.margin)
            reached = dashes[1:, :2] - places[1:]
            assert np.allclose(np.arctan2(reached[:, 0], reached[:, 1]), facing[1:])
            off = np.linalg.norm(reached, axis=1) - spec.paddle_length - scene.margin
            assert (abs(off) < math.sqrt(2)).all()
            turns = (np.diff(facing) + math.pi) % (2 * math.pi) - math.pi
            assert (spec.continuity * abs(turns) < math.pi / 2 + 1e-9).all()
            assert 0 <= dashes[:, :2].min() <= dashes[:, :2].max() < spec.resolution


def test_paths_start_at_the_seed_distance(spec):
    for scene in scenes(spec, 10):
        first, second = (scene.dashes[scene.paths == path][0, :2] for path in (0, 1))
        band = round(2 * spec.seed_distance)
        assert band <= first.min() <= first.max() < spec.resolution - band
        assert abs(np.linalg.norm(first - second) - spec.seed_distance) <= 0.5 * math.sqrt(2)


def test_discs_match_the_label(spec):
    """Main paths have them at a tail and at a head, distractors at their first pivots."""
    labels = set()
    for scene in scenes(spec, 30):
        first, second = scene.ends[:2]
        assert {first, second} <= {0, 1}
        assert scene.connected == (first == second)
        assert np.array_equal(scene.discs[0], scene.dashes[scene.paths == first][0, :2])
        assert np.array_equal(scene.discs[1], scene.dashes[scene.paths == second][-1, :2])
        marked = range(2, scene.distractors + 2) if spec.mark_distractors else ()
        assert scene.ends[2:].tolist() == list(marked)
        for path, disc in zip(marked, scene.discs[2:], strict=True):
            dashes = scene.dashes[scene.paths == path]
            assert np.array_equal(disc, pivots(dashes, spec, scene.margin)[0][0])
        labels.add((scene.connected, int(first)))
    assert labels == {(True, 0), (True, 1), (False, 0), (False, 1)}


def neighbourhoods(spec, scene, dashes):
    """The neighbourhoods of dashes on an image, [D, R, R], without what is outside."""
    rooms, size = made(spec, scene.margin).room, spec.resolution
    half, drawn = rooms.shape[1] // 2, np.zeros((len(dashes), size, size), dtype=int)
    wide = np.zeros((size + 2 * rooms.shape[1],) * 2, dtype=int)
    for k, (y, x, stamp) in enumerate(dashes):
        wide[:] = 0
        top, left = y - half + rooms.shape[1], x - half + rooms.shape[1]
        wide[top : top + len(rooms[0]), left : left + len(rooms[0])] = rooms[stamp]
        drawn[k] = wide[rooms.shape[1] : -rooms.shape[1], rooms.shape[1] : -rooms.shape[1]]
    return drawn


@pytest.mark.parametrize("name", ["128", "pathfinder", "other"])
def test_dashes_have_room(name):
    """A further dash overlaps no earlier one but its predecessors, nor the border."""
    spec = SPECS[name]
    for scene in scenes(spec, 4):
        rooms = neighbourhoods(spec, scene, scene.dashes)
        border = np.full((spec.resolution,) * 2, 255)
        inner = slice(spec.padding, spec.resolution - spec.padding)
        border[inner, inner] = 0
        total, last = border, {}
        for k, (dash, path) in enumerate(zip(scene.dashes, scene.paths, strict=True)):
            if dash[2] >= stamps.DEGREES:
                assert (total + rooms[k]).max() < stamps.CORE + 255
                total = np.maximum(total, rooms[last[path]])
            elif path >= 2:
                for finished in set(last) - {0}:  # the last dash of path 0 never blocks
                    total = np.maximum(total, rooms[last[finished]])
            last[path] = k


# ---------------------------------------------------------------------------------- statistics


def test_chances_of_heads_are_those_of_the_definition(spec):
    """cos(min(continuity d, pi/2))^2 of the turning angle d, cumulative."""
    found = made(spec, spec.margins[0])
    facing = np.array([angle(stamp, found) for stamp in range(len(found.room))])
    turns = abs(facing[:, None] - facing[None, stamps.DEGREES :])
    turns = np.minimum(turns, 2 * math.pi - turns)
    weights = np.cos(np.minimum(spec.continuity * turns, math.pi / 2)) ** 2
    assert np.allclose(found.chances, weights.cumsum(axis=1))
    heads = found.tables[stamps.DEGREES :, [stamps.HEAD_Y, stamps.HEAD_X]]
    radius = spec.paddle_length + spec.margins[0]
    around = np.arange(math.ceil(2 * math.pi * radius)) / radius
    circle = np.floor(radius * np.stack([np.sin(around), np.cos(around)], axis=1))
    assert np.array_equal(heads, np.unique(circle.astype(int), axis=0))


def test_half_of_the_images_are_connected():
    drawn = scenes(SPECS["pathfinder"], 1500)
    for share in (
        np.mean([scene.connected for scene in drawn]),
        np.mean([scene.ends[0] for scene in drawn]),
        np.mean([scene.ends[1] for scene in drawn]),
    ):
        assert abs(share - 0.5) < 4 * math.sqrt(0.25 / 1500)


def test_margins_are_equally_likely_and_shared_by_all_attempts():
    spec = SPECS["128"]
    drawn = scenes(spec, 250)
    share = np.mean([scene.margin == 2 for scene in drawn])
    assert abs(share - 0.5) < 4 * math.sqrt(0.25 / 250)
    for index in range(3):
        later = spec.scene("train", index, drawn[index].attempt + 1)
        assert later.attempt > drawn[index].attempt
        assert later.margin == drawn[index].margin
        assert not np.array_equal(later.dashes, drawn[index].dashes)


@pytest.mark.parametrize(
    ("name", "count"),
    [("128", 400), ("256", 300), ("512", 80), ("pathfinder", 1000), ("path-x", 400)],
)
def test_images_are_statistically_those_of_the_authors(name, count):
    """Each measure is within 3 standard errors: see pathfinder_measures.py."""
    found = compare(name, count)
    assert statistics(name)[0] >= (40 if name == "512" else 300)
    assert len(found) == 18
    assert {each: numbers for each, numbers in found.items() if not abs(numbers[2]) <= 3} == {}


def test_the_comparison_finds_small_differences(monkeypatch):
    """Thinner dashes, fewer distractors, dimmer discs: what it must notice."""
    for change in ({"paddle_thickness": 1}, {"distractors": 14}, {"contrast": 0.8}):
        monkeypatch.setitem(PAPER, "128", replace(SPECS["128"], **change))
        assert max(abs(numbers[2]) for numbers in compare("128", 100).values()) > 4


# ---------------------------------------------------------------------------------- pixels


def distances(length, facing, half, scale):
    """The distance of each pixel's centre from a dash whose anchor is the middle pixel."""
    places = np.arange(-half, half + 1)
    z = places[None, :] + 1j * places[:, None]
    z = z * complex(math.cos(facing), -math.sin(facing))
    return abs(z - np.clip(z.real, 0, length))


def test_stamps_are_dashes_and_their_neighbourhoods(spec):
    margin, length = spec.margins[-1], spec.paddle_length
    found, fine = made(spec, margin), 1 / spec.antialias_scale
    half = found.room.shape[1] // 2
    width = max(1, round(spec.paddle_thickness / fine)) * fine
    for stamp in (0, 17, 45, 90, 200, 300, stamps.DEGREES, len(found.room) - 1):
        facing = angle(stamp, found) + (math.pi if stamp >= stamps.DEGREES else 0)
        away = distances(length, facing, half, spec.antialias_scale)
        side = width / 2 + 2 * fine
        ink = found.ink[stamp] / stamps.FULL
        assert ink[away > side + 3].max(initial=0) < 0.03
        assert ink.sum() == pytest.approx((length + fine) * width, rel=0.45)
        assert found.room[stamp][away < margin - 0.75].min() > 220  # the filter rings
        assert found.room[stamp][away > side + margin + 1].max(initial=0) < 60
        box = found.tables[stamp, : stamps.RIGHT + 1] + half
        outside = np.ones_like(ink, dtype=bool)
        outside[box[0] : box[1], box[2] : box[3]] = False
        assert not found.ink[stamp][outside].any()
        assert not found.room[stamp][outside].any()


@pytest.mark.parametrize(("radius", "scale"), [(2.1, 2), (4.2, 2), (9, 3), (1.5, 2)])
def test_discs_have_their_area_and_overshoot_unless_clipped(radius, scale):
    soft, clipped = (disc_of(float(radius), scale, clip) / stamps.FULL for clip in (False, True))
    assert clipped.sum() == pytest.approx(math.pi * radius**2, rel=0.15)
    assert clipped.max() <= 1 <= soft.max()
    half, wide = len(soft) // 2, np.arange(len(soft))
    centre = (soft.sum(axis=1) * wide).sum() / soft.sum() - half
    assert centre == pytest.approx(0.5 / scale - 0.5, abs=0.05)


def slow_image(spec, scene):
    """Image and mask from stamps, in floating point, on a canvas with a wide border."""
    found, wide = made(spec, scene.margin), 100
    size, half = spec.resolution + 2 * wide, found.ink.shape[1] // 2
    drawn = np.zeros((len(scene.dashes) + len(scene.discs), size, size))
    for k, (y, x, stamp) in enumerate(scene.dashes):
        contrast = spec.contrast if scene.paths[k] < 2 else spec.distractor_contrast
        top, left = y + wide - half, x + wide - half
        window = slice(top, top + 2 * half + 1), slice(left, left + 2 * half + 1)
        drawn[k][window] = contrast * found.ink[stamp] / stamps.FULL
    disc = disc_of(float(spec.marker_radius), spec.antialias_scale, spec.clipped) / stamps.FULL
    for k, (y, x) in enumerate(scene.discs, start=len(scene.dashes)):
        top, left = y + wide - len(disc) // 2, x + wide - len(disc) // 2
        drawn[k][top : top + len(disc), left : left + len(disc)] = disc
    drawn = drawn[:, wide:-wide, wide:-wide]
    most, mask = drawn.max(), np.zeros(drawn.shape[1:], dtype=int)
    for path in (0, 1):
        class_ = 1 + (scene.connected and scene.ends[0] == path)
        ink = drawn[: len(scene.paths)][scene.paths == path].max(axis=0)
        mask = np.maximum(mask, class_ * (255 * ink / most >= 0.5))
    return 255 * drawn.max(axis=0) / most, mask


@pytest.mark.parametrize("name", ["128", "pathfinder", "64", "other"])
def test_an_image_is_the_brightest_of_its_stamps(name):
    spec = SPECS[name]
    for scene in scenes(spec, 3):
        image, (expected, mask) = spec.paint(scene), slow_image(spec, scene)
        assert abs(image.pixels - expected).max() <= 0.55
        assert (image.mask != mask).mean() < 1e-3
        assert image.pixels.max() == 255
        facts = image.margin, image.distractors, image.attempt, image.label
        assert facts == (scene.margin, scene.distractors, scene.attempt, scene.connected)


def test_masks_are_consistent_with_images(spec):
    for index in range(6):
        image = spec.draw("validation", index)
        assert (image.pixels.shape, image.pixels.dtype) == ((spec.resolution,) * 2, np.uint8)
        assert (image.mask.shape, image.mask.dtype) == ((spec.resolution,) * 2, np.uint8)
        assert (image.pixels[image.mask > 0] > 0).all()
        assert set(np.unique(image.mask)) == ({0, 1, 2} if image.label else {0, 1})


def test_measures_of_a_small_picture():
    picture = np.zeros((8, 8), np.uint8)
    picture[1, 1:4], picture[5:7, 5], picture[3, 7] = 255, 130, 20
    mask = (picture > 200).astype(np.uint8)
    found = measures(picture, mask, np.array([[[1, 1], [1, 3]], [[0, 0], [3, 4]]]), 3, 2)
    assert (found["pieces > 100"], found["largest piece > 100"]) == (2, 3)
    assert found["share > 128"] == pytest.approx(100 * 5 / 64)
    assert (found["mask height"], found["mask width"], found["mask left"]) == (1, 3, 1)
    assert found["pixels > 128 of a main dash"] == 3 / 4
    assert found["end to end"] == (2 + 5) / 2


# ---------------------------------------------------------------------------------- sets on disk


@pytest.mark.parametrize(
    "make", [pathfinder.segmentation, pathfinder.lra], ids=lambda f: f.__name__
)
def test_a_data_set_holds_the_generated_images(make, tmp_path):
    counts = {"train": 11, "validation": 3, "test": 0}
    spec = make(counts=counts, shard_rows=4, seed=3)
    one = build_set(spec, tmp_path / "one")
    assert shards.verify(one) == []
    manifest = shards.load_manifest(one)
    assert manifest["task"] == spec.name
    assert manifest["parameters"] == spec.parameters
    assert manifest["parameters"]["resolution"] == spec.resolution
    train = shards.Split(one, "train")
    for index in (10, 0, 5):
        sample, image = train[index], spec.draw("train", index)
        assert np.array_equal(sample["image"], image.pixels.ravel())
        assert ("mask" in sample) == spec.masks
        if spec.masks:
            assert np.array_equal(sample["mask"], image.mask.ravel())
        for name in ("label", "margin", "distractors", "attempt"):
            assert sample[name] == getattr(image, name)


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("128", "aceb944852cbeb7c"),
        ("256", "19202023f9c34de8"),
        ("512", "617bfb2e075db7e0"),
        ("pathfinder", "52603a3698e18d10"),
        ("path-x", "513182325d04f1c9"),
    ],
)
def test_images_have_their_recorded_hashes(name, digest):
    """Data sets and recorded runs of this `generator.VERSION` consist of these images."""
    images = [SPECS[name].draw("train", index) for index in range(8)]
    content = b"".join(image.pixels.tobytes() + image.mask.tobytes() for image in images)
    assert hashlib.sha256(content).hexdigest()[:16] == digest


def test_sets_of_another_generator_are_refused(tmp_path, monkeypatch):
    """A set of the first generator has no `generator` among its parameters."""
    counts = {"train": 3, "validation": 1, "test": 1}
    with monkeypatch.context() as patch:
        patch.setattr(generator, "VERSION", 1)
        old = build_set(pathfinder.lra(counts=counts), tmp_path / "old")
    assert shards.load_manifest(old)["parameters"]["generator"] == 1
    with pytest.raises(ValueError, match="has generator 1, not 2"):
        tasks.get("pathfinder", folder=old).sample(2)
    with pytest.raises(ValueError, match="holds another set"):
        build_set(pathfinder.lra(counts=counts), old)
    new = build_set(pathfinder.lra(counts=counts), tmp_path / "new")
    assert len(tasks.get("pathfinder", folder=new).sample(2).inputs) == 2


def test_samples_differ_by_seed_split_and_index():
    spec, other = SPECS["pathfinder"], pathfinder.lra(seed=1)
    drawn = [
        spec.draw(split, index) for split in ("train", "validation", "test") for index in (0, 1)
    ]
    drawn += [other.draw("train", 0)]
    assert len({image.pixels.tobytes() for image in drawn}) == 7
    assert np.array_equal(spec.draw("train", 1).pixels, drawn[1].pixels)


def test_estimated_sizes_on_disk(spec, tmp_path):
    settings = {**spec.__dict__, "counts": {"train": 30}}
    one = build_set(type(spec)(**settings), tmp_path / "set")
    size = sum(path.stat().st_size for path in one.glob("*.parquet"))
    assert size / 30 < spec.bytes_per_sample < 6 * size / 30
    assert spec.shard_rows * spec.bytes_per_sample < 2**25
    assert spec.shard_rows * spec.resolution**2 <= 2**25
