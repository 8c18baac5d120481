"""Save and load models in folders, and on the Hugging Face Hub.

folder/config.json         the kind of the model and its arguments
folder/model.safetensors   its parameters
folder/README.md           a model card
folder/tokenizer.json      the tokenizer of a language model
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

from torch import Tensor, nn

from dlrnn._version import __version__
from dlrnn.common.files import create_new, write_whole
from dlrnn.common.untrusted import check_import, fit_fields, parse_json, read_bytes, read_sealed
from dlrnn.models.config import foreign_mixers
from dlrnn.models.language import LanguageConfig, LanguageModel
from dlrnn.models.model import SequenceModel, build_model
from dlrnn.nn.dlr import DLR
from dlrnn.nn.files import misfit, model_bytes, outline
from dlrnn.ops.checks import require

CONFIG, WEIGHTS, CARD, TOKENIZER = "config.json", "model.safetensors", "README.md", "tokenizer.json"
FILES = [CONFIG, WEIGHTS, CARD, TOKENIZER]
BEGUN = ".dlrnn-begun"  # there while a model is being written
LARGEST_FILE = 2**28
"""Bytes of a tokenizer."""
_FORMAT = 1
_SCHEMA = {"format": int, "dlrnn": str, "model": str, "options": dict[str, Any]}
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_MAKERS: dict[str, tuple[Callable[..., nn.Module], Callable[..., Any]]] = {
    "DLR": (DLR, DLR.__init__),
    "SequenceModel": (build_model, build_model),
    "LanguageModel": (lambda **config: LanguageModel(LanguageConfig(**config)), LanguageConfig),
}
"""What makes a model from its options, and where the types of the options are declared."""
_EXAMPLE = """
```python
from dlrnn.models import from_pretrained

model = from_pretrained("owner/name")  # or this folder
```

