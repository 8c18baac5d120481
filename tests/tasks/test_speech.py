"""Speech Commands: import of clips from folders and archives, their split, and the task."""

import functools
import hashlib
import io
import struct

import numpy as np
import pyarrow.parquet as pq
import pytest
import soundfile
import torch
from releases import containers, parquet, refused, write_folder, write_tar, write_zip

from dlrnn.cli import main
from dlrnn.tasks.data import import_set
from dlrnn.tasks.speech import UNIT, WORDS, SpeechCommands, hashed_split
from dlrnn.tasks.storage import build, shards

NAME, SPLITS = "speech-commands", ("train", "validation", "test")
SPEAKERS = [f"{number:08x}" for number in range(12)]


def wave(word, number):
    """A clip's samples: a few are shorter than a second."""
    length = 16_000 if number % 3 else 9_000 + 100 * number
    noise = np.random.default_rng([WORDS.index(word), number])
    return noise.integers(-(2**15), 2**15, length).astype(np.int16)


def encoded(samples, kind="WAV", rate=16_000, subtype="PCM_16"):
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind, subtype=subtype)
    return file.getvalue()


@functools.cache
def clips(kind="wav"):
    return {
        f"{word}/{speaker}_nohash_{number}.{kind}": encoded(wave(word, number), kind)
        for word in WORDS[:4]
        for number, speaker in enumerate(SPEAKERS)
    }


OTHERS = {
    "bed/0a_nohash_0.wav": b"not read",
    "_background_noise_/tap.wav": b"",
    "README.md": b"\xff",
    "LICENSE": b"",
    "yes/._00000000_nohash_0.wav": b"of a Mac",
}


def official(split_of):
    """The official lists, which also name missing clips."""
    lists = {"validation": ["bed/gone_nohash_0.wav"], "test": []}
    for name in clips():
        if (split := split_of(name)) != "train":
            lists[split].append(name)
    files = {"validation_list.txt": lists["validation"], "testing_list.txt": lists["test"]}
    return {name: "".join(f"{line}\n" for line in lines).encode() for name, lines in files.items()}


def manifest(split_of, kind="flac"):
    rows = ["split\tlabel\tpath\tsamples\n"]
    for name in clips(kind):
        word, _, file = name.partition("/")
        samples = len(wave(word, int(file.partition(".")[0].rpartition("_")[2])))
        rows.append(f"{split_of(name)}\t{word}\t{name}\t{samples}\n")
    return "".join(rows).encode()


def by_hash(name):
    """The official rule, as its authors state it."""
    speaker = name.partition("/")[2].partition("_nohash_")[0]
    share = int(hashlib.sha1(speaker.encode()).hexdigest(), 16) % (2**27) * (100.0 / (2**27 - 1))
    return "validation" if share < 10 else "test" if share < 20 else "train"


def by_number(name):
    return SPLITS[int(name.partition(".")[0].rpartition("_")[2]) % 3]


def stored(folder):
    return {split: pq.read_table(folder / f"{split}-00000.parquet").to_pylist() for split in SPLITS}


def assert_all_there(folder, split_of):
    found = stored(folder)
    assert sum(map(len, found.values())) == 48
    for split, rows in found.items():
        for row in rows:
            word, _, stem = row["clip"].partition("/")
            assert split_of(f"{row['clip']}.wav") == split
            assert row["label"] == WORDS.index(word)
            assert np.array_equal(row["samples"], wave(word, int(stem.rpartition("_")[2])))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("speech")
    source = write_tar(path / "speech.tar.gz", {**clips(), **OTHERS}, "w:gz")
    return import_set(NAME, source, path / "set")


# ---------------------------------------------------------------------------------- importing


def test_without_lists_the_split_follows_the_official_rule(folder):
    assert shards.verify(folder) == []
    assert_all_there(folder, by_hash)
    assert {by_hash(name) for name in clips()} == set(SPLITS)
    for speaker, split in (("00f0204f", "train"), ("026290a7", "validation"), ("022cd682", "test")):
        assert hashed_split(speaker) == split  # of the official lists


def test_the_split_follows_the_official_lists(tmp_path):
    files = {f"speech/{name}": data for name, data in (clips() | official(by_number)).items()}
    for place, source in enumerate(containers(tmp_path, files)):
        assert_all_there(import_set(NAME, source, tmp_path / f"set{place}"), by_number)


def test_the_split_follows_a_manifest_and_flac_is_read(tmp_path):
    files = {**clips("flac"), "MANIFEST.tsv": manifest(by_number)}
    source = write_tar(tmp_path / "x.tar", {f"a/{k}": v for k, v in files.items()}, "w")
    assert_all_there(import_set(NAME, source, tmp_path / "set"), by_number)


