"""Hostile content for a run directory, and a harness that runs commands on it.

`hostile_configs` yields config.json files that no run writes; `side_files` does the same for the
other files of a run. `run_command` calls `dlrnn.cli.main` in this process under a deadline and a
memory limit, and reports imports and processes that a file must not cause.
"""

import contextlib
import copy
import io
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import unicodedata
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from support import tiny_books

import dlrnn
from dlrnn.cli import main
from dlrnn.models import LanguageConfig
from dlrnn.paper.recipes import get, scaled
from dlrnn.train import RunConfig, TaskConfig, train

EVERYTHING = os.environ.get("DLRNN_FAULTS") == "all"
SECONDS = 10.0  # the longest that a command may work on a hostile file
MEMORY = 2**31  # bytes of address space that it may add
RECIPE = "table1/shift/dlr-1"
RUN_IN_SWEEP = Path("tiny", RECIPE, "seed-0")
MIXER_PATH = "mixer path "  # how the names of configurations with an import path begin
HANDLER = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"

# ---------------------------------------------------------------------------------- runs

SMALL = [
    *("--scale", "tiny", "--steps", "6", "--batch_size", "2", "--eval_batches", "1"),
    *("--log_every", "1", "--eval_every", "2", "--checkpoint_every", "2"),
    *("--model.d_model", "8", "--model.mixer_options.d_state", "8"),
    *("--task.settings.length", "32"),
]
WHERE = ["--writer", "none", "--device", "cpu"]


def make_run(path: Path, *arguments: str) -> Path:
    """Train a run of 6 steps in `path`; its checkpoints are of the steps 4 and 6."""
    status = main(["train", RECIPE, *SMALL, "--out", str(path), *WHERE, "--json", *arguments])
    assert status == 0
    return path


def make_language_run(folder: Path) -> Path:
    """Train a language model of 2 steps in `folder`/run."""
    data = tiny_books(folder)
    sizes = {"layers": 1, "d_model": 16, "d_state": 8, "d_embedding": 8, "d_ff": 16}
    model = LanguageConfig(**sizes, vocabulary=32, dt_min=0.05, dt_max=0.5, kernel_length=32)
    task = TaskConfig("pg19", {"length": 32, "folder": str(data)})
    config = RunConfig(task, model, steps=2, batch_size=4, lr=1e-2, eval_every=2)
    train(folder / "run", config, device="cpu", show=False, writer="none")
    return folder / "run"


def command_line(command: str, run: Path, out: Path) -> list[object]:
    """The arguments of a command that reads `run` and writes to `out` at most."""
    return {
        "eval": ["eval", run, "--device", "cpu"],
        "export": ["export", run, out],
        "generate": ["generate", run, "--prompt", "w1", "--tokens", "2", "--device", "cpu"],
        "resume": ["train", "--resume", run, *WHERE],
        "report": ["report", "--runs", run, "--out", out],
        "results": ["results", "add", run, "--into", out],
    }[command]


def as_recipe(run: Path) -> Path:
    """Make a run look like a complete one of the recipe at its tiny scale."""
    config = scaled(get(RECIPE), "tiny")
    (run / "config.json").write_text(config.to_json())
    result = json.loads((run / "result.json").read_text())
    done = {**result, "steps": config.steps, "best_step": config.steps}
    (run / "result.json").write_text(json.dumps(done))
    records = (run / "records.jsonl").read_text().splitlines()[:-1]
    last = {"step": config.steps, "split": "validation", "R2": 0.5, "loss": 0.1}
    (run / "records.jsonl").write_text("\n".join([*records, json.dumps(last)]) + "\n")
    return run


def python_in(folder: Path, code: str, *arguments: object, silent: bool = True) -> str:
    """What code prints when it runs in a folder, which is not on the import path.

    With `silent` it must print nothing to stderr.
    """
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, *map(str, arguments)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": str(Path(dlrnn.__file__).parents[1]),
            "OMP_NUM_THREADS": "1",
        },
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert not (silent and done.stderr), done.stderr
    return done.stdout.strip()


