"""Models in folders and on a Hub that is not the real one."""

import json
import re
import sys
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import torch
from torch import nn

from dlrnn.common.files import write_whole
from dlrnn.models import (
    LanguageConfig,
    LanguageModel,
    ModelConfig,
    build_model,
    from_pretrained,
    pretrained,
    push_to_hub,
    save_pretrained,
)
from dlrnn.nn import DLR

SMALL = {"layers": 1, "d_model": 6, "d_state": 4, "d_embedding": 5, "d_ff": 7, "vocabulary": 23}
CONFIG = ModelConfig("dlr", {"d_state": 4, "bidirectional": True}, d_model=6, norm="pre")
MODELS = {
    "layer": (lambda: DLR(6, 4, kernel_length=5), torch.randn(2, 7, 6)),
    "numbers": (lambda: build_model(CONFIG, d_input=3, d_output=2), torch.randn(2, 7, 3)),
    "pooled": (
        lambda: build_model(CONFIG, vocabulary=9, d_output=2, pooled=True),
        torch.randint(9, (2, 7)),
    ),
    "pairs": (
        lambda: build_model(CONFIG, vocabulary=9, d_output=2, pair=True),
        torch.randint(9, (2, 2, 7)),
    ),
    "language": (
        lambda: LanguageModel(LanguageConfig(**SMALL, experts=2, kernel_length=5)),
        torch.randint(23, (2, 7)),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_saved_models_load_unchanged(name, tmp_path):
    make, x = MODELS[name]
    model = make().eval()
    save_pretrained(model, tmp_path / "model")
    again = from_pretrained(tmp_path / "model")
    assert type(again) is type(model)
    assert not again.training
    assert torch.equal(model(x), again(x))
    assert all(parameter.requires_grad for parameter in again.parameters())
    double = make().double()
    save_pretrained(double, tmp_path / "model")  # the same folder again
    assert next(from_pretrained(tmp_path / "model").parameters()).dtype == torch.float64


def test_saving_without_a_tokenizer_removes_the_old_one(tmp_path):
    save_pretrained(MODELS["language"][0](), tmp_path / "model", tokenizer=b"{}")
    save_pretrained(DLR(2, 2), tmp_path / "model")
    assert not (tmp_path / "model" / "tokenizer.json").exists()


def test_a_failed_save_keeps_the_old_model(tmp_path, unchecked):
    layer, x = DLR(2, 2), torch.randn(1, 5, 2)
    folder = save_pretrained(layer, tmp_path / "model")
    for wrong, sentence in (
        ({"tokenizer": "tokenizer.json"}, "tokenizer must be the bytes of a tokenizer.json"),
        ({"results": [1]}, "results must be values by name, not a list"),
        ({"run": {"lr": torch.ones(1)}}, "cannot be written as JSON"),
        ({"results": {"a\udc80": 1}}, "cannot be written as JSON"),
    ):
        with pytest.raises(ValueError, match=sentence):
            save_pretrained(DLR(2, 3), folder, **wrong)
        assert torch.equal(from_pretrained(folder)(x), layer(x))
    with pytest.raises(ValueError, match="it is on the meta device"):
        save_pretrained(DLR(2, 3).to("meta"), folder)
    assert torch.equal(from_pretrained(folder)(x), layer(x))


@pytest.mark.parametrize("at", ["model.safetensors", "README.md", "config.json"])
def test_an_interrupted_save_may_be_repeated(at, tmp_path, monkeypatch):
    folder, x = tmp_path / "model", torch.randn(1, 5, 2)
    for layer in (DLR(2, 2), DLR(2, 3)):  # a new folder, and one that has a model

        def killed(path, content):
            if path.name == at:
                path.with_name(f"{path.name}.part").write_bytes(content[:9])
                raise KeyboardInterrupt
            write_whole(path, content)

        with monkeypatch.context() as patched:
            patched.setattr(pretrained, "write_whole", killed)
            with pytest.raises(KeyboardInterrupt):
                save_pretrained(layer, folder)
        with pytest.raises(ValueError, match=r"it has no config.json"):
            from_pretrained(folder)
        save_pretrained(layer, folder)
        assert torch.equal(from_pretrained(folder)(x), layer(x))
        names = {path.name for path in folder.iterdir()}
        assert names == {"README.md", "config.json", "model.safetensors"}


@pytest.mark.parametrize("name", ["model.safetensors", "notes.txt", "README.md"])
def test_folders_with_other_files_are_refused(name, tmp_path):
    (tmp_path / name).write_bytes(b"mine")
    with pytest.raises(ValueError, match="holds something other"):
        save_pretrained(DLR(2, 2), tmp_path)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [(name, b"mine")]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"options": [1]}, "does not describe a model"),
        (
            {"model": "SequenceModel", "options": {"config": {"mixer": "json.tool.X"}}},
            "json.tool.X.*--trust",
        ),
        (
            {
                "model": "SequenceModel",
                "options": {"config": {"mixer": "dlrnn.nn.DLR,json.tool.X"}},
            },
            "json.tool.X.*--trust",
        ),
        (
            {
                "model": "SequenceModel",
                "options": {"config": {"mixer": "foo"}, "d_input": 1, "d_output": 1},
            },
            "there is no mixer 'foo'",
        ),
        ("[" * 100_000, "nested too deeply"),
    ],
    ids=["a list", "a module", "a module in a pattern", "no mixer", "deep"],
)
def test_wrong_configurations_raise(content, sentence, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "json.tool", raising=False)
    whole = {"format": 1, "model": "DLR"}
    text = content if isinstance(content, str) else json.dumps(whole | content)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=sentence):
        from_pretrained(tmp_path)
    assert "json.tool" not in sys.modules


