"""As many results as the paper has: how large the pages are, and how fast they open."""

import json
import time

import pytest

import made_up
from dlrnn.paper.comparison import counts
from dlrnn.paper.results import read_results
from dlrnn.paper.tables import make_tables
from dlrnn.report.site import LIMIT, write_site

PAGES = ["index", *(f"table{k}" for k in range(1, 7)), "speed", "listops", "pathfinder", "explorer"]
LOADED = "performance.getEntriesByType('navigation')[0].loadEventEnd"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("full")
    results = made_up.write(folder, made_up.full())
    write_site(folder / "site", [read_results(results, "ours")], folder / "lengths.json")
    return folder / "site"


def size(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_all_of_it_is_there_and_small(site):
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
def test_it_opens_at_once(name, visit):
    took = []
    for _ in range(2):
        start = time.perf_counter()
        page = visit(name)
        loaded = page.evaluate(LOADED) / 1000
        took.append(max(loaded, time.perf_counter() - start))
    assert min(took) < 2
    if name == "explorer":
        page.locator("#explorer figure").first.wait_for()


def test_a_cell_opens_at_once(visit):
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