def stop(run: Path) -> Path:
    """Make a complete run one that was stopped at step 4."""
    (run / "result.json").unlink(missing_ok=True)
    (run / "step-000000006.safetensors").unlink(missing_ok=True)
    return run


# ---------------------------------------------------------------------------------- harness


class TooSlowError(BaseException):
    """The deadline has passed; no handler of ordinary errors catches it."""


class Done(NamedTuple):
    """What a command did."""

    status: int | str
    """Its exit status, or what it raised."""
    out: str
    err: str
    events: list[str]
    """Imports and processes that no file may cause."""

    @property
    def text(self) -> str:
        """Both outputs."""
        return self.out + self.err

    def faults(self) -> list[str]:
        """What no file may cause, whatever the command does."""
        found = [f"event {each}" for each in self.events]
        if isinstance(self.status, str):
            found.append(self.status)
        if "Traceback" in self.text:
            found.append("a traceback is printed")
        if any(line.startswith("injected") for line in self.text.splitlines()):
            found.append("text of a file begins a line")
        if raw := sorted({f"U+{ord(each):04X}" for each in self.text if is_control(each)}):
            found.append(f"raw control characters {raw}")
        return found


def assert_refused(outcome: Done, *names: object) -> None:
    """The command ended in one sentence that has these names, and did nothing forbidden."""
    assert outcome.status == 2, outcome
    assert not outcome.faults()
    assert outcome.err.count("\n") == 1, outcome.err
    for name in names:
        assert str(name) in outcome.err


def is_control(character: str) -> bool:
    """Whether a terminal may act on it: C0, C1, DEL, bidirectional and other format controls."""
    return character not in "\n\t" and unicodedata.category(character) in ("Cc", "Cf")


_WATCHED = {
    *("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.startfile"),
    *("pty.spawn", "socket.connect", "urllib.Request"),
}
_FORBIDDEN = ("canary", HANDLER, "dlrnn.__main__", "antigravity")
_events: list[str] | None = None  # None: events are not recorded


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _events is None:
        return
    if event in _WATCHED:
        command = arguments[1] if event == "subprocess.Popen" else arguments
        first = command[0] if isinstance(command, list | tuple) and command else command
        if os.path.basename(str(first)) not in ("git", "uname"):  # the environment of a run
            _events.append(f"{event} {str(command)[:200]}")


_hooks: list[object] = []


class _Finder:
    """The first finder of modules: it records forbidden names, and finds no module."""

    @staticmethod
    def find_spec(name: str, *_: object) -> None:
        if _events is not None and name.startswith(_FORBIDDEN):
            _events.append(f"import {name}")


@contextlib.contextmanager
def watched() -> Iterator[list[str]]:
    """Collect imports of a canary, and started processes."""
    global _events  # noqa: PLW0603 (an audit hook cannot be removed)
    if not _hooks:
        sys.addaudithook(_audit)
        _hooks.append(_audit)
    _events = found = []
    finder: Any = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield found
    finally:
        _events = None
        sys.meta_path.remove(finder)
        for name in [each for each in sys.modules if each.startswith("canary")]:
            del sys.modules[name]


