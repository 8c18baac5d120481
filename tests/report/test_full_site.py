"""As many results as the paper has: how large the pages are, and how fast they open."""

import json
import time

import pytest

from dlrnn.paper.comparison import counts
from dlrnn.paper.results import read_results
from dlrnn.paper.tables import make_tables
from dlrnn.report.site import LIMIT
from dlrnn.report.templates import PAGES

LOADED = "performance.getEntriesByType('navigation')[0].loadEventEnd"


@pytest.fixture
def site(full_site):
    return full_site


def size(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_the_site_is_complete_and_small(site):
    table = make_tables([read_results(site.parent / "results", "ours")])[0]
    assert counts(table)[:2] == (66, 66)
    assert all(len(cell.ours["R2"].records) == 2 for cell in table.grid)
    assert size(site) <= LIMIT == 8_000_000
    assert size(site.parent / "results") < 40_000_000, "it goes into a repository"
    scripts = list((site / "layers").iterdir())
    assert len(scripts) >= 44, "every DLR and DSS of Table 1, one seed"
    steps = {len(json.loads(each.read_text()[:-3].partition(",")[2])) for each in scripts}
    assert steps == {5}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_opens_within_two_seconds(name, visit):
    took = []
    for _ in range(2):
        start = time.perf_counter()
        page = visit(name)
        loaded = page.evaluate(LOADED) / 1000
        took.append(max(loaded, time.perf_counter() - start))
    assert min(took) < 2
    if name == "explorer":
        page.locator("#explorer figure").first.wait_for()


def test_a_cell_opens_within_a_second(visit):
    took = []
    for _ in range(3):
        page = visit("table1")
        start = time.perf_counter()
        page.locator("table.grid td a").nth(20).click()
        assert page.locator("dialog[open] .plot").is_visible()
        took.append(time.perf_counter() - start)
    assert min(took) < 1
    legend = page.locator("dialog[open] .legend").inner_text()
    assert "seed 0" in legend
    assert "seed 1" in legend
