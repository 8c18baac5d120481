"""Bit flips in checkpoints, best models, exports and configurations are always found."""

import json
import os
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hostile import EVERYTHING, WHERE, assert_refused, command_line, make_run, run_command, stop

from dlrnn.models import from_pretrained
from dlrnn.train import load_best
from dlrnn.train.checkpoint import checkpoints, load_newest, read_checkpoint

pytestmark = pytest.mark.usefixtures("unchecked")

CPU = torch.device("cpu")
BEST, WEIGHTS = "best.safetensors", "model.safetensors"
NEWEST = "step-000000006.safetensors"
CASE = 5  # the bit in which "a" and "A" differ: two digests that name one number
TENSOR_FLIPS = 1500 if EVERYTHING else 200


@pytest.fixture(scope="module")
def made(trained, tmp_path_factory):
    """A copy of the run to be damaged, and an export of it."""
    folder = tmp_path_factory.mktemp("damaged")
    shutil.copytree(trained, folder / "run")
    assert run_command(["export", folder / "run", folder / "export"], seconds=60).status == 0
    return folder


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


def failures_of(path, reads, check, share=1):
    """A line for each flip that `reads` does not handle as `check` requires."""
    content, failures, count = path.read_bytes(), [], 0
    end = header_end(content)
    for byte, bit in flips(content, share):
        count += 1
        with flipped(path, byte, bit):
            wrong = check(reads)
        if wrong:
            around = content[max(0, byte - 12) : byte + 12] if byte < end else "tensors"
            failures.append(f"byte {byte}, bit {bit} ({around}): {wrong}")
    assert path.read_bytes() == content
    assert count > share * end
    return f"{len(failures)} of {count}\n" + "\n".join(failures[:40]) if failures else ""


def refusal_of(path):
    """A check that reading ends in one sentence, a ValueError that names the file."""

    def check(reads):
        try:
            reads()
        except ValueError as error:
            if str(path) not in str(error):
                return f"the file is not named: {str(error)[:200]}"
            return "more than one line" if "\n" in str(error) else ""
        except Exception as error:
            return f"{type(error).__name__}: {str(error)[:100]}"
        return "accepted"

    return check


def test_undamaged_files_are_read(made):
    run = made / "run"
    assert load_newest(run).path == run / NEWEST
    assert load_newest(run).problems == []
    assert load_best(run, CPU).step == 6
    assert from_pretrained(made / "export") is not None


def test_every_flip_of_the_newest_checkpoint_is_found_and_the_older_one_used(made):
    run = made / "run"
    older = checkpoints(run)[0]
    counters = json.dumps(load_newest(run).counters)

    def falls_back(reads):
        try:
            found = reads()
        except Exception as error:
            return f"{type(error).__name__}: {str(error)[:100]}"
        if found.path != older:
            return "accepted"
        named = any(NEWEST in problem for problem in found.problems)
        return "" if named else f"not named: {found.problems}"

    wrong = failures_of(run / NEWEST, lambda: load_newest(run), falls_back)
    assert json.dumps(load_newest(run).counters) == counters
    assert not wrong, wrong


def test_every_flip_of_the_only_checkpoint_is_refused(made, tmp_path):
    run = Path(shutil.copytree(made / "run", tmp_path / "run"))
    stop(run)
    [path] = checkpoints(run)
    wrong = failures_of(path, lambda: load_newest(run), refusal_of(path), share=1 / 4)
    assert not wrong, wrong


def test_every_flip_of_the_best_model_is_refused(made):
    path = made / "run" / BEST
    wrong = failures_of(path, lambda: read_checkpoint(path), refusal_of(path))
    assert not wrong, wrong
    wrong = failures_of(path, lambda: load_best(made / "run", CPU), refusal_of(path), share=1 / 8)
    assert not wrong, wrong


def test_every_flip_of_an_exported_model_is_refused(made):
    path = made / "export" / WEIGHTS
    wrong = failures_of(path, lambda: from_pretrained(made / "export"), refusal_of(path))
    assert not wrong, wrong


@pytest.mark.parametrize(("name", "folder"), [("run", "run"), ("export", "export")])
def test_flips_of_a_configuration_are_refused_unless_its_values_stay(name, folder, made):
    """The weights carry the digest of the configuration that they belong to."""
    path = made / folder / "config.json"
    content, values, failures = path.read_bytes(), json.loads(path.read_bytes()), []
    check = refusal_of(made / folder)

    def reads():
        return load_best(path.parent, CPU) if name == "run" else from_pretrained(path.parent)

    for byte in range(len(content)):
        for bit in range(8) if EVERYTHING else [byte * 3 % 8]:
            changed = bytearray(content)
            changed[byte] ^= 1 << bit
            try:
                same = json.loads(bytes(changed)) == values
            except ValueError:
                same = False
            with flipped(path, byte, bit):
                wrong = check(reads)
            if wrong and not (same and wrong == "accepted"):
                line = bytes(changed[max(0, byte - 20) : byte + 20])
                failures.append(f"byte {byte}, bit {bit} ({line}): {wrong}")
    assert not failures, f"{len(failures)} flips\n" + "\n".join(failures[:40])


# ---------------------------------------------------------------------------------- commands


