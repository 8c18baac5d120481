"""Folders and archives: all give the same files; unsafe and damaged archives are refused."""

import gzip
import lzma
import os
import stat
import struct
import tarfile
import zipfile

import pytest
from releases import write_folder, write_tar, write_zip

from dlrnn.tasks.storage.archives import entries

FILES = {"a/one.txt": b"one", "a/b/two.txt": b"2" * 70_000, "empty": b""}


def content(path, **bounds):
    return {entry.name: entry.read(2**30) for entry in entries(path, **bounds)}


def refused(path, keywords, **bounds):
    with pytest.raises(ValueError, match=keywords) as caught:
        content(path, **bounds)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["", ":gz", ":xz", ":bz2"])
def test_a_tar_is_recognized_under_any_name(tmp_path, kind):
    for name in (f"x.tar{kind.replace(':', '.')}", "unnamed"):
        path = write_tar(tmp_path / name, FILES, "w" + kind)
        assert content(path) == FILES
        assert [entry.size for entry in entries(path)] == [3, 70_000, 0]


def test_zip_and_folder_give_the_same_files(tmp_path):
    assert content(write_zip(tmp_path / "x.zip", FILES)) == FILES
    folder = write_folder(tmp_path / "folder", FILES)
    assert content(folder) == FILES
    assert [entry.name for entry in entries(folder)] == ["a/b/two.txt", "a/one.txt", "empty"]


def test_one_file_may_be_compressed(tmp_path):
    for name, data in (
        ("x.tsv", b"data"),
        ("x.tsv.xz", lzma.compress(b"data")),
        ("x.tsv.gz", gzip.compress(b"data")),
    ):
        (tmp_path / name).write_bytes(data)
        assert content(tmp_path / name) == {"x.tsv": b"data"}


def test_entries_may_be_skipped_or_read_in_part(tmp_path):
    for path in (write_tar(tmp_path / "x.tar.xz", FILES), write_zip(tmp_path / "x.zip", FILES)):
        seen = {e.name: e.open().read(5) for e in entries(path) if e.name != "a/one.txt"}
        assert seen == {"a/b/two.txt": b"22222", "empty": b""}


def test_dots_before_a_name_are_dropped(tmp_path):
    assert content(write_tar(tmp_path / "x.tar", {"./a/./b": b"x"}, "w")) == {"a/b": b"x"}


# ---------------------------------------------------------------------------------- untrusted


@pytest.mark.parametrize(
    ("name", "keywords"),
    [
        *((name, "climbs out") for name in ("../out", "a/../../out", "a\\..\\..\\out")),
        *((name, "not relative") for name in ("/etc/passwd", "C:\\passwd", "\\passwd")),
    ],
)
def test_paths_outside_the_archive_are_refused(tmp_path, name, keywords):
    refused(write_tar(tmp_path / "x.tar.xz", {name: b""}), keywords)
    refused(write_zip(tmp_path / "x.zip", {name: b""}), keywords)


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE]
)
def test_links_and_devices_in_a_tar_are_refused(tmp_path, kind):
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        member = tarfile.TarInfo("a/it")
        member.type, member.linkname = kind, "/etc/passwd"
        tar.addfile(member)
    what = "a link" if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE) else "not a plain file"
    refused(tmp_path / "x.tar", f"'a/it', which is {what}")


def test_links_in_a_zip_and_in_a_folder_are_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        link = zipfile.ZipInfo("a/it")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "/etc/passwd")
    folder = tmp_path / "folder"
    folder.mkdir()
    os.symlink("/etc", folder / "it")
    for path in (tmp_path / "x.zip", folder):
        refused(path, "it', which is a link")


def test_sizes_are_limited(tmp_path):
    for path in (
        write_tar(tmp_path / "x.tar.xz", FILES),
        write_zip(tmp_path / "x.zip", FILES),
        write_folder(tmp_path / "folder", FILES),
    ):
        refused(path, "'a/b/two.txt' of 70000 bytes, more than the 69999", member_bytes=69_999)
        refused(path, "more than the 70002 bytes allowed in all", total_bytes=70_002)
        assert content(path, member_bytes=70_000, total_bytes=70_003) == FILES
    bomb = tmp_path / "x.xz"
    bomb.write_bytes(lzma.compress(bytes(10**6)))
    refused(bomb, "'x' of more bytes than the 999999 allowed", member_bytes=999_999)


