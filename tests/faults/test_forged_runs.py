"""Undamaged files with hostile content: a correct digest proves nothing about who wrote a file."""

import base64
import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from hostile import WHERE, assert_refused, command_line, python_in, run_command, stop
from safetensors.torch import load_file, save_file

import dlrnn
from dlrnn import DLR
from dlrnn.common.untrusted import read_sealed, seal
from dlrnn.models import LanguageConfig, LanguageModel, ModelConfig, build_model, save_pretrained
from dlrnn.nn import save_model
from dlrnn.train import RunDirectory, from_json

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture
def run(trained, tmp_path):
    return Path(shutil.copytree(trained, tmp_path / "run"))


def forge(path, change):
    """Write a safetensors file again with other counters, and a right digest."""
    found = read_sealed(path)
    counters = json.loads(found.metadata["dlrnn_run"])
    change(counters)
    content = seal(found.tensors, {**found.metadata, "dlrnn_run": json.dumps(counters)})
    path.write_bytes(content)


# ---------------------------------------------------------------------------------- checkpoints

COUNTERS = {
    "no best": lambda c: c.update(best={}),
    "null best": lambda c: c.update(best=None),
    "null step of the best": lambda c: c["best"].update(step=None),
    "negative records": lambda c: c.update(records=-1),
    "negative snapshots": lambda c: c.update(snapshots=-5),
    "no digest of the records": lambda c: c.pop("records_sha256"),
    "text as the last metrics": lambda c: c.update(last={"R2": "x"}),
    "unknown": lambda c: c.update(more=1),
    "another step": lambda c: c.update(step=3),
    "logged later": lambda c: c.update(logged=5, loss_sum=0.0),
}


@pytest.mark.parametrize("name", COUNTERS)
def test_counters_that_no_run_writes_are_refused(name, run):
    stop(run)
    path = run / "step-000000004.safetensors"
    forge(path, COUNTERS[name])
    assert_refused(run_command(["train", "--resume", run, *WHERE]), path.name)


EVALUATIONS = {
    "no best value": lambda c: c["best"].update(value=None),
    "no last metrics": lambda c: c.update(last={}),
}


@pytest.mark.parametrize("name", EVALUATIONS)
def test_a_last_checkpoint_without_an_evaluation_is_refused(name, run):
    (run / "result.json").unlink()
    (run / "best.safetensors").unlink()
    path = run / "step-000000006.safetensors"
    forge(path, EVALUATIONS[name])
    assert_refused(run_command(["train", "--resume", run, *WHERE]), path.name)
    assert not (run / "result.json").exists()


def test_a_checkpoint_beyond_the_run_is_refused(run):
    stop(run)
    path = run / "step-000000004.safetensors"
    forge(path, lambda c: c.update(step=10**6))
    path.rename(run / "step-001000000.safetensors")
    assert_refused(run_command(["train", "--resume", run, *WHERE]), "step-001000000")


def test_moments_of_another_type_are_refused(run):
    stop(run)
    path = run / "step-000000004.safetensors"
    found = read_sealed(path)
    name = next(name for name in found.tensors if name.endswith("exp_avg"))
    tensors = {**found.tensors, name: found.tensors[name].double()}
    path.write_bytes(seal(tensors, found.metadata))
    assert_refused(run_command(["train", "--resume", run, *WHERE]), "moments")


@pytest.mark.parametrize("name", ["records.jsonl", "timing.jsonl", "snapshots.jsonl"])
def test_a_huge_sparse_file_is_not_read(name, run):
    stop(run)
    with open(run / name, "r+b") as file:
        file.truncate(2**35)
    assert_refused(run_command(["train", "--resume", run, *WHERE]), name)


@pytest.mark.parametrize("command", ["resume", "eval", "results"])
def test_records_without_their_metric_are_refused(command, run, tmp_path):
    if command == "resume":
        stop(run)
        lines = (run / "records.jsonl").read_text()
        changed = lines.replace('"R2"', '"XX"')
        (run / "records.jsonl").write_text(changed)
        path = run / "step-000000004.safetensors"
        read = RunDirectory(run).records()[:-2]
        length = json.loads(read_sealed(path).metadata["dlrnn_run"])["records"]
        digest = hashlib.sha256(changed[:length].encode()).hexdigest()
        forge(path, lambda c: c.update(records_sha256=digest))
        assert read
        assert_refused(run_command(["train", "--resume", run, *WHERE]), "records.jsonl")
        return
    (run / "records.jsonl").write_text('{"step": 6, "split": "validation", "loss": 1.0}\n')
    if command == "results":
        outcome = run_command(command_line("results", run, tmp_path / "out"))
        assert_refused(outcome, "records.jsonl")
    else:
        assert not run_command(["eval", run, "--device", "cpu"], seconds=60).faults()


