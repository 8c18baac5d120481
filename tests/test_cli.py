import dataclasses
import importlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from functools import partialmethod

import pytest
import torch
from safetensors.torch import save_file
from support import run_python

from dlrnn import DLR
from dlrnn.bench.doctor import kernels_of
from dlrnn.bench.measure import require_right
from dlrnn.cli import COMMANDS, main
from dlrnn.common.untrusted import seal
from dlrnn.nn import load_layers, save_model
from dlrnn.ops import dispatch


def test_help_is_fast_and_does_not_import_torch():
    code = """
import sys, time
from dlrnn.cli import COMMANDS, main
try: main(["--help"])
except SystemExit as leaving: assert leaving.code == 0
assert not {"torch", "numpy", "rich"} & set(sys.modules)
print(time.process_time())  # waiting for others does not count
"""
    text, seconds = run_python(code).rsplit(maxsplit=1)
    assert "doctor" in text
    assert float(seconds) < 1


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_in_the_module_that_the_table_names(command, capsys):
    with pytest.raises(SystemExit) as leaving:
        main([command, "--help"])
    assert leaving.value.code == 0
    assert f"usage: dlrnn {command}" in capsys.readouterr().out


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    listed = re.findall(r"^    (\w+)", capsys.readouterr().out, re.MULTILINE)
    assert sorted(listed) == sorted(COMMANDS)


