"""Releases in folders and archives, and what an import of them must refuse."""

import io
import tarfile
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dlrnn.tasks.data import import_set
from dlrnn.tasks.storage import shards


def write_tar(path, files, mode="w:xz"):
    with tarfile.open(path, mode) as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def write_zip(path, files):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def write_folder(path, files):
    for name, data in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    return path


def containers(path, files):
    """The same files in a folder, a zip and a tar, in another order."""
    path.mkdir(exist_ok=True)
    return [
        write_folder(path / "folder", files),
        write_zip(path / "release.zip", files),
        write_tar(path / "release.tar.gz", dict(reversed(files.items())), "w:gz"),
    ]


def parquet(columns):
    """The bytes of a Parquet file."""
    file = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), file)
    return file.getvalue().to_pybytes()


def content(folder):
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


def hashes(folder):
    """The hashes of a set's shards."""
    return [entry["sha256"] for entry in shards.load_manifest(folder)["shards"]]


def refused(name, source, tmp_path, keywords, **options):
    """An import fails with one line that names the source, and leaves nothing."""
    with pytest.raises(ValueError, match=keywords) as caught:
        import_set(name, source, tmp_path / "refused" / "out", **options)
    assert source.name in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "refused").exists()
