"""Build a generated data set on disk in the format of `shards.py`.

Worker processes generate shards and send their bytes to the building process, which alone writes
files, each under a temporary name that is then renamed. A build that was killed at any moment is
completed by the same command.
"""

import contextlib
import hashlib
import io
import json
import os
import shutil
import signal
from collections.abc import Callable, Generator, Iterator, Mapping
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from dlrnn._version import __version__
from dlrnn.common.files import PART, lock, naming, open_append, sync, write_unlocked
from dlrnn.common.untrusted import fit
from dlrnn.tasks.random import SPLITS
from dlrnn.tasks.storage.columns import check_file, read_group
from dlrnn.tasks.storage.shards import (
    FORMAT,
    MANIFEST,
    MAX_SAMPLES,
    PROGRESS,
    SHARD_NAME,
    TOKENIZER,
    Entry,
    Shard,
    Spec,
    listed,
    load_manifest,
    manifest_hash,
    naming_damage,
    sha256,
    shards_of,
    whole_lines,
)

_MAX_ATTEMPT = 2**31  # attempts at a sample are below it
_REDRAWS = 1000  # of a sample with a duplicate key, after which there are too few keys


def build_set(
    spec: Spec,
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
    if workers < 1:
        raise ValueError(f"workers must be at least 1, not {workers}")
    _check_spec(spec)
    header = set_header(spec)
    check_folder(folder, header)
    _check_space(folder, spec)
    shards = shards_of(spec.counts, spec.shard_rows)
    if not (folder / MANIFEST).exists():
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


def _check_spec(spec: Spec) -> None:
    """Refuse counts and seeds that `shards.load_manifest` would not accept."""
    for split, count in spec.counts.items():
        if split not in SPLITS[:3]:
            expected = f"expected {listed(SPLITS[:3])}"
            raise ValueError(f"{spec.name}: there is no split {split!r}; {expected}")
        if not 0 <= count <= MAX_SAMPLES:
            limits = f"samples of {split} must be from 0 to {MAX_SAMPLES}, not {count}"
            raise ValueError(f"{spec.name}: {limits}")
    if sum(spec.counts.values()) < 1:
        raise ValueError(f"{spec.name}: samples must be at least 1, not 0")
    if not -(2**63) <= spec.seed < 2**63:
        raise ValueError(f"{spec.name}: the seed of a set must be below 2**63, not {spec.seed}")


def set_header(spec: Spec) -> dict[str, Any]:
    """Return the entries of a manifest that are known before its shards are written."""
    header = {
        "format": FORMAT,
        "task": spec.name,
        "parameters": dict(spec.parameters),
        "seed": spec.seed,
        "counts": {split: spec.counts.get(split, 0) for split in SPLITS[:3]},
        "shard_rows": spec.shard_rows,
        "versions": {
            **{"dlrnn": __version__, "numba": numba.__version__},
            **{"numpy": np.__version__, "pyarrow": pa.__version__},
        },
    }
    as_json: dict[str, Any] = json.loads(json.dumps(header))
    return as_json


# ---------------------------------------------------------------------------------- folder


def check_folder(folder: Path, header: dict[str, Any]) -> None:
    """Refuse a folder that contains anything but this data set or a part of it."""
    parent = existing_parent(folder)
    if not parent.is_dir():
        raise ValueError(f"{parent} is a file; a folder was expected")
    if not folder.exists():
        return
    names = {path.name for path in folder.iterdir()}
    others = sorted(name for name in names if not _is_part_of_a_set(name))
    if others:
        raise ValueError(
            f"{folder} holds {others[0]!r}, which belongs to no set; "
            "choose an empty or a new folder"
        )
    found = found_header(folder)
    if found is None:
        if any(SHARD_NAME.fullmatch(name) or name == TOKENIZER for name in names):
            raise ValueError(f"{folder} holds shards of an unknown set; choose another folder")
        return
    for key in ("format", "task", "parameters", "seed", "counts", "shard_rows", "versions"):
        if found.get(key) == header[key] or (key == "versions" and MANIFEST in names):
            continue
        difference = f"{key} {json.dumps(found.get(key)):.200}, not {json.dumps(header[key])}"
        raise ValueError(f"{folder} holds another set (its {difference}); choose another folder")


def _is_part_of_a_set(name: str) -> bool:
    name = name.removesuffix(PART)
    return name in (MANIFEST, PROGRESS, TOKENIZER) or SHARD_NAME.fullmatch(name) is not None


def found_header(folder: Path) -> dict[str, Any] | None:
    """Return the header of the complete or unfinished data set in a folder."""
    if (folder / MANIFEST).exists():
        return load_manifest(folder)
    lines = whole_lines(folder / PROGRESS)
    return lines[0] if lines else None


def existing_parent(folder: Path) -> Path:
    """Return the folder, or the first folder above it that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def _check_space(folder: Path, spec: Spec) -> None:
    if (folder / MANIFEST).exists():
        return
    written = sum(path.stat().st_size for path in folder.glob("*.parquet"))
    need = sum(spec.counts.values()) * spec.bytes_per_sample - written
    check_free_space(existing_parent(folder), need, f" for {spec.name}", about="about ")


def check_free_space(folder: Path, need: int, what: str = "", *, about: str = "") -> None:
    """Refuse to write more bytes than the disk of a folder has free."""
    free = shutil.disk_usage(folder).free
    if need > free:
        sizes = f"{about}{need / 1e9:.2f} GB are needed and {free / 1e9:.2f} GB are free"
        raise ValueError(f"there is not enough room{what} in {folder}: {sizes}")


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
        spec: Spec,
        folder: Path,
        header: dict[str, Any],
        shards: list[Shard],
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.spec, self.folder, self.header, self.shards = spec, folder, header, shards
        self.hashes: dict[str, str] = {}
        self.progress = progress
        self.total = sum(len(shard.rows) for shard in shards)

    def start(self) -> bool:
        """Keep shards that are complete, remove partial files; return False if all is done."""
        for path in self.folder.glob(f"*{PART}"):
            path.unlink()
        manifest = load_manifest(self.folder) if (self.folder / MANIFEST).exists() else None
        entries = manifest["shards"] if manifest else whole_lines(self.folder / PROGRESS)[1:]
        where = str(self.folder / (MANIFEST if manifest else PROGRESS))
        known = {each.file: each.sha256 for each in fit(entries, list[Entry], where)}
        for shard in self.shards:
            path = self.folder / shard.file
            if shard.file in known and path.is_file() and sha256(path) == known[shard.file]:
                self.hashes[shard.file] = known[shard.file]
        whole = manifest is not None and len(self.hashes) == len(self.shards)
        if manifest and not whole and manifest["versions"] != self.header["versions"]:
            versions = json.dumps(manifest["versions"])
            made_by = f"is damaged and was made by {versions}"
            raise ValueError(f"{self.folder} {made_by}: repair it with these versions")
        self._report()
        if whole:
            (self.folder / PROGRESS).unlink(missing_ok=True)
            return False
        lines = [self.header, *map(self._entry, (s for s in self.shards if s.file in self.hashes))]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        write_unlocked(self.folder / PROGRESS, text.encode())
        return True

    def make(self, workers: int) -> None:
        """Write the missing shards, with the first attempt at each sample."""
        missing = [shard for shard in self.shards if shard.file not in self.hashes]
        with contextlib.closing(_generated(self.spec, missing, workers)) as generated:
            for shard, data in generated:
                self._write(shard, data)

    def make_unique(self, column: str) -> None:
        """Redraw samples whose key is that of an earlier sample.

        Samples are checked in order, against the final keys of the earlier ones. A sample that was
        redrawn before an interruption has a new key: doing this twice changes nothing.
        """
        seen: set[bytes] = set()
        types = self.spec.table(self.shards[0].split, self.shards[0].rows[:1], {}).schema
        for shard in self.shards:
            stored = self._read(shard, pa.schema([types.field(n) for n in (column, "attempt")]))
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
                self._write(shard, _encoded(self.spec, shard, begin))

    def _read(self, shard: Shard, types: pa.Schema) -> pa.Table:
        """Return columns of a shard, which is untrusted: an earlier process wrote it."""
        path = self.folder / shard.file
        with naming_damage(path), pq.ParquetFile(path, memory_map=True) as file:
            check_file(file, len(shard.rows), min(self.spec.group_rows, len(shard.rows)), {})
            found = {each.name: each.type for each in file.schema_arrow}
            for each in types:
                if found.get(each.name) != each.type:
                    raise pa.ArrowInvalid(f"it has no column {each.name!r} of {each.type}")
            groups = range(file.num_row_groups)
            table = pa.concat_tables(read_group(file, path, k, types.names, {}) for k in groups)
            if pc.max(table["attempt"]).as_py() >= _MAX_ATTEMPT:
                raise pa.ArrowInvalid(f"it has a sample of attempt {_MAX_ATTEMPT} or later")
            return table

    def _redrawn(
        self, split: str, index: int, attempt: int, column: str, seen: set[bytes]
    ) -> tuple[bytes, int]:
        for _ in range(_REDRAWS):
            row = self.spec.table(split, range(index, index + 1), {index: attempt + 1})
            key, attempt = row[column][0].as_py(), row["attempt"][0].as_py()
            if key not in seen:
                return key, attempt
        raise ValueError(
            f"{self.spec.name}: {split} sample {index} has no unique {column} in {_REDRAWS} "
            f"attempts; ask for fewer than {self.total} samples or for larger ones"
        )

    def finish(self) -> None:
        """Write the manifest, which makes the data set complete."""
        entries = [self._entry(shard) for shard in self.shards]
        write_manifest(self.folder, {**self.header, "shards": entries})

    def _write(self, shard: Shard, data: bytes) -> None:
        write_unlocked(self.folder / shard.file, data)
        self.hashes[shard.file] = hashlib.sha256(data).hexdigest()
        with naming(path := self.folder / PROGRESS), open_append(path) as file:
            file.write(json.dumps(self._entry(shard)).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self._report()

    def _entry(self, shard: Shard) -> dict[str, Any]:
        return {"file": shard.file, "rows": len(shard.rows), "sha256": self.hashes[shard.file]}

    def _report(self) -> None:
        if self.progress is not None:
            done = sum(len(shard.rows) for shard in self.shards if shard.file in self.hashes)
            self.progress(done, self.total)


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write a manifest with its hash and remove the progress file."""
    manifest = {**manifest, "sha256": manifest_hash(manifest)}
    write_unlocked(folder / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
    (folder / PROGRESS).unlink()
    with naming(folder / MANIFEST):
        sync(folder)


def _encoded(spec: Spec, shard: Shard, attempts: Mapping[int, int]) -> bytes:
    """Return the bytes of a shard."""
    file = io.BytesIO()
    table = spec.table(shard.split, shard.rows, attempts)
    how = {"compression": "zstd", "row_group_size": spec.group_rows, **spec.writer}
    pq.write_table(table, file, **how)
    return file.getvalue()


def _generated(
    spec: Spec, shards: list[Shard], workers: int
) -> Generator[tuple[Shard, bytes], None, None]:
    """Yield shards with their bytes, in the order in which the workers finish them."""
    workers = min(workers, len(shards))
    if workers < 2:
        for shard in shards:
            yield shard, _encoded(spec, shard, {})
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


def _work(spec: Spec, pipe: Connection) -> None:
    """Generate shards until the other end of the pipe is closed."""
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            shard = pipe.recv()
            try:
                answer: bytes | Exception = _encoded(spec, shard, {})
            except Exception as error:
                answer = error
            pipe.send(answer)
