"""Undamaged files with hostile content: a correct digest proves nothing about who wrote a file."""

import base64
import json
import os
import shutil
from hashlib import sha256

import pytest
import torch
from damage import GONE, NEWEST, OLDER, command_line, edit, put, stop
from harness import assert_refused, refusal, run_command, run_well
from safetensors.torch import load_file, save_file

from dlrnn import DLR, models
from dlrnn.common.untrusted import read_sealed, seal
from dlrnn.models import from_pretrained, save_pretrained
from dlrnn.nn import save_model
from dlrnn.train import from_json


def forge(path, changes):
    """Write a safetensors file again with other counters, and a right digest."""
    found = read_sealed(path)
    counters = json.loads(found.metadata["dlrnn_run"])
    for place, value in changes.items():
        put(counters, place, value)
    path.write_bytes(seal(found.tensors, {**found.metadata, "dlrnn_run": json.dumps(counters)}))


@pytest.fixture
def refused(tmp_path):
    """Run a command on the run, which must refuse it in a sentence with these names."""

    def refused(command, *names):
        assert_refused(run_command(command_line(command, tmp_path)), *names)

    return refused


# ---------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize(
    "changes",
    [
        {"best": {}},
        {"best": None},
        {"best.step": None},
        {"records": -1},
        {"snapshots": -5},
        {"records_sha256": GONE},
        {"last": {"R2": "x"}},
        {"more": 1},
        {"step": 3},
        {"logged": 5, "loss_sum": 0.0},
    ],
    ids=str,
)
def test_counters_that_no_run_writes_are_refused(changes, run, refused):
    forge(stop(run) / OLDER, changes)
    refused("resume", OLDER)


@pytest.mark.parametrize("changes", [{"best.value": None}, {"last": {}}], ids=str)
def test_a_last_checkpoint_without_an_evaluation_is_refused(changes, run, refused):
    (run / "result.json").unlink()
    (run / "best.safetensors").unlink()
    forge(run / NEWEST, changes)
    refused("resume", NEWEST)
    assert not (run / "result.json").exists()


def test_a_checkpoint_beyond_the_run_is_refused(run, refused):
    forge(stop(run) / OLDER, {"step": 10**6})
    (run / OLDER).rename(run / "step-001000000.safetensors")
    refused("resume", "step-001000000")


def test_moments_of_another_type_are_refused(run, refused):
    path = stop(run) / OLDER
    found = read_sealed(path)
    name = next(name for name in found.tensors if name.endswith("exp_avg"))
    tensors = {**found.tensors, name: found.tensors[name].double()}
    path.write_bytes(seal(tensors, found.metadata))
    refused("resume", "moments")


@pytest.mark.parametrize("name", ["records.jsonl", "timing.jsonl", "snapshots.jsonl"])
def test_a_huge_sparse_file_is_not_read(name, run, refused):
    os.truncate(stop(run) / name, 2**35)
    refused("resume", name)


def test_a_resume_refuses_records_without_their_metric(run, refused):
    path = stop(run) / OLDER
    lines = (run / "records.jsonl").read_text().replace('"R2"', '"XX"')
    (run / "records.jsonl").write_text(lines)
    length = json.loads(read_sealed(path).metadata["dlrnn_run"])["records"]
    forge(path, {"records_sha256": sha256(lines[:length].encode()).hexdigest()})
    refused("resume", "records.jsonl")


def test_only_commands_that_need_the_metric_refuse_records_without_it(run, refused, tmp_path):
    (run / "records.jsonl").write_text('{"step": 6, "split": "validation", "loss": 1.0}\n')
    refused("results", "records.jsonl")
    assert not run_command(command_line("eval", tmp_path), seconds=60).faults()


def test_a_copy_with_hard_links_can_be_read_and_is_not_appended_to(run, refused, tmp_path):
    """`cp -al` is an ordinary backup."""
    shutil.copytree(run, tmp_path / "backup", copy_function=os.link)
    run_well(command_line("eval", tmp_path))
    run_well(command_line("results", tmp_path))
    stop(run)
    refused("resume", "records.jsonl")


# ---------------------------------------------------------------------------------- sizes