def hub_files():
    """Parquet files as the package `datasets` writes sounds."""
    files = {}
    for split in SPLITS:
        names = [name for name in clips() if by_number(name) == split] + ["bed/0a_nohash_0.wav"]
        audio = [{"bytes": clips().get(name, b""), "path": name} for name in names]
        rows = {"file": names, "audio": audio, "label": [0] * len(names)}
        files[f"{split}-00000-of-00001.parquet"] = parquet(rows)
    return files


def test_damaged_parquet_files_are_refused(tmp_path):
    name = "test-00000-of-00001.parquet"
    data = hub_files()[name]
    for broken, keywords in (
        (parquet({"file": ["a"], "audio": [None]}), f"{name} row 0 has no file or no audio"),
        (parquet({"sound": [1]}), rf"{name} has no column 'file'; it has \['sound'\]"),
        *((broken, f"{name}.* is damaged: ") for broken in (data[:-100], b"PAR1", b"")),
    ):
        refused(NAME, write_folder(tmp_path / "v0.02", {name: broken}), tmp_path, keywords)
    archive = write_tar(tmp_path / "x.tar", {name: data})
    refused(NAME, archive, tmp_path, "is Parquet inside an archive")


def test_the_number_of_skipped_words_is_printed(folder, tmp_path, capsys):
    remark = "left out: 2 clips of 2 other words (_background_noise_, bed)"
    assert shards.load_manifest(folder)["remark"] == remark
    source = write_folder(tmp_path / "source", {**clips(), **OTHERS})
    assert main(["data", "import", NAME, str(source), "--out", str(tmp_path / "a")]) == 0
    assert capsys.readouterr().out == f"{remark}\nthe set is in {tmp_path / 'a'}\n"


# ---------------------------------------------------------------------------------- refusals


GOOD, FLAC = encoded(wave("yes", 1)), encoded(wave("yes", 1), "FLAC")
NEW = "yes/ffffffff_nohash_0.wav"


@pytest.mark.parametrize(
    ("name", "data", "keywords"),
    [
        (NEW, GOOD[:-1], "is damaged: it is truncated"),
        (NEW, GOOD[:30], "is damaged: it is truncated"),
        (NEW, GOOD[:12], "is damaged: it is truncated"),
        (NEW, b"", "is damaged: "),
        (NEW, b"something else", "is damaged: "),
        (NEW, b"RIFF" + struct.pack("<I", 2**31) + GOOD[8:40] + b"\xff" * 4, "is truncated"),
        *(
            (NEW.replace("wav", "flac"), data, r"ffffffff_nohash_0.flac is damaged: ")
            for data in (FLAC[:-100], FLAC[:200], FLAC[:9000] + bytes(300) + FLAC[9300:])
        ),
        (NEW, encoded(wave("yes", 1), rate=8000), "has 8000 samples per second, not 16000"),
        (NEW, encoded(np.zeros((100, 2), np.int16)), "has 2 channels, not 1"),
        (NEW, encoded(np.zeros(0, np.int16)), "has 0 samples; expected 1 to"),
        (NEW, encoded(np.zeros(16_001, np.int16)), "has 16001 samples; expected 1 to"),
        (NEW, encoded(np.zeros(50), subtype="FLOAT"), "is WAV FLOAT"),
        (NEW, encoded(np.zeros(200_000, np.int16)), "has more than 259072 bytes"),
        ("yes/hello.wav", GOOD, "yes/hello.wav is not named SPEAKER_nohash_NUMBER"),
        ("copy/yes/00000000_nohash_0.flac", FLAC, "00000000_nohash_0.flac occurs twice"),
        ("validation_list.txt", b"", "holds validation_list.txt and no testing_list.txt"),
        ("testing_list.txt", b"yes\n", "testing_list.txt line 1 is not a clip: 'yes'"),
        ("testing_list.txt", b"caf\xe9", "testing_list.txt line 1 is not UTF-8"),
        ("MANIFEST.tsv", b"split\tlabel\n", "line 1 is not split, label, path, samples"),
    ],
)
def test_invalid_clips_and_lists_are_refused(tmp_path, name, data, keywords):
    source = write_tar(tmp_path / "speech.tar", {**clips(), name: data}, "w")
    refused(NAME, source, tmp_path, keywords)


