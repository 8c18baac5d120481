"""The documentation: its Python code runs, its commands parse, and the site builds offline."""

import argparse
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from dlrnn import __version__
from dlrnn.cli import Parser, main
from dlrnn.paper import recipes
from dlrnn.tasks import TASKS
from dlrnn.train import with_overrides

REPOSITORY = Path(__file__).parent.parent
DOCS = REPOSITORY / "docs"
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
SHELL = ("", "sh", "bash", "console")
PRESENT = [page for page in PAGES if page.name != "results.md" and page.parent.name != "log"]
"""Pages that describe the code as it is."""
EXTERNAL = re.compile(r"""<(?:script|img|link|iframe)\b[^>]*?(?:src|href)=["']?https?://[^>]*>""")


def blocks(*languages):
    """The fenced blocks of all pages in one of these languages, as test parameters."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in re.finditer(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", text, re.M | re.S):
            if match[2] in languages:
                line = text.count("\n", 0, match.start()) + 1
                indent = re.compile(f"^{match[1]}", re.M)
                name = f"{page.relative_to(REPOSITORY)}:{line}"
                found.append(pytest.param(indent.sub("", match[3]), id=name))
    return found


def commands():
    """Every `dlrnn ...` of shell blocks and of code spans, as test parameters."""
    found = {}
    for block in blocks(*SHELL):
        for line in block.values[0].replace("\\\n", " ").splitlines():
            for arguments in dlrnn_arguments(line):
                found.setdefault(shlex.join(arguments), (arguments, True))
    for page in PAGES:
        for span in re.findall(r"`(dlrnn [a-z][^`]*)`", page.read_text()):
            for arguments in dlrnn_arguments(span.replace("\n", " ")):
                found.setdefault(shlex.join(arguments), (arguments, False))
    return [pytest.param(*both, id=name) for name, both in sorted(found.items())]


def dlrnn_arguments(line):
    """The arguments of each call of `dlrnn` in a line of shell code."""
    code = re.sub(r"(^|\s)#.*", "", line.split("$ ", 1)[-1])
    parts = [shlex.split(part) for part in re.split(r"[();<>|&]+", code) if "dlrnn" in part]
    return [words[words.index("dlrnn") + 1 :] for words in parts if "dlrnn" in words]


class Parsed(BaseException):
    """Raised instead of running a command: its arguments were parsed."""


def parse(monkeypatch, arguments):
    """What the parser of `dlrnn` makes of the arguments; the command itself does not run."""
    usual = argparse.ArgumentParser.parse_known_args

    def parse_known_args(self, *given, **options):
        parsed = usual(self, *given, **options)
        if self.prog == "dlrnn":
            raise Parsed(*parsed)
        return parsed

    def error(self, message):
        raise ValueError(message)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse_known_args)
    monkeypatch.setattr(Parser, "error", error)
    with pytest.raises(Parsed) as parsed:
        main(arguments)
    return parsed.value.args


@pytest.mark.parametrize("code", blocks("python"))
def test_python_blocks_run_when_pasted_alone(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        exec(compile(code, "block", "exec"), {"__name__": "__main__"})
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(("arguments", "complete"), commands())
def test_commands_parse(arguments, complete, monkeypatch):
    try:
        given, rest = parse(monkeypatch, arguments)
    except ValueError as error:
        unfinished = re.search("required|expected one argument", str(error))
        if complete or not unfinished:  # prose may name `dlrnn bench` alone
            raise
        return
    if not rest:
        return
    assert getattr(given, "takes_overrides", False), f"unknown arguments: {rest}"
    named = list(getattr(given, "recipes", []))
    if given.command == "train" and not rest[0].startswith("-"):
        named.append(rest.pop(0))
    known = [name for name in named if name and name != "RECIPE"]
    recipe = recipes.chosen(known)[0] if known else recipes.get("table1/shift/dlr-1")
    with_overrides(recipes.scaled(recipe, given.scale), rest)


def test_a_wrong_option_does_not_parse(monkeypatch):
    with pytest.raises(ValueError, match="invalid choice"):
        parse(monkeypatch, ["bench", "layre"])
    given, rest = parse(monkeypatch, ["doctor", "--devise", "cpu"])
    assert rest
    assert not getattr(given, "takes_overrides", False)


def test_named_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.M))
    for page in PAGES:
        named = set(re.findall(r"(?:`|^)make ([a-z-]+)", page.read_text(), re.M))
        assert named <= targets, f"{page.name} names {named - targets}"


@pytest.mark.parametrize("page", PRESENT, ids=lambda page: page.name)
def test_names_and_files_exist(page):
    """Names such as `ops.convolution`, and paths such as `tests/conftest.py`, in code spans."""
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", page.read_text(), flags=re.S))
    packages = "analysis|models|nn|ops|tasks|train"
    for span in spans:
        for package, name in re.findall(rf"(?<![\w./-])(?:dlrnn\.)?({packages})\.(\w+)", span):
            found = hasattr(import_module(f"dlrnn.{package}"), name)
            assert found or importlib.util.find_spec(f"dlrnn.{package}.{name}"), span
        for path in re.findall(r"^[\w./]+/[\w.-]+\.(?:py|json|cpp|md)$", span):
            places = (REPOSITORY, REPOSITORY / "src", REPOSITORY / "src" / "dlrnn", page.parent)
            assert "tableN" in path or any((place / path).exists() for place in places), path


def test_citations_have_the_version_of_the_package():
    assert f"\nversion: {__version__}\n" in (REPOSITORY / "CITATION.cff").read_text()
    assert f"version = {{{__version__}}}" in (DOCS / "citation.md").read_text()


def test_the_readme_is_short():
    assert len((REPOSITORY / "README.md").read_text().splitlines()) <= 150


def test_the_catalogue_has_every_task():
    text = (DOCS / "tasks.md").read_text()
    for name, task in TASKS.items():
        assert f"`{name}`" in text
        if task.kind == "regression":
            picture = DOCS / "pictures" / "tasks" / f"{name}.png"
            assert f"pictures/tasks/{name}.png" in text
            assert picture.stat().st_size < 40_000


@pytest.mark.skipif(not importlib.util.find_spec("mkdocs"), reason="MkDocs is not installed")
def test_the_site_builds_offline_without_warnings(tmp_path):
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        assert not EXTERNAL.search(page.read_text()), f"{page.name} loads something from a server"
    reference = (site / "api" / "nn.html").read_text()
    assert 'id="dlrnn.nn.DLR"' in reference
