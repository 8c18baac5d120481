"""Import of ListOps and Pathfinder from the LRA release."""

import functools
import hashlib
import io
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image
from releases import refused, write_folder, write_tar, write_zip

from dlrnn.tasks import listops, lra
from dlrnn.tasks.data import import_set
from dlrnn.tasks.listops.task import ListOps
from dlrnn.tasks.pathfinder.task import Pathfinder, PathX
from dlrnn.tasks.storage import shards
from dlrnn.tasks.storage.archives import entries, text_lines

# ---------------------------------------------------------------------------------- ListOps

TREES = {
    "train": ["[MAX 2 6 [MED [SM 3 1 6 ] 8 3 ] 4 5 ]", "( ( ( ( [SM 3 ) 1 ) 6 ) ] )", "[MIN 7 ]"],
    "val": ["[MED 1 2 ]", "( ( ( ( [MAX 2 ) 9 ) 6 ) ] )"],
    "test": ["[SM 9 9 ]"],
}
NAMES = {"train": "train", "val": "validation", "test": "test"}


def tsv(split):
    rows = "".join(f"{tree}\t{listops.evaluate(tree)}\r\n" for tree in TREES[split])
    return f"Source\tTarget\n{rows}".encode()


def trees(**changed):
    files = {f"lra_release/listops-1000/basic_{split}.tsv": tsv(split) for split in TREES}
    files |= {
        f"lra_release/listops-1000/basic_{split}.tsv": data for split, data in changed.items()
    }
    return {"lra_release/README": b"\xff", "lra_release/listops-1000/._basic_val.tsv": b"", **files}


@pytest.mark.parametrize("kind", ["gz", "zip", "folder"])
def test_imported_expressions(tmp_path, kind):
    source = tmp_path / f"lra_release.{kind}"  # the official archive is a tar named .gz
    if kind == "gz":
        write_tar(source, trees(), "w:gz")
    else:
        (write_zip if kind == "zip" else write_folder)(source, trees())
    folder = import_set("listops", source, tmp_path / "set")
    assert shards.verify(folder) == []
    task = ListOps(folder=folder)
    for split, name in NAMES.items():
        count = len(TREES[split])
        assert task.count(name) == count
        batch = task.sample(count, split=name)
        found = {
            (listops.to_text(tokens.numpy().astype(np.uint8)), int(label), int(length))
            for tokens, label, length in zip(*batch[:2], batch.lengths, strict=True)
        }
        plain = [listops.from_text(tree) for tree in TREES[split]]
        values = map(listops.evaluate, TREES[split])
        assert found == {
            (listops.to_text(t), v, len(t)) for t, v in zip(plain, values, strict=True)
        }
    assert len(task.preview().axes) == 1


@pytest.mark.parametrize(
    ("data", "keywords"),
    [
        (b"Source\tTarget\n[SM 9 9 ]\t8\n[SM 9 9 ]\t7\n", "line 3 has the label '7'.* is 8"),
        (b"Source\tTarget\n[SM 9 9 ]\teight\n", "line 2 has the label 'eight'"),
        (b"Source\tTarget\n[SM 9 9\t8\n", "line 2: the expression is not closed"),
        (b"Source\tTarget\n[ADD 9 9 ]\t8\n", r"line 2: '\[ADD'"),
        (b"Source\tTarget\n\n", "line 2 has 1 columns, not 2"),
        (b"[SM 9 9 ]\t8\n", r"begins with \['\[SM 9 9 \]', '8'\]"),
        (b"Source\tTarget\n\xff\t8\n", "line 2 is not UTF-8"),
        (b"Source\tTarget\n[SM " + b"5 " * 1999 + b"]\t5\n", "line 2 has 2001 tokens"),
        (b"Source\tTarget\n", r"no test samples of listops; basic_\{train,val,test\}.tsv"),
        (b"", r"begins with \[\]"),
    ],
)
def test_invalid_expressions_are_refused(tmp_path, data, keywords):
    source = write_tar(tmp_path / "lra.tar.xz", trees(test=data))
    refused("listops", source, tmp_path, keywords)


def test_only_the_first_byte_order_mark_is_skipped(tmp_path):
    [entry] = entries(write_folder(tmp_path, {"a": "\ufeffa\n\ufeffb".encode()}))
    assert list(text_lines(entry)) == ["a\n", "\ufeffb"]


