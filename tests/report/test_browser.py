"""The pages in a real browser, headless Chromium: what a visitor does, and what must not happen."""

import time
from pathlib import Path

import pytest

import made_up
from dlrnn.paper.results import read_results
from dlrnn.report.site import write_site
from dlrnn.report.templates import PAGES

ROOT = Path(__file__).parent
CHECKS = (ROOT / "checks.js").read_text()
LOADED = "performance.getEntriesByType('navigation')[0].loadEventEnd"
PHONE = {"width": 360, "height": 740}
OPEN_DETAILS = "for (const one of document.querySelectorAll('details')) one.open = true"
TWO_FRAMES = "new Promise(go => requestAnimationFrame(() => requestAnimationFrame(go)))"
BEYOND = """() => [...document.querySelectorAll('main :is(td, tbody th, td a, td .badge)')]
  .filter((each) => each.checkVisibility() && !each.closest('dialog'))
  .filter((each) => {
    const box = each.getBoundingClientRect();
    const over = each.matches('td, th') && each.scrollWidth > each.clientWidth + 1;
    return over || box.left < 0 || box.right > 360 || box.width < 8;
  })
  .map((each) => each.outerHTML.slice(0, 99))"""
"""What lies beyond the edge of a phone."""
IN_FULL = "#explorer[aria-busy=false]"  # the run that was chosen has come, and is drawn


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_pages_are_accessible(name, scheme, visit):
    """Colours, names, labels, order of headings, contrast; a dialog and all details open."""
    page = visit(name, scheme=scheme)
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}[scheme]
    page.evaluate(OPEN_DETAILS)
    found = page.evaluate(CHECKS)
    assert not found["wrong"]
    assert found["texts"] > 15
    if page.locator("td a").count():
        page.locator("td a").first.click()
        assert page.evaluate(CHECKS)["wrong"] == []


def test_the_accessibility_checks_can_fail(visit, tmp_path):
    (tmp_path / "bad.html").write_text(
        "<!doctype html><html lang=en><body style='background:#fff'><link rel=icon href='data:,'>"
        "<h1>a</h1><h3>b</h3><p style='color:#999'>pale</p><img src='data:,'><input>"
        "<svg></svg><button></button><p id=x></p><p id=x></p><table><tr><td>1</td></tr></table>"
    )
    page = visit("bad", at=tmp_path)
    said = " ".join(page.evaluate(CHECKS)["wrong"])
    for words in (
        *("a picture without a name: <img", "a picture without a name: <svg", "contrast 2.85"),
        *("label: <input", "label: <button", "level 3 after one of level 1", "the id x twice"),
        "a table without heads",
    ):
        assert words in said, words


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_pages_fit_on_a_phone(name, scheme, visit):
    """Nothing of a table lies beyond the edge, not even inside its own box; labels say which."""
    page = visit(name, viewport=PHONE, scheme=scheme)
    for _ in range(2):
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        page.evaluate(OPEN_DETAILS)
    assert page.evaluate(CHECKS)["wrong"] == []
    if name != "listops":  # its table scrolls
        assert page.evaluate(BEYOND) == []
        assert page.locator(".box.more").count() == 0, "no table needs to scroll"
    if not page.locator("td a").count():
        return
    numbers = page.locator("table.list tbody tr").nth(1).locator("td.number")
    labels = numbers.evaluate_all("all => all.map(c => getComputedStyle(c, '::before').content)")
    assert labels[:3] == ['"paper"', '"ours"', '"difference"']
    tops = numbers.evaluate_all("all => all.map(c => c.getBoundingClientRect().top)")
    assert len(set(tops[:3])) == 1, "paper, ours and difference on one line"
    page.locator("td a").first.click()
    dialogs = "[...document.querySelectorAll('dialog[open]')]"
    assert page.evaluate(f"{dialogs}.map(d => d.scrollWidth - d.clientWidth)") == [0]


def test_a_table_that_scrolls_has_a_hint(visit):
    for width, more in ((700, 1), (1200, 0)):
        page = visit("table1", viewport={"width": width, "height": 700})
        page.evaluate(TWO_FRAMES)  # an observer of sizes has been called
        box = page.locator(".box").first
        assert ("more" in box.get_attribute("class")) == bool(more)
        hint = box.evaluate("b => getComputedStyle(b, '::before').content")
        assert ("scroll the table sideways" in hint) == bool(more)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        box.locator(".wide").evaluate("wide => wide.scrollTo(500, 0)")
        first = box.locator("tbody th").first.bounding_box()
        assert 0 <= first["x"] < 60, "the first column stays"


def test_the_ceiling_is_explained(visit):
    for name in ("index", "speed"):
        note = visit(name).locator("figure", has_text="Time of a layer").locator(".note")
        for words in ("not measured", "an H200", "Bytes: five passes", "FLOP: 12 H N L"):
            assert words in note.inner_text()


