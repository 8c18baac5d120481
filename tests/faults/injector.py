"""Faults at the N-th file-system call of a command: kills, a full disk, input/output errors.

`inject.c` counts calls and injects the fault. `Server` is a process that has imported everything
and has the library preloaded; it forks a child for each trial, so that a trial does not import
torch again. `WORKLOADS` are short commands; `check` runs one of them with a fault at each chosen
call, then without a fault, and compares the end with an undisturbed run, byte for byte.

    python tests/faults/injector.py [WORKLOAD ...]

runs all calls and all modes and prints a table.
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
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, NoReturn

MODES = ("count", "kill before", "kill after", "torn write", "ENOSPC", "EIO")  # as in inject.c
KILLS, ERRORS = MODES[1:4], MODES[4:]
EVERY_CALL = os.environ.get("DLRNN_FAULTS") == "all"
SHORT = 4  # trials of a workload and a mode, without DLRNN_FAULTS=all


# ---------------------------------------------------------------------------------- the library


@cache
def library() -> Path:
    """The path of the compiled injector."""
    source = Path(__file__).with_name("inject.c")
    folder = Path(tempfile.mkdtemp(prefix="dlrnn-faults-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "g++", "c++"))), None)
    if compiler is None:
        raise RuntimeError("no C compiler was found: install gcc or g++")
    path = folder / "inject.so"
    flags = ["-shared", "-fPIC", "-O1", "-o", str(path), str(source), "-ldl"]
    subprocess.run([compiler, *flags], check=True)
    return path


@dataclass(frozen=True)
class Fault:
    """A mode of MODES, and the call (from 1) at which it happens. ENOSPC stays from there on."""

    mode: str = "count"
    n: int = 0


@dataclass(frozen=True)
class Call:
    """A counted call: whether the fault was injected there, and whether it may allocate."""

    faulty: bool
    allocates: bool
    name: str
    path: Path


@dataclass(frozen=True)
class Outcome:
    """How a trial ended."""

    status: int | None  # None: killed by `signal`
    signal: int | None
    stdout: str
    stderr: str
    calls: list[Call] = field(repr=False)

    @property
    def where(self) -> list[Call]:
        """The calls at which the fault was injected."""
        return [call for call in self.calls if call.faulty]


# ---------------------------------------------------------------------------------- the server


class Server:
    """A process that runs `dlrnn` commands, each in a forked child with a fault of its own."""

    def __init__(self, *, imports: bool = True) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="dlrnn-faults-"))
        preload = {"LD_PRELOAD": str(library()), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", str(library()), "imports" if imports else "bare"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env={**os.environ, **preload},
        )

    def run(self, arguments: list[str], *, root: Path, fault: Fault | None = None) -> Outcome:
        """Run `dlrnn ARGUMENTS`, or the code of ["-c", code], with a fault below `root`."""
        fault = fault or Fault()
        out = {name: self.folder / name for name in ("stdout", "stderr", "trace")}
        for path in out.values():
            path.unlink(missing_ok=True)
        request: dict[str, Any] = {"arguments": arguments, "root": str(root)}
        request |= {"mode": MODES.index(fault.mode), "n": fault.n}
        request |= {name: str(path) for name, path in out.items()}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        reply = self._process.stdout.readline()
        if not reply:
            raise RuntimeError(f"the server ended with status {self._process.wait()}")
        ended = json.loads(reply)
        if ended["late"]:
            raise TimeoutError(f"{' '.join(arguments)}: not done after {_timeout()} s, {fault}")
        text = {name: path.read_text(errors="replace") for name, path in out.items()}
        calls = []
        for line in text["trace"].splitlines():
            faulty, allocates, name, where = line.split("\t", 3)
            calls.append(Call(faulty == "1", allocates == "1", name, Path(where)))
        return Outcome(ended["status"], ended["signal"], text["stdout"], text["stderr"], calls)

    def close(self) -> None:
        """End the process and remove its files."""
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()
        shutil.rmtree(self.folder, ignore_errors=True)


def _timeout() -> float:
    """Seconds of a trial."""
    return float(os.environ.get("DLRNN_FAULTS_TIMEOUT", "60"))


@cache
def shared_server() -> Server:
    """One server for all tests of a process."""
    server = Server()
    atexit.register(server.close)
    return server


def _serve(library_path: str, *, imports: bool) -> NoReturn:
    """Fork a child for each line of stdin; print how it ended."""
    warnings.simplefilter("ignore", DeprecationWarning)  # fork, with threads that do nothing
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path.pop(0)  # this folder, which no command has there
    injector = ctypes.CDLL(library_path)
    if imports:
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
        late = not select.select([handle], [], [], _timeout())[0]
        if late:
            os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.close(handle)
        ended = {"status": code if code >= 0 else None, "signal": -code if code < 0 else None}
        print(json.dumps({**ended, "late": late}), file=replies, flush=True)
    sys.exit()


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


class Workload:
    """A command below a folder `root`, and what it leaves there."""

    name = ""
    reference = ""  # the workload whose undisturbed end this one has to reach

    def prepare(self, root: Path) -> None:
        """Make what the command needs."""

    def command(self, root: Path) -> list[str]:
        """The command to which the fault happens."""
        raise NotImplementedError

    def again(self, root: Path) -> list[str]:
        """The command that continues."""
        return self.command(root)

    def end(self, root: Path) -> dict[str, Any]:
        """What has to be the same as without a fault, by file; every other file is a stray one."""
        raise NotImplementedError


TRAIN = (
    "train table1/shift/dlr-1 --scale tiny --steps 6 --log_every 2 --eval_every 2"
    " --eval_batches 1 --checkpoint_every 2 --batch_size 2 --task.settings.length 16"
    " --model.d_model 4 --model.mixer_options.d_state 4 --device cpu --json --out"
)


class Train(Workload):
    """A training run from its first step."""

    name = reference = "train"

    def command(self, root: Path) -> list[str]:
        """A new run."""
        return [*TRAIN.split(), str(root / "run")]

    def again(self, root: Path) -> list[str]:
        """Resume; if there is no configuration yet, begin again."""
        if not (root / "run" / "config.json").exists():
            return self.command(root)
        return [*["train", "--device", "cpu", "--json", "--resume"], str(root / "run")]

    def end(self, root: Path) -> dict[str, Any]:
        """All but times and TensorBoard's files."""
        found: dict[str, Any] = {}
        for path in sorted((root / "run").rglob("*")):
            name = str(path.relative_to(root / "run"))
            if name.startswith("tensorboard") or path.is_dir():
                continue
            found[name] = (
                None if name in ("timing.jsonl", "environment.json") else path.read_bytes()
            )
        if "result.json" in found:
            result = json.loads(found["result.json"])
            for key in ("seconds", "seconds_from_step"):
                result.pop(key, None)
            found["result.json"] = result
        return found