def test_repeated_files_are_refused(tmp_path):
    source = write_zip(tmp_path / "a.zip", {**trees(), "copy/basic_val.tsv": tsv("val")})
    refused("listops", source, tmp_path, "copy/basic_val.tsv is a second file of validation")


# ---------------------------------------------------------------------------------- Pathfinder


def png(pixels, mode="L"):
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, "PNG")
    return file.getvalue()


def array(values):
    file = io.BytesIO()
    np.save(file, values, allow_pickle=True)
    return file.getvalue()


def picture(number, size):
    return np.random.default_rng(number).integers(0, 256, (size, size), dtype=np.uint8)


def label(number):
    return number * 7 % 5 % 2


def row(folder, number):
    drawn = ["1.8", "14", "4", "5", "1.5", "2", "1"]
    return [f"imgs/{folder}", f"sample_{number}.png", str(number), str(label(number)), *drawn]


@functools.cache
def images(size=32, kind="text"):
    """20 images in the folders 2 and 10, and other files of the release."""
    base = f"lra_release/pathfinder{size}/curv_contour_length_14"
    files = {f"lra_release/pathfinder{size}/curv_baseline/imgs/0/sample_172.png": b""}
    other = {32: 64, 128: 256}[size]
    files[f"lra_release/pathfinder{other}/curv_contour_length_14/imgs/2/sample_0.png"] = b"other"
    files[f"lra_release/pathfinder{other}/curv_contour_length_14/metadata/2.npy"] = b"other"
    for folder in (10, 2):
        numbers = range(folder, folder + 10)
        for number in numbers:
            files[f"{base}/imgs/{folder}/sample_{number}.png"] = png(picture(number, size))
        rows = [row(folder, number) for number in numbers]
        if kind == "text":
            data = "".join(" ".join(cells) + "\n" for cells in rows).encode()
        else:
            data = array(np.array(rows))
        files[f"{base}/metadata/{folder}.npy"] = data
    return files


@pytest.mark.parametrize(
    ("name", "size", "task"), [("pathfinder", 32, Pathfinder), ("path-x", 128, PathX)]
)
@pytest.mark.parametrize("kind", ["text", "array"])
def test_imported_images(tmp_path, name, size, task, kind):
    folder = import_set(
        name, write_tar(tmp_path / "lra_release.gz", images(size, kind), "w:gz"), tmp_path / "set"
    )
    assert shards.verify(folder) == []
    task = task(folder=folder)
    expected = {picture(k, size).tobytes(): label(k) for k in (*range(2, 12), *range(10, 20))}
    found = {}
    for split, count in (("train", 16), ("validation", 2), ("test", 2)):
        assert task.count(split) == count
        batch = task.sample(count, split=split)
        for pixels, answer in zip(*batch[:2], strict=True):
            image = np.round((pixels[:, 0].numpy() + 1) * 127.5).astype(np.uint8)
            found[image.tobytes()] = int(answer)
    assert found == expected
    assert len(task.preview().axes) == 4


def test_the_split_equals_that_of_the_loader_of_s4(tmp_path):
    """`random_split` of the list in the order of the metadata's numbers, generator seeded by 42."""
    source = write_folder(tmp_path / "release", images())
    folder = import_set("pathfinder", source / "lra_release" / "pathfinder32", tmp_path / "set")
    listed = [f"imgs/{k}/sample_{n}.png" for k in (2, 10) for n in range(k, k + 10)]
    generator = torch.Generator().manual_seed(42)
    parts = torch.utils.data.random_split(listed, [16, 2, 2], generator=generator)
    for split, part in zip(("train", "validation", "test"), parts, strict=True):
        found = [sample["file"] for sample in shards.Split(folder, split)]
        assert sorted(found) == sorted(part)


def test_the_permutation_of_torch_is_unchanged():
    """Another permutation would change the test split; it would have to be stored in a file."""
    found = lra.split_images([(str(number), 0) for number in range(200_000)])
    test = sorted(int(name) for name, (split, _) in found.items() if split == "test")
    assert len(test) == 20_000
    digest = hashlib.sha256(np.array(test, dtype="<i8").tobytes()).hexdigest()
    assert digest[:16] == "9821649e42dcdffd"


BASE = "lra_release/pathfinder32/curv_contour_length_14"
NPY = f"{BASE}/metadata/2.npy"
PNG = f"{BASE}/imgs/2/sample_2.png"


HUGE = array(np.array([["a"]])).replace(b"(1, 1), }", b"(9" + b"9" * 12 + b", 9), }")


