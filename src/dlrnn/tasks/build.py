"""Building a set on disk, see `shards.py`.

Only the process that was asked to build writes, beside and then by renaming; its workers send it
the bytes. Killed at any moment, the same command finishes the set.
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
from dlrnn.common.files import PART, naming, open_append, sync, write_unlocked
from dlrnn.common.untrusted import fit
from dlrnn.tasks.columns import check_file, read_group
from dlrnn.tasks.random import SPLITS
from dlrnn.tasks.shards import (
    FORMAT,
    MANIFEST,
    MOST_SAMPLES,
    PROGRESS,
    SHARD_NAME,
    TOKENIZER,
    Entry,
    Shard,
    Spec,
    damage,
    listed,
    load_manifest,
    own_hash,
    sha256,
    whole_lines,
)

_LAST = 2**31  # attempts at a sample come before it
_REDRAWS = 1000  # of one sample that keeps meeting others' keys: then there are too few keys


def build_set(
    spec: Spec,
    out: str | os.PathLike[str],
    *,
    workers: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write a set, or finish it, or find it whole; `progress` gets samples done and to do.

    The bytes are the same for any number of workers and after any interruption.
    """
    folder = Path(out)
    if workers < 1:
        raise ValueError(f"workers must be at least 1, not {workers}")
    _check_counts(spec)
    header = _header(spec)
    _check_folder(folder, header)
    _check_space(folder, spec)
    _check_readable(spec)
    shards = _shards(spec)
    if not (folder / MANIFEST).exists():
        # A spec that cannot be met ends here; what numba compiles is there for all workers.
        spec.table(shards[0].split, shards[0].rows[:1], {})
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        _check_folder(folder, header)
        builder = _Builder(spec, folder, header, shards, progress)
        if builder.start():
            builder.make(workers)
            if spec.unique is not None:
                builder.make_unique(spec.unique)
            builder.finish()
    return folder


def _check_counts(spec: Spec) -> None:
    for split, count in spec.counts.items():
        if split not in SPLITS[:3]:
            raise ValueError(f"{spec.name}: there is no split {split!r}; {listed(SPLITS[:3])} are")
        if count < 0:
            raise ValueError(f"{spec.name}: samples of {split} must be at least 0, not {count}")
    if sum(spec.counts.values()) < 1:
        raise ValueError(f"{spec.name}: samples must be at least 1, not 0")


def _check_readable(spec: Spec) -> None:
    """What a manifest cannot say is refused before it is built."""
    if not -(2**63) <= spec.seed < 2**63:
        raise ValueError(f"{spec.name}: the seed of a set must be below 2**63, not {spec.seed}")
    for split, count in spec.counts.items():
        if count > MOST_SAMPLES:
            most = f"at most {MOST_SAMPLES} samples of {split} can be in one set, not {count}"
            raise ValueError(f"{spec.name}: {most}; build several sets")


def _shards(spec: Spec) -> list[Shard]:
    shards, size = [], spec.shard_rows
    for split in SPLITS[:3]:
        count = spec.counts.get(split, 0)
        for number, first in enumerate(range(0, count, size)):
            shards.append(Shard(split, number, range(first, min(first + size, count))))
    return shards


def _header(spec: Spec) -> dict[str, Any]:
    """What a set is, as the manifest says it."""
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
    same: dict[str, Any] = json.loads(json.dumps(header))
    return same


# ---------------------------------------------------------------------------------- refusing


def _check_folder(folder: Path, header: dict[str, Any]) -> None:
    """Refuse a folder that holds anything but this set or a part of it."""
    there = _nearest_there(folder)
    if not there.is_dir():
        raise ValueError(f"{there} is a file; a folder was expected")
    if not folder.exists():
        return
    names = {path.name for path in folder.iterdir()}
    ours = {name for name in names if _is_ours(name)}
    if names - ours:
        raise ValueError(
            f"{folder} holds {sorted(names - ours)[0]!r}, which belongs to no set; "
            "choose an empty or a new folder"
        )
    found = _found(folder)
    if found is None:
        if any(SHARD_NAME.fullmatch(name) or name == TOKENIZER for name in names):
            raise ValueError(f"{folder} holds shards of an unknown set; choose another folder")
        return
    for key in ("format", "task", "parameters", "seed", "counts", "shard_rows", "versions"):
        if found.get(key) == header[key] or (key == "versions" and MANIFEST in names):
            continue
        was = f"{key} {json.dumps(found.get(key)):.200}, not {json.dumps(header[key])}"
        raise ValueError(f"{folder} holds another set (its {was}); choose another folder")


