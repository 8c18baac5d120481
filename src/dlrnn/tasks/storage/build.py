"""Build a generated data set on disk in the format of `shards.py`.

Worker processes generate shards and send their bytes to the building process, which alone writes
files, each under a temporary name that is then renamed. A build that was killed at any moment is
completed by the same command.
"""

import contextlib
import hashlib
import json
import math
import os
import shutil
import signal
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from dlrnn._version import __version__
from dlrnn.common.files import PART, lock, naming, open_append, sync, write_unlocked
from dlrnn.common.untrusted import fit
from dlrnn.tasks.base import check_number
from dlrnn.tasks.random import SPLITS
from dlrnn.tasks.storage.columns import Column, check_file, read_group
from dlrnn.tasks.storage.shards import (
    FORMAT,
    MANIFEST,
    MAX_SAMPLES,
    PROGRESS,
    SHARD_NAME,
    TOKENIZER,
    Entry,
    Shard,
    listed,
    load_manifest,
    manifest_hash,
    naming_damage,
    sha256,
    shards_of,
    whole_lines,
)
from dlrnn.tasks.storage.specs import GeneratedSet, encoded

_MAX_ATTEMPT = 2**31  # attempts at a sample are below it
_REDRAWS = 1000  # of a sample with a duplicate key, after which there are too few keys