def many(kind, shape):
    """The header of an array whose entries have no bytes."""
    file = io.BytesIO()
    header = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    file.write(b"\x93NUMPY\x01\x00" + (len(header) + 1).to_bytes(2, "little") + header + b"\n")
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "data", "keywords"),
    [
        (NPY, b"imgs/2 sample_2.png 2 2 1.8\n", "2.npy row 1 has the label '2'"),
        (NPY, b"imgs/2 sample_2.png 2\n", "2.npy row 1 has 3 entries"),
        (NPY, b"imgs/2 sample_99.png 2 1\n", "sample_99.png is in the metadata but missing"),
        (NPY, b"\xff\xfe", "2.npy is neither text nor an array"),
        (
            NPY,
            array(np.array([row(2, 2), [1]], dtype=object)),
            "2.npy is neither text nor an array",
        ),
        (NPY, array(np.array([["a"]]))[:-1], "2.npy is neither text nor an array"),
        (NPY, HUGE, "2.npy is neither text nor an array"),
        (NPY, array(np.zeros((3, 4))), r"2.npy is not a table of strings: float64 \(3, 4\)"),
        (NPY, many("<U0", "(1000000000, 5)"), "2.npy is not a table of strings: <U0"),
        (NPY, array(np.array([[b"\xff"] * 4])), "2.npy is neither text nor an array"),
        (NPY, array(np.array([["a"] * 4])).replace(b"a\0\0\0", b"\xff" * 4), "2.npy is neither"),
        (NPY, b"a b c 0\n" * (2**20 + 1), "2.npy has more than 1048576 rows"),
        (NPY, b"imgs/10 sample_10.png 2 1\n", "lra.tar: the metadata name an image more than once"),
        (PNG, b"", "sample_2.png is damaged or not PNG"),
        (PNG, png(picture(2, 32))[:-300], "sample_2.png is damaged or not PNG"),
        (PNG, b"GIF89a", "sample_2.png is damaged or not PNG"),
        (PNG, png(picture(2, 64)), "sample_2.png is 64 x 64 pixels"),
        (PNG, bytes(2**20 + 1), "sample_2.png has more than 1048576 bytes"),
        (f"copy/{NPY}", b"", "copy/.*/metadata/2.npy occurs twice"),
    ],
)
def test_invalid_images_and_metadata_are_refused(tmp_path, name, data, keywords):
    refused(
        "pathfinder",
        write_tar(tmp_path / "lra.tar", {**images(), name: data}, "w"),
        tmp_path,
        keywords,
    )


@pytest.mark.parametrize("error", [IndexError, TypeError, struct.error, zlib.error])
def test_any_error_of_pillow_names_the_file(monkeypatch, error):
    data, chunk = png(picture(2, 32)), b"iCCP\0"
    broken = data[:-12] + b"\0\0\0\1" + chunk + zlib.crc32(chunk).to_bytes(4) + data[-12:]
    with pytest.raises(ValueError, match="here is damaged or not PNG"):
        lra.read_pixels("here", broken, 32)  # IndexError

    def fail(*_):
        raise error

    monkeypatch.setattr(Image.Image, "convert", fail)
    with pytest.raises(ValueError, match="here is damaged or not PNG"):
        lra.read_pixels("here", data, 32)


def test_long_rows_of_metadata_are_split_up_to_the_label():
    assert list(lra.read_metadata("here", b"a b c 1 " + b"d " * 1000)) == [("a/b", 1)]
    [row] = lra.metadata_rows("here", b"a b c 1 " + b"d " * 1000)
    assert len(row) == 5
    with pytest.raises(ValueError, match="here row 1 has 1 entries"):
        next(lra.read_metadata("here", b"a\n" + b"\xff"))


def test_images_without_metadata_are_counted_and_colours_converted(tmp_path):
    colours = png(picture(2, 32), "RGB")
    extra = {f"{BASE}/imgs/2/sample_77.png": b"not read", PNG: colours}
    source = write_tar(tmp_path / "lra.tar", {**images(), **extra}, "w")
    folder = import_set("pathfinder", source, tmp_path / "set")
    assert shards.load_manifest(folder)["remark"] == "left out: 1 images without metadata"
    found = [sample for split in NAMES.values() for sample in shards.Split(folder, split)]
    [gray] = [sample["image"] for sample in found if sample["file"] == "imgs/2/sample_2.png"]
    assert gray.tobytes() == picture(2, 32).tobytes()