def _is_ours(name: str) -> bool:
    whole = name.removesuffix(PART)
    return whole in (MANIFEST, PROGRESS, TOKENIZER) or SHARD_NAME.fullmatch(whole) is not None


def _found(folder: Path) -> dict[str, Any] | None:
    """The header of the set that a folder holds, whole or begun."""
    if (folder / MANIFEST).exists():
        return load_manifest(folder)
    lines = whole_lines(folder / PROGRESS)
    return lines[0] if lines else None


def _nearest_there(folder: Path) -> Path:
    """The folder, or the first above it that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def _check_space(folder: Path, spec: Spec) -> None:
    there = _nearest_there(folder)
    there_already = sum(path.stat().st_size for path in folder.glob("*.parquet"))
    need = sum(spec.counts.values()) * spec.bytes_per_sample - there_already
    free = shutil.disk_usage(there).free
    if need > free and not (folder / MANIFEST).exists():
        sizes = f"about {need / 1e9:.2f} GB are needed and {free / 1e9:.2f} GB are free"
        raise ValueError(f"there is not enough room for {spec.name} in {there}: {sizes}")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One build a folder; the lock goes with the process that holds it."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise ValueError(f"another process is building {folder}; wait for it to end") from None
    try:
        yield
    finally:
        os.close(handle)


# ---------------------------------------------------------------------------------- building


class _Builder:
    """The one writer of a folder."""

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
        """Keep what is whole, remove what is not; is there anything to do?"""
        for path in self.folder.glob(f"*{PART}"):
            path.unlink()
        manifest = load_manifest(self.folder) if (self.folder / MANIFEST).exists() else None
        entries = manifest["shards"] if manifest else whole_lines(self.folder / PROGRESS)[1:]
        where = str(self.folder / (MANIFEST if manifest else PROGRESS))
        noted = {each.file: each.sha256 for each in fit(entries, list[Entry], where)}
        for shard in self.shards:
            path = self.folder / shard.file
            if shard.file in noted and path.is_file() and sha256(path) == noted[shard.file]:
                self.hashes[shard.file] = noted[shard.file]
        whole = manifest is not None and len(self.hashes) == len(self.shards)
        if manifest and not whole and manifest["versions"] != self.header["versions"]:
            made = json.dumps(manifest["versions"])
            raise ValueError(f"{self.folder} is damaged and was made by {made}: mend it with those")
        self._report()
        if whole:
            (self.folder / PROGRESS).unlink(missing_ok=True)
            return False
        lines = [self.header, *map(self._entry, (s for s in self.shards if s.file in self.hashes))]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        write_unlocked(self.folder / PROGRESS, text.encode())
        return True

    def make(self, workers: int) -> None:
        """Every shard that is missing, each sample at its first attempt."""
        missing = [shard for shard in self.shards if shard.file not in self.hashes]
        with contextlib.closing(_made(self.spec, missing, workers)) as made:
            for shard, data in made:
                self._keep(shard, data)

    def make_unique(self, column: str) -> None:
        """Draw again what has the key of an earlier sample.

        Samples are judged in order, against what the earlier ones ended as. One that was drawn
        again before an interruption passes: going over the set twice changes nothing.
        """
        seen: set[bytes] = set()
        kinds = self.spec.table(self.shards[0].split, self.shards[0].rows[:1], {}).schema
        for shard in self.shards:
            kept = self._read(shard, pa.schema([kinds.field(n) for n in (column, "attempt")]))
            keys, attempts = kept[column].to_pylist(), kept["attempt"].to_pylist()
            changed = False
            for place, index in enumerate(shard.rows):
                if keys[place] in seen:
                    changed = True
                    keys[place], attempts[place] = self._another(
                        shard.split, index, attempts[place], column, seen
                    )
                seen.add(keys[place])
            if changed:
                begin = dict(zip(shard.rows, attempts, strict=True))
                self._keep(shard, _encoded(self.spec, shard, begin))

    def _read(self, shard: Shard, kinds: pa.Schema) -> pa.Table:
        """Columns of a shard that an earlier build may have left, or somebody else."""
        path = self.folder / shard.file
        with damage(path), pq.ParquetFile(path, memory_map=True) as file:
            check_file(file, len(shard.rows), min(self.spec.group_rows, len(shard.rows)), {})
            found = {each.name: each.type for each in file.schema_arrow}
            for each in kinds:
                if found.get(each.name) != each.type:
                    raise pa.ArrowInvalid(f"it has no column {each.name!r} of {each.type}")
            groups = range(file.num_row_groups)
            table = pa.concat_tables(read_group(file, path, k, kinds.names, {}) for k in groups)
            if pc.max(table["attempt"]).as_py() >= _LAST:
                raise pa.ArrowInvalid(f"a sample of it is of attempt {_LAST} or later")
            return table

    def _another(
        self, split: str, index: int, attempt: int, column: str, seen: set[bytes]
    ) -> tuple[bytes, int]:
        for _ in range(_REDRAWS):
            row = self.spec.table(split, range(index, index + 1), {index: attempt + 1})
            key, attempt = row[column][0].as_py(), row["attempt"][0].as_py()
            if key not in seen:
                return key, attempt
        raise ValueError(
            f"{self.spec.name}: {split} sample {index} found no {column} of its own in {_REDRAWS} "
            f"attempts; ask for fewer than {self.total} samples or for larger ones"
        )

    def finish(self) -> None:
        """The manifest: from now on the set is whole."""
        manifest = {**self.header, "shards": [self._entry(shard) for shard in self.shards]}
        manifest["sha256"] = own_hash(manifest)
        write_unlocked(self.folder / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
        (self.folder / PROGRESS).unlink()
        with naming(self.folder / MANIFEST):
            sync(self.folder)

    def _keep(self, shard: Shard, data: bytes) -> None:
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


def _encoded(spec: Spec, shard: Shard, attempts: Mapping[int, int]) -> bytes:
    """The bytes of a shard."""
    file = io.BytesIO()
    table = spec.table(shard.split, shard.rows, attempts)
    how = {"compression": "zstd", "row_group_size": spec.group_rows, **spec.writer}
    pq.write_table(table, file, **how)
    return file.getvalue()


def _made(
    spec: Spec, shards: list[Shard], workers: int
) -> Generator[tuple[Shard, bytes], None, None]:
    """Shards and their bytes, as they get ready."""
    workers = min(workers, len(shards))
    if workers < 2:
        for shard in shards:
            yield shard, _encoded(spec, shard, {})
        return
    context, queue = get_context("spawn"), iter(shards)
    processes, at_work = [], {}
    try:
        for _ in range(workers):
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(spec, there), daemon=True)
            _start(process)
            there.close()  # so that the end of a worker is seen as the end of its pipe
            processes.append(process)
            at_work[here] = next(queue)
            here.send(at_work[here])
        while at_work:
            for ready in wait(list(at_work)):
                assert isinstance(ready, Connection)
                try:
                    answer = ready.recv()
                except EOFError:
                    raise RuntimeError("a worker ended before its shard was made") from None
                if isinstance(answer, Exception):
                    raise answer
                done = at_work.pop(ready)
                following = next(queue, None)
                if following is not None:
                    at_work[ready] = following
                    ready.send(following)
                yield done, answer
    finally:
        for process in processes:
            process.kill()
            process.join()


def _start(process: BaseProcess) -> None:
    """A terminal's Ctrl-C goes to all processes: the worker never hears it, and is ended by us."""
    resource_tracker.ensure_running()  # else the first start does, and unblocks what we block
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(spec: Spec, pipe: Connection) -> None:
    """Make shards until the other end of the pipe is gone."""
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            shard = pipe.recv()
            try:
                answer: bytes | Exception = _encoded(spec, shard, {})
            except Exception as error:
                answer = error
            pipe.send(answer)