@contextlib.contextmanager
def deadline(seconds: float, wall: float | None = None) -> Iterator[None]:
    """Raise TooSlowError after `seconds` of processor time, or `wall` seconds (default: ten times).

    On a loaded machine a test may wait long without using the processor.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def over(*_: object) -> None:
        raise TooSlowError

    timers = {
        signal.ITIMER_PROF: (signal.SIGPROF, seconds),
        signal.ITIMER_REAL: (signal.SIGALRM, wall or 10 * seconds),
    }
    before = {number: signal.signal(number, over) for number, _ in timers.values()}
    for timer, (_, limit) in timers.items():
        signal.setitimer(timer, limit)
    try:
        yield
    finally:
        for timer, (number, _) in timers.items():
            signal.setitimer(timer, 0)
            signal.signal(number, before[number])


@contextlib.contextmanager
def opened_later(fifo: Path | None, seconds: float) -> Iterator[None]:
    """Open the other end of a pipe after the deadline, from another process.

    A library that waits for the pipe may hold the interpreter's lock, so no signal handler runs.
    """
    if fifo is None:
        yield
        return
    script = 'sleep "$1"; test -p "$2" && exec 3<>"$2" && sleep 1'
    command = ["sh", "-c", script, "sh", str(seconds + 1), str(fifo)]
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            yield
        finally:
            os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def bounded_memory(extra: int = MEMORY) -> Iterator[None]:
    """Allocations beyond `extra` bytes of address space fail."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + extra, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def run_command(
    arguments: Sequence[object], *, seconds: float = SECONDS, fifo: Path | None = None
) -> Done:
    """Run `dlrnn.cli.main` and collect its output; an exception becomes its status."""
    out, err = io.StringIO(), io.StringIO()
    status: int | str
    with (
        opened_later(fifo, seconds),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        watched() as events,
        bounded_memory(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", DeprecationWarning)  # which would hide what it warns of
        try:
            with deadline(seconds, wall=seconds if fifo else None):
                status = main([str(each) for each in arguments])
        except TooSlowError:
            status = f"not done after {seconds:.0f} s"
        except SystemExit as error:
            status = f"SystemExit({error.code!r})"
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            status = f"traceback of {type(error).__name__}: {str(error)[:200]}"
    return Done(status, out.getvalue(), err.getvalue(), events.copy())


def tree(folder: Path) -> dict[str, Any]:
    """Every name below a folder with its type, and its content where it is a file."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = ("link", os.readlink(path))
        elif path.is_file():
            found[name] = ("file", path.read_bytes(), path.stat().st_mtime_ns)
        else:
            found[name] = ("folder" if path.is_dir() else "other",)
    return found


def plant_canary(folder: Path) -> None:
    """A module in `folder` that creates the file `imported` when it is imported."""
    text = f"open({str(folder / 'imported')!r}, 'w').close()\n"
    text += "import torch\n\n\nclass Layer(torch.nn.Linear):\n"
    text += "    def __init__(self, d_model, **_):\n        super().__init__(d_model, d_model)\n"
    (folder / "canary.py").write_text(text)


# ---------------------------------------------------------------------------------- config.json


def fields(values: dict[str, Any], before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every key, also of those that hold mappings."""
    for name, value in values.items():
        yield (*before, name)
        if isinstance(value, dict):
            yield from fields(value, (*before, name))


def changed(values: dict[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    """A copy with another value at a path."""
    found = copy.deepcopy(values)
    owner = found
    for name in path[:-1]:
        owner = owner[name]
    owner[path[-1]] = value
    return found


def _at(values: dict[str, Any], path: Sequence[str]) -> Any:
    for name in path:
        values = values[name]
    return values


def _wrong_values(path: tuple[str, ...], value: Any) -> list[Any]:
    """Values of another JSON type than the field has."""
    found: list[Any] = [[value], {"value": 1}]
    if path[-1] not in ("kernel_lr", "clip"):
        found.append(None)
    if isinstance(value, bool):
        found += [1, "true"]
    elif isinstance(value, str):
        found += [7, True, ""]
    elif isinstance(value, dict):
        found = [None, [], [value], "text", 3, True]
    else:
        found += ["text", str(value), True]
    return found


def hostile_configs(  # noqa: PLR0912, PLR0915 (a list)
    valid: dict[str, Any], marker: Path
) -> Iterator[tuple[str, bytes]]:
    """Names and contents of config.json files that every command must refuse.

    `valid` is the configuration that they are made from. Believed by a reader that instantiates
    class paths, they would create the file `marker`. Names that begin with MIXER_PATH are of
    configurations that are valid but for the import path of their mixer.
    """
    touch = {"entrypoint": "touch", "args": [str(marker)], "env": {}, "stdout": None}
    touch |= {"stderr": None, "local_rank_id": 0, "numa_options": None}
    attack = {"class_path": f"{HANDLER}.SubprocessHandler", "init_args": touch}
    every = list(fields(valid))

    def put(name: str, path: Sequence[str], value: Any) -> tuple[str, bytes]:
        return name, json.dumps(changed(valid, path, value)).encode()

    def raw(name: str, path: Sequence[str], text: str) -> tuple[str, bytes]:
        """`text` is written as it is, which json.dumps would not do."""
        content = json.dumps(changed(valid, path, "<here>"))
        return name, content.replace('"<here>"', text).encode()

    options = ("model", "mixer_options") if "mixer_options" in valid["model"] else ("model",)
    number = next(p for p in every if p[:-1] == options and p[-1] == "d_state")
    settings = ("task", "settings")

    # Class paths.
    for path in every:
        yield put(f"class path at {'.'.join(path)}", path, attack)
    yield put("class path at a new key", ["extra"], attack)
    yield put("class path at a new setting", [*settings, "extra"], attack)
    yield put("class path at a new option", [*options, "extra"], attack)
    yield put("class path in a list", [*settings, "length"], [attack])
    yield put("class path in a list in a list", number, [[1, [attack]]])
    yield put("class path three mappings deep", [*settings, "length"], {"a": {"b": {"c": attack}}})
    yield put("class path beside other options", options, {**_at(valid, options), **attack})
    yield put("class path beside other settings", settings, {**valid["task"]["settings"], **attack})
    yield put("class path without arguments", number, {"class_path": "canary.Layer"})
    yield put("arguments without a class path", number, {"init_args": {"a": 1}})
    yield put("init_args beside the model", ["model", "init_args"], {})
    yield put("class_path beside the task", ["task", "class_path"], "canary.Layer")
    yield put("class path with dict_kwargs", number, {**attack, "dict_kwargs": {"a": 1}})
    yield put("class path of torch", number, {"class_path": "torch.nn.Linear", "init_args": {}})
    yield put("class path of dlrnn", number, {"class_path": "dlrnn.nn.DLR", "init_args": {}})
    yield "class path as the file", json.dumps(attack).encode()
    yield "class path in a list as the file", json.dumps([attack]).encode()
    text = json.dumps(attack)
    for path in (("task",), ("model",), settings, options, number, ("steps",), ("schedule",)):
        yield put(f"class path as text at {'.'.join(path)}", path, text)
    yaml = f"!!python/object/apply:os.system ['touch {marker}']"
    yield put("YAML object as text", number, yaml)
    yield "YAML object as the file", f"task: {yaml}\n".encode()
    yield (
        "class path in the first of two tasks",
        (json.dumps(valid)[:-1] + f', "task": {json.dumps(valid["task"])}}}')
        .encode()
        .replace(b'"task": {', b'"task": {"class_path": "canary.Layer", ', 1),
    )

    # Import paths.
    for name in (
        "os.system",
        "subprocess.Popen",
        "canary.Layer",
        "torch.hub.load",
        "builtins.eval",
    ):
        if "mixer" in valid["model"]:
            yield put(f"{MIXER_PATH}{name}", ["model", "mixer"], name)
        yield put(f"task {name}", ["task", "name"], name)
    if "mixer" in valid["model"]:
        for name in (
            *("dlrnn.__main__.main", "dlrnn.cli.main", "dlrnn.nn.canary.Layer", "canary:Layer"),
            *("..canary.Layer", "./canary.py:Layer", "canary.", ".canary", "dlrnn", "canary\x00.L"),
        ):
            bad = "task-like mixer " if "\x00" in name else MIXER_PATH
            yield put(f"{bad}{name!r}", ["model", "mixer"], name)
    for path in (("task",), ("model",), settings):
        yield put(f"file name at {'.'.join(path)}", path, "/etc/hostname")
    yield put("key config", ["config"], "/etc/hostname")
    yield put("key __path__", ["__path__"], "/etc/hostname")

    # Numbers.
    huge = "9" * 5000
    for path, value in (
        *((("model", "layers"), 10**9), (("model", "d_model"), 10**9), (number, 10**12)),
        *(((*settings, "length"), 10**15), (("batch_size",), 10**12), (("eval_batches",), 10**15)),
        *((("steps",), 10**19), (("seed",), 2**63), (("seed",), -(2**63) - 1)),
        *((("seed",), 10**400), (("lr",), 10**400), (("warmup",), 10**30)),
        *(((*settings, "length"), 2**64), (number, 10**400), (("steps",), 0), (("steps",), -1)),
        *((("batch_size",), -1), (("model", "layers"), -1), (("model", "layers"), 0)),
        *(((*settings, "length"), -1), ((*settings, "length"), 0), (("lr",), -1.0)),
        *((("model", "layers"), 1.5), (number, 1.5), (("seed",), 0.5), (("accumulate",), 10**18)),
    ):
        yield put(f"{'.'.join(path)} {str(value)[:24]}", path, value)
    for path in (("seed",), ("lr",), (*settings, "length"), number, ("model", "layers")):
        yield raw(f"5000 digits at {'.'.join(path)}", path, huge)
    for path in (("lr",), ("clip",), ("weight_decay",), (*settings, "length"), number):
        for name in ("NaN", "Infinity", "-Infinity", "1e999"):
            if EVERYTHING or name in ("NaN", "1e999"):
                yield raw(f"{name} at {'.'.join(path)}", path, name)

    # Types.
    for place, path in enumerate(every):
        if path == (*settings, "folder"):
            continue
        wrong = _wrong_values(path, _at(valid, path))
        for value in wrong if EVERYTHING else [wrong[place % len(wrong)]]:
            yield put(f"{'.'.join(path)} {json.dumps(value)[:24]}", path, value)
    yield put("a list as the name of the task", ["task", "name"], ["a"])
    yield put("no model", ["model"], None)
    for path in (("model", "norm"), ("schedule",), ("precision",)):
        if path[0] != "model" or path[1] in valid["model"]:
            yield put(f"unknown word at {'.'.join(path)}", path, "other")
    yield put("a list with a mapping with a list", [*settings, "length"], [{"a": [{"b": []}]}])

    # Keys.
    for path in (("unknown",), ("task", "unknown"), ("model", "unknown"), ("__class__",)):
        yield put(f"unknown key {'.'.join(path)}", path, 1)
    yield put("unknown setting", [*settings, "unknown"], 1)
    yield put("unknown option", [*options, "unknown"], 1)
    yield put("empty key", [*options, ""], 1)
    yield put("dotted key", ["model.layers"], 1)
    yield put("a thousand unknown keys", options, {f"k{k}": k for k in range(1000)})
    yield "two seeds", (json.dumps(valid)[:-1] + ', "seed": 1}').encode()
    yield "two lengths", json.dumps(valid).replace('"length"', '"length": 8, "length"', 1).encode()
    yield "no task", json.dumps({k: v for k, v in valid.items() if k != "task"}).encode()
    yield put("no name of the task", ["task"], {"settings": {}})

    # Files.
    whole = json.dumps(valid, indent=1).encode()
    yield "empty file", b""
    yield "white space", b" \n\t "
    for name in ("null", "true", "3", "[]", "{}", '"text"', "nonsense", "[[[]]]"):
        yield f"the file {name}", name.encode()
    yield "truncated", whole[: len(whole) // 2]
    yield "text behind it", whole + b"\n{}"
    yield "NUL behind it", whole + b"\0"
    yield "comment", b"// a comment\n" + whole
    yield "single quotes", repr(valid).encode()
    yield "byte order mark", b"\xef\xbb\xbf" + whole
    yield "UTF-16", whole.decode().encode("utf-16")
    yield "invalid UTF-8 in a string", whole.replace(b'"schedule"', b'"sched\xff\xfeule"', 1)
    yield "invalid UTF-8 as a value", whole.replace(b'"fp32"', b'"\xc3\x28"', 1)
    yield raw("a lone surrogate", ["task", "name"], '"shift\\ud800"')
    yield "100000 lists deep", b"[" * 100_000 + b"]" * 100_000
    yield "100000 mappings deep", b'{"a":' * 100_000 + b"1" + b"}" * 100_000
    yield "100000 brackets that are never closed", b"[" * 100_000
    for path in ((*settings, "length"), number):
        yield raw(f"100000 lists deep at {'.'.join(path)}", path, "[" * 100_000 + "]" * 100_000)
    yield raw("2000 lists deep at a setting", [*settings, "length"], "[" * 2000 + "]" * 2000)
    yield "100 MB of white space", whole + b" " * 100_000_000
    yield put("a list of a million", [*settings, "length"], [0] * 1_000_000)
    yield put("a name of 10 MB", ["task", "name"], "a" * 10_000_000)

    # Characters.
    for name, mark in CHARACTERS.items():
        yield put(f"{name} in the task", ["task", "name"], f"shift{mark}")
        if name in MARKUP:
            continue
        yield put(f"{name} in a key", [f"seed{mark}"], 1)
        yield put(f"{name} in an option", [*options, f"d{mark}"], 1)
        yield put(f"{name} in a setting", [*settings, f"length{mark}"], 1)
        if "mixer" in valid["model"]:
            yield put(f"{name} in the mixer", ["model", "mixer"], f"dlr{mark}")
            yield put(f"{name} in a path", ["model", "mixer"], f"canary{mark}.Layer")


MARKUP = {"markup": "[red]no[/red]", "closing tag": "[/foo]", "link": "[link=http://a]b"}
CHARACTERS = {
    **MARKUP,
    "ANSI colour": "\x1b[31mred",
    "terminal title": "\x1b]0;title\x07",
    "C1 control": "\x9b31m",
    "new line": "a\ninjected line",
    "carriage return": "a\rb",
    "bidi override": "a\u202eb",
}

# ---------------------------------------------------------------------------------- other files


def side_files(run: Path) -> Iterator[tuple[str, str, bytes]]:
    """Files of a complete run with content that no run writes: file, what it is, content."""
    everywhere = {
        **{f"the value {text}": text.encode() for text in ("null", "3", "[]", "{}", '"text"')},
        "empty": b"",
        "not JSON": b"\xff\xfe{{{",
        "deep": b"[" * 100_000,
        "NaN": b"NaN",
        "folder of lists": b'{"then": [[[]]], "step": [], "split": {}, "steps": [[1]]}',
    }
    texts = [*CHARACTERS.values()]
    for name in ("result.json", "environment.json", "test.json", "eval-test.json"):
        for what, content in everywhere.items():
            yield name, what, content
    for name, replacements in {
        "result.json": [None, "text", [1], {"a": 1}, True, 10**30, -1, *texts],
        "environment.json": [None, 5, [5], [[5]], {"a": 1}, *texts],
        "test.json": [None, "0.5", [1], {"a": 1}, *texts],
        "eval-test.json": [None, "text", [5], {"a": 1}, {"by height": [5]}, *texts],
    }.items():
        path = run / name
        known = json.loads(path.read_text())
        for value in replacements:
            short = json.dumps(value)[:24]
            yield name, f"every value {short}", json.dumps(dict.fromkeys(known, value)).encode()
            if EVERYTHING:
                for key in known:
                    yield name, f"{key} {short}", json.dumps({**known, key: value}).encode()
        for key in known if EVERYTHING or name == "result.json" else []:
            less = {k: v for k, v in known.items() if k != key}
            yield name, f"no {key}", json.dumps(less).encode()
        yield name, "NaN everywhere", json.dumps(dict.fromkeys(known, float("nan"))).encode()
        for what, mark in CHARACTERS.items():
            marked = {f"{k}{mark}": v for k, v in known.items()} | known
            yield name, f"{what} in keys", json.dumps(marked).encode()
            yield name, f"{what} in values", json.dumps(_marked(known, mark)).encode()
    known = json.loads((run / "environment.json").read_text())
    for value in (5, [5], None, "text", [None], {"git": 5}, [{"git": [1]}], [{"git": "\x1b[31m"}]):
        content = json.dumps({**known, "then": value}).encode()
        yield "environment.json", f"then {json.dumps(value)}", content
    yield from _line_files(run)


def _marked(values: Any, mark: str) -> Any:
    """Every string of a JSON value with a mark behind it."""
    if isinstance(values, dict):
        return {key: _marked(value, mark) for key, value in values.items()}
    if isinstance(values, list):
        return [_marked(value, mark) for value in values]
    return f"{values}{mark}" if isinstance(values, str) else values


def _line_files(run: Path) -> Iterator[tuple[str, str, bytes]]:
    """Files of JSON lines; their size stays, so that a checkpoint's length of them is right."""
    hostile = [
        *(b"null", b"3", b"[]", b"{}", b'"text"', b"", b"\xff\xfe", b"{", b"[" * 50_000),
        *(b'{"step": "3", "split": "validation", "R2": "0.5", "loss": "x"}',),
        *(b'{"step": 3, "split": "validation"}', b'{"step": 3, "split": "train"}'),
        *(b'{"step": null, "split": null}', b'{"step": [1], "split": ["validation"]}'),
        *(b'{"step": 3, "split": {"a": 1}, "R2": {}}', b'{"step": -3, "split": "validation"}'),
        *(b'{"step": 1e999, "split": "validation", "R2": NaN, "loss": 1e999}',),
        *(b'{"step": 3, "split": "validation", "R2": ' + b"9" * 5000 + b', "loss": 1}',),
        *(b'{"step": 3, "from": 0, "seconds": "1"}', b'{"step": 3, "from": [], "seconds": null}'),
        *(b'{"step": 3, "length": 8, "layers": 5}', b'{"step": 3, "length": 8, "layers": [5]}'),
        *(b'{"step": 3, "length": 8, "layers": [{"name": 5, "eigenvalues": [["a"]]}]}',),
    ]
    for name in ("records.jsonl", "timing.jsonl", "snapshots.jsonl"):
        before = (run / name).read_bytes()
        lines = before.splitlines()
        for place, line in enumerate(hostile):
            if not EVERYTHING and name != "records.jsonl" and place % 2:
                continue
            yield name, f"line {line[:50]!r}", _padded(line + b"\n", before)
            if EVERYTHING:
                yield name, f"last line {line[:50]!r}", b"\n".join([*lines, line]) + b"\n"
        for what, mark in CHARACTERS.items():
            text = json.dumps(_marked(json.loads(lines[0]), mark))
            yield name, f"{what} in values", _padded(text.encode() + b"\n", before)
            keyed = {f"{k}{mark}": v for k, v in json.loads(lines[0]).items()}
            keyed |= {"step": 2, "split": f"validation{mark}"}
            yield name, f"{what} in keys", before + json.dumps(keyed).encode() + b"\n"
        yield name, "no line", b""


def _padded(line: bytes, before: bytes) -> bytes:
    """A first line that is replaced, in a file of at least the same size that ends a line."""
    rest = before.splitlines(keepends=True)
    while rest and sum(map(len, rest)) + len(line) > len(before):
        rest.pop(0)
    fill = len(before) - len(line) - sum(map(len, rest))
    return line[:-1] + b" " * max(0, fill) + b"\n" + b"".join(rest)
