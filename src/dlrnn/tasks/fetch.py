"""`dlrnn data fetch`: the official release from the Hugging Face Hub, or what to download by hand.

Files are downloaded into `data/download/NAME`, where they stay: a connection that breaks goes on in
the middle of a file, and a fetch that failed, with the first file that is not whole. Sizes and
SHA-256 are compared with what the Hub says of each; files of an older commit are removed. Its
Speech Commands and PG-19 have held no data so far, only scripts that name other places; once they
are turned into Parquet, as IMDb was, they are found.
"""

import contextlib
import fnmatch
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from dlrnn.tasks import nearest
from dlrnn.tasks.build import _nearest_there
from dlrnn.tasks.shards import sha256

DOWNLOADS = Path("data") / "download"
_PATIENCE = 10  # seconds for the first answer


@dataclass(frozen=True)
class Home:
    """Where a release is: a dataset of the Hub, or else what a user downloads."""

    by_hand: str
    """What to download, to the file or folder `put` in DOWNLOADS."""
    put: str
    repository: str | None = None
    files: str = ""
    """Of the repository, as a pattern: all in one folder."""


_LRA = Home("https://storage.googleapis.com/long-range-arena/lra_release.gz", "lra_release.gz")

HOMES = {
    "text": Home(
        "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",
        "aclImdb_v1.tar.gz",
        "stanfordnlp/imdb",
        "plain_text/t*.parquet",  # train and test
    ),
    "retrieval": _LRA,
    "listops": _LRA,
    "pathfinder": _LRA,
    "path-x": _LRA,
    "speech-commands": Home(
        "http://download.tensorflow.org/data/speech_commands_v0.02.tar.gz",
        "speech_commands_v0.02.tar.gz",
        "google/speech_commands",
        "v0.02/*.parquet",
    ),
    "pg19": Home(
        "the folders train, validation and test of gs://deepmind-gutenberg (gcloud storage cp -r)",
        "pg19",
        "deepmind/pg19",
        "data/*.parquet",
    ),
}
"""By the name of the task."""


def download(name: str) -> Path:
    """The folder that holds the release afterwards; ValueError if it cannot be had."""
    if name not in HOMES:
        raise ValueError(f"there is no set {name!r} to fetch{nearest(name, list(HOMES))}")
    home = HOMES[name]
    if home.repository is None:
        raise ValueError(f"{name} is not on the Hugging Face Hub: {_instead(name)}")
    with _failures(name, home.repository):
        commit, files = _listed(home.repository, home.files)
    if not files:
        raise ValueError(f"{home.repository} on the Hub holds no data of {name}: {_instead(name)}")
    folder = DOWNLOADS / name
    _check_space(folder, sum(file.size for file in files))
    for file in files:
        with _failures(name, home.repository):
            path = _downloaded(home.repository, commit, file.rfilename, folder)
        digest = file.lfs.sha256 if file.lfs is not None else None
        if path.stat().st_size != file.size or (digest and sha256(path) != digest):
            path.unlink()
            raise ValueError(f"{path} is not what the Hub says it is and was removed; fetch again")
    _remove_others(folder, home.files, {file.rfilename for file in files})
    return folder / PurePosixPath(home.files).parent


def _remove_others(folder: Path, pattern: str, wanted: set[str]) -> None:
    """Files of an older commit, which would be imported with those of the newest."""
    for path in list(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and fnmatch.fnmatchcase(name, pattern) and name not in wanted:
            path.unlink()


def _instead(name: str) -> str:
    home = HOMES[name]
    path = DOWNLOADS / home.put
    tokenizer = " --tokenizer FILE" if name == "pg19" else ""
    run = f"`dlrnn data import {name} {path}{tokenizer}`"
    return f"download {home.by_hand} to {path}, then {run}"


def _listed(repository: str, pattern: str) -> tuple[str, list[Any]]:
    """The newest commit, and those of its files that are looked for."""
    from huggingface_hub import HfApi

    about = HfApi().dataset_info(repository, files_metadata=True, timeout=_PATIENCE)
    files = [f for f in about.siblings or () if fnmatch.fnmatchcase(f.rfilename, pattern)]
    return str(about.sha), files


def _downloaded(repository: str, commit: str, file: str, folder: Path) -> Path:
    from huggingface_hub import hf_hub_download

    path = hf_hub_download(repository, file, repo_type="dataset", revision=commit, local_dir=folder)
    return Path(path)


@contextlib.contextmanager
def _failures(name: str, repository: str) -> Iterator[None]:
    """Whatever the Hub's package raises, as one sentence."""
    try:
        yield
    except Exception as error:  # of httpx, of the system, of its own
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise ValueError(
            f"{repository} on the Hugging Face Hub cannot be read ({reason}); "
            f"fetch again when it can, or {_instead(name)}"
        ) from None


def _check_space(folder: Path, need: int) -> None:
    there = _nearest_there(folder)
    had = sum(os.path.getsize(path) for path in folder.rglob("*") if path.is_file())
    free = shutil.disk_usage(there).free
    if need - had > free:
        sizes = f"{(need - had) / 1e9:.2f} GB are needed and {free / 1e9:.2f} GB are free"
        raise ValueError(f"there is not enough room in {there}: {sizes}")