@pytest.mark.parametrize(
    ("old", "new", "keywords"),
    [
        (b"train\tyes\t", b"train\tno\t", "line 2 has the label 'no' for yes/00000000"),
        (b"train\tyes\t", b"dev\tyes\t", "line 2 has the split 'dev'"),
        (b"\t9000\n", b"\t9001\n", "nohash_0.flac has 9000 samples, not 9001 as in MANIFEST.tsv"),
        (b"00000000_nohash_0.flac", b"0_nohash_0.flac", "00000000_nohash_0.flac is not in MANIF"),
        (b"\t9000\n", b"\tmany\n", "line 2 has no clip and its number of samples"),
        (b"samples\n", b"samples\ntrain\tup\tup/a_nohash_0.flac\t5\n", "is in MANIFEST.* missing"),
        (b"\t9000\n", b"\t" + b"9" * 5000 + b"\n", "line 2 has no clip and its number of samples"),
        (b"train\tyes\t", b"t" * 200_000 + b"\tyes\t", "line 2 has the split 'ttt"),
        (
            b"train\tyes\t",
            b"test\tyes\tyes/00000000_nohash_0.wav\t9000\ntrain\tyes\t",
            "MANIFEST.tsv line 3: yes/00000000_nohash_0 occurs twice",
        ),
        (b"\tyes\t", b"\t", "line 2 is not split, label, path, samples"),
    ],
)
def test_an_invalid_manifest_is_refused(tmp_path, old, new, keywords):
    text = manifest(by_number).replace(old, new, 1)
    source = write_zip(tmp_path / "speech.zip", {**clips("flac"), "MANIFEST.tsv": text})
    refused(NAME, source, tmp_path, keywords)


def test_contradicting_and_repeated_lists_are_refused(tmp_path):
    lists = official(by_number)
    both = dict.fromkeys(lists, lists["testing_list.txt"])
    source = write_tar(tmp_path / "a.tar", {**clips(), **both}, "w")
    refused(NAME, source, tmp_path, r"yes/00000002_nohash_2 is also in the other list")
    source = write_tar(tmp_path / "b.tar", {**clips(), **lists, "a/testing_list.txt": b""}, "w")
    refused(NAME, source, tmp_path, r"a/testing_list.txt is a second testing_list.txt")


def test_damaged_and_empty_archives_are_refused(tmp_path):
    source = write_tar(tmp_path / "speech.tar", clips(), "w:gz")
    source.write_bytes(source.read_bytes()[:100_000])
    refused(NAME, source, tmp_path, "speech.tar is damaged")
    empty = write_tar(tmp_path / "x.tar", OTHERS)
    refused(NAME, empty, tmp_path, "holds no train samples of speech-com")


def test_a_full_disk_leaves_no_files(tmp_path, monkeypatch):
    source = write_tar(tmp_path / "speech.tar", clips(), "w")

    def full(path, data):
        if path.suffix == ".parquet":
            raise OSError(28, "No space left on device", str(path))
        return write(path, data)

    write = build.write_unlocked
    monkeypatch.setattr(build, "write_unlocked", full)
    with pytest.raises(OSError, match="No space left on device"):
        import_set(NAME, source, tmp_path / "new" / "out")
    assert not (tmp_path / "new").exists()


# ---------------------------------------------------------------------------------- the task


def test_batches_and_scores(folder):
    task = SpeechCommands(folder=folder)
    sizes = task.d_input, task.d_output, task.input_length, task.output_length
    assert sizes == (1, 10, 16_000, 1)
    assert task.vocabulary is None
    rows = stored(folder)["train"]
    count = task.count("train")
    assert count == len(rows)
    batch = task.sample(count)  # an epoch
    assert (batch.inputs.shape, batch.inputs.dtype) == ((count, 16_000, 1), torch.float32)
    assert batch.lengths is None
    expected = {}
    for row in rows:
        padded = np.zeros(16_000, dtype=np.int16)
        padded[: len(row["samples"])] = row["samples"]
        expected[padded.tobytes()] = row["label"]
    for wave, label in zip(batch.inputs[..., 0].double(), batch.targets, strict=True):
        assert expected.pop(np.round(wave.numpy() * UNIT).astype(np.int16).tobytes()) == label
    logits = torch.nn.functional.one_hot(batch.targets, 10).double()
    assert task.metrics(logits, batch)["accuracy"] == 1
    assert task.loss(logits, batch).item() == pytest.approx(np.log(1 + 9 * np.exp(-1)))
    assert len(task.preview().axes) == 4


def test_the_preview_command_needs_a_folder(folder, tmp_path, capsys):
    preview = ["tasks", "preview", "speech-commands", "--out", str(tmp_path / "x.png")]
    assert main([*preview, "--folder", str(folder)]) == 0
    assert (tmp_path / "x.png").stat().st_size > 1000
    assert main(preview) == 2
    assert "speech-commands is real data" in capsys.readouterr().err
