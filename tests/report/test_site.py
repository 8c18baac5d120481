"""The pages without a browser: structure, escaping, what is broken, size; and the Markdown."""

import json
import math
import random
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from jinja2 import UndefinedError

import made_up
from dlrnn.bench.cases import PEERS
from dlrnn.paper.counts import counts
from dlrnn.paper.results import Results, read_results
from dlrnn.paper.store import add
from dlrnn.paper.tables import make_tables
from dlrnn.report.markdown import markdown, with_summary
from dlrnn.report.plots import SHAPES, STYLES, Axis, Plot, Series
from dlrnn.report.site import LIMIT, write_site
from dlrnn.report.templates import PAGES, environment

REPOSITORY = Path(__file__).parents[2]
EVIL = "<script>alert(1)</script>\"'&|`<img src=x onerror=alert(1)>"


class Page(HTMLParser):
    """Elements in order, and whether each was closed."""

    VOID = ("meta", "link", "img", "input", "br")

    def __init__(self, text):
        super().__init__()
        self.elements, self.open, self.text = [], [], ""
        self.feed(text)
        self.text = " ".join(self.text.split())
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, name, attributes):
        self.elements.append((name, dict(attributes)))
        if name not in self.VOID:
            self.open.append(name)

    def handle_endtag(self, name):
        assert self.open.pop() == name

    def handle_data(self, text):
        self.text += text

    def all(self, name):
        return [attributes for each, attributes in self.elements if each == name]


def pages(folder):
    return {path.stem: Page(path.read_text()) for path in folder.glob("*.html")}


def test_every_page_is_whole(site):
    found = pages(site)
    assert sorted(found) == sorted(PAGES)
    for name, page in found.items():
        assert len(page.all("h1")) == 1, name
        for landmark in ("header", "nav", "main", "footer"):
            assert len(page.all(landmark)) == 1, (name, landmark)
        assert page.all("html")[0]["lang"] == "en"
        assert page.all("a")[0]["href"] == "#main", "the skip link comes first"
        ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
        assert len(ids) == len(set(ids)), name
        for attributes in page.all("a"):
            file, _, target = attributes["href"].partition("#")
            assert not file or (site / file).exists()
            assert not target or target in ids, target
        for source in [*page.all("img"), *page.all("script")]:
            assert "src" not in source or (site / source["src"]).exists()
            assert "://" not in source.get("src", "")


def test_plots_have_names_and_values(site):
    for name, page in pages(site).items():
        for attributes in page.all("svg"):
            named = "aria-labelledby" in attributes and attributes["role"] == "img"
            assert named or attributes.get("aria-hidden") == "true", name
        for attributes in page.all("img"):
            assert len(attributes["alt"]) > 20
    text = (site / "table2.html").read_text()
    assert 'data-n="DLR-prod, ours"' in text
    assert 'data-t="length 16384, R² ' in text


def test_dialogs_show_where_numbers_come_from(site):
    page = Page((site / "table1.html").read_text())
    assert len(page.all("dialog")) == 70
    assert "dlrnn train table1/shift/dlr-1 --seed 0" in page.text
    for words in ("Hardware", "made-up GPU", "Commit", "0123456789abcdef", "of 40000", "Seeds"):
        assert words in page.text
    assert "Finding: Made up: the rate of the paper" in page.text


def test_our_column_never_has_a_number_of_the_paper(tmp_path):
    write_site(tmp_path, [Results("ours")], tmp_path / "none")
    for k in range(1, 7):
        text = (tmp_path / f"table{k}.html").read_text()
        page = Page(text)
        assert "Not run: none of" in page.text
        assert page.text.count("We have not run this recipe") == len(page.all("dialog"))
        assert 'class="ours"' not in text, "a cell of the grid with a number"
        cells = len(make_tables([Results("ours")])[k - 1].grid)
        assert text.count('class="ours missing">not run<') == cells
        links = [a for a in page.all("a") if "aria-label" in a]
        assert links, "the column of the list"
        assert all(a["aria-label"].startswith("not run, ") for a in links)
        assert 'class="badge near"> ' not in text


@pytest.mark.parametrize("seed", range(6))
def test_damaged_files_do_not_stop_the_site(seed, tmp_path):
    """Any byte of any file may be another."""
    draw = random.Random(seed)
    results = made_up.write(tmp_path)
    files = [path for path in sorted(tmp_path.rglob("*")) if path.is_file()]
    nasty = (b"1e999", b"-1", b"9" * 400, b"\\ud800", b"[" * 2000, b"null", b"\xff", b",,,", b"")
    for path in files:
        content = path.read_bytes()
        for _ in range(draw.randrange(4)):
            at = draw.randrange(len(content) + 1)
            content = content[:at] + draw.choice(nasty) + content[at + draw.randrange(6) :]
        path.write_bytes(content)
    write_site(tmp_path / "site", [read_results(results, "ours")], tmp_path / "lengths.json")
    assert sorted(pages(tmp_path / "site")) == sorted(PAGES)


