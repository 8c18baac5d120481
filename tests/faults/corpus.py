"""Hostile content for the files of a run directory.

`hostile_configs` yields config.json files that no run writes; `side_files` does the same for the
other files of a run.
"""

import copy
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from damage import EVERYTHING, GONE, put
from harness import HANDLER

MIXER_PATH = "mixer path "  # how the names of configurations with an import path begin
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


def plant_canary(folder: Path) -> None:
    """A module in `folder` that creates the file `imported` when it is imported."""
    text = f"open({str(folder / 'imported')!r}, 'w').close()\n"
    text += "import torch\n\n\nclass Layer(torch.nn.Linear):\n"
    text += "    def __init__(self, d_model, **_):\n        super().__init__(d_model, d_model)\n"
    (folder / "canary.py").write_text(text)


def with_value(values: dict[str, Any], place: str | Sequence[str], value: Any) -> bytes:
    """The JSON of a mapping with another value at a place."""
    found = copy.deepcopy(values)
    put(found, place, value)
    return json.dumps(found).encode()


# ---------------------------------------------------------------------------------- config.json

MIXER_PATHS = (
    *("os.system", "subprocess.Popen", "canary.Layer", "torch.hub.load", "builtins.eval"),
    *("dlrnn.__main__.main", "dlrnn.cli.main", "dlrnn.nn.canary.Layer", "canary:Layer"),
    *("..canary.Layer", "./canary.py:Layer", "canary.", ".canary", "dlrnn"),
)
SETTINGS, LENGTH = "task.settings", "task.settings.length"


def hostile_configs(valid: dict[str, Any], marker: Path) -> Iterator[tuple[str, bytes]]:
    """Names and contents of config.json files that every command must refuse.

    `valid` is the configuration that they are made from. Believed by a reader that instantiates
    class paths, they would create the file `marker`. Names that begin with MIXER_PATH are of
    configurations that are valid but for the import path of their mixer.
    """
    touch = {"entrypoint": "touch", "args": [str(marker)], "env": {}, "stdout": None}
    touch |= {"stderr": None, "local_rank_id": 0, "numa_options": None}
    attack = {"class_path": f"{HANDLER}.SubprocessHandler", "init_args": touch}
    yaml = f"!!python/object/apply:os.system ['touch {marker}']"
    options = "model.mixer_options" if "mixer_options" in valid["model"] else "model"
    for part in (_classes(valid, options, attack), _values(valid, options), marked(options)):
        for place, value in part:
            if place != "model.mixer" or "mixer" in valid["model"]:
                yield f"{place} {repr(value)[:40]}", with_value(valid, place, value)
    for place, text in _texts(f"{options}.d_state"):
        content = with_value(valid, place, "<here>").replace(b'"<here>"', text.encode())
        yield f"{place} {text[:40]}", content
    yield f"{options}.d_state YAML", with_value(valid, f"{options}.d_state", yaml)
    yield "the file YAML", f"task: {yaml}\n".encode()
    yield from _files(valid, json.dumps(attack))
    if "mixer" in valid["model"]:
        for path in MIXER_PATHS:
            yield f"{MIXER_PATH}{path}", with_value(valid, "model.mixer", path)