def build_set(
    spec: GeneratedSet,
    out: str | os.PathLike[str],
    *,
    workers: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write a data set, or complete it; return its folder.

    The bytes are the same for any number of workers and after any interruption. `progress` gets the
    number of samples written so far and the number of all samples.
    """
    folder = Path(out)
    check_number("workers", workers, 1, math.inf)
    _check_spec(spec)
    header = set_header(spec.name, spec.parameters, spec.shard_rows, spec.counts, spec.seed)
    check_folder(folder, header)
    shards = shards_of(spec.counts, spec.shard_rows)
    if not (folder / MANIFEST).exists():
        written = sum(path.stat().st_size for path in folder.glob("*.parquet"))
        need = sum(spec.counts.values()) * spec.bytes_per_sample - written
        check_free_space(folder, need, f" for {spec.name}")
        # An impossible spec fails here, and numba compiles its kernels before the workers start.
        spec.table(shards[0].split, shards[0].rows[:1], {})
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        check_folder(folder, header)
        builder = _Builder(spec, folder, header, shards, progress)
        if builder.start():
            builder.make(workers)
            if spec.unique is not None:
                builder.make_unique(spec.unique)
            builder.finish()
    return folder


def _check_spec(spec: GeneratedSet) -> None:
    """Refuse counts and seeds that `shards.load_manifest` would not accept."""
    for split, count in spec.counts.items():
        if split not in SPLITS[:3]:
            expected = f"expected {listed(SPLITS[:3])}"
            raise ValueError(f"{spec.name}: there is no split {split!r}; {expected}")
        check_number(f"{spec.name}: samples of {split}", count, 0, MAX_SAMPLES)
    check_number(f"{spec.name}: samples", sum(spec.counts.values()), 1, math.inf)
    if not -(2**63) <= spec.seed < 2**63:
        raise ValueError(f"{spec.name}: the seed of a set must be below 2**63, not {spec.seed}")


def set_header(
    name: str,
    parameters: Mapping[str, Any],
    shard_rows: int,
    counts: Mapping[str, int],
    seed: int = 0,
) -> dict[str, Any]:
    """Return the entries of a manifest that are known before its shards are written."""
    header = {
        "format": FORMAT,
        "task": name,
        "parameters": dict(parameters),
        "seed": seed,
        "counts": {split: counts.get(split, 0) for split in SPLITS[:3]},
        "shard_rows": shard_rows,
        "versions": {
            **{"dlrnn": __version__, "numba": numba.__version__},
            **{"numpy": np.__version__, "pyarrow": pa.__version__},
        },
    }
    as_json: dict[str, Any] = json.loads(json.dumps(header))
    return as_json


# ---------------------------------------------------------------------------------- folder


def check_folder(folder: Path, header: Mapping[str, Any], ignored: Sequence[str] = ()) -> None:
    """Refuse a folder that contains anything but this data set or a part of it.

    Entries of the header that are `ignored` may differ, and the versions of a complete data set.
    """
    parent = _existing_parent(folder)
    if not parent.is_dir():
        raise ValueError(f"{parent} is a file; a folder was expected")
    if not folder.exists():
        return
    names = sorted(path.name for path in folder.iterdir())
    for name in names:
        whole = name.removesuffix(PART)
        if whole not in (MANIFEST, PROGRESS, TOKENIZER) and not SHARD_NAME.fullmatch(whole):
            advice = "choose an empty or a new folder"
            raise ValueError(f"{folder} holds {name!r}, which belongs to no set; {advice}")
    if (folder / MANIFEST).exists():
        found, ignored = load_manifest(folder), (*ignored, "versions")
    elif lines := whole_lines(folder / PROGRESS):
        found = lines[0]
    else:
        if any(name != PROGRESS and not name.endswith(PART) for name in names):
            raise ValueError(f"{folder} holds shards of an unknown set; choose another folder")
        return
    for key, value in header.items():
        if key not in ignored and found.get(key) != value:
            difference = f"{key} {json.dumps(found.get(key)):.200}, not {json.dumps(value)}"
            other = f"holds another set (its {difference}); choose another folder"
            raise ValueError(f"{folder} {other}")


def _existing_parent(folder: Path) -> Path:
    """Return the folder, or the first folder above it that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def check_free_space(folder: Path, need: int, what: str = "") -> None:
    """Refuse to write more bytes than the disk of a folder has free."""
    parent = _existing_parent(folder)
    free = shutil.disk_usage(parent).free
    if need > free:
        sizes = f"{need / 1e9:.2f} GB are needed and {free / 1e9:.2f} GB are free"
        raise ValueError(f"there is not enough room{what} in {parent}: {sizes}")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder for one build; the lock ends with the process that holds it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            lock(handle, wait=False)
        except BlockingIOError:
            raise ValueError(f"another process is building {folder}; wait for it to end") from None
        yield
    finally:
        os.close(handle)


# ---------------------------------------------------------------------------------- building


class _Builder:
    """The only writer of a folder."""

    def __init__(
        self,
        spec: GeneratedSet,
        folder: Path,
        header: dict[str, Any],
        shards: list[Shard],
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.spec, self.folder, self.header, self.shards = spec, folder, header, shards
        self.entries: dict[Shard, Entry] = {}
        self.progress = progress
        self.total = sum(len(shard.rows) for shard in shards)

    def start(self) -> bool:
        """Keep shards that are complete, remove partial files; return False if all is done."""
        for path in self.folder.glob(f"*{PART}"):
            path.unlink()
        manifest = load_manifest(self.folder) if (self.folder / MANIFEST).exists() else None
        stored = manifest["shards"] if manifest else whole_lines(self.folder / PROGRESS)[1:]
        where = str(self.folder / (MANIFEST if manifest else PROGRESS))
        known = {each.file: each.sha256 for each in fit(stored, list[Entry], where)}
        for shard in self.shards:
            path = self.folder / shard.file
            if shard.file in known and path.is_file() and sha256(path) == known[shard.file]:
                self.entries[shard] = Entry(shard.file, len(shard.rows), known[shard.file])
        whole = manifest is not None and len(self.entries) == len(self.shards)
        if manifest and not whole and manifest["versions"] != self.header["versions"]:
            versions = json.dumps(manifest["versions"])
            made_by = f"is damaged and was made by {versions}"
            raise ValueError(f"{self.folder} {made_by}: repair it with these versions")
        self._report()
        if whole:
            (self.folder / PROGRESS).unlink(missing_ok=True)
            return False
        lines = [self.header, *map(asdict, self.entries.values())]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        write_unlocked(self.folder / PROGRESS, text.encode())
        return True

    def make(self, workers: int) -> None:
        """Write the missing shards, with the first attempt at each sample."""
        missing = [shard for shard in self.shards if shard not in self.entries]
        with contextlib.closing(_generated(self.spec, missing, workers)) as generated:
            for shard, data in generated:
                self._write(shard, data)

    def make_unique(self, column: str) -> None:
        """Redraw samples whose key is that of an earlier sample.

        Samples are checked in order, against the final keys of the earlier ones. A sample that was
        redrawn before an interruption has a new key: doing this twice changes nothing.
        """
        seen: set[bytes] = set()
        for shard in self.shards:
            stored = self._read(shard, column)
            keys, attempts = stored[column].to_pylist(), stored["attempt"].to_pylist()
            changed = False
            for place, index in enumerate(shard.rows):
                if keys[place] in seen:
                    changed = True
                    keys[place], attempts[place] = self._redrawn(
                        shard.split, index, attempts[place], column, seen
                    )
                seen.add(keys[place])
            if changed:
                begin = dict(zip(shard.rows, attempts, strict=True))
                self._write(shard, _shard_bytes(self.spec, shard, begin))

    def _read(self, shard: Shard, key: str) -> pa.Table:
        """Return keys and attempts of a shard, which is untrusted: an earlier process wrote it."""
        path, kind = self.folder / shard.file, str(self.spec.schema.field(key).type)
        columns = {key: Column((kind,)), "attempt": Column(("uint32",), below=_MAX_ATTEMPT)}
        with naming_damage(path), pq.ParquetFile(path, memory_map=True) as file:
            size = min(self.spec.group_rows, len(shard.rows))
            check_file(file, len(shard.rows), size, columns)
            if missing := sorted(columns.keys() - set(file.schema_arrow.names)):
                raise pa.ArrowInvalid(f"it has no column {missing[0]!r}")
            groups = range(file.num_row_groups)
            return pa.concat_tables(read_group(file, path, k, [*columns], columns) for k in groups)

    def _redrawn(
        self, split: str, index: int, attempt: int, column: str, seen: set[bytes]
    ) -> tuple[bytes, int]:
        for _ in range(_REDRAWS):
            sample = self.spec.sample(split, index, attempt + 1)
            key, attempt = sample[column], sample["attempt"]
            if key not in seen:
                return key, attempt
        raise ValueError(
            f"{self.spec.name}: {split} sample {index} has no unique {column} in {_REDRAWS} "
            f"attempts; ask for fewer than {self.total} samples or for larger ones"
        )

    def finish(self) -> None:
        """Write the manifest, which makes the data set complete."""
        entries = [asdict(self.entries[shard]) for shard in self.shards]
        write_manifest(self.folder, {**self.header, "shards": entries})

    def _write(self, shard: Shard, data: bytes) -> None:
        self.entries[shard] = write_shard(self.folder, shard, data)
        with naming(path := self.folder / PROGRESS), open_append(path) as file:
            file.write(json.dumps(asdict(self.entries[shard])).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self._report()

    def _report(self) -> None:
        if self.progress is not None:
            self.progress(sum(entry.rows for entry in self.entries.values()), self.total)


def write_shard(folder: Path, shard: Shard, data: bytes) -> Entry:
    """Write the file of a shard; return its entry in the manifest."""
    write_unlocked(folder / shard.file, data)
    return Entry(shard.file, len(shard.rows), hashlib.sha256(data).hexdigest())


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write a manifest with its hash and remove the progress file."""
    manifest = {**manifest, "sha256": manifest_hash(manifest)}
    write_unlocked(folder / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
    (folder / PROGRESS).unlink()
    with naming(folder / MANIFEST):
        sync(folder)


# ---------------------------------------------------------------------------------- workers


def _shard_bytes(spec: GeneratedSet, shard: Shard, attempts: Mapping[int, int]) -> bytes:
    table = spec.table(shard.split, shard.rows, attempts)
    return encoded(table, spec.group_rows, spec.writer)


def _generated(
    spec: GeneratedSet, shards: list[Shard], workers: int
) -> Generator[tuple[Shard, bytes], None, None]:
    """Yield shards with their bytes, in the order in which the workers finish them."""
    workers = min(workers, len(shards))
    if workers < 2:
        for shard in shards:
            yield shard, _shard_bytes(spec, shard, {})
        return
    context, queue = get_context("spawn"), iter(shards)
    processes, assigned = [], {}
    try:
        for _ in range(workers):
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(spec, there), daemon=True)
            start_without_interrupts(process)
            there.close()  # so that the pipe ends when the worker does
            processes.append(process)
            assigned[here] = next(queue)
            here.send(assigned[here])
        while assigned:
            for ready in wait(list(assigned)):
                assert isinstance(ready, Connection)
                try:
                    answer = ready.recv()
                except EOFError:
                    raise RuntimeError("a worker ended before its shard was complete") from None
                if isinstance(answer, Exception):
                    raise answer
                done = assigned.pop(ready)
                following = next(queue, None)
                if following is not None:
                    assigned[ready] = following
                    ready.send(following)
                yield done, answer
    finally:
        for process in processes:
            process.kill()
            process.join()


def start_without_interrupts(process: BaseProcess) -> None:
    """Start a process that ignores the Ctrl-C of a terminal: its parent ends it."""
    resource_tracker.ensure_running()  # the first start would do it and unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(spec: GeneratedSet, pipe: Connection) -> None:
    """Generate shards until the other end of the pipe is closed."""
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            shard = pipe.recv()
            try:
                answer: bytes | Exception = _shard_bytes(spec, shard, {})
            except Exception as error:
                answer = error
            pipe.send(answer)