def some(content, count):
    """Flips over the length, the header, and the tensors."""
    end = header_end(content)
    places = [*range(8, end, max(1, end // count)), *range(end, len(content), len(content) // 8)]
    return [(0, 0), (7, 7), *((byte, (byte * 5 + 1) % 8) for byte in places)]


@pytest.mark.parametrize("command", ["eval", "export", "generate", "resume"])
def test_commands_refuse_a_flipped_file(command, trained, language, tmp_path):
    """The best model, or for a resume the only checkpoint."""
    source = language if command == "generate" else trained
    run, failures = Path(shutil.copytree(source, tmp_path / "run")), []
    path = run / BEST if command != "resume" else checkpoints(stop(run))[0]
    arguments = command_line(command, run, tmp_path / "out")
    before = (run / "records.jsonl").read_bytes()
    for byte, bit in some(path.read_bytes(), 8 if command == "generate" else 16):
        with flipped(path, byte, bit):
            outcome = run_command(arguments)
        if outcome.status != 2 or path.name not in outcome.err or outcome.faults():
            failures.append(
                f"byte {byte}, bit {bit}: {outcome.status}, {outcome.err}, {outcome.faults()}"
            )
    assert not failures, "\n".join(failures)
    assert not (tmp_path / "out").exists()
    assert (run / "records.jsonl").read_bytes() == before
    if command == "generate":
        assert run_command(arguments, seconds=60).status == 0, "the undamaged file is refused"


def changed_text(before, after):
    """A damage that replaces text of the same length in the header."""

    def damage(content):
        assert before in content[: header_end(content)]
        return content.replace(before, after, 1)

    return damage


def one_bit(share):
    def damage(content):
        end = header_end(content)
        byte = end + int(share * (len(content) - end - 1))
        return content[:byte] + bytes([content[byte] ^ 4]) + content[byte + 1 :]

    return damage


def without_digests(content):
    """Remove what the header says about the file's content, as a forger would."""
    end = header_end(content)
    header = json.loads(content[8:end])
    header["__metadata__"] = {"dlrnn_run": '{"step": 6, "records": 0}'}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content[end:]


DAMAGES = {
    "step": changed_text(b'\\"step\\": 6', b'\\"step\\": 5'),
    "records": changed_text(b'\\"records\\": ', b'\\"recordt\\": '),
    "dtype": changed_text(b'"dtype":"F32"', b'"dtype":"I32"'),
    "shape": changed_text(b'"shape":[8,8]', b'"shape":[8,9]'),
    "name": changed_text(b'"model.decoder', b'"model.decodes'),
    "first tensor": one_bit(0.0),
    "last tensor": one_bit(1.0),
    "truncated": lambda content: content[: len(content) // 2],
    "one byte less": lambda content: content[:-1],
    "one byte more": lambda content: content + b"\0",
    "empty": lambda content: b"",
    "zeros": lambda content: bytes(len(content)),
    "not UTF-8": lambda content: content[:20] + b"\xff\xfe" + content[22:],
    "no digest": without_digests,
}


@pytest.mark.parametrize(
    ("damage", "printed"), [*((each, "") for each in DAMAGES), ("step", "--json")]
)
def test_resume_uses_the_older_checkpoint_and_ends_the_same(damage, printed, trained, tmp_path):
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    (run / "result.json").unlink()
    path = run / NEWEST
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    outcome = run_command(
        ["train", "--resume", run, *WHERE, *([printed] if printed else [])], seconds=60
    )
    assert outcome.status == 0, outcome
    assert not outcome.faults()
    assert NEWEST in "".join((outcome.err if printed else outcome.text).split()), "not named"
    for name in ("records.jsonl", NEWEST, BEST, "config.json"):
        assert (run / name).read_bytes() == (trained / name).read_bytes(), name
    results = [json.loads((each / "result.json").read_text()) for each in (run, trained)]
    for result in results:
        del result["seconds"], result["seconds_from_step"]
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("seed",), 1),
        (("task", "settings", "length"), 64),
        (("task", "settings", "copies"), 4),
        (("lr",), 0.002),
        (("steps",), 7),
        (("precision",), "bf16"),
        (("model", "mixer_options", "dt_min"), 0.0003),
        (("model", "pooling"), "mean"),
    ],
)
@pytest.mark.parametrize("command", ["eval", "export", "resume", "load_best"])
def test_another_configuration_under_the_weights_is_refused(
    command, path, value, trained, tmp_path
):
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    config = json.loads((run / "config.json").read_text())
    owner = config
    for name in path[:-1]:
        owner = owner[name]
    assert owner[path[-1]] != value
    owner[path[-1]] = value
    (run / "config.json").write_text(json.dumps(config, indent=1))
    if command == "load_best":
        with pytest.raises(ValueError, match=r"(?i)config") as caught:
            load_best(run, CPU)
        assert str(run) in str(caught.value)
        return
    if command == "resume":
        stop(run)
    before = {each.name: each.read_bytes() for each in run.iterdir() if each.suffix != ".json"}
    outcome = run_command(command_line(command, run, tmp_path / "out"))
    assert_refused(outcome, run)
    assert not (tmp_path / "out").exists()
    after = {name: (run / name).read_bytes() for name in before if name != "lock"}
    assert after == {name: content for name, content in before.items() if name != "lock"}


def test_generate_refuses_another_configuration_under_the_weights(language, tmp_path):
    run = Path(shutil.copytree(language, tmp_path / "run"))
    for name, value in (("dt_min", 0.04), ("norm", "other")):
        config = json.loads((run / "config.json").read_text())
        config["model"][name] = value
        (run / "config.json").write_text(json.dumps(config))
        assert_refused(run_command(command_line("generate", run, tmp_path)), run)


def test_weights_of_another_export_are_refused(made, tmp_path):
    """Each file is undamaged, but they do not belong together."""
    other = make_run(tmp_path / "other", "--seed", "1", "--model.mixer_options.dt_min", "0.0001")
    assert run_command(["export", other, tmp_path / "export"], seconds=60).status == 0
    shutil.copy(made / "export" / WEIGHTS, tmp_path / "export" / WEIGHTS)
    with pytest.raises(ValueError, match=r"(?i)config") as caught:
        from_pretrained(tmp_path / "export")
    assert str(tmp_path / "export") in str(caught.value)