TOO_LARGE = [
    ("run", {"model.mixer_options.d_state": 2**27}),
    ("run", {"model.mixer": "dlrnn.nn.DLR", "model.mixer_options.d_state": 2**27}),
    ("run", {"model.d_model": 2**20}),
    ("run", {"model.layers": 900}),
    ("language_run", {"model.vocabulary": 2**27, "model.d_embedding": 8}),
    ("language_run", {"model.experts": 10**5}),
    ("language_run", {"model.layers": 900}),
]


@pytest.mark.parametrize(("kind", "changes"), TOO_LARGE, ids=str)
def test_sizes_that_the_weights_do_not_have_take_no_memory(kind, changes, refused, request):
    """The weights claim to belong to the forged configuration."""
    run = request.getfixturevalue(kind)
    for place, value in changes.items():
        edit(run / "config.json", place, value)
    digest = from_json((run / "config.json").read_bytes()).digest()
    forge(run / "best.safetensors", {"config": digest})
    refused("eval" if kind == "run" else "generate")


EXPORTS = {
    "layer": lambda: DLR(4, 8),
    "network": lambda: models.build_model(
        models.ModelConfig("dlr", {"d_state": 8}, 8), d_input=1, d_output=1
    ),
    "language": lambda: models.LanguageModel(
        models.LanguageConfig(layers=1, d_model=8, d_state=8, d_embedding=8, d_ff=8, vocabulary=8)
    ),
}


def reconfigure_export(folder, options):
    """Change the options of an exported model, whose weights then claim to belong to them."""
    config, weights = folder / "config.json", folder / "model.safetensors"
    for name, value in options.items():
        edit(config, f"options.{name}", value)
    metadata = {**read_sealed(weights).metadata, "config": sha256(config.read_bytes()).hexdigest()}
    weights.write_bytes(seal(load_file(weights), metadata))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("layer", {"d_state": 2**28}),
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
def test_other_options_of_an_exported_model_are_refused(kind, options, tmp_path):
    """Also those that this model does not use: heads of a model without attention."""
    folder = save_pretrained(EXPORTS[kind](), tmp_path / "model")
    reconfigure_export(folder, {})
    assert from_pretrained(folder) is not None
    reconfigure_export(folder, options)
    fits_no_weights = (folder / "model.safetensors", "does not fit")
    with refusal(
        *(fits_no_weights if "d_state" in options else (folder / "config.json", "option"))
    ):
        from_pretrained(folder)


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


def forty(kind, **each):
    """A sequence of steps, each of which makes the text longer."""
    return {"type": "Sequence", kind: [each] * 40}


LONG = base64.b64encode((1024).to_bytes(4, "little") + bytes(1024) + b"w" * 10**6 + b"\0").decode()
GROWING = forty("normalizers", type="Replace", pattern={"String": "w"}, content="ww")
EMPTY = forty("normalizers", type="Replace", pattern={"Regex": "(?=.)"}, content="w")
BYTES = forty("pretokenizers", type="ByteLevel", add_prefix_space=False, trim_offsets=True)
TOKENIZERS = {
    "another one": {"added_tokens": []},
    "a panic": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "another panic": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "replacements that grow": {"normalizer": GROWING},
    "empty matches that grow": {"normalizer": EMPTY},
    "bytes that grow": {"pre_tokenizer": BYTES},
    "long text": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": LONG}},
    "long text in front": {"normalizer": {"type": "Prepend", "prepend": "w" * 10**6}},
    "not a tokenizer": None,
}


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_hostile_tokenizer_is_one_sentence(name, sealed, language_run, refused, tmp_path):
    """Also if the best model has the digest of the tokenizer."""
    path, changes = language_run / "tokenizer.json", TOKENIZERS[name]
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes} if changes else {}))
    if sealed:
        digest = sha256(path.read_bytes()).hexdigest()
        forge(language_run / "best.safetensors", {"files": {path.name: digest}})
    if sealed and name == "another one":
        run_well(command_line("generate", tmp_path))
    else:
        refused("generate", path.name)


@pytest.mark.parametrize("name", ["../tokenizer.json", "/etc/hostname", "absent"])
def test_a_best_model_names_only_files_of_its_folder(name, language_run, refused):
    forge(language_run / "best.safetensors", {"files": {name: "0" * 64}})
    refused("generate", name)