def test_texts_of_records_are_escaped(tmp_path):
    texts = dict.fromkeys(("note", "command", "hardware", "commit", "differs"), EVIL)
    evil = made_up.run("table1/shift/dlr-1")
    evil.records[:] = [
        made_up.record(name, variant=variant, metric=metric, versions={EVIL: EVIL}, **texts)
        for variant in ("", EVIL)
        for metric in ("R2", EVIL)
        for name in ("table1/shift/dlr-1", f"table1/{EVIL.replace('/', '')}/x")
    ]
    layers = made_up.snapshots()
    layers[0]["layers"][0]["name"] = EVIL
    add([evil, made_up.run("table1/shift/dss-1", snapshots=layers)], tmp_path / "results")
    (tmp_path / "results" / "notes.json").write_text(json.dumps({"table1/shift/dlr-1": EVIL}))
    lengths = made_up.lengths() | {"device": EVIL}
    lengths["cases"][0][EVIL] = 3.0
    (tmp_path / "lengths.json").write_text(json.dumps(lengths))
    found = read_results(tmp_path / "results", EVIL)
    found.problems.append(EVIL)
    write_site(tmp_path / "site", [found, found], tmp_path / "lengths.json")
    for name, page in pages(tmp_path / "site").items():
        scripts = page.all("script")
        assert all("src" in a or a.get("type") == "application/json" for a in scripts), name
        assert not page.all("img"), name
        assert not any("onerror" in attributes for _, attributes in page.elements)
    assert "<script>" not in markdown([found])


def test_templates_escape_text_once_and_refuse_unknown_names():
    parts = environment().get_template("parts.html").module
    assert parts.head("<&\"'").count("&lt;&amp;&#34;&#39;<span") == 1
    assert all(environment().get_template(name) for name in environment().list_templates())
    with pytest.raises(UndefinedError, match="'nobody' is undefined"):
        environment().from_string("{{ nobody }}").render()


