"""Bit flips in checkpoints, best models, exports and configurations are always found."""

import json
import os
import shutil
from contextlib import contextmanager, nullcontext

import pytest
import torch
from damage import EVERYTHING, NEWEST, OLDER, WHERE, command_line, edit, make_run, stop, tree
from harness import assert_refused, refusal, run_command, run_well

from dlrnn.models import from_pretrained
from dlrnn.train import load_best
from dlrnn.train.checkpoint import load_newest, read_checkpoint

CPU = torch.device("cpu")
BEST, WEIGHTS = "best.safetensors", "model.safetensors"
CASE = 5  # the bit in which "a" and "A" differ: two digests that name one number
TENSOR_FLIPS = 1500 if EVERYTHING else 200


@pytest.fixture
def exported(made, tmp_path):
    """A copy of the run and of its export."""
    for name in ("run", "export"):
        shutil.copytree(made / name, tmp_path / name)
    return tmp_path


@contextmanager
def flipped(path, byte, bit):
    """The file with one bit changed, in place."""
    with open(path, "r+b") as file:
        before = os.pread(file.fileno(), 1, byte)
        os.pwrite(file.fileno(), bytes([before[0] ^ 1 << bit]), byte)
        try:
            yield
        finally:
            os.pwrite(file.fileno(), before, byte)


def header_end(content):
    """The first byte behind the header of a safetensors file."""
    return 8 + int.from_bytes(content[:8], "little")


def flips(content, share=1):
    """Bytes and bits: all of the header, or a `share`, and some of the tensors, evenly spread."""
    end, every = header_end(content), 1 if EVERYTHING else round(1 / share)
    for byte in range(0, end, every):
        bits = {byte * 3 % 8, *([CASE] if chr(content[byte]).isalpha() else [])}
        for bit in range(8) if EVERYTHING else sorted(bits):
            yield byte, bit
    size = len(content) - end
    for k in range(0, TENSOR_FLIPS, every):
        yield end + k * size // TENSOR_FLIPS, k % 8


def test_undamaged_files_are_read(made):
    newest = load_newest(made / "run")
    assert (newest.path.name, newest.problems) == (NEWEST, [])
    assert load_best(made / "run", CPU).step == 6
    assert from_pretrained(made / "export") is not None


def test_every_flip_of_the_newest_checkpoint_is_found_and_the_older_one_used(run, case):
    path, counters = run / NEWEST, load_newest(run).counters
    for byte, bit in flips(path.read_bytes()):
        with case(f"byte {byte}, bit {bit}"), flipped(path, byte, bit):
            found = load_newest(run)
            assert found.path.name == OLDER
            assert any(NEWEST in problem for problem in found.problems)
    assert load_newest(run).counters == counters


READERS = {
    "only checkpoint": (f"run/{OLDER}", lambda path: load_newest(stop(path.parent)), 1 / 4),
    "best model's tensors": (f"run/{BEST}", read_checkpoint, 1),
    "best model": (f"run/{BEST}", lambda path: load_best(path.parent, CPU), 1 / 8),
    "export": (f"export/{WEIGHTS}", lambda path: from_pretrained(path.parent), 1),
}