def test_values_that_are_not_json_raise(tmp_path, unchecked):
    layer = DLR(2, 2, dt_min=np.float32(1e-3), dropout=np.float32(0.25))
    again = from_pretrained(save_pretrained(layer, tmp_path / "layer"))
    assert again.options() == layer.options()
    assert again.dropout_p == 0.25


def test_loading_imports_nothing_untrusted(tmp_path, monkeypatch):
    """A user's mixer: its module is imported only with `trust`."""
    twice = "class Twice(torch.nn.Linear):\n    def __init__(self, d_model):\n"
    text = f"import torch\n\n\n{twice}        super().__init__(d_model, d_model)\n"
    (tmp_path / "own_layer.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    model = build_model(ModelConfig("own_layer.Twice", d_model=4), d_input=2, d_output=1)
    folder = save_pretrained(model, tmp_path / "model")
    x = torch.randn(1, 3, 2)
    assert torch.equal(from_pretrained(folder, trust=True)(x), model(x))
    monkeypatch.delitem(sys.modules, "own_layer")
    sentence = "names the class 'own_layer.Twice'.*--trust"
    with pytest.raises(ValueError, match=sentence):
        from_pretrained(folder)
    assert "own_layer" not in sys.modules


def test_the_card_describes_the_model(tmp_path):
    model = MODELS["language"][0]()
    about = {"results": {"test loss": 2.88}, "run": {"steps": 7}}
    folder = save_pretrained(model, tmp_path / "model", tokenizer=b"{}", **about)
    assert {path.name for path in folder.iterdir()} == set(pretrained.FILES)
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: dlrnn\n")
    for said in ("pipeline_tag: text-generation", "| test loss | 2.88 |", '"experts": 2', "ahead"):
        assert said in card
    assert '"steps": 7' in card


class FakeHub:
    """Repositories are folders below one."""

    def __init__(self, root):
        self.root = root

    def create_repo(self, name, *, private, exist_ok):
        assert exist_ok
        (self.root / name).mkdir(parents=True, exist_ok=True)

    def upload_folder(self, *, repo_id, folder_path, allow_patterns):
        for path in Path(folder_path).iterdir():
            if path.name in allow_patterns:
                (self.root / repo_id / path.name).write_bytes(path.read_bytes())

    def snapshot_download(self, name, *, revision, allow_patterns):
        if not (self.root / name).is_dir():
            raise ConnectionError("offline:\n no address found")
        return str(self.root / name)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    made = FakeHub(tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: made)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", made.snapshot_download)
    return made


def test_upload_and_download(hub, tmp_path):
    make, x = MODELS["pooled"]
    model = make().eval()
    folder = save_pretrained(model, tmp_path / "model")
    (folder / "secret.txt").write_text("stays here")
    assert push_to_hub(folder, "somebody/small") == "https://huggingface.co/somebody/small"
    assert not (hub.root / "somebody/small/secret.txt").exists()
    assert torch.equal(from_pretrained("somebody/small")(x), model(x))


def test_wrong_names_and_models_raise(hub, tmp_path):
    layer, run = DLR(2, 2), tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text('{"task": {}, "model": {}}')  # that of a run
    (tmp_path / "empty").mkdir()
    folder = save_pretrained(layer, tmp_path / "layer")
    kinds = "a DLR layer, a network of build_model or a LanguageModel can be saved, not a Linear"
    absent = "there is no folder no/body, and the Hub does not give it: offline: no address found"
    owner = "there is no folder nobody; a model of the Hub is named owner/name"
    for sentence, call, *arguments in (
        (kinds, save_pretrained, nn.Linear(2, 2), tmp_path / "a"),
        ("run holds something other than a model; choose", save_pretrained, layer, run),
        ("empty holds no model: it has no config.json", from_pretrained, tmp_path / "empty"),
        ("empty holds no model: it has no config.json", push_to_hub, tmp_path / "empty", "a/b"),
        (absent, from_pretrained, "no/body"),
        (owner, from_pretrained, "nobody"),
        ("a model of the Hub is named owner/name, not ab", push_to_hub, folder, "ab"),
    ):
        refused(sentence, call, *arguments)
    assert not (tmp_path / "a").exists()
    assert (run / "config.json").read_text() == '{"task": {}, "model": {}}'
    config = json.loads((folder / "config.json").read_text())
    for change, sentence in (
        ({"format": 9}, "it has format 9; this dlrnn reads 1"),
        ({"model": "GPT"}, "it has a 'GPT'; there are DLR, SequenceModel, LanguageModel"),
        ({"options": {"d_model": 2, "d_state": 2, "statess": 3}}, "statess"),
        ({"options": config["options"] | {"d_state": 3}}, "config.json is not the one that"),
    ):
        (folder / "config.json").write_text(json.dumps(config | change))
        refused(sentence, from_pretrained, folder)
    (folder / "model.safetensors").write_bytes(b"no")
    refused("is not a safetensors file", from_pretrained, folder)


def refused(sentence, call, *arguments):
    with pytest.raises(ValueError, match=re.escape(sentence)) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