def _fields(values: dict[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """The place and the value of every key, also of those that hold mappings."""
    for name, value in values.items():
        yield f"{before}{name}", value
        if isinstance(value, dict):
            yield from _fields(value, f"{before}{name}.")


def _classes(valid: dict[str, Any], options: str, attack: Any) -> Iterator[tuple[str, Any]]:
    """Places, and values there that name a class, a function or a file."""
    number = f"{options}.d_state"
    fields = dict(_fields(valid))
    for place in (*fields, "extra", f"{SETTINGS}.extra", f"{options}.extra"):
        yield place, attack
    for place in ("task", "model", SETTINGS, options, number, "steps", "schedule"):
        yield place, json.dumps(attack)
    for place in (options, SETTINGS):
        yield place, {**fields[place], **attack}
    yield LENGTH, [attack]
    yield number, [[1, [attack]]]
    yield LENGTH, {"a": {"b": {"c": attack}}}
    yield number, {"class_path": "canary.Layer"}
    yield number, {"init_args": {"a": 1}}
    yield "model.init_args", {}
    yield "task.class_path", "canary.Layer"
    yield number, {**attack, "dict_kwargs": {"a": 1}}
    yield number, {"class_path": "torch.nn.Linear", "init_args": {}}
    yield number, {"class_path": "dlrnn.nn.DLR", "init_args": {}}
    for name in MIXER_PATHS[:5]:
        yield "task.name", name
    yield "model.mixer", "canary\x00.L"
    for place in ("task", "model", SETTINGS, "config", "__path__"):
        yield place, "/etc/hostname"


def _values(valid: dict[str, Any], options: str) -> Iterator[tuple[Any, Any]]:
    """Places, and values there of a wrong size or type; unknown keys."""
    number = f"{options}.d_state"
    yield from (
        *(("model.layers", 10**9), ("model.d_model", 10**9), (number, 10**12), (LENGTH, 10**15)),
        *(("batch_size", 10**12), ("eval_batches", 10**15), ("steps", 10**19), ("seed", 2**63)),
        *(("seed", -(2**63) - 1), ("seed", 10**400), ("lr", 10**400), ("warmup", 10**30)),
        *((LENGTH, 2**64), (number, 10**400), ("steps", 0), ("steps", -1), ("batch_size", -1)),
        *(("model.layers", -1), ("model.layers", 0), (LENGTH, -1), (LENGTH, 0), ("lr", -1.0)),
        *(("model.layers", 1.5), (number, 1.5), ("seed", 0.5), ("accumulate", 10**18)),
        *(("task.name", ["a"]), ("model", None), ("task", {"settings": {}}), ("task", GONE)),
        *((LENGTH, [{"a": [{"b": []}]}]), (LENGTH, [0] * 10**6), ("task.name", "a" * 10**7)),
        *(("unknown", 1), ("task.unknown", 1), ("model.unknown", 1), ("__class__", 1)),
        *((f"{SETTINGS}.unknown", 1), (f"{options}.unknown", 1), (f"{options}.", 1)),
        *((["model.layers"], 1), (options, {f"k{k}": k for k in range(1000)})),
    )
    for place, (name, value) in enumerate(_fields(valid)):
        if name != f"{SETTINGS}.folder":
            wrong = _wrong_types(name, value)
            for each in wrong if EVERYTHING else [wrong[place % len(wrong)]]:
                yield name, each
    for place in ("schedule", "precision", *(["model.norm"] if "norm" in valid["model"] else [])):
        yield place, "other"


def _wrong_types(name: str, value: Any) -> list[Any]:
    """Values of another JSON type than the field has."""
    if isinstance(value, dict):
        return [None, [], [value], "text", 3, True]
    found: list[Any] = [[value], {"value": 1}]
    if name.rpartition(".")[2] not in ("kernel_lr", "clip", "lengths", "stage_steps", "stage_lr"):
        found.append(None)
    if isinstance(value, bool):
        return [*found, 1, "true"]
    if isinstance(value, str):
        return [*found, 7, True, ""]
    return [*found, "text", str(value), True]


def marked(options: str) -> Iterator[tuple[str, Any]]:
    """Places, and values or keys there with characters that are not to be printed raw."""
    for name, mark in CHARACTERS.items():
        yield "task.name", f"shift{mark}"
        yield f"seed{mark}", 1
        yield "model.mixer", f"dlr{mark}"
        if name not in MARKUP:
            yield f"{options}.d{mark}", 1
            yield f"{LENGTH}{mark}", 1
            yield "model.mixer", f"canary{mark}.Layer"


def _texts(number: str) -> Iterator[tuple[str, str]]:
    """Places, and values there that json.dumps would not write."""
    deep = "[" * 100_000 + "]" * 100_000
    for place in ("seed", "lr", LENGTH, number, "model.layers"):
        yield place, "9" * 5000
    for place in ("lr", "clip", "weight_decay", LENGTH, number):
        for text in ("NaN", "1e999", *(["Infinity", "-Infinity"] if EVERYTHING else [])):
            yield place, text
    yield "task.name", '"shift\\ud800"'
    yield LENGTH, deep
    yield number, deep
    yield LENGTH, "[" * 2000 + "]" * 2000


def _files(valid: dict[str, Any], attack: str) -> Iterator[tuple[str, bytes]]:
    """Whole files."""
    text, whole = json.dumps(valid), json.dumps(valid, indent=1).encode()
    for name in ("null", "true", "3", "[]", "{}", '"text"', "nonsense", "[[[]]]", attack):
        yield f"the file {name}", name.encode()
    yield "class path in a list", f"[{attack}]".encode()
    tasks = f'{text[:-1]}, "task": {json.dumps(valid["task"])}}}'
    first = tasks.replace('"task": {', '"task": {"class_path": "canary.Layer", ', 1)
    yield "class path in the first of two tasks", first.encode()
    yield "two seeds", f'{text[:-1]}, "seed": 1}}'.encode()
    yield "two lengths", text.replace('"length"', '"length": 8, "length"', 1).encode()
    yield "empty", b""
    yield "white space", b" \n\t "
    yield "truncated", whole[: len(whole) // 2]
    yield "text behind it", whole + b"\n{}"
    yield "NUL behind it", whole + b"\0"
    yield "comment", b"// a comment\n" + whole
    yield "single quotes", repr(valid).encode()
    yield "byte order mark", b"\xef\xbb\xbf" + whole
    yield "UTF-16", whole.decode().encode("utf-16")
    yield "invalid UTF-8 in a string", whole.replace(b'"schedule"', b'"sched\xff\xfeule"', 1)
    yield "invalid UTF-8 as a value", whole.replace(b'"fp32"', b'"\xc3\x28"', 1)
    yield "100000 lists deep", b"[" * 100_000 + b"]" * 100_000
    yield "100000 mappings deep", b'{"a":' * 100_000 + b"1" + b"}" * 100_000
    yield "100000 brackets that are never closed", b"[" * 100_000
    yield "100 MB of white space", whole + b" " * 100_000_000


# ---------------------------------------------------------------------------------- other files


def side_files(run: Path) -> Iterator[tuple[str, str, bytes]]:
    """Files of a complete run with content that no run writes: file, what it is, content."""
    mappings = {
        "result.json": [None, "text", [1], {"a": 1}, True, 10**30, -1],
        "environment.json": [None, 5, [5], [[5]], {"a": 1}],
        "test.json": [None, "0.5", [1], {"a": 1}],
        "eval-test.json": [None, "text", [5], {"a": 1}, {"by height": [5]}],
    }
    whole = (
        *(b"null", b"3", b"[]", b"{}", b'"text"', b"", b"\xff\xfe{{{", b"[" * 100_000, b"NaN"),
        b'{"then": [[[]]], "step": [], "split": {}, "steps": [[1]]}',
    )
    for name, values in mappings.items():
        known = json.loads((run / name).read_text())
        for content in whole:
            yield name, f"the file {content[:24]!r}", content
        for value in (*values, *CHARACTERS.values()):
            short = json.dumps(value)[:24]
            yield name, f"every value {short}", json.dumps(dict.fromkeys(known, value)).encode()
            for key in known if EVERYTHING else []:
                yield name, f"{key} {short}", with_value(known, [key], value)
        for key in known if EVERYTHING or name == "result.json" else []:
            yield name, f"no {key}", with_value(known, [key], GONE)
        yield name, "NaN everywhere", json.dumps(dict.fromkeys(known, float("nan"))).encode()
        for what, mark in CHARACTERS.items():
            keys = {f"{k}{mark}": v for k, v in known.items()} | known
            yield name, f"{what} in keys", json.dumps(keys).encode()
            yield name, f"{what} in values", json.dumps(_marked(known, mark)).encode()
    environment = json.loads((run / "environment.json").read_text())
    for value in (5, [5], None, "text", [None], {"git": 5}, [{"git": [1]}], [{"git": "\x1b[31m"}]):
        content = with_value(environment, "then", value)
        yield "environment.json", f"then {json.dumps(value)}", content
    yield from _line_files(run)


def _marked(values: Any, mark: str) -> Any:
    """Every string of a JSON value with a mark behind it."""
    if isinstance(values, dict):
        return {key: _marked(value, mark) for key, value in values.items()}
    if isinstance(values, list):
        return [_marked(value, mark) for value in values]
    return f"{values}{mark}" if isinstance(values, str) else values


LINES = (
    *(b"null", b"3", b"[]", b"{}", b'"text"', b"", b"\xff\xfe", b"{", b"[" * 50_000),
    b'{"step": "3", "split": "validation", "R2": "0.5", "loss": "x"}',
    *(b'{"step": 3, "split": "validation"}', b'{"step": 3, "split": "train"}'),
    *(b'{"step": null, "split": null}', b'{"step": [1], "split": ["validation"]}'),
    *(b'{"step": 3, "split": {"a": 1}, "R2": {}}', b'{"step": -3, "split": "validation"}'),
    b'{"step": 1e999, "split": "validation", "R2": NaN, "loss": 1e999}',
    b'{"step": 3, "split": "validation", "R2": ' + b"9" * 5000 + b', "loss": 1}',
    *(b'{"step": 3, "from": 0, "seconds": "1"}', b'{"step": 3, "from": [], "seconds": null}'),
    *(b'{"step": 3, "length": 8, "layers": 5}', b'{"step": 3, "length": 8, "layers": [5]}'),
    b'{"step": 3, "length": 8, "layers": [{"name": 5, "eigenvalues": [["a"]]}]}',
)


def _line_files(run: Path) -> Iterator[tuple[str, str, bytes]]:
    """Files of JSON lines; their size stays, so that a checkpoint's length of them is right."""
    for name in ("records.jsonl", "timing.jsonl", "snapshots.jsonl"):
        before = (run / name).read_bytes()
        for line in LINES if EVERYTHING or name == "records.jsonl" else LINES[::2]:
            yield name, f"line {line[:50]!r}", _padded(line, before)
            if EVERYTHING:
                yield name, f"last line {line[:50]!r}", before + line + b"\n"
        first = json.loads(before.splitlines()[0])
        for what, mark in CHARACTERS.items():
            text = json.dumps(_marked(first, mark))
            yield name, f"{what} in values", _padded(text.encode(), before)
            keyed = {f"{k}{mark}": v for k, v in first.items()}
            keyed |= {"step": 2, "split": f"validation{mark}"}
            yield name, f"{what} in keys", before + json.dumps(keyed).encode() + b"\n"
        yield name, "no line", b""


def _padded(line: bytes, before: bytes) -> bytes:
    """A first line that is replaced, in a file of at least the same size that ends a line."""
    rest = before.splitlines(keepends=True)
    while rest and sum(map(len, rest)) + len(line) + 1 > len(before):
        rest.pop(0)
    tail = b"".join(rest)
    return line.ljust(len(before) - len(tail) - 1) + b"\n" + tail
