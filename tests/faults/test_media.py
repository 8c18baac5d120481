"""Parquet files that decode to far more than their size are refused before decoding."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hostile import run_command

pytestmark = pytest.mark.usefixtures("unchecked")


def dictionary_bomb(path, size, rows):
    """A Parquet file whose column is one text of `size` bytes, referenced by every row."""
    indices = pa.array([0] * rows, pa.int32())
    text = pa.DictionaryArray.from_arrays(indices, pa.array(["a" * size]))
    table = pa.table({"text": text, "label": pa.array([0] * rows, pa.int64())})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, compression="zstd", row_group_size=rows, store_schema=False)
    return path


@pytest.mark.parametrize(("size", "rows"), [(2**26, 1000), (2**20, 4_000_000)])
def test_a_parquet_dictionary_bomb_is_refused(size, rows, tmp_path):
    """A file of a few KB decodes to 64 GB, or to 4 TB of text."""
    bomb = dictionary_bomb(tmp_path / "set" / "train-00000-of-00001.parquet", size, rows)
    assert bomb.stat().st_size < 100_000
    done = run_command(["data", "import", "text", bomb.parent, "--out", tmp_path / "out"])
    assert done.status == 2, done
    assert not done.faults()
    assert bomb.name in done.err
    assert not list((tmp_path / "out").glob("*.parquet"))


@pytest.mark.parametrize(
    "dates", [pa.array([2**31 - 1] * 8, pa.date32()), pa.array([2**40] * 8, pa.timestamp("s"))]
)
@pytest.mark.parametrize("name", ["text", "label"])
def test_dates_that_python_does_not_have_are_refused(name, dates, tmp_path):
    table = pa.table({"text": ["a"] * 8, "label": [0] * 8, name: dates})
    path = tmp_path / "set" / "train-00000-of-00001.parquet"
    path.parent.mkdir()
    pq.write_table(table, path)
    done = run_command(["data", "import", "text", path.parent, "--out", tmp_path / "out"])
    assert done.status == 2, done
    assert not done.faults()
    assert path.name in done.err


def test_an_ordinary_dictionary_is_read(tmp_path):
    """Files of the Hub have dictionaries, too."""
    for split in ("train", "test"):
        labels = [0, 1] * 4
        texts = [f"{split} review number {k}" for k in range(8)]
        table = pa.table({"text": texts, "label": labels})
        (tmp_path / "set").mkdir(exist_ok=True)
        path = tmp_path / "set" / f"{split}-00000-of-00001.parquet"
        pq.write_table(table, path, compression="zstd", use_dictionary=True)
    done = run_command(["data", "import", "text", tmp_path / "set", "--out", tmp_path / "out"])
    assert done.status == 0, done
