"""Download official releases from the Hugging Face Hub, or tell the user what to download.

Files are downloaded to `data/download/NAME` and stay there. A broken connection is resumed in the
middle of a file, and a failed download with its first incomplete file. Sizes and SHA-256 must be
those that the Hub announces; files of an older commit are removed. The Hub's repositories of Speech
Commands and PG-19 contain only scripts so far; their data will be found once it is converted to
Parquet, as that of IMDb was.
"""

import contextlib
import fnmatch
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from dlrnn.common.suggestions import suggestion
from dlrnn.tasks.storage.build import check_free_space
from dlrnn.tasks.storage.shards import sha256

DOWNLOADS = Path("data") / "download"
_TIMEOUT = 10  # seconds for the first answer


@dataclass(frozen=True)
class Home:
    """Where a release is: in a dataset repository of the Hub, or at an address."""

    by_hand: str
    """What the user downloads instead, to the file or folder `put` in DOWNLOADS."""
    put: str
    repository: str | None = None
    files: str = ""
    """The pattern of the repository's files, which are in one folder."""


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
"""The release of each task."""


def download(name: str) -> Path:
    """Download the release of a task; return the folder of its files."""
    if name not in HOMES:
        advice = suggestion(name, HOMES, f"there are: {', '.join(HOMES)}")
        raise ValueError(f"there is no set {name!r} to fetch: {advice}")
    home = HOMES[name]
    if home.repository is None:
        raise ValueError(f"{name} is not on the Hugging Face Hub: {_instead(name)}")
    with _failures(name, home.repository):
        from huggingface_hub import HfApi, hf_hub_download

        about = HfApi().dataset_info(home.repository, files_metadata=True, timeout=_TIMEOUT)
        every: list[Any] = about.siblings or []
        files = [file for file in every if fnmatch.fnmatchcase(file.rfilename, home.files)]
    if not files:
        raise ValueError(f"{home.repository} on the Hub holds no data of {name}: {_instead(name)}")
    folder = DOWNLOADS / name
    present = sum(os.path.getsize(path) for path in folder.rglob("*") if path.is_file())
    check_free_space(folder, sum(file.size for file in files) - present)
    for file in files:
        with _failures(name, home.repository):
            where: dict[str, Any] = {"revision": about.sha, "local_dir": folder}
            found = hf_hub_download(home.repository, file.rfilename, repo_type="dataset", **where)
        path = Path(found)
        digest = file.lfs.sha256 if file.lfs is not None else None
        if path.stat().st_size != file.size or (digest and sha256(path) != digest):
            path.unlink()
            raise ValueError(
                f"{path} has not the size or SHA-256 that the Hub announces and was removed; "
                "fetch again"
            )
    current = {file.rfilename for file in files}
    for path in list(folder.rglob("*")):  # those of an older commit would also be imported
        other = path.relative_to(folder).as_posix()
        if path.is_file() and fnmatch.fnmatchcase(other, home.files) and other not in current:
            path.unlink()
    return folder / PurePosixPath(home.files).parent


def _instead(name: str) -> str:
    """Return how to download a release by hand and import it."""
    home = HOMES[name]
    path = DOWNLOADS / home.put
    tokenizer = " --tokenizer FILE" if name == "pg19" else ""
    run = f"`dlrnn data import {name} {path}{tokenizer}`"
    return f"download {home.by_hand} to {path}, then {run}"


@contextlib.contextmanager
def _failures(name: str, repository: str) -> Iterator[None]:
    """Turn any error of the Hub's package into a ValueError with advice."""
    try:
        yield
    except Exception as error:  # of httpx, of the operating system, or the package's
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise ValueError(
            f"{repository} on the Hugging Face Hub cannot be read ({reason}); "
            f"fetch again when it can, or {_instead(name)}"
        ) from None