def test_a_long_tar_header_is_refused_unread(tmp_path):
    member = tarfile.TarInfo("x")
    member.type, member.size = tarfile.XHDTYPE, 2**33
    (tmp_path / "x.tar").write_bytes(member.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    refused(tmp_path / "x.tar", "is damaged: a member's header cannot be read")


# ---------------------------------------------------------------------------------- damaged


@pytest.mark.parametrize("kind", ["", ":gz", ":xz", ":bz2"])
@pytest.mark.parametrize("share", [0.001, 0.2, 0.5, 0.9, 0.999])
def test_a_truncated_tar_is_refused(tmp_path, kind, share):
    files = {f"{number}.txt": os.urandom(1500) for number in range(40)}
    path = write_tar(tmp_path / f"x.tar{kind.replace(':', '.')}", files, "w" + kind)
    data = path.read_bytes()
    end = len(data) if kind else 40 * (512 + 1536)  # zeros at the end of a tar may be missing
    path.write_bytes(data[: int(end * share)])
    refused(path, "is damaged")


@pytest.mark.parametrize("kind", [":gz", ":xz"])
def test_a_flipped_bit_is_found(tmp_path, kind):
    files = {f"{number}.txt": os.urandom(1500) for number in range(10)}
    path = write_tar(tmp_path / "x.tar", files, "w" + kind)
    data = bytearray(path.read_bytes())
    for place in (len(data) // 2, len(data) - 6):
        broken = data.copy()
        broken[place] ^= 1
        path.write_bytes(broken)
        refused(path, "is damaged")


def test_a_missing_or_damaged_tar_header_is_refused(tmp_path):
    path = write_tar(tmp_path / "x.tar", {"a": b"1", "b": b"2"}, "w")
    data = bytearray(path.read_bytes())
    path.write_bytes(data[:1024])
    refused(path, "x.tar is damaged: a member's header cannot be read .empty header.")
    data[1024] ^= 1
    path.write_bytes(data)
    refused(path, "is damaged: a member's header cannot be read .bad checksum.")


def test_a_damaged_zip_is_refused(tmp_path):
    path = write_zip(tmp_path / "x.zip", {"a": os.urandom(5000)})
    data = bytearray(path.read_bytes())
    path.write_bytes(data[:3000])
    refused(path, "x.zip is damaged: File is not a zip file")
    data[2500] ^= 1
    path.write_bytes(data)
    refused(path, "x.zip is damaged in 'a': ")


def test_an_encrypted_zip_is_refused(tmp_path):
    path = write_zip(tmp_path / "x.zip", {"a": b"data"})
    data = bytearray(path.read_bytes())
    for place in (6, data.index(b"PK\1\2") + 8):
        struct.pack_into("<H", data, place, 1)
    path.write_bytes(data)
    refused(path, "holds 'a', which is encrypted")


@pytest.mark.parametrize("name", ["x.tar.xz", "x.tgz", "x.zip", "x.gz", "x.tsv.xz", "x.tar"])
def test_a_file_that_contradicts_its_suffix_is_refused(tmp_path, name):
    for data in (b"", b"something else" * 100):
        if (name, data) != ("x.gz", b""):  # an empty file is an empty gzip file
            (tmp_path / name).write_bytes(data)
            refused(tmp_path / name, f"{name} is damaged")


def test_one_uncompressed_file_is_seekable(tmp_path):
    """Parquet files must be."""
    (tmp_path / "a.parquet").write_bytes(b"abc")
    for entry in entries(tmp_path / "a.parquet"):
        assert (entry.name, entry.size) == ("a.parquet", 3)
        with entry.open() as file:
            assert file.seekable()
    refused(tmp_path / "a.parquet", "of 3 bytes, more than the 2 allowed", member_bytes=2)


def test_a_missing_path_is_refused(tmp_path):
    refused(tmp_path / "no", "there is no file or folder")