# ---------------------------------------------------------------------------------- sizes


def reconfigure(run, change):
    """Another configuration, and weights that claim to belong to it."""
    config = json.loads((run / "config.json").read_text())
    change(config)
    (run / "config.json").write_text(json.dumps(config))
    digest = from_json((run / "config.json").read_bytes()).digest()
    forge(run / "best.safetensors", lambda c: c.update(config=digest))


SIZES = {
    "states by a name": lambda c: c["model"]["mixer_options"].update(d_state=2**27),
    "states by an import path": lambda c: (
        c["model"].update(mixer="dlrnn.nn.DLR"),
        c["model"]["mixer_options"].update(d_state=2**27),
    ),
    "channels": lambda c: c["model"].update(d_model=2**20),
    "layers": lambda c: c["model"].update(layers=900),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_that_the_weights_do_not_have_take_no_memory(name, run):
    reconfigure(run, SIZES[name])
    assert_refused(run_command(command_line("eval", run, run)))


@pytest.mark.parametrize(
    "sizes", [{"vocabulary": 2**27, "d_embedding": 8}, {"experts": 10**5}, {"layers": 900}]
)
def test_sizes_of_a_language_model_take_no_memory(sizes, language, tmp_path):
    run = Path(shutil.copytree(language, tmp_path / "run"))
    reconfigure(run, lambda c: c["model"].update(sizes))
    assert_refused(run_command(command_line("generate", run, tmp_path)))


def reconfigure_export(folder, change):
    """Change the options of an exported model, whose weights then claim to belong to them."""
    config = json.loads((folder / "config.json").read_text())
    change(config["options"])
    content = json.dumps(config).encode()
    (folder / "config.json").write_bytes(content)
    path = folder / "model.safetensors"
    metadata = read_sealed(path).metadata
    digest = hashlib.sha256(content).hexdigest()
    path.write_bytes(seal(load_file(path), {**metadata, "config": digest}))


def test_sizes_in_an_exported_model_take_no_memory(tmp_path):
    folder = save_pretrained(DLR(4, 8), tmp_path / "model")
    reconfigure_export(folder, lambda options: options.update(d_state=2**28))
    with pytest.raises(ValueError, match="does not fit") as caught:
        dlrnn.models.from_pretrained(folder)
    assert str(folder / "model.safetensors") in str(caught.value)


EXPORTS = {
    "layer": lambda: DLR(4, 8),
    "network": lambda: build_model(ModelConfig("dlr", {"d_state": 8}, 8), d_input=1, d_output=1),
    "language": lambda: LanguageModel(
        LanguageConfig(layers=1, d_model=8, d_state=8, d_embedding=8, d_ff=8, vocabulary=8)
    ),
}


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("layer", {"dt_max": True}),
        ("layer", {"more": 1}),
        ("network", {"pooled": "x"}),
        ("network", {"pair": []}),
        ("network", {"config": {"norm": "post", "more": 1}}),
        ("language", {"heads": {"a": 1}}),
        ("language", {"d_head": "x"}),
        ("language", {"dt_max": True}),
    ],
)
def test_values_of_another_type_in_an_exported_model_are_refused(kind, change, tmp_path):
    """Also those that this model does not use: heads of a model without attention."""
    folder = save_pretrained(EXPORTS[kind](), tmp_path / "model")
    reconfigure_export(folder, lambda options: None)
    assert dlrnn.models.from_pretrained(folder) is not None
    reconfigure_export(folder, lambda options: options.update(change))
    with pytest.raises(ValueError, match="options") as caught:
        dlrnn.models.from_pretrained(folder)
    assert str(folder / "config.json") in str(caught.value)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("out.weight", lambda value: torch.zeros(())),
        ("W", lambda value: value.to(torch.complex64)),
        ("D", lambda value: value.to(torch.int32)),
    ],
)
def test_tensors_that_no_layer_has_are_refused(name, change, tmp_path):
    path = tmp_path / "layer.safetensors"
    tensors = DLR(4, 8).state_dict()
    save_file({**tensors, name: change(tensors[name])}, path)  # as another program writes it
    assert_refused(run_command(["doctor", path]), path.name)