@pytest.mark.parametrize("what", READERS)
def test_every_flip_of_weights_is_refused(what, exported, case):
    name, read, share = READERS[what]
    path = exported / name
    content = path.read_bytes()
    for byte, bit in flips(content, share):
        with case(f"byte {byte}, bit {bit}"), flipped(path, byte, bit), refusal(path):
            read(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("name", ["run", "export"])
def test_flips_of_a_configuration_are_refused_unless_its_values_stay(name, exported, case):
    """The weights carry the digest of the configuration that they belong to."""
    path = exported / name / "config.json"
    content, values = path.read_bytes(), json.loads(path.read_bytes())
    for byte in range(len(content)):
        for bit in range(8) if EVERYTHING else [byte * 3 % 8]:
            with case(f"byte {byte}, bit {bit}"), flipped(path, byte, bit):
                try:
                    same = json.loads(path.read_bytes()) == values
                except ValueError:
                    same = False
                with nullcontext() if same else refusal(path.parent):
                    load_best(path.parent, CPU) if name == "run" else from_pretrained(path.parent)


# ---------------------------------------------------------------------------------- commands


@pytest.mark.parametrize("command", ["eval", "export", "generate", "resume"])
def test_commands_refuse_a_flipped_file(command, copied, tmp_path, case):
    """The best model, or for a resume the only checkpoint: its length, its header, its tensors."""
    run = copied(command, tmp_path)
    path = run / (OLDER if command == "resume" else BEST)
    arguments, before = command_line(command, tmp_path), (run / "records.jsonl").read_bytes()
    content = path.read_bytes()
    end, count = header_end(content), 8 if command == "generate" else 16
    places = [*range(8, end, max(1, end // count)), *range(end, len(content), len(content) // 8)]
    for byte, bit in [(0, 0), (7, 7), *((byte, (byte * 5 + 1) % 8) for byte in places)]:
        with case(f"byte {byte}, bit {bit}"), flipped(path, byte, bit):
            outcome = run_command(arguments)
            assert (outcome.status, outcome.faults()) == (2, []), outcome
            assert path.name in outcome.err
    assert not (tmp_path / "out").exists()
    assert (run / "records.jsonl").read_bytes() == before
    if command == "generate":
        run_well(arguments)


def changed_text(before, after):
    """A damage that replaces text of the same length in the header."""

    def damage(content):
        assert before in content[: header_end(content)]
        return content.replace(before, after, 1)

    return damage


def without_digests(content):
    """Remove what the header says about the file's content, as a forger would."""
    end = header_end(content)
    header = json.loads(content[8:end])
    header["__metadata__"] = {"dlrnn_run": '{"step": 6, "records": 0}'}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content[end:]


def one_bit(content, byte):
    return content[:byte] + bytes([content[byte] ^ 4]) + content[byte + 1 :]


DAMAGES = {
    "step": changed_text(b'\\"step\\": 6', b'\\"step\\": 5'),
    "records": changed_text(b'\\"records\\": ', b'\\"recordt\\": '),
    "dtype": changed_text(b'"dtype":"F32"', b'"dtype":"I32"'),
    "shape": changed_text(b'"shape":[8,8]', b'"shape":[8,9]'),
    "name": changed_text(b'"model.decoder', b'"model.decodes'),
    "first tensor": lambda content: one_bit(content, header_end(content)),
    "last tensor": lambda content: one_bit(content, len(content) - 1),
    "truncated": lambda content: content[: len(content) // 2],
    "one byte less": lambda content: content[:-1],
    "one byte more": lambda content: content + b"\0",
    "empty": lambda content: b"",
    "zeros": lambda content: bytes(len(content)),
    "not UTF-8": lambda content: content[:20] + b"\xff\xfe" + content[22:],
    "no digest": without_digests,
}


@pytest.mark.parametrize(
    ("damage", "printed"), [*((each, []) for each in DAMAGES), ("step", ["--json"])]
)
def test_resume_uses_the_older_checkpoint_and_ends_the_same(damage, printed, made, run):
    (run / "result.json").unlink()
    path = run / NEWEST
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    outcome = run_well(["train", "--resume", run, *WHERE, *printed])
    assert NEWEST in "".join((outcome.err if printed else outcome.text).split()), "not named"
    for name in ("records.jsonl", NEWEST, BEST, "config.json"):
        assert (run / name).read_bytes() == (made / "run" / name).read_bytes(), name
    results = [json.loads((each / "result.json").read_text()) for each in (run, made / "run")]
    for result in results:
        del result["seconds"], result["seconds_from_step"]
    assert results[0] == results[1]


# ---------------------------------------------------------------------------------- configurations

OTHERS = {
    "seed": 1,
    "task.settings.length": 64,
    "task.settings.copies": 4,
    "lr": 0.002,
    "steps": 7,
    "precision": "bf16",
    "model.mixer_options.dt_min": 0.0003,
    "model.pooling": "mean",
}
GENERATE = {"model.dt_min": 0.04, "model.norm": "other"}


@pytest.mark.parametrize(
    ("command", "place", "value"),
    [
        *((command, *each) for command in ("eval", "export", "resume") for each in OTHERS.items()),
        *(("generate", *each) for each in GENERATE.items()),
    ],
)
def test_another_configuration_under_the_weights_is_refused(
    command, place, value, copied, tmp_path
):
    run = copied(command, tmp_path)
    valid = json.loads((run / "config.json").read_text())
    edit(run / "config.json", place, value)
    assert json.loads((run / "config.json").read_text()) != valid
    (run / "lock").unlink()  # it may be written
    before = tree(run)
    assert_refused(run_command(command_line(command, tmp_path)), run)
    assert not (tmp_path / "out").exists()
    assert {name: each for name, each in tree(run).items() if name != "lock"} == before
    if command == "eval":
        with refusal(run, "config"):
            load_best(run, CPU)


def test_weights_of_another_export_are_refused(exported, tmp_path):
    """Each file is undamaged, but they do not belong together."""
    other = make_run(tmp_path / "other", "--seed", "1", "--model.mixer_options.dt_min", "0.0001")
    run_well(["export", other, tmp_path / "second"])
    shutil.copy(exported / "export" / WEIGHTS, tmp_path / "second" / WEIGHTS)
    with refusal(tmp_path / "second", "config"):
        from_pretrained(tmp_path / "second")