def test_doctor_checks_every_op(capsys):
    assert main(["doctor", "--device", "cpu", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["environment"]["torch"] == torch.__version__
    assert [row["op"] for row in report["ops"]] == list(dispatch.OPS)
    assert all(row["ok"] and row["error"] < 1e-6 for row in report["ops"])
    assert {row["backend"] for row in report["ops"]} == {"torch"}
    assert len({row["layer"] for row in report["layers"]}) == 7
    assert len(report["layers"]) == 28
    assert all(row["ok"] for row in report["layers"])
    assert main(["doctor", "--device", "cpu", "--length", "5"]) == 0
    told = capsys.readouterr().out
    assert "vandermonde_adjoint" in told
    assert "prod, online" in told


@pytest.mark.parametrize(
    ("capability", "known"),
    [
        (None, "plain PyTorch"),
        ((7, 5), "needs compute capability 8.0"),
        ((8, 6), "tested and timed as PTX"),
        ((9, 0), "measured"),
        ((12, 0), "never run"),
        ((12, 1), "never compiled"),
    ],
)
def test_doctor_says_what_is_known_of_the_kernels_of_a_gpu(capability, known):
    assert known in kernels_of(capability)


def test_doctor_reports_a_broken_op(capsys, monkeypatch):
    monkeypatch.setattr("dlrnn.ops.convolution", lambda u, kernel: 1.001 * u)
    assert main(["doctor", "--device", "cpu"]) == 1
    assert "FAILED" in capsys.readouterr().out


def wrong_step(layer, right, x, state=None):
    return right(layer, 1.001 * x, state)


LAYER = "layer --batch 1 --d-model 3 --d-state 8 --length 50 --repeats 2"
BENCHES = {
    LAYER: "times as fast as the paper's listing",
    "kernel --d-model 2 --d-state 4 --length 5000": "log_lambda_im",
    "step --d-model 2 --d-state 4 --steps 20": "a step takes",
    "layer --all --factor 256 --repeats 1": "ceiling",
    "conv --factor 256 --repeats 1": "ceiling",
}


@pytest.mark.parametrize("what", BENCHES)
def test_bench_prints_json_or_a_table(what, capsys):
    command = ["bench", *what.split(), "--device", "cpu"]
    assert main([*command, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    if what == LAYER:
        assert result["case"] == {"B": 1, "H": 3, "N": 8, "L": 50}
        assert result["dlrnn"]["error"] < 1e-5
        assert result["listing"]["ms"] > 0
    elif what.startswith("kernel"):
        assert max(result["errors"].values()) < 1e-5 < result["naive"]
    elif what.startswith("step"):
        assert result["first_us"] > 0
    else:  # at the paper's sizes
        assert len(result["cases"]) >= 7
        for row in result["cases"]:
            assert row["torch"] > 0
            assert row["torch error"] < 1e-5
            assert not {"goal", "authors"} & row.keys()  # of other sizes
    assert main(command) == 0
    assert BENCHES[what] in capsys.readouterr().out


@pytest.mark.parametrize(
    ("what", "name", "wrong"),
    [
        ("layer --length 50", "dlrnn.bench.layer.TOLERANCE", 0.0),
        ("kernel --length 50", "dlrnn.bench.layer.TOLERANCE", 0.0),
        (
            "layer --length 50",
            "dlrnn.ops.convolution",
            lambda u, right, left, skip: u * (right[:, 0] + skip),
        ),
        ("step --steps 20", "dlrnn.nn.DLR.step", partialmethod(wrong_step, DLR.step)),
    ],
)
def test_bench_gives_no_time_of_a_wrong_answer(what, name, wrong, capsys, monkeypatch):
    monkeypatch.setattr(name, wrong)
    assert main(["bench", *what.split(), "--d-state", "8", "--device", "cpu"]) == 1
    captured = capsys.readouterr()
    assert "errors above" in captured.err
    assert captured.out == ""


def test_nan_fails_the_accuracy_check():
    with pytest.raises(RuntimeError, match="errors above 1e-05: x nan"):
        require_right({"y": 0.0, "x": float("nan")}, 1e-5)


@pytest.mark.parametrize("case", ["layer", "kernel"])
def test_bench_of_the_smallest_size(capsys, case):
    """Length 1: gradients of lambda are 0, and so are their errors."""
    small = ["--d-model", "1", "--d-state", "1", "--length", "1", "--repeats", "1"]
    assert main(["bench", case, *small, "--device", "cpu", "--json"]) == 0
    assert "NaN" not in capsys.readouterr().out


def test_bench_measures_the_memory_of_the_listing():
    from dlrnn.bench.layer import bench_layer

    result = bench_layer(batch=1, d_model=4, d_state=256, length=2048, device="cpu", repeats=1)
    at_least = 256 * 2048 * 8 / 2**20  # P alone
    assert result["listing"]["extra_mib"] > at_least
    assert result["dlrnn"]["extra_mib"] < at_least


def test_bench_tables(capsys, monkeypatch):
    """Steps of all models relative to DLR and to the paper; the report reads the output."""
    tables = importlib.import_module("dlrnn.bench.tables")
    monkeypatch.setattr(tables, "loop_overhead", lambda: None)
    cost = {"dlr": 2.0, "dss": 3.0, "attention": 8.0, "local-attention": 10.0}
    monkeypatch.setattr(tables, "step_ms", lambda config, *_: cost.get(config.model.mixer, 4.0))
    given = ["bench", "step", "--tables", "--scale", "tiny", "--device", "cpu"]
    assert main([*given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = importlib.import_module("dlrnn.paper.results").check_step_times(found)["table3"]
    assert [(row["relative"], row["paper"]) for row in rows] == [
        *((1, 1), (1.5, 1), (5, 8)),
        *((1, 1), (1.5, 1), (5, 19)),
    ]
    rows = importlib.import_module("dlrnn.paper.results").check_step_times(found)["table5"]
    assert [row["paper"] for row in rows] == [1.1, 1.0, 0.9, 1.1, 1.0]
    assert [row["relative"] for row in rows] == [1, 1, 1, 4, 4], "attention, 16 experts, is 1"
    assert [row["L"] for row in found["models"][:3]] == [1, 1.5, 4]
    assert {row["precision"] for row in found["models"] + found["table3"]} == {"fp32"}
    assert main(given) == 0
    assert "Pathfinder-Segmentation-128" in capsys.readouterr().out


def test_a_step_of_a_language_model_is_timed_without_a_data_set():
    tables = importlib.import_module("dlrnn.bench.tables")
    assert tables._language(torch.device("cpu"), "full", 1) == [], "too large"
    recipes = importlib.import_module("dlrnn.paper.recipes")
    config = recipes.scaled(recipes.get("table5/pg19/dlr-16-pre"), "tiny")
    config = dataclasses.replace(config, precision="fp32", batch_size=2)
    assert tables.step_ms(config, torch.device("cpu"), 1) > 0


def test_bench_tables_has_every_model_in_bf16_on_a_gpu(monkeypatch):
    tables = importlib.import_module("dlrnn.bench.tables")
    cost = {"fp32": 8.0, "bf16": 2.0}
    monkeypatch.setattr(tables, "step_ms", lambda config, *_: cost[config.precision])
    for rows in (tables._atomic, tables._higher_order):
        found = rows(torch.device("cuda"), "tiny", 1)
        ms = {row["precision"]: row.get("ms", row.get("L ms")) for row in found}
        assert ms == cost
        both = [row["model"] for row in found if row["precision"] == "bf16"]
        assert both == [row["model"] for row in found if row["precision"] == "fp32"]
        assert found[0]["precision"] == "fp32", "DLR, the unit"


def test_bench_lengths(capsys, monkeypatch):
    """Every mixer is timed at every length, except one with a wrong result."""
    lengths = importlib.import_module("dlrnn.bench.cases")
    wide = lengths.PEERS["attention"]._replace(up_to=8)
    monkeypatch.setitem(lengths.PEERS, "attention", wide)
    wrong = lengths.Peer(lambda case: Wrong(case.channels))
    monkeypatch.setitem(lengths.PEERS, "wrong", wrong)
    for slow in ("s4", "s4d", "attention-ff"):
        monkeypatch.delitem(lengths.PEERS, slow)
    small = ["bench", "lengths", "--factor", "1024", "--repeats", "1", "--device", "cpu"]
    assert main([*small, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["cases"]
    assert [row["L"] for row in rows] == [2, 2, 2, *(2**k for k in range(1, 9))]
    for row in rows:
        for name in ("layer dss", "layer sgconv", "layer local-attention"):
            assert row[name] > 0
            assert row[f"{name} error"] < 1e-5
        assert ("layer attention" in row) == (row["L"] <= 8)
        assert row["layer wrong error"] > 1e-5
        assert "layer wrong" not in row
    assert main(small) == 0
    told = capsys.readouterr().out
    assert "layer local-attention" in told
    assert "the largest error against float64 is" in told


class Wrong(torch.nn.Linear):
    """A mixer that is right in float64 only."""

    def __init__(self, channels):
        super().__init__(channels, channels)

    def forward(self, x):
        return super().forward(x) * (1 if x.dtype == torch.float64 else 1.001)


def test_bench_lengths_in_bf16():
    """Attention in bf16, as on a GPU, has another tolerance."""
    lengths = importlib.import_module("dlrnn.bench.cases")
    torch.manual_seed(0)
    layer, x, dy = lengths.Attention(16), torch.randn(1, 50, 16), torch.randn(1, 50, 16)
    for bf16, least, most in ((False, 0, 1e-5), (True, 1e-4, lengths.COARSE)):
        assert least < lengths.error_of(lengths.LayerCall(layer, bf16=bf16), x, dy) <= most


# ---------------------------------------------------------------------------------- layers


def model(**options):
    return torch.nn.Sequential(torch.nn.Linear(2, 4), DLR(4, 6, **options))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cast": "prod", "kernel_length": 9},
        {"bidirectional": True, "glu": True},
        {"real": True},
    ],
    ids=str,
)
def test_doctor_of_a_saved_model(tmp_path, capsys, options):
    save_model(model(**options), tmp_path / "model.safetensors")
    assert main(["doctor", str(tmp_path), "--length", "5", "90", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["layers"]
    assert [(r["layer"], r["dtype"], r["length"]) for r in rows] == [
        ("1", "float64", 5),
        ("1", "float64", 90),
        ("1", "float32", 5),
        ("1", "float32", 90),
    ]
    assert all(row["ok"] and row["padded"] < 1e-5 for row in rows)
    streams = "bidirectional" not in options
    assert all((row["steps"] is not None) == streams for row in rows)
    assert main(["doctor", str(tmp_path), "--length", "5"]) == 0
    assert "float64" in capsys.readouterr().out


def test_doctor_of_a_layer_that_gives_zeros(tmp_path, capsys):
    layer = DLR(4, 6)
    torch.nn.init.zeros_(layer.out.weight)
    torch.nn.init.zeros_(layer.out.bias)
    save_model(layer, tmp_path / "model.safetensors")
    assert main(["doctor", str(tmp_path), "--length", "5", "--json"]) == 0
    assert "NaN" not in capsys.readouterr().out


def test_doctor_reports_a_layer_that_does_not_stream(tmp_path, capsys, monkeypatch):
    save_model(DLR(4, 6), tmp_path / "model.safetensors")
    monkeypatch.setattr(DLR, "step", partialmethod(wrong_step, DLR.step))
    assert main(["doctor", str(tmp_path / "model.safetensors"), "--length", "50"]) == 1
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize("options", [{"glu": True}, {"project": False}, {"real": True}], ids=str)
def test_layers_are_read_from_a_state_dict_file(tmp_path, options):
    """The options of a layer follow from the shapes of its state_dict."""
    layer = DLR(4, 6, kernel_length=5, **options)
    path = tmp_path / "plain.safetensors"
    save_file(layer.state_dict(), path)
    (loaded,) = load_layers(path, kernel_length=5).values()
    x = torch.randn(1, 20, 4)
    assert torch.equal(loaded(x), layer.eval()(x))


def test_any_model_can_be_saved(tmp_path):
    """Tied weights, a shared layer, weights that are views; the file has the usual permissions."""
    layer = DLR(4, 6, cast="prod", kernel_length=5)
    tied = torch.nn.Sequential(layer, torch.nn.Linear(4, 4), layer)
    tied[1].weight = torch.nn.Parameter(layer.out.weight.detach().t())
    path = tmp_path / "model.safetensors"
    save_model(tied, path)
    layers = load_layers(path)
    assert set(layers) == {"0", "2"}
    assert layers["0"].options() == layers["2"].options() == layer.options()
    other = tmp_path / "other"
    other.touch()
    assert path.stat().st_mode == other.stat().st_mode


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    save_model(DLR(4, 6), path)
    before = path.read_bytes()
    monkeypatch.setattr("os.fsync", lambda handle: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save_model(DLR(4, 7), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def sentence(capsys, *arguments):
    """The only line of a command with wrong arguments."""
    try:
        status = main(list(arguments))
    except SystemExit as leaving:
        status = leaving.code
    [error] = capsys.readouterr().err.splitlines()
    assert status == 2
    return error


def test_wrong_arguments_end_in_one_sentence(tmp_path, capsys):
    (tmp_path / "model.pt").write_bytes(b"pickle")
    (tmp_path / "not.safetensors").write_bytes(b"nothing of the kind")
    good = DLR(4, 6).state_dict()
    folder = tmp_path / "odd"
    folder.mkdir()
    odd = {
        "rows": good | {"W": torch.zeros(5, 6, 2)},
        "flat": good | {"W": torch.zeros(4, 6)},
        "bias": {key: value for key, value in good.items() if key != "out.bias"},
        "whole": {key: value.int() for key, value in good.items()},
    }
    for name, tensors in odd.items():
        save_file(tensors, folder / f"{name}.safetensors")
    wrong = {"d_model": 4, "d_state": 6, "d_stat": 1}
    (folder / "header.safetensors").write_bytes(seal(good, {"dlrnn": "not json"}))
    (folder / "option.safetensors").write_bytes(seal(good, {"dlrnn": json.dumps({"": wrong})}))
    save_file({"weight": torch.ones(2)}, tmp_path / "other.safetensors")
    check = lambda name: sentence(capsys, "doctor", str(tmp_path / name))  # noqa: E731
    assert "there is no such file" in check("missing.safetensors")
    assert "only .safetensors files are read (nothing is unpickled)" in check("model.pt")
    assert "is not a safetensors file" in check("not.safetensors")
    assert "holds no DLR layer" in check("other.safetensors")
    assert "W has 5 rows for the 4 entries of D" in check("odd/rows.safetensors")
    assert "W must be [H, N, 2], not [4, 6]" in check("odd/flat.safetensors")
    assert "out.bias is not there, not [4]" in check("odd/bias.safetensors")
    assert "the layer '' cannot be made" in check("odd/whole.safetensors")
    assert "is not JSON" in check("odd/header.safetensors")
    (folder / "list.safetensors").write_bytes(seal(good, {"dlrnn": "[]"}))
    assert "must be a JSON object, not []" in check("odd/list.safetensors")
    (folder / "lost.safetensors").write_bytes(seal(good, {"dlrnn": '{"other": {}}'}))
    assert "the header names 'other', and the tensors are not there" in check(
        "odd/lost.safetensors"
    )
    assert "unexpected keyword argument 'd_stat'" in check("odd/option.safetensors")
    save_model(DLR(4, 6, cast="prod"), folder / "prod.safetensors")
    assert "cast='real' was given, and the file says 'prod'" in sentence(
        capsys, "doctor", str(folder / "prod.safetensors"), "--cast", "real"
    )
    assert "belong to a file: name one" in sentence(capsys, "doctor", "--cast", "prod")
    shutil.rmtree(folder)
    assert "should hold one .safetensors file, and holds 2" in check("")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "holds none" in check("empty")
    for command, said in (
        ("bench layer --length 0", "--length must be a whole number of at least 1, not '0'; see"),
        ("bench layer --tiny --d-state 8", "leave out --d-state"),
        ("bench layer --factor 16 --device cpu", "--factor belongs to --all"),
        ("doctor --device gpu", "there is no device 'gpu': say cpu or cuda"),
        ("doctor --device mps", "device 'mps' is not supported"),
        ("bnch", "not 'bnch'; did you mean bench?"),
        ("doctor --jsn", "no option or further argument --jsn; did you mean --json?"),
        ("eval", "dlrnn eval: RUN must be given; see `dlrnn eval --help`"),
        ("eval run --split", "--split must have a value, and nothing was given"),
        ("train table1/shift/dlr-1 --scale tin", "must be one of 'full', 'short', 'tiny', not"),
        ("generate run --prompt a --top-p x", "--top-p must be a number, not 'x'"),
    ):
        assert said in sentence(capsys, *command.split())
    assert main([]) == 2
    assert "train" in capsys.readouterr().out  # the list of commands
    if not torch.cuda.is_available():
        assert "torch finds no CUDA device here" in sentence(capsys, "doctor", "--device", "cuda")


@pytest.mark.parametrize("arguments", ["tasks", "recipes --json", "recipes table1"])
def test_a_closed_pipe_ends_a_command_silently(arguments):
    """As in `dlrnn tasks | true`."""
    command = [sys.executable, "-m", "dlrnn", *arguments.split()]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("before", [signal.default_int_handler, signal.SIG_IGN])
def test_the_interrupt_handler_is_restored_after_importing_torch(before, monkeypatch):
    """During the import Ctrl-C ends the process, unless it is ignored."""
    found = []
    first = signal.signal(signal.SIGINT, before)

    def seen(name):
        if name == "torch":
            found.append((name, signal.getsignal(signal.SIGINT)))
        return importlib.import_module(name)

    monkeypatch.setattr("dlrnn.cli.import_module", seen)
    try:
        assert main(["tasks", "--json"]) == 0
        assert signal.getsignal(signal.SIGINT) == before
    finally:
        signal.signal(signal.SIGINT, first)
    usual = before is signal.default_int_handler
    assert found == ([("torch", signal.SIG_DFL)] if usual else [])


def test_a_broken_pipe_of_a_worker_is_one_sentence(monkeypatch, capsys):
    def broken(_):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("dlrnn.cli.tasks._tasks", broken)
    assert main(["tasks"]) == 2
    assert capsys.readouterr().err.startswith("dlrnn tasks: [Errno 32] Broken pipe (test_cli.py, ")


def test_a_closed_stdout_is_ignored():
    command = f"{shlex.quote(sys.executable)} -m dlrnn recipes table4 >&-"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_python_dash_m_runs_the_command():
    command = [sys.executable, "-m", "dlrnn", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "dlrnn 0." in done.stdout


def test_tasks_lists_and_draws_tasks(capsys, tmp_path):
    assert main(["tasks", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 20
    assert rows[0].pop("definition")
    assert rows[0] | {"probes": ""} == {
        **{"name": "shift", "kind": "regression", "length": 4096, "answers": "4096 x 8"},
        **{"metric": "R2", "probes": ""},
    }
    assert main(["tasks"]) == 0
    assert "pathfinder-segmentation" in capsys.readouterr().out
    out = tmp_path / "sort.png"
    assert main(["tasks", "preview", "sort", "--length", "50", "--out", str(out)]) == 0
    assert out.stat().st_size > 5000
    preview = ["tasks", "preview", "srt", "--out"]
    assert "did you mean 'sort'?" in sentence(capsys, *preview, str(out))
    assert "must end in .png" in sentence(capsys, *preview, "picture.jpg")
    assert "there is no folder" in sentence(capsys, *preview, str(tmp_path / "no" / "p.png"))


def test_bench_data(capsys, monkeypatch):
    small = ["--d-model", "2", "--d-state", "4", "--length", "16", "--repeats", "1"]
    assert main(["bench", "data", *small, "--device", "cpu", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert len(result["tasks"]) == 11
    assert all(row["samples_a_second"] > 0 for row in result["generators"])
    monkeypatch.setattr("dlrnn.bench.data.bench_data", lambda **_: result)  # as a table
    assert main(["bench", "data", *small, "--device", "cpu"]) == 0
    assert "select-fixed" in capsys.readouterr().out


def test_data_builds_verifies_and_lists_sets(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["data", "list"]) == 0
    assert "no sets in data/" in capsys.readouterr().out
    small = ["--samples", "50", "--workers", "1"]
    assert main(["data", "build", "listops", *small]) == 0
    assert "the set is in data/listops" in capsys.readouterr().out
    assert main(["data", "verify", "data/listops"]) == 0
    assert "every hash and count is right" in capsys.readouterr().out
    assert main(["data", "list", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 1
    shard = tmp_path / "data" / "listops" / "test-00000.parquet"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert main(["data", "verify", "data/listops"]) == 1
    assert "test-00000.parquet" in capsys.readouterr().out
    refusals = [
        (["build", "lisops", *small], "there is no set 'lisops' to build: did you mean 'listops'?"),
        (["build", "listops", *small, "--out", f"{shard}/sub"], "is a file; a folder was expected"),
        (["build", "listops", "--samples", "2"], "samples must be at least 3, one for each of"),
        (["verify", str(shard)], "test-00000.parquet is a file; a folder was expected"),
        (["verify", "missing"], "there is no folder missing"),
    ]
    for arguments, text in refusals:
        assert main(["data", *arguments]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert len(printed.err.splitlines()) == 1
        assert text in printed.err


def test_bench_of_eager_calls(capsys, monkeypatch):
    """Every model of every case has a time; graphs are for GPUs."""
    monkeypatch.setattr(torch, "compile", lambda module, **_: module)
    command = ["bench", "layer", "--eager", "--factor", "512", "--repeats", "1", "--device", "cpu"]
    assert main([*command, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["cases"]
    models = {
        case: [r["model"] for r in rows if r["case"] == case] for case in (r["case"] for r in rows)
    }
    assert [len(names) for names in models.values()] == [5, 5, 5, 5, 3, 3, 4]
    assert all(row["eager"] > 0 and "graph" not in row for row in rows)
    assert all(row["error"] < (1e-2 if "16" in row["model"] else 1e-5) for row in rows)
    assert main(command) == 0
    assert "the paper's listing" in capsys.readouterr().out