"""


def save_pretrained(
    model: nn.Module,
    folder: str | Path,
    *,
    tokenizer: bytes | None = None,
    results: Mapping[str, Any] | None = None,
    run: Mapping[str, Any] | None = None,
) -> Path:
    """Write a DLR layer, a network of `build_model` or a LanguageModel into a folder.

    The folder must be new, or hold a model, which is replaced. The model card contains the
    configuration and, if given, the `results` by name and the configuration of the `run`.
    """
    folder = Path(folder)
    kind, options = _described(model)
    require(not folder.is_file(), f"{folder} is a file; a folder was expected")
    strange = folder.is_dir() and any(folder.iterdir()) and not _is_ours(folder)
    require(not strange, f"{folder} holds something other than a model; choose another folder")
    given = f"tokenizer must be the bytes of a tokenizer.json, not a {type(tokenizer).__name__}"
    require(tokenizer is None or isinstance(tokenizer, bytes), given)
    named = results is None or isinstance(results, Mapping)
    require(named, f"results must be values by name, not a {type(results).__name__}")
    config = {"format": _FORMAT, "dlrnn": __version__, "model": kind, "options": options}
    try:
        card = _card(model, kind, options, results or {}, run).encode()
        content = (json.dumps(config, indent=1) + "\n").encode()
    except (TypeError, UnicodeError) as error:  # numbers of numpy, for instance
        what = "the options, results or run cannot be written as JSON text"
        raise ValueError(f"{what}: {error}") from error
    others = {"config": content, **({} if tokenizer is None else {"tokenizer": tokenizer})}
    weights = model_bytes(model, {name: _digest(each) for name, each in others.items()})
    folder.mkdir(parents=True, exist_ok=True)
    create_new(folder / BEGUN)
    (folder / CONFIG).unlink(missing_ok=True)  # without it a folder is no model
    write_whole(folder / WEIGHTS, weights)
    (folder / TOKENIZER).unlink(missing_ok=True)
    if tokenizer is not None:
        write_whole(folder / TOKENIZER, tokenizer)
    write_whole(folder / CARD, card)
    write_whole(folder / CONFIG, content)
    (folder / BEGUN).unlink()
    return folder


def from_pretrained(
    source: str | Path, *, revision: str | None = None, trust: bool = False
) -> nn.Module:
    """Load the model in a folder, or `owner/name` of the Hub; in evaluation mode.

    The digests of its weights and its configuration are checked. A mixer outside of dlrnn is
    imported, which runs its code, only with `trust`.
    """
    folder = Path(source)
    if not folder.is_dir():
        folder = _downloaded(str(source), revision)
    path = folder / CONFIG
    require(path.is_file(), f"{folder} holds no model: it has no {CONFIG}")
    content = read_bytes(path, links=True)  # the Hub's cache is made of links
    try:
        needed = ("format", "model", "options")
        config = fit_fields(parse_json(content, str(path)), _SCHEMA, str(path), needed=needed)
        known, kind, options = config["format"], config["model"], config["options"]
        require(known == _FORMAT, f"it has format {known}; this dlrnn reads {_FORMAT}")
        require(kind in _MAKERS, f"it has a {kind!r}; there are {', '.join(_MAKERS)}")
        inner = options.get("config")
        mixer = inner.get("mixer") if isinstance(inner, dict) else None
        foreign = [n for n in foreign_mixers(mixer) if "." in n] if isinstance(mixer, str) else []
        for name in foreign:
            check_import(name, path, trust=trust)
        maker, declared = _MAKERS[kind]
        make = partial(maker, **fit_fields(options, get_type_hints(declared), "options", needed=()))
        expected = None if foreign else outline(make)  # a user's mixer may fail on the meta device
        tensors = _weights(folder, content)
        wrong = "" if expected is None else misfit(expected, tensors)
        require(not wrong, f"{folder / WEIGHTS} does not fit its {CONFIG}: {wrong}")
        model = make()
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} does not describe a model of dlrnn: {reason}") from error
    _load(model, tensors, folder / WEIGHTS)
    return model.eval()


def push_to_hub(folder: str | Path, name: str, *, private: bool = False) -> str:
    """Upload a folder of `save_pretrained` to the Hub as `owner/name`; returns its address."""
    require((Path(folder) / CONFIG).is_file(), f"{folder} holds no model: it has no {CONFIG}")
    named = _HUB_NAME.fullmatch(name) is not None
    require(named, f"a model of the Hub is named owner/name, not {name}")
    with _failures(f"{folder} cannot be uploaded as {name}"):
        from huggingface_hub import HfApi

        hub = HfApi()
        hub.create_repo(name, private=private, exist_ok=True)
        hub.upload_folder(repo_id=name, folder_path=str(folder), allow_patterns=FILES)
        return f"https://huggingface.co/{name}"


# ---------------------------------------------------------------------------------- helpers


def _is_ours(folder: Path) -> bool:
    """Whether `save_pretrained` wrote a folder, perhaps not completely; a run is not ours."""
    if (folder / BEGUN).is_file():
        return True
    try:
        found = parse_json(read_bytes(folder / CONFIG), CONFIG)
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and {"format", "dlrnn", "model", "options"} <= found.keys()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _weights(folder: Path, config: bytes) -> dict[str, Tensor]:
    """The tensors of a model, which must have been saved with this configuration."""
    path = folder / WEIGHTS
    found = read_sealed(path, links=True)
    advice = "export the model again"
    require(found.sealed, f"{path} has no SHA-256, so it may be damaged: {advice}")
    for name, other in (("config", folder / CONFIG), ("tokenizer", folder / TOKENIZER)):
        if name == "config" or name in found.metadata:
            content = config if name == "config" else read_bytes(other, LARGEST_FILE, links=True)
            same = found.metadata.get(name) == _digest(content)
            require(same, f"{other} is not the one that {path} was saved with: {advice}")
    return found.tensors


def _described(model: nn.Module) -> tuple[str, dict[str, Any]]:
    """The kind of a model and its arguments, for config.json."""
    if isinstance(model, DLR):
        return "DLR", model.options()
    if isinstance(model, LanguageModel):
        return "LanguageModel", asdict(model.config)
    if isinstance(model, SequenceModel) and model.built is not None:
        config, sizes = model.built
        return "SequenceModel", {"config": asdict(config), **sizes}
    kind = type(model).__name__
    kinds = "a DLR layer, a network of build_model or a LanguageModel"
    raise ValueError(f"{kinds} can be saved, not a {kind}")


def _load(model: nn.Module, tensors: dict[str, Tensor], path: Path) -> None:
    """Load tensors, with the types that they have in the file."""
    own = model.state_dict()
    wrong = misfit(own, tensors)
    for name, value in own.items():
        if not wrong and value.is_floating_point() != tensors[name].is_floating_point():
            wrong = f"{name} has another type"
    require(not wrong, f"{path} does not fit its {CONFIG}: {wrong}")
    model.load_state_dict(tensors, assign=True)


def _downloaded(name: str, revision: str | None) -> Path:
    if not _HUB_NAME.fullmatch(name):
        raise ValueError(f"there is no folder {name}; a model of the Hub is named owner/name")
    with _failures(f"there is no folder {name}, and the Hub does not give it"):
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, revision=revision, allow_patterns=FILES))


@contextmanager
def _failures(what: str) -> Iterator[None]:
    """Turn any error of the Hub's package into a ValueError of one sentence."""
    try:
        yield
    except Exception as error:  # of the network, the system, or the package
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(f"{what}: {reason}") from error


def _card(
    model: nn.Module,
    kind: str,
    options: Mapping[str, Any],
    results: Mapping[str, Any],
    run: Mapping[str, Any] | None,
) -> str:
    """The model card: what the model is, how to load it, results, configuration."""
    count = sum(parameter.numel() for parameter in model.parameters())
    writes = kind == "LanguageModel"
    tags = "dlrnn, diagonal-linear-rnn" + writes * ", text-generation"
    card = f"---\nlibrary_name: dlrnn\ntags: [{tags}]\n"
    card += writes * "pipeline_tag: text-generation\n"
    card += f"---\n\n# {kind}\n\n{count:,} parameters, made with dlrnn {__version__}.\n{_EXAMPLE}"
    if writes and options["experts"] > 1 and options["router"] == "top":
        note = "Experts are chosen over whole sequences, which looks ahead; to write, take"
        card += f"{note} `dlrnn.models.causal(model)`.\n\n"
    if results:
        rows = "".join(f"| {name} | {value} |\n" for name, value in results.items())
        card += f"## Results\n\n| | |\n|---|---|\n{rows}\n"
    for title, values in (("Configuration", options), ("The run", run)):
        if values is not None:
            card += f"## {title}\n\n```json\n{json.dumps(values, indent=1)}\n```\n\n"
    return card.rstrip() + "\n"