def test_every_page_is_reached(visit, site):
    """From any page, which says where one is; `test_site` follows all other links."""
    page = visit("index")
    for name in PAGES:
        page.locator(f"nav a[href='{name}.html']").click()
        assert page.url == f"{(site / name).as_uri()}.html"
        here = page.locator("nav a[aria-current='page']")
        assert here.get_attribute("href") == f"{name}.html"


@pytest.mark.parametrize("name", [f"table{k}" for k in range(1, 7)])
def test_every_cell_opens(name, visit):
    page = visit(name)
    opened = page.evaluate(
        """() => [...document.querySelectorAll('td a[aria-haspopup]')].map((link) => {
             link.click();
             const all = document.querySelectorAll('dialog[open]');
             const right = all.length === 1 && '#' + all[0].id === link.hash;
             const seen = right && all[0].checkVisibility();
             all[0]?.close();
             return seen && document.querySelectorAll('dialog[open]').length === 0;
           })"""
    )
    assert len(opened) >= 10
    assert all(opened)


def test_a_cell_opens_with_the_keyboard(visit):
    page = visit("table1")
    link = page.locator("td a").first
    link.focus()
    page.keyboard.press("Enter")
    dialog = page.locator("dialog[open]")
    assert dialog.count() == 1
    assert page.evaluate("document.activeElement.className") == "close"
    assert "Shift" in dialog.locator("h2").inner_text()
    for words in ("Command", "Commit", "Hardware", "Steps", "Seeds", "made-up GPU"):
        assert words in dialog.inner_text()
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    tip = dialog.locator(".plot .tip").first
    assert tip.is_visible()
    assert "step" in tip.inner_text()
    page.keyboard.press("Escape")
    assert not tip.is_visible()
    page.keyboard.press("Escape")
    assert page.locator("dialog[open]").count() == 0
    assert link.evaluate("link => link === document.activeElement")


def test_a_cell_has_an_address(visit):
    page = visit("table1#cell-table1-shift-dlr-1")
    assert page.locator("dialog[open] h2").inner_text().startswith("Shift")
    page.locator("dialog[open] .close").click()
    assert page.locator("dialog").first.is_hidden()
    page = visit("table1#cell-table1-shift-dlr-1", java_script_enabled=False)
    assert page.locator("#cell-table1-shift-dlr-1").is_visible()
    assert page.locator("table.list").is_visible()


def test_tables_sort(visit):
    page = visit("table1")
    table = page.locator("table.list")
    head = table.locator("th", has_text="difference")
    place = head.evaluate("th => th.cellIndex")
    keys = f"rows => rows.map(row => row.cells[{place}].dataset.sort)"
    for order, sign in (("ascending", 1), ("descending", -1)):
        head.locator("button").click()
        assert head.get_attribute("aria-sort") == order
        found = table.locator("tbody tr").evaluate_all(keys)
        known = [sign * float(key) for key in found if key]
        assert len(known) > 50
        assert known == sorted(known)
        assert "" in found
        assert found[: len(known)] == [key for key in found if key], "what is missing comes last"
    table.locator("th", has_text="task").first.locator("button").press("Enter")
    names = table.locator("tbody th").all_inner_texts()
    assert names == sorted(names, key=str.lower)
    assert table.locator("[aria-sort]").count() == 1
    grid = page.locator("table.grid")
    grid.locator("thead button").nth(1).click()
    shown = grid.locator("tbody tr td:nth-child(2)").evaluate_all("c => c.map(d => d.dataset.sort)")
    known = [float(key) for key in shown if key]
    assert known == sorted(known)


def test_plots_show_values_of_points(visit):
    page = visit("table2")
    plot = page.locator(".plot").first
    point = plot.locator("[data-t]").nth(2)
    point.hover(force=True)
    tip = plot.locator(".tip")
    assert tip.is_visible()
    name = point.evaluate("p => p.parentElement.dataset.n")
    assert tip.inner_text() == f"{name}: {point.get_attribute('data-t')}"
    page.mouse.move(5, 5)
    assert not tip.is_visible()
    plot.focus()
    page.keyboard.press("End")
    last = plot.locator("[data-t]").last.get_attribute("data-t")
    assert last in tip.inner_text()


