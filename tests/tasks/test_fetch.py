"""`dlrnn data fetch` with a local server in place of the Hub: no test needs the network."""

import contextlib
import hashlib
import json
import shutil
import threading
import time
from collections import namedtuple
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub.constants
import pytest
from releases import parquet
from test_speech import assert_all_there, by_number, hub_files

from dlrnn.cli import main
from dlrnn.tasks.data import import_set, imported_sets
from dlrnn.tasks.storage import fetch, shards

COMMIT = "0123456789abcdef" * 2 + "01234567"


class Hub:
    """The content of a local Hub; `cut` counts the downloads of a file that will be truncated."""

    def __init__(self):
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.hashes: dict[str, str] = {}  # announced instead of the real ones
        self.cut: dict[str, int] = {}
        self.asked: list[tuple[str, str | None]] = []  # requested files and ranges

    def about(self, repository):
        siblings = [
            {"rfilename": name, "size": len(data), "blobId": "0" * 40, "lfs": self.lfs(name, data)}
            for name, data in self.repositories[repository].items()
        ]
        return {"id": repository, "sha": COMMIT, "siblings": siblings}

    def lfs(self, name, data):
        digest = self.hashes.get(name) or hashlib.sha256(data).hexdigest()
        return {"sha256": digest, "size": len(data), "pointerSize": 130}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"  # closes the connection after each answer

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, *, body):
        hub, path = self.server.hub, self.path.partition("?")[0]
        for repository, files in hub.repositories.items():
            if path == f"/api/datasets/{repository}":
                return self.send(json.dumps(hub.about(repository)).encode(), {}, body)
            start = f"/datasets/{repository}/resolve/{COMMIT}/"
            name = path.removeprefix(start)
            if path.startswith(start) and name in files:
                if body:
                    hub.asked.append((name, self.headers.get("Range")))
                digest = hub.lfs(name, files[name])["sha256"]
                return self.send(files[name], {"ETag": f'"{digest}"'}, body, name)
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()

    def send(self, data, headers, body, name=None):
        hub, first = self.server.hub, 0
        if asked := self.headers.get("Range"):
            first = int(asked.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
        self.send_response(206 if first else 200)
        for key, value in {**headers, "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data) - first))
        self.end_headers()
        if not body:
            return
        if hub.cut.get(name):
            hub.cut[name] -= 1
            data = data[: (first + len(data)) // 2]
        with contextlib.suppress(BrokenPipeError):
            self.wfile.write(data[first:])


def at(monkeypatch, port):
    constants = huggingface_hub.constants
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
    endpoint = f"http://127.0.0.1:{port}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + template)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.hub = Hub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    at(monkeypatch, server.server_port)
    yield server.hub
    server.shutdown()
    thread.join()
    server.server_close()


def reviews(split):
    texts = [f"{split} review {number}, ünïcode " * (number + 1) for number in range(120)]
    return {"text": texts, "label": [number % 2 for number in range(120)]}


def imdb():
    files = {
        f"plain_text/{split}-00000-of-00001.parquet": parquet(reviews(split))
        for split in ("train", "test")
    }
    files["plain_text/unsupervised-00000-of-00001.parquet"] = b"not requested"
    return {**files, "README.md": b"a card"}


def run(*arguments):
    return main(["data", "fetch", *arguments])


def refused(capsys, name, *parts):
    assert run(name) == 2
    printed = capsys.readouterr().err
    message = printed[printed.rindex("dlrnn data: ") :]
    for part in parts:
        assert part in message
    assert message.count("\n") == 1


def test_text_is_downloaded_and_imported(hub, tmp_path, capsys):
    hub.repositories["stanfordnlp/imdb"] = imdb()
    assert run("text") == 0
    assert "the set is in data/text" in capsys.readouterr().out
    assert shards.verify("data/text") == []
    counts = shards.load_manifest("data/text")["counts"]
    assert counts["test"] == 120
    assert counts["train"] + counts["validation"] == 120
    assert 5 <= counts["validation"] <= 25
    texts = {}
    for split in ("train", "validation", "test"):
        for sample in shards.Split("data/text", split):
            official, label, _, number = sample["review"].split("/")
            assert sample["label"] == int(label == "pos")
            texts[official, int(number)] = sample["tokens"].tobytes()
    for split in ("train", "test"):
        for number, text in enumerate(reviews(split)["text"]):
            assert texts[split, number] == text.encode()[:2048]
    assert {name for name, _ in hub.asked} == {
        "plain_text/train-00000-of-00001.parquet",
        "plain_text/test-00000-of-00001.parquet",
    }
    before = (tmp_path / "data/text/manifest.json").stat().st_mtime_ns
    hub.asked.clear()
    assert run("text") == 0  # nothing is downloaded or written again
    assert hub.asked == []
    assert (tmp_path / "data/text/manifest.json").stat().st_mtime_ns == before


def test_files_of_an_older_commit_are_removed(hub, tmp_path):
    files = imdb()
    old, new = (f"plain_text/train-0000{k}-of-0000{n}.parquet" for k, n in ((0, 1), (1, 2)))
    hub.repositories["stanfordnlp/imdb"] = files
    assert run("text", "--out", "old") == 0
    kept = tmp_path / "data/download/text/plain_text/notes.txt"
    kept.write_text("mine")
    hub.repositories["stanfordnlp/imdb"] = {
        new if name == old else name: files[name] for name in files
    }
    assert run("text", "--out", "new") == 0
    assert shards.load_manifest("new")["counts"]["test"] == 120
    assert sum(shards.load_manifest("new")["counts"].values()) == 240
    there = {path.name for path in (tmp_path / "data/download/text/plain_text").iterdir()}
    assert there == {"notes.txt", new.rpartition("/")[2], "test-00000-of-00001.parquet"}


def test_speech_commands_from_parquet_files(hub, tmp_path):
    files = {f"v0.02/{name}": data for name, data in hub_files().items()}
    hub.repositories["google/speech_commands"] = files
    assert run("speech-commands", "--out", "here") == 0
    assert_all_there(tmp_path / "here", by_number)


def test_a_broken_download_is_resumed(hub, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    monkeypatch.setattr(time, "sleep", lambda _: None)  # between attempts
    train, test = (f"plain_text/{split}-00000-of-00001.parquet" for split in ("train", "test"))
    hub.repositories["stanfordnlp/imdb"] = imdb()
    hub.cut = {train: 2, test: 1000}
    refused(capsys, "text", "stanfordnlp/imdb on the Hugging Face Hub cannot be read")
    assert not (tmp_path / "data/text").exists()
    places = [place for name, place in hub.asked if name == train]
    assert places == [None, "bytes=8000-", "bytes=12000-"]
    hub.cut.clear()
    hub.asked.clear()
    assert run("text") == 0
    assert shards.verify("data/text") == []
    assert {name for name, _ in hub.asked} == {test}


def test_a_file_with_another_hash_is_removed(hub, tmp_path, capsys):
    hub.repositories["stanfordnlp/imdb"] = imdb()
    name = "plain_text/train-00000-of-00001.parquet"
    hub.hashes[name] = "f" * 64
    refused(capsys, "text", f"data/download/text/{name} has not the size or SHA-256", "removed")
    assert not (tmp_path / "data/download/text" / name).exists()
    assert not (tmp_path / "data/text").exists()
    hub.hashes.clear()
    assert run("text") == 0


def test_invalid_parquet_files_of_the_hub_are_refused(hub, tmp_path, capsys):
    rows = parquet({"text": ["good", "bad"], "label": [1, -1]})
    name = "plain_text/train-00000-of-00001.parquet"
    hub.repositories["stanfordnlp/imdb"] = {**imdb(), name: rows}
    file = "train-00000-of-00001.parquet"
    refused(capsys, "text", f"{file} row 1 has the label -1")
    assert not (tmp_path / "data/text").exists()
    path = tmp_path / "data/download/text" / name
    path.write_bytes(parquet({"text": ["good", ""], "label": [1, 0]}))
    with pytest.raises(ValueError, match=f"{file} row 1 has no text"):
        import_set("text", path.parent)
    mixed = tmp_path / "data/download/text/plain_text/train/pos/1_7.txt"
    mixed.parent.mkdir(parents=True)
    mixed.write_text("good")
    with pytest.raises(ValueError, match=r"holds test-.*parquet and train/pos/1_7.txt; keep one"):
        import_set("text", mixed.parents[2])


def test_without_a_network_the_error_tells_what_to_download(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    at(monkeypatch, 9)  # no server
    refused(
        capsys,
        "text",
        "stanfordnlp/imdb on the Hugging Face Hub cannot be read",
        "download https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz to ",
        "`dlrnn data import text data/download/aclImdb_v1.tar.gz`",
    )
    assert list(tmp_path.iterdir()) == []


def test_releases_that_are_not_on_the_hub(hub, tmp_path, capsys):
    assert fetch.HOMES.keys() == imported_sets().keys()
    for name in ("retrieval", "listops", "pathfinder", "path-x"):
        place = "data/download/lra_release.gz"
        refused(
            capsys,
            name,
            f"{name} is not on the Hugging Face Hub: download https://storage.googleapis.com/",
            f"lra_release.gz to {place}, then `dlrnn data import {name} {place}`",
        )
    hub.repositories["google/speech_commands"] = {"speech_commands.py": b"a script"}
    hub.repositories["deepmind/pg19"] = {"pg19.py": b"", "data/train_files.txt": b"a list"}
    for name, place in (("speech-commands", "speech_commands_v0.02.tar.gz"), ("pg19", "pg19")):
        repository = fetch.HOMES[name].repository
        message = f"{repository} on the Hub holds no data of {name}: download "
        refused(capsys, name, message, f"`dlrnn data import {name} data/download/{place}")
    assert list(tmp_path.iterdir()) == []


def test_unknown_names_repositories_and_a_full_disk(hub, monkeypatch, tmp_path, capsys):
    refused(capsys, "txt", "there is no set 'txt' to fetch: did you mean 'text'?")
    refused(capsys, "text", "stanfordnlp/imdb on the Hugging Face Hub cannot be read (")
    hub.repositories["stanfordnlp/imdb"] = imdb()
    usage = namedtuple("usage", "total used free")(100, 90, 10)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    refused(capsys, "text", "there is not enough room in ", "0.00 GB are free")
    assert list(tmp_path.iterdir()) == []
