"""Results on disk, and a static site of them: `dlrnn results add` and `dlrnn report`."""

from dlrnn.report.collect import Collected, collect, find_runs
from dlrnn.report.records import Record
from dlrnn.report.results import Results, read_results
from dlrnn.report.store import add

__all__ = ["Collected", "Record", "Results", "add", "collect", "find_runs", "read_results"]