class Resume(Train):
    """A run that was killed after its second checkpoint and is continued."""

    name = "resume"

    def prepare(self, root: Path) -> None:
        """Copy the killed run."""
        shutil.copytree(_killed_run(), root, dirs_exist_ok=True)

    def command(self, root: Path) -> list[str]:
        """Continue."""
        return super().again(root)


@cache
def _killed_run() -> Path:
    server, train = shared_server(), Train()
    root = server.folder / "killed"
    root.mkdir()
    calls = server.run(train.command(root), root=root).calls
    last = "step-000000006.safetensors"
    written = [
        n
        for n, call in enumerate(calls, start=1)
        if call.name == "write" and call.path.name.startswith(last)
    ]
    shutil.rmtree(root)
    root.mkdir()
    server.run(train.command(root), root=root, fault=Fault("torn write", written[0]))
    there = {path.name for path in (root / "run").glob("step-*")}
    assert there == {"step-000000002.safetensors", "step-000000004.safetensors", f"{last}.part"}
    return root


class Data(Workload):
    """A set of several small shards, in which samples are drawn again."""

    name = reference = "data"

    def command(self, root: Path) -> list[str]:
        """Build, or finish."""
        arguments = "data build listops --samples 20 --workers 1 --seed 1 --out"
        return [*arguments.split(), str(root / "set")]

    def end(self, root: Path) -> dict[str, Any]:
        """Every file."""
        return {path.name: path.read_bytes() for path in sorted((root / "set").iterdir())}


class Mend(Data):
    """A whole set with a damaged shard, which the build mends."""

    name = "mend"

    def prepare(self, root: Path) -> None:
        """Copy the damaged set."""
        shutil.copytree(_damaged_set(), root, dirs_exist_ok=True)


@cache
def _damaged_set() -> Path:
    server, data = shared_server(), Data()
    root = server.folder / "damaged"
    root.mkdir()
    outcome = server.run(data.command(root), root=root)
    assert outcome.status == 0, outcome.stderr
    (root / "set" / "train-00001.parquet").write_bytes(b"damaged")
    return root


class Import(Data):
    """A set that is imported; its source lies elsewhere and has no faults."""

    name = reference = "import"

    def command(self, root: Path) -> list[str]:
        """Import, or finish."""
        return ["data", "import", "text", str(_source()), "--out", str(root / "set")]


@cache
def _source() -> Path:
    folder = shared_server().folder / "aclImdb"
    for split in ("train", "test"):
        for label in ("pos", "neg"):
            (folder / split / label).mkdir(parents=True)
            for k in range(3):
                review = folder / split / label / f"{k}_{k + 1}.txt"
                review.write_text(f"review {k} of {split}, which is {label}")
    return folder


EVERY = (Train(), Resume(), Data(), Mend(), Import())
WORKLOADS: dict[str, Workload] = {each.name: each for each in EVERY}