def test_sizes_in_the_header_of_a_layer_take_no_memory(tmp_path):
    path = tmp_path / "layer.safetensors"
    save_model(DLR(4, 8), path)
    options = json.dumps({"": {"d_model": 4, "d_state": 2**28}})
    path.write_bytes(seal(load_file(path), {"dlrnn": options}))
    assert_refused(run_command(["doctor", path]), path.name)


# ---------------------------------------------------------------------------------- tokenizers

TOKENIZERS = {
    "another one": lambda t: t.update(added_tokens=[]),
    "a normalizer that panics": lambda t: t.update(
        normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    ),
    "a pre-tokenizer that panics": lambda t: t.update(
        pre_tokenizer={"type": "FixedLength", "length": 0}
    ),
    "replacements that grow": lambda t: t.update(
        normalizer={
            "type": "Sequence",
            "normalizers": [
                {"type": "Replace", "pattern": {"String": "w"}, "content": "ww"} for _ in range(40)
            ],
        }
    ),
    "empty matches that grow": lambda t: t.update(
        normalizer={
            "type": "Sequence",
            "normalizers": [
                {"type": "Replace", "pattern": {"Regex": "(?=.)"}, "content": "w"}
                for _ in range(40)
            ],
        }
    ),
    "bytes that grow": lambda t: t.update(
        pre_tokenizer={
            "type": "Sequence",
            "pretokenizers": [
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
                for _ in range(40)
            ],
        }
    ),
    "one long text for a character": lambda t: t.update(
        normalizer={
            "type": "Precompiled",
            "precompiled_charsmap": base64.b64encode(
                (1024).to_bytes(4, "little") + bytes(1024) + b"w" * 10**6 + b"\0"
            ).decode(),
        }
    ),
    "a long text in front": lambda t: t.update(
        normalizer={"type": "Prepend", "prepend": "w" * 10**6}
    ),
    "not a tokenizer": lambda t: t.clear(),
}


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_hostile_tokenizer_is_one_sentence(name, sealed, language, tmp_path):
    """Also if the best model has the digest of the tokenizer."""
    run = Path(shutil.copytree(language, tmp_path / "run"))
    path = run / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    TOKENIZERS[name](tokenizer)
    path.write_text(json.dumps(tokenizer))
    if sealed:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        forge(run / "best.safetensors", lambda c: c.update(files={path.name: digest}))
    outcome = run_command(command_line("generate", run, tmp_path))
    if sealed and name == "another one":
        assert outcome.status == 0
    else:
        assert_refused(outcome, path.name)


@pytest.mark.parametrize("name", ["../tokenizer.json", "/etc/hostname", "absent"])
def test_a_best_model_names_only_files_of_its_folder(name, language, tmp_path):
    run = Path(shutil.copytree(language, tmp_path / "run"))
    forge(run / "best.safetensors", lambda c: c.update(files={name: "0" * 64}))
    assert_refused(run_command(command_line("generate", run, tmp_path)), name)


# ---------------------------------------------------------------------------------- this folder


def test_numba_reads_no_settings_of_the_current_folder(tmp_path):
    """They could name the folder of its cache, which holds pickles."""
    (tmp_path / ".numba_config.yaml").write_text("cache_dir: here\ndebug: 1\n")
    code = "import dlrnn.tasks, numba; print(numba.config.CACHE_DIR, numba.config.DEBUG)"
    assert python_in(tmp_path, code) == "0"
    assert python_in(tmp_path, f"{code}; import yaml; yaml.safe_load('a: 1')") == "0"


def test_matplotlib_reads_no_settings_of_the_current_folder(tmp_path):
    """They could run LaTeX."""
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\n")
    code = "from dlrnn.common.figures import new_figure; new_figure(1, 1); import matplotlib as m;"
    assert python_in(tmp_path, f"{code} print(m.rcParams['text.usetex'])") == "False"


def test_a_copy_with_hard_links_can_be_read_and_is_not_appended_to(run, tmp_path):
    """`cp -al` is an ordinary backup."""
    shutil.copytree(run, tmp_path / "backup", copy_function=os.link)
    assert run_command(["eval", run, "--device", "cpu"], seconds=60).status == 0
    outcome = run_command(["results", "add", run, "--into", tmp_path / "out"], seconds=60)
    assert outcome.status == 0
    stop(run)
    assert_refused(run_command(["train", "--resume", run, *WHERE]), "records.jsonl")