def test_curves_show_values_of_many_points(visit):
    """Lines of many points hold values; the points come when they are asked for."""
    page = visit("table1#cell-table1-shift-dlr-1")
    plot = page.locator("dialog[open] .plot").first
    group = plot.locator("g[data-v]").first
    values = group.get_attribute("data-v").split(";")
    name = group.get_attribute("data-n")
    assert len(values) == 60
    assert plot.locator("[data-t]").count() == 0
    plot.focus()
    page.keyboard.press("Home")
    step, value = values[0].split(" ")
    assert plot.locator(".tip").inner_text() == f"{name}: step {step}, validation R² {value}"
    page.keyboard.press("End")
    assert plot.locator("[data-v]").count() == 0
    shown = plot.locator("circle.on").bounding_box()
    line = plot.locator("g.line > path:first-child").last.bounding_box()
    assert abs(shown["x"] + shown["width"] / 2 - line["x"] - line["width"]) < 3, "at its end"


def test_the_explorer(visit):
    page = visit("explorer")
    page.locator("#explorer figure").first.wait_for()
    assert page.locator("#explorer figure").count() == 4
    first = page.locator("#explorer").inner_html()
    assert page.locator("#step-shown").inner_text() == "40000 (snapshot 5 of 5)", "the last"
    assert page.locator("#steps .ends span").all_inner_texts() == ["0", "40000"]
    slider = page.get_by_label("Training step")
    slider.focus()
    page.keyboard.press("ArrowLeft")
    assert page.locator("#step-shown").inner_text() == "20000 (snapshot 4 of 5)"
    assert slider.get_attribute("aria-valuetext") == "step 20000, snapshot 4 of 5"
    assert page.locator("#explorer").inner_html() != first
    page.keyboard.press("Home")
    assert page.locator("#step-shown").inner_text() == "0 (snapshot 1 of 5)"
    assert "at step 0" in page.locator("#explorer figcaption").first.inner_text()
    runs = page.locator("#run option").evaluate_all("all => all.map(one => one.value)")
    assert len(runs) == 3
    for run in runs:
        page.locator("#run").select_option(run)
        page.locator(IN_FULL).wait_for()
        layers = page.locator("#layer option").count()
        for layer in range(layers):
            page.locator("#layer").select_option(str(layer))
            assert page.locator("#explorer svg [data-t]").count() > 1000
    assert {page.locator("#layer option").count()} <= {1, 2}
    page.locator("#explorer .plot").first.focus()
    page.keyboard.press("ArrowRight")
    assert "|λ|" in page.locator("#explorer .tip").first.inner_text()


def test_a_single_snapshot_has_no_slider(visit, tmp_path):
    runs = [
        made_up.run("table1/shift/dlr-1", snapshots=made_up.snapshots()[-1:]),
        made_up.run("table1/shift/dss-1", snapshots=made_up.snapshots("dss")),
    ]
    made_up.add(runs, tmp_path / "results")
    write_site(tmp_path / "site", [read_results(tmp_path / "results", "ours")], tmp_path / "none")
    page = visit("explorer", at=tmp_path / "site")
    page.locator("#explorer figure").first.wait_for()
    for place, shown in enumerate(("the only snapshot", "snapshot 5 of 5")):
        page.locator("#run").select_option(index=place)
        page.locator(IN_FULL).wait_for()
        assert page.locator("#step-shown").inner_text() == f"40000 ({shown})"
        assert page.locator("#step").is_visible() == (place == 1)


def test_hostile_records_stay_text(visit, tmp_path):
    evil = "<img src=x onerror=\"console.log('ran')\"><script>console.log('ran')</script>"
    layers = made_up.snapshots()
    for each in layers:
        each["layers"][0]["name"] = evil
    run = made_up.run("table1/shift/dlr-1", variant=evil, snapshots=layers)
    made_up.add([run], tmp_path / "results")
    found = read_results(tmp_path / "results", evil)
    found.problems.append(evil)
    write_site(tmp_path / "site", [found, found], tmp_path / "none")
    for name in ("index", "table1", "explorer"):
        page = visit(name, at=tmp_path / "site")
        page.wait_for_timeout(100)
        assert page.locator("img").count() == 0
    assert "onerror" in page.locator("#layer option").first.inner_text()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_opens_within_two_seconds(name, visit, full_site):
    took = []
    for _ in range(2):
        start = time.perf_counter()
        page = visit(name, at=full_site)
        loaded = page.evaluate(LOADED) / 1000
        took.append(max(loaded, time.perf_counter() - start))
    assert min(took) < 2
    if name == "explorer":
        page.locator("#explorer figure").first.wait_for()


def test_a_cell_opens_within_a_second(visit, full_site):
    took = []
    for _ in range(3):
        page = visit("table1", at=full_site)
        start = time.perf_counter()
        page.locator("table.grid td a").nth(20).click()
        assert page.locator("dialog[open] .plot").is_visible()
        took.append(time.perf_counter() - start)
    assert min(took) < 1
    legend = page.locator("dialog[open] .legend").inner_text()
    assert "seed 0" in legend
    assert "seed 1" in legend
