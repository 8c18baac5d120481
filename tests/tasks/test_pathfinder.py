"""Pathfinder against slow definitions: sampled points for geometry, fine rasters for pixels."""

import hashlib
import itertools
import math

import numpy as np
import pytest

from dlrnn.tasks import pathfinder
from dlrnn.tasks.pathfinder import paths, pixels
from dlrnn.tasks.pathfinder.generator import Scene
from dlrnn.tasks.storage import shards
from dlrnn.tasks.storage.build import build_set

SPECS = {
    "128": pathfinder.segmentation(),
    "256": pathfinder.segmentation(256),
    "512": pathfinder.segmentation(512),
    "pathfinder": pathfinder.lra(),
    "path-x": pathfinder.path_x(),
    "32": pathfinder.segmentation(32),
    "64": pathfinder.segmentation(64),
    "96": pathfinder.segmentation(96),
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


def vectors(angles):
    return np.stack([np.cos(angles), np.sin(angles)], axis=-1)


def orientations(dashes):
    along = dashes[..., 2:] - dashes[..., :2]
    return np.arctan2(along[..., 1], along[..., 0])


def turned(angles):
    """Into -pi .. pi."""
    return (angles + math.pi) % (2 * math.pi) - math.pi


def points(dashes, count=60):
    """Points along each dash: [..., count, 2]."""
    t = np.linspace(0, 1, count)[:, None]
    return dashes[..., None, :2] * (1 - t) + dashes[..., None, 2:] * t


def apart(a, b):
    """The least distance of two sets of points."""
    return np.linalg.norm(a.reshape(-1, 1, 2) - b.reshape(1, -1, 2), axis=-1).min()


# ---------------------------------------------------------------------------------- geometry


def test_paths_grow_from_pivot_to_pivot(spec):
    """Every dash has its length, every gap its two margins, every path its number of dashes."""
    for scene in scenes(spec, 5):
        assert scene.margin in spec.margins
        assert scene.paths.max() == scene.distractors + 1 <= spec.distractors + 1
        for path in range(scene.distractors + 2):
            dashes = scene.dashes[scene.paths == path]
            main = path < 2
            assert len(dashes) == (spec.contour_length if main else spec.distractor_length)
            assert np.allclose(
                np.linalg.norm(dashes[:, 2:] - dashes[:, :2], axis=1), spec.paddle_length
            )
            facing = orientations(dashes)
            pivots = dashes[:-1, 2:] + scene.margin * vectors(facing[:-1])
            assert np.allclose(dashes[1:, :2], pivots + scene.margin * vectors(facing[1:]))
            turns = turned(np.diff(facing))
            assert (spec.continuity * abs(turns) < math.pi / 2 + 1e-9).all()
            arc = math.ceil(2 * math.pi * (spec.paddle_length + scene.margin))
            steps = turns * arc / (2 * math.pi)
            assert np.allclose(steps, steps.round(), atol=1e-6)
            degrees = np.degrees(facing[0])
            assert abs(degrees - round(degrees)) < 1e-6


def test_paths_start_at_the_seed_distance(spec):
    for scene in scenes(spec, 10):
        first, second = (scene.dashes[scene.paths == path][0, :2] for path in (0, 1))
        least = 2 * spec.seed_distance
        assert least < first.min()
        assert first.max() < spec.resolution - least
        assert np.linalg.norm(first - second) == pytest.approx(spec.seed_distance)


def test_shapes_keep_their_distances(spec):
    """Neighbourhoods do not overlap: 2 margins between dashes, one between a dash and a disc."""
    thick, radius = spec.paddle_thickness, spec.marker_radius
    for scene in scenes(spec, 3):
        dashes, paths, margin = scene.dashes, scene.paths, scene.margin
        slack = spec.paddle_length / 59 + 1e-9
        drawn = points(dashes)
        for path in range(scene.distractors + 2):
            mine, others = drawn[paths == path], drawn[paths != path]
            assert apart(mine, others) >= 2 * margin + thick
            for i in range(2, len(mine)):
                assert apart(mine[i], mine[: i - 1]) >= 2 * margin + thick
            assert all(apart(a, b) > margin for a, b in itertools.pairwise(mine))
            discs = scene.discs[scene.ends == path]
            if len(discs):
                assert apart(discs, others) >= margin + radius + thick / 2
                assert apart(discs, mine) == pytest.approx(margin, abs=slack)
        corners = dashes.reshape(-1, 2)
        inside = spec.padding + thick / 2 - 1e-9
        assert inside <= corners.min()
        assert corners.max() <= spec.resolution - inside
        inside = spec.padding + radius - 1e-9
        assert inside <= scene.discs.min()
        assert scene.discs.max() <= spec.resolution - inside
        between = np.linalg.norm(scene.discs[:, None] - scene.discs, axis=-1)
        assert between[~np.eye(len(between), dtype=bool)].min() >= 2 * radius - 1e-9


def test_discs_match_the_label(spec):
    labels = set()
    for scene in scenes(spec, 30):
        starts, stops = [], []
        for path in range(scene.distractors + 2):
            dashes = scene.dashes[scene.paths == path]
            facing = vectors(orientations(dashes))
            starts.append(dashes[0, :2] - scene.margin * facing[0])
            stops.append(dashes[-1, 2:] + scene.margin * facing[-1])
        first, second = scene.ends[:2]
        assert {first, second} <= {0, 1}
        assert scene.connected == (first == second)
        assert np.allclose(scene.discs[0], starts[first])
        assert np.allclose(scene.discs[1], stops[second])
        marked = range(2, scene.distractors + 2) if spec.mark_distractors else ()
        assert scene.ends[2:].tolist() == list(marked)
        assert np.allclose(scene.discs[2:], np.array(starts)[list(marked)].reshape(-1, 2))
        labels.add((scene.connected, int(first)))
    assert labels == {(True, 0), (True, 1), (False, 0), (False, 1)}


def test_distance_of_segments_matches_sampled_points():
    random = np.random.default_rng(0)
    for a, b in random.normal(size=(300, 2, 4)):
        slow = apart(points(a, 200), points(b, 200))
        steps = sum(np.linalg.norm(s[2:] - s[:2]) for s in (a, b)) / 199
        assert slow - steps <= paths.distance(a, b) <= slow + 1e-12
    point = np.array([3.0, 4.0, 3.0, 4.0])
    assert paths.distance(point, np.array([0.0, 0.0, 0.0, 0.0])) == 5
    assert paths.distance(point, np.array([0.0, 4.0, 9.0, 4.0])) == 0


# ---------------------------------------------------------------------------------- statistics


@pytest.mark.parametrize("continuity", [1.0, 1.8, 2.5])
def test_turns_are_drawn_with_the_weights_of_the_definition(continuity):
    """In an empty image: cos(min(continuity d, pi/2))^2 of the turning angle d, normalised."""
    spec = pathfinder.segmentation(
        1000, margins=(2,), seed_distance=200, marker_radius=2, contour_length=2, paddle_length=5,
        paddle_thickness=1, continuity=continuity, distractors=0,
    )  # fmt: skip
    drawn = np.array([scene.dashes for scene in scenes(spec, 3000)])  # path 0, 1, 0, 1
    facing = orientations(drawn)
    turns = turned(facing[:, 2:] - facing[:, :2]).ravel()
    count = math.ceil(2 * math.pi * 7)
    angles = np.arange(count) * 2 * math.pi / count
    angles = np.minimum(angles, 2 * math.pi - angles)
    weights = np.cos(np.minimum(continuity * angles, math.pi / 2)) ** 2
    chances = weights / weights.sum()
    found = np.bincount(
        np.round(turns * count / (2 * math.pi)).astype(int) % count, minlength=count
    )
    spread = np.sqrt(len(turns) * chances * (1 - chances))
    assert (abs(found - len(turns) * chances) <= 4.5 * spread + 1e-9).all()
    degrees = np.round(np.degrees(facing[:, :2].ravel())).astype(int) % 360
    quarters = np.bincount(degrees // 45, minlength=8) / len(degrees)
    assert (abs(quarters - 1 / 8) < 4.5 * math.sqrt(1 / 8 * 7 / 8 / len(degrees))).all()
    assert len(set(degrees.tolist())) == 360


def test_half_of_the_images_are_connected():
    spec = SPECS["pathfinder"]
    drawn = scenes(spec, 1500)
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


def guessed(distances, labels, bins=8, folds=5):
    """The share of labels predicted by the majority in a histogram of the other folds."""
    edges = np.quantile(distances, np.linspace(0, 1, bins + 1)[1:-1])
    bin_of, fold = np.searchsorted(edges, distances), np.arange(len(labels)) % folds
    right = 0
    for held_out in range(folds):
        others = fold != held_out
        votes = np.bincount(bin_of[others], 2.0 * labels[others] - 1, minlength=bins)
        right += ((votes[bin_of[~others]] > 0) == labels[~others]).sum()
    return right / len(labels)


@pytest.mark.parametrize(
    ("name", "share", "mean"),
    [
        *(("pathfinder", 0.5, 2.1), ("path-x", 0.52, 7.2), ("128", 0.54, 11.8)),
        *(("256", 0.53, 12.2), ("512", 0.65, 14.7)),
    ],
)
def test_guessed_labels_and_distractors_are_those_of_the_docstring(name, share, mean):
    """From the distance of the discs; both numbers were measured on thousands of images."""
    drawn = scenes(SPECS[name], 600)
    placed = [scene.distractors for scene in drawn]
    assert abs(np.mean(placed) - mean) < 4 * np.std(placed) / math.sqrt(len(placed)) + 0.05
    labels = np.array([scene.connected for scene in drawn])
    discs = np.array([scene.discs[:2] for scene in drawn])
    distances = np.linalg.norm(discs[:, 0] - discs[:, 1], axis=1)
    spread = math.sqrt(0.25 / len(labels))
    assert abs(guessed(distances, labels) - share) < 4 * spread
    leak = np.where(labels, distances, distances + 2 * SPECS[name].seed_distance)
    assert guessed(leak, labels) > share + 4 * spread, "the test must detect a leak"


# ---------------------------------------------------------------------------------- pixels


def fine_raster(shape, radius, resolution, scale):
    """All fine pixels whose centre is in a dash or disc, [s R, s R]."""
    centres = (np.arange(resolution * scale) + 0.5) / scale
    z = centres[None, :] + 1j * centres[:, None]
    tail, head = complex(*shape[:2]), complex(*shape[2:])
    if tail == head:
        return abs(z - tail) <= radius
    length = abs(head - tail)
    z = (z - tail) * (head - tail).conjugate() / length
    return (z.real >= 0) & (z.real <= length) & (abs(z.imag) <= radius)


def lanczos_matrix(resolution, scale):
    """The weight of each fine pixel of a row for each pixel, [R, s R]."""
    pixel, fine = np.arange(resolution)[:, None], np.arange(resolution * scale)
    x = (fine + 0.5) / scale - (pixel + 0.5)
    weights = np.where(abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0)
    whole = weights[resolution // 2].sum()  # where the border takes nothing away
    return weights / whole


def slow_ink(shape, radius, resolution, scale, contrast):
    """The gray values of a shape before rounding; a border of 20 pixels holds ink outside."""
    reduce = lanczos_matrix(resolution + 40, scale)
    raster = fine_raster(np.asarray(shape) + 20, radius, resolution + 40, scale)
    ink = 255 * contrast * (reduce @ raster @ reduce.T)
    return np.clip(ink, 0, 255)[20:-20, 20:-20]


def rounding(scale, contrast):
    """The largest error of integer weights: 2^-15 for each, along y and along x."""
    weights = pixels.lanczos(scale) / 2**14
    off = weights.size * 2.0**-15
    return 255 * contrast * (2 * abs(weights).sum() * off + off**2)


@pytest.mark.parametrize(("scale", "contrast"), [(1, 1.0), (2, 0.9), (2, 1.5), (3, 1.0), (4, 0.3)])
def test_one_shape_matches_a_fine_raster(scale, contrast):
    random = np.random.default_rng(scale)
    weights = pixels.lanczos(scale)
    for k in range(40):
        place, angle = random.uniform(-3, 33, 2), random.uniform(0, 7)  # some across the border
        length, radius = (random.uniform(1, 12), random.uniform(0.25, 3)) if k % 2 else (0.0, 3.3)
        shape = np.concatenate([place, place + length * vectors(angle)])
        exact = slow_ink(shape, radius, 30, scale, contrast)
        classes = np.array([1])
        given = np.append(shape, radius)[None]
        image, mask = pixels.paint(given, classes, 30, weights, contrast)
        assert abs(image - exact).max() <= 0.5 + rounding(scale, contrast)
        assert np.array_equal(mask > 0, image > 0)


def test_an_image_matches_fine_rasters():
    """Each pixel has the brightest shape, and the class of the brightest main path."""
    for name, index in (("pathfinder", 0), ("32", 1), ("64", 2), ("64", 5)):
        spec = SPECS[name]
        scene = spec.scene("test", index)
        how = spec.resolution, spec.antialias_scale, spec.contrast
        dashes = [slow_ink(dash, spec.paddle_thickness / 2, *how) for dash in scene.dashes]
        discs = [slow_ink(np.tile(disc, 2), spec.marker_radius, *how) for disc in scene.discs]
        image = spec.paint(scene)
        off = rounding(spec.antialias_scale, spec.contrast)
        assert abs(image.pixels - np.max(dashes + discs, axis=0)).max() <= 0.5 + off
        own = [np.max([d for d, p in zip(dashes, scene.paths, strict=True) if p == path], axis=0)
               for path in (0, 1)]  # fmt: skip
        class_of = [1 + (scene.connected and scene.ends[0] == path) for path in (0, 1)]
        expected = np.where(own[0] > own[1], *class_of) * (np.maximum(*own) >= 0.5)
        rounded = [np.rint(ink) for ink in own]
        sure = (abs(np.maximum(*own) - 0.5) > off) & (rounded[0] != rounded[1])
        sure |= np.maximum(*own) < 0.5 - off
        assert np.array_equal(image.mask[sure], expected[sure])
        assert sure.mean() > 0.85


def alone(spec, scene, path):
    """An image of one path, with two discs far outside."""
    own = scene.paths == path
    nowhere = np.full((2, 2), -1000.0)
    return spec.paint(
        Scene(scene.dashes[own], scene.paths[own], nowhere, np.array([0, 1]), scene.margin, 0)
    )


def test_masks_are_consistent_with_images(spec):
    for index in range(6):
        scene, image = spec.scene("validation", index), spec.draw("validation", index)
        assert (image.pixels.shape, image.pixels.dtype) == ((spec.resolution,) * 2, np.uint8)
        assert (image.mask.shape, image.mask.dtype) == ((spec.resolution,) * 2, np.uint8)
        assert (image.pixels[image.mask > 0] > 0).all()
        assert set(np.unique(image.mask)) == ({0, 1, 2} if image.label else {0, 1})
        first, second = (alone(spec, scene, path).pixels for path in (0, 1))
        assert np.array_equal(image.mask > 0, np.maximum(first, second) > 0)
        if image.label:
            joined, other = (first, second) if scene.ends[0] == 0 else (second, first)
            assert np.array_equal(image.mask == 2, (joined > 0) & (joined >= other))
        assert image.pixels.max() >= round(255 * min(spec.contrast, 1)) - 1
        facts = image.margin, image.distractors, image.attempt, image.label
        assert facts == (scene.margin, scene.distractors, scene.attempt, scene.connected)


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
        ("128", "4a5e1a14c8c3fb7f"),
        ("256", "d4a5978257115bde"),
        ("512", "c68a6e0215bca479"),
        ("pathfinder", "b391679974ad31f5"),
        ("path-x", "ca5e243f0057549f"),
    ],
)
def test_images_have_their_recorded_hashes(name, digest):
    """Existing data sets and recorded runs consist of these images."""
    images = [SPECS[name].draw("train", index) for index in range(8)]
    content = b"".join(image.pixels.tobytes() + image.mask.tobytes() for image in images)
    assert hashlib.sha256(content).hexdigest()[:16] == digest


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


# ---------------------------------------------------------------------------------- settings


def test_settings_of_other_resolutions_are_scaled():
    spec = pathfinder.segmentation(192, continuity=2)
    assert (spec.margins, spec.seed_distance, spec.paddle_length) == ((3.0,), 20.25, 6.0)
    assert (spec.contour_length, spec.continuity, spec.antialias_scale) == (16, 2, 2)
    assert pathfinder.segmentation(64).margins == (1, 1.5)  # as near to 32: the larger decides
    assert pathfinder.segmentation(1024).paddle_length == 44
    for resolution in (*range(32, 512), 700, 4095, 4096):
        assert pathfinder.segmentation(resolution).resolution == resolution


@pytest.mark.parametrize(
    ("settings", "keywords"),
    [
        *(({"resolution": size}, f"^resolution .* not {size}$") for size in (4, 8, 24, 31, 4097)),
        ({"seed_distance": 32}, "128 is too small for its seed_distance: more than 4 . 32"),
        ({"contour_length": True}, "contour_length must be a whole number, not True"),
        ({"continuity": math.nan}, "continuity .* not nan"),
        ({"margins": ()}, "margins must be a tuple of numbers"),
        ({"margins": (0.5, 2)}, "too small for its dashes: 5 pixels with gaps of 1.0"),
        ({"paddle_thickness": 0.4}, "paddle_thickness must be at least 1 / 2"),
        ({"marker_radius": 9}, "marker_radius must be at most 8.25 .* not 9"),
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
    spec = pathfinder.segmentation(seed_distance=3, counts={"train": 2})
    with pytest.raises(ValueError, match="14 dashes of 5 pixels found no room at resolution 128"):
        build_set(spec, tmp_path / "set")
    assert not (tmp_path / "set").exists()
    with pytest.raises(ValueError, match=r"split .* not 'dev'"):
        spec.draw("dev", 0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'gap'"):
        pathfinder.segmentation(gap=3)