def size(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_the_site_is_complete_and_small(full_site, tmp_path):
    """More than there can be: of many layers one seed and fewer steps are shown."""
    found = read_results(full_site.parent / "results", "ours")
    table = make_tables([found])[0]
    assert counts(table)[:2] == (66, 66)
    assert all(len(cell.ours["R2"].records) == 2 for cell in table.grid)
    assert size(full_site) <= LIMIT == 8_000_000
    assert size(full_site.parent / "results") < 40_000_000, "it goes into a repository"
    assert len(list((full_site / "layers").iterdir())) >= 44, "every DLR and DSS of Table 1"
    said = "Left out to limit the size of the pages: "
    assert said in (full_site / "explorer.html").read_text()
    write_site(tmp_path, [found], tmp_path / "none")
    (tmp_path / "layers" / "1-mine.js").touch()
    write_site(tmp_path, [Results("ours")], tmp_path / "none")
    assert [path.name for path in (tmp_path / "layers").iterdir()] == ["1-mine.js"]


def test_relative_times(tmp_path, site):
    """Measured alone, by the benchmark: a recorded run may have shared its GPU."""
    text = pages(site)["speed"].text
    assert "LocalAttention 27 3 8" in text
    assert "LocalAttention, bf16 5.5 0.5 8" in text
    older = made_up.step_times()
    del older["table3"]
    (tmp_path / "step-times.json").write_text(json.dumps(older))
    (tmp_path / "records.jsonl").touch()
    write_site(tmp_path / "site", [read_results(tmp_path, "ours")], tmp_path / "none")
    text = pages(tmp_path / "site")["speed"].text
    assert text.count("Not measured: there is no recorded dlrnn bench step --tables.") == 2


def test_time_against_length_of_every_mixer(tmp_path, site):
    """Whole layers in a plot of their own, on the page of speed; without them there is none."""
    text = pages(site)["speed"].text
    one, other = "Time of a layer against its length", "Time of a layer of every mixer against"
    between = text[text.index(one) : text.index(other)]
    assert "DLR, the paper's listing" in between
    assert "DSS-exp" not in between
    after = text[text.index(other) : text.index("The same as a table")]
    for title in ("DLR, our kernels", "DSS-exp", "attention, bf16", "ceiling for DLR"):
        assert title in after
    assert "plain PyTorch" not in after
    assert other not in pages(site)["index"].text
    lengths = made_up.lengths()
    for row in lengths["cases"]:
        for name in [name for name in row if name.startswith("layer ")]:
            del row[name]
    (tmp_path / "lengths.json").write_text(json.dumps(lengths))
    write_site(tmp_path / "site", [Results("ours")], tmp_path / "lengths.json")
    text = pages(tmp_path / "site")["speed"].text
    assert one in text
    assert other not in text


def asset(name):
    return (REPOSITORY / "src/dlrnn/report/assets" / name).read_text()


def test_no_two_lines_of_a_plot_look_the_same(tmp_path):
    """Every mixer that `bench lengths` measures, beside DLR and its ceiling: nine lines."""
    lengths = made_up.lengths()
    for row in lengths["cases"]:
        row |= {f"layer {kind}": 1.0 + k for k, kind in enumerate(PEERS)}
        row.pop("layer attention bf16", None)
    (tmp_path / "lengths.json").write_text(json.dumps(lengths))
    write_site(tmp_path / "site", [Results("ours")], tmp_path / "lengths.json")
    text = (tmp_path / "site" / "speed.html").read_text()
    figure = next(f for f in text.split("<figure>") if "of every mixer against its" in f)
    samples = re.findall(r'<g class="line (s\d)[^"]*">.*?d="M14 6([^"]+)"', figure)
    assert len(set(SHAPES)) == len(SHAPES)
    assert math.lcm(STYLES, len(SHAPES)) == 45
    assert all(shape in asset("explorer.js") for shape in SHAPES)
    assert len(samples) == len(PEERS) + 2
    assert len(set(samples)) == len({colour for colour, _ in samples}) == len(samples)
    known = re.findall(r"^ *--(s\d+):", asset("report.css"), re.MULTILINE)
    assert sorted(known) == sorted(f"s{k}" for k in range(STYLES) for _ in ("light", "dark"))


def test_facts_that_seeds_share_are_said_once(tmp_path):
    one = {"note": "warm", "versions": {"torch": "0.1"}, "parameters": 7001}
    one |= {"seconds_per_step": 0.5, "wall_seconds": 100.0}
    other = {"note": "cold", "versions": {"torch": "0.2"}, "parameters": 7002}
    other |= {"seconds_per_step": 0.6, "wall_seconds": 110.0, "seed": 1}
    records = [made_up.record(differs="lr 0.1 (0.2)", **fields) for fields in (one, other)]
    write_site(tmp_path, [Results("ours", records)], tmp_path / "none")
    text = Page((tmp_path / "table1.html").read_text()).text
    for words in (
        *("the validation split", "lr 0.1 (0.2)", "warm; cold", "torch 0.1; torch 0.2"),
        *("500 ms; 600 ms", "100 s; 110 s", "7001; 7002"),
    ):
        assert words in text
    assert text.count("made-up GPU") == 1, "what they share is said once"


def test_the_markdown_is_what_the_results_generate():
    """docs/results.md is never edited by hand."""
    written = (REPOSITORY / "docs" / "results.md").read_text()
    again = "run `dlrnn report --markdown docs/results.md` again"
    assert markdown([read_results(REPOSITORY / "results", "ours")]) == written, again
    assert "Generated by `dlrnn report" in written.splitlines()[0]


def test_the_readme_has_the_counts_that_the_results_generate():
    text = (REPOSITORY / "README.md").read_text()
    again = "run `make report` again"
    assert with_summary(text, [read_results(REPOSITORY / "results", "ours")]) == text, again
    assert with_summary(text, [Results("ours")]) != text
    with pytest.raises(ValueError, match="a line <!-- counts"):
        with_summary("# No marks\n", [Results("ours")])


def test_parameters_times_and_throughput_stand_beside_the_papers(tmp_path):
    """Parameters are counted; times that were not measured say so."""
    times = made_up.step_times() | {"table5": [{"model": "dlr-16", "precision": "bf16", "ms": 800.0,
                                                "relative": 1.07, "paper": 1.1}]}  # fmt: skip
    (tmp_path / "step-times.json").write_text(json.dumps(times))
    (tmp_path / "records.jsonl").touch()
    found = read_results(tmp_path, "ours")
    assert not found.problems
    text = markdown([found])
    for row in (
        "| DLR, 16 experts | 312M | 312.64M | 1.1 | 1.07 (bf16) |",
        "| Transformer, 64 experts | 1.2B | 1.23B | 0.9 | not measured |",
        "| SGConv | 920K | 919.0K |",
        "| ListOps-SubTrees | LocalAttention | 8 | 3 (fp32), 0.5 (bf16) |",
        "| Attention, 1 layer, L 4096 | 83K | 83.5K | 6.3 | 3 (fp32) | 13.3 | 5 (fp32) |",
    ):
        assert row in text
    write_site(tmp_path / "site", [found], tmp_path / "none")
    page = pages(tmp_path / "site")["table5"].text
    assert "Parameters and throughput" in page
    assert "1.07 (bf16)" in page
    assert "DLR, 16 experts, bf16 800 1.07 1.1" in pages(tmp_path / "site")["speed"].text


def test_a_dialog_names_the_departures_of_its_recipe(site):
    text = Page((site / "table1.html").read_text()).text
    assert "Departures from the paper: attention-block, mips-batch, mips-steps" in text


@pytest.mark.parametrize(("height", "is_below"), [(0.55, True), (0.45, False)])
def test_the_name_of_a_guide_stands_where_no_line_passes(height, is_below):
    line = Series("a", [(0, height), (10, height)])
    plot = Plot("k", "t", "", [line], x=Axis("x"), y=Axis("y", limits=(0, 1)))
    _, base = plot.name_of_guide(0.5, "paper")
    assert (base > plot.up(0.5)) == is_below
