"""Faults at the N-th file-system call of a command: kills, a full disk, input/output errors.

`inject.c` counts calls and injects the fault. `Server` is a process that has imported everything
and has the library preloaded; it forks a child for each trial, so that a trial does not import
torch again. `WORKLOADS` are short commands; `check` runs one of them with a fault at each chosen
call, then without a fault, and compares the end with an undisturbed run, byte for byte.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

MODES = ("count", "kill before", "kill after", "torn write", "ENOSPC", "EIO")  # as in inject.c
KILLS, ERRORS = MODES[1:4], MODES[4:]
EVERY_CALL = os.environ.get("DLRNN_FAULTS") == "all"
SHORT = 4  # trials of a workload and a mode, without DLRNN_FAULTS=all
SOURCE = Path(__file__).with_name("inject.c")
FLAGS = ("-shared", "-fPIC", "-O1", "-ldl")

# ---------------------------------------------------------------------------------- the server


class Call(NamedTuple):
    """A counted call: whether the fault was injected there, and whether it may allocate."""

    faulty: bool
    allocates: bool
    name: str
    path: Path


class Outcome(NamedTuple):
    """How a trial ended."""

    status: int
    """The exit status; -N after signal N."""
    stdout: str
    stderr: str
    calls: list[Call]

    @property
    def where(self) -> list[Call]:
        """The calls at which the fault was injected."""
        return [call for call in self.calls if call.faulty]

    def __str__(self) -> str:
        """Status and errors, briefly."""
        return f"status {self.status} and {self.stderr[-400:]!r}"


class Server:
    """A process that runs `dlrnn` commands, each in a forked child with a fault of its own."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="dlrnn-faults-"))
        atexit.register(shutil.rmtree, self.folder, ignore_errors=True)
        compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "g++", "c++"))), None)
        assert compiler is not None, "no C compiler was found: install gcc or g++"
        library = self.folder / "inject.so"
        subprocess.run([compiler, SOURCE, "-o", library, *FLAGS], check=True)
        self._process = subprocess.Popen(
            [sys.executable, __file__, library],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env={**os.environ, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"},
        )
        atexit.register(self._process.communicate)

    def run(
        self, arguments: list[str], root: Path, mode: str = "count", n: int = 0, seconds: float = 60
    ) -> Outcome:
        """Run `dlrnn ARGUMENTS`, or the code of ["-c", code], with a fault below `root`.

        The fault happens at the call `n` (from 1); ENOSPC stays from there on.
        """
        out = {name: self.folder / name for name in ("stdout", "stderr", "trace")}
        for path in out.values():
            path.unlink(missing_ok=True)
        request: dict[str, Any] = {"arguments": arguments, "root": str(root), "seconds": seconds}
        request |= {"mode": MODES.index(mode), "n": n}
        request |= {name: str(path) for name, path in out.items()}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        reply = self._process.stdout.readline()
        assert reply, f"the server ended with status {self._process.wait()}"
        status = json.loads(reply)
        if status is None:
            raise TimeoutError(f"{' '.join(arguments)}: not done after {seconds} s")
        stdout, stderr, trace = (path.read_text(errors="replace") for path in out.values())
        calls = []
        for line in trace.splitlines():
            faulty, allocates, name, where = line.split("\t", 3)
            calls.append(Call(faulty == "1", allocates == "1", name, Path(where)))
        return Outcome(status, stdout, stderr, calls)


@cache
def shared_server() -> Server:
    """One server for all tests of a process."""
    return Server()


def _serve(library: str) -> None:
    """Fork a child for each line of stdin; print its status, or null if it was not done in time."""
    warnings.simplefilter("ignore", DeprecationWarning)  # fork, with threads that do nothing
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path.pop(0)  # this folder, which no command has there
    injector = ctypes.CDLL(library)
    _import_all()
    gc.collect()
    gc.freeze()  # a child collects only what it made
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            replies.close()
            _trial(injector, request)
        handle = os.pidfd_open(pid)
        late = not select.select([handle], [], [], request["seconds"])[0]
        if late:
            os.kill(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.close(handle)
        print(json.dumps(None if late else status), file=replies, flush=True)


def _import_all() -> None:
    """What a command would import or compile first; no operation that starts threads."""
    import torch

    torch.set_num_threads(1)
    for name in ("dlrnn.cli", "dlrnn.paper.recipes", "dlrnn.train", "torch.utils.tensorboard"):
        importlib.import_module(name)
    importlib.import_module("lightning_fabric.strategies.model_parallel")
    from dlrnn.tasks import data, get, listops

    # So short that samples meet each other's keys and are drawn again; several shards.
    limits: dict[str, Any] = {"max_depth": 4, "max_args": 3, "min_length": 6, "max_length": 40}
    small = data.GENERATORS["listops"] = partial(listops.lra, **limits, shard_rows=6)
    small(seed=1).table("train", range(1), {})
    get("shift", length=16).sample(1)


def _trial(injector: ctypes.CDLL, request: dict[str, Any]) -> NoReturn:
    """The child: redirect, arm, run, end as the interpreter would."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    root, trace = (request[name].encode() for name in ("root", "trace"))
    if injector.faults_arm(root, ctypes.c_long(request["n"]), request["mode"], trace) != 0:
        os._exit(70)
    try:
        status = _main(request["arguments"])
        atexit._run_exitfuncs()
        gc.collect()  # a file that cannot be closed is reported here
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    injector.faults_disarm()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def _main(arguments: list[str]) -> int:
    if arguments[0] == "-c":
        exec(arguments[1], {"__name__": "__main__"})
        return 0
    from dlrnn.cli import main

    return main(arguments)


# ---------------------------------------------------------------------------------- workloads

TRAIN = (
    "train table1/shift/dlr-1 --scale tiny --steps 6 --log_every 2 --eval_every 2"
    " --eval_batches 1 --checkpoint_every 2 --batch_size 2 --task.settings.length 16"
    " --model.d_model 4 --model.mixer_options.d_state 4 --device cpu --json --out"
)
RESUME = "train --device cpu --json --resume"
BUILD = "data build listops --samples 20 --workers 1 --seed 1 --out"


def stop_at_a_checkpoint(root: Path) -> None:
    """Leave a run that was killed while it wrote its last checkpoint."""
    command, last = WORKLOADS["train"].arguments(root), "step-000000006.safetensors"
    calls = shared_server().run(command, root).calls
    writes = (n for n, call in enumerate(calls, start=1) if call.name == "write")
    written = next(n for n in writes if calls[n - 1].path.name.startswith(last))
    shutil.rmtree(root / "out")
    shared_server().run(command, root, "torn write", written)
    there = {path.name for path in root.glob("out/step-*")}
    assert there == {"step-000000002.safetensors", "step-000000004.safetensors", f"{last}.part"}


def damage_a_shard(root: Path) -> None:
    """Leave a whole set of several small shards, one of which is damaged."""
    assert shared_server().run(WORKLOADS["data"].arguments(root), root).status == 0
    (root / "out" / "train-00001.parquet").write_bytes(b"damaged")


def make_reviews(root: Path) -> None:
    """Write texts to import beside `root`, where no faults happen."""
    for split, label in product(("train", "test"), ("pos", "neg")):
        source = root.with_name("reviews") / split / label
        source.mkdir(parents=True)
        for k in range(3):
            text = f"review {k} of {split}, which is {label}"
            (source / f"{k}_{k + 1}.txt").write_text(text)


class Workload(NamedTuple):
    """A command that writes to `root`/out, and what prepares `root`."""

    command: str
    prepare: Callable[[Path], None] | None = None
    reference: str | None = None
    """The workload whose undisturbed end this one has to reach, if it is another."""

    def arguments(self, root: Path) -> list[str]:
        """The command to which the fault happens."""
        command = self.command.format(reviews=root.with_name("reviews"))
        return [*command.split(), str(root / "out")]

    def again(self, root: Path) -> list[str]:
        """The command that continues; a run without a configuration begins again."""
        resumes = (root / "out" / "config.json").exists()
        return [*RESUME.split(), str(root / "out")] if resumes else self.arguments(root)


WORKLOADS = {
    "train": Workload(TRAIN),
    "resume": Workload(RESUME, stop_at_a_checkpoint, "train"),
    "data": Workload(BUILD),
    "mend": Workload(BUILD, damage_a_shard, "data"),
    "import": Workload("data import text {reviews} --out", make_reviews),
}


def end_of(root: Path) -> dict[str, Any]:
    """Every file that a command left, with its content, but no times and not TensorBoard's."""
    found: dict[str, Any] = {}
    for path in sorted((root / "out").rglob("*")):
        name = str(path.relative_to(root / "out"))
        if path.is_file() and not name.startswith("tensorboard"):
            timed = name in ("timing.jsonl", "environment.json")
            found[name] = None if timed else path.read_bytes()
    if "result.json" in found:
        result = json.loads(found["result.json"]).items()
        found["result.json"] = str([each for each in result if "seconds" not in each[0]])
    return found


# ---------------------------------------------------------------------------------- trials


@cache
def _template(name: str) -> Path:
    root = shared_server().folder / f"before-{name}"
    root.mkdir()
    if prepare := WORKLOADS[name].prepare:
        prepare(root)
    return root


@contextlib.contextmanager
def _prepared(name: str) -> Iterator[Path]:
    """A folder of its own in which a workload can run."""
    root = Path(shared_server().folder, "trial").resolve()
    shutil.copytree(_template(name), root)
    try:
        yield root
    finally:
        shutil.rmtree(root)


@cache
def _undisturbed(name: str) -> tuple[list[Call], dict[str, Any]]:
    """The calls and the end of a workload without a fault."""
    with _prepared(name) as root:
        outcome = shared_server().run(WORKLOADS[name].arguments(root), root)
        assert (outcome.status, outcome.stderr) == (0, ""), outcome
        return outcome.calls, end_of(root)


def chosen(workload: str, mode: str) -> list[int]:
    """The calls at which a fault of this mode is injected: all that differ, or a few of them."""
    calls, _ = _undisturbed(workload)
    numbers = [
        n
        for n, call in enumerate(calls, start=1)
        if {"torn write": call.name == "write", "ENOSPC": call.allocates}.get(mode, True)
    ]
    if EVERY_CALL or len(numbers) <= SHORT:
        return numbers
    stride = len(numbers) / SHORT
    offset = MODES.index(mode) / len(MODES)  # so that two modes do not have the same calls
    return [numbers[int((place + offset) * stride)] for place in range(SHORT)]


def check(name: str, mode: str, n: int) -> None:
    """Assert that a workload loses nothing after a fault at its n-th call."""
    workload, server = WORKLOADS[name], shared_server()
    _, expected = _undisturbed(workload.reference or name)
    with _prepared(name) as root:
        outcome = server.run(workload.arguments(root), root, mode, n)
        _check_status(outcome, mode)
        if outcome.status != 0:
            again = server.run(workload.again(root), root)
            assert again.status == 0, f"continued after {outcome}: {again}"
        different = end_of(root).items() ^ expected.items()
        assert not different, f"after {outcome}: {sorted({file for file, _ in different})} differ"


def _check_status(outcome: Outcome, mode: str) -> None:
    """A kill kills. An error is tolerated, or ends in one sentence with the file's name."""
    if mode in KILLS:
        assert outcome.status == -signal.SIGKILL or not outcome.where, outcome
        return
    assert "Traceback" not in outcome.stderr, outcome
    if outcome.status != 0:
        names = {call.path.name.removesuffix(".part") for call in outcome.where}
        assert outcome.status == 2, outcome
        assert outcome.stderr.count("\n") == 1, outcome
        assert any(name in outcome.stderr for name in names), f"{names} not named: {outcome}"


if __name__ == "__main__":
    _serve(sys.argv[1])