# ---------------------------------------------------------------------------------- trials


@cache
def _undisturbed(name: str) -> tuple[list[Call], dict[str, Any]]:
    """The calls and the end of a workload without a fault."""
    workload, server = WORKLOADS[name], shared_server()
    with _root(workload) as root:
        outcome = server.run(workload.command(root), root=root)
        assert (outcome.status, outcome.stderr) == (0, ""), outcome
        return outcome.calls, workload.end(root)


@contextlib.contextmanager
def _root(workload: Workload) -> Iterator[Path]:
    root = Path(tempfile.mkdtemp(prefix="trial-", dir=shared_server().folder)).resolve()
    try:
        workload.prepare(root)
        yield root
    finally:
        shutil.rmtree(root)


def chosen(workload: str, mode: str, *, every: bool = EVERY_CALL) -> list[int]:
    """The calls at which a fault of this mode is injected: all that differ, or a few of them."""
    calls, _ = _undisturbed(workload)
    fits = [
        {"torn write": call.name == "write", "ENOSPC": call.allocates}.get(mode, True)
        for call in calls
    ]
    numbers = [n for n, fitting in enumerate(fits, start=1) if fitting]
    if every or len(numbers) <= SHORT:
        return numbers
    stride = len(numbers) / SHORT
    offset = MODES.index(mode) / len(MODES)  # so that two modes do not have the same calls
    return [numbers[int((place + offset) * stride)] for place in range(SHORT)]


def check(workload: str, mode: str, *, every: bool = EVERY_CALL) -> tuple[int, list[str]]:
    """The number of trials, and a sentence for each that did not end as it has to."""
    numbers = chosen(workload, mode, every=every)
    failures = []
    for n in numbers:
        failure = _check_one(WORKLOADS[workload], Fault(mode, n))
        if failure:
            failures.append(failure)
    return len(numbers), failures


def _check_one(workload: Workload, fault: Fault) -> str:
    """Say what went wrong; "" if nothing did."""
    _, expected = _undisturbed(workload.reference)
    with _root(workload) as root:
        try:
            outcome = shared_server().run(workload.command(root), root=root, fault=fault)
            wrong = _how_it_ended(outcome, fault)
            if outcome.status == 0:
                wrong += _difference("", expected, workload.end(root))
            else:
                again = shared_server().run(workload.again(root), root=root)
                if again.status != 0:
                    wrong.append(f"continuing ended with {_ended(again)}")
                wrong += _difference("continued, ", expected, workload.end(root))
        except (OSError, ValueError) as error:  # a time limit, a file that the end needs
            return f"{workload.name}, {fault.mode} at {fault.n}: {error}"
        at = [f"{c.name} {c.path.relative_to(root)}" for c in outcome.where[:1]]
    if not wrong:
        return ""
    return f"{workload.name}, {fault.mode} at {fault.n} ({', '.join(at)}): {'; '.join(wrong)}"


def _how_it_ended(outcome: Outcome, fault: Fault) -> list[str]:
    """A kill kills. An error is tolerated, or ends in one sentence with the file's name."""
    if fault.mode in KILLS:
        killed = outcome.signal == signal.SIGKILL or not outcome.where
        return [] if killed else [f"was not killed: {_ended(outcome)}"]
    if outcome.status == 0:
        return [f"printed {outcome.stderr!r}"] if "Traceback" in outcome.stderr else []
    names = {call.path.name.removesuffix(".part") for call in outcome.where}
    one_line = outcome.stderr.count("\n") == 1 and "Traceback" not in outcome.stderr
    if outcome.status == 2 and one_line and any(name in outcome.stderr for name in names):
        return []
    return [f"ended with {_ended(outcome)}"]


def _ended(outcome: Outcome) -> str:
    how = f"signal {outcome.signal}" if outcome.status is None else f"status {outcome.status}"
    said = outcome.stderr
    if len(said) > 400:
        said = f"{said[:200]} ... {said[-200:]}"
    return f"{how} and {said!r}"


def _difference(when: str, expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    wrong = [f"{when}{name} is missing" for name in expected if name not in found]
    wrong += [f"{when}{name} is left over" for name in found if name not in expected]
    both = [name for name in expected if name in found]
    return wrong + [f"{when}{name} differs" for name in both if expected[name] != found[name]]


def _table(names: list[str]) -> int:
    """Print every workload and mode; the failures below."""
    failures = []
    print(f"{'workload':10}{'mode':14}{'calls':>7}{'failures':>10}")
    for name in names or WORKLOADS:
        for mode in MODES[1:]:
            count, found = check(name, mode, every=True)
            failures += found
            print(f"{name:10}{mode:14}{count:7}{len(found):10}", flush=True)
    print("\n".join(failures))
    return 1 if failures else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        _serve(sys.argv[2], imports=sys.argv[3] == "imports")
    sys.exit(_table(sys.argv[1:]))
