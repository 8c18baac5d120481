"""Pages of made-up results, and a real browser for them, headless Chromium."""

import os
import shutil

import pytest

import made_up
from dlrnn.paper.results import read_results
from dlrnn.report.site import write_site

FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--no-first-run"),
)
DESK = {"width": 1200, "height": 900}


def write_pages(folder, runs=None):
    """Made-up results in a folder and a site of them."""
    results = made_up.write(folder, runs)
    said = write_site(folder / "site", [read_results(results, "ours")], folder / "lengths.json")
    assert said == []
    return folder / "site"


@pytest.fixture(scope="session")
def made_up_site(tmp_path_factory):
    """Pages with a run or two of nearly every recipe."""
    return write_pages(tmp_path_factory.mktemp("made-up"))


@pytest.fixture(scope="session")
def full_site(tmp_path_factory):
    """Pages with as many results as the paper has."""
    return write_pages(tmp_path_factory.mktemp("full"), made_up.full())


@pytest.fixture
def site(made_up_site):
    """The site that `visit` opens; a test module may have its own."""
    return made_up_site


def left_out(why):
    """Skip, or fail where DLRNN_BROWSER_TESTS says that they are obligatory."""
    if os.environ.get("DLRNN_BROWSER_TESTS") == "required":
        pytest.fail(f"the browser tests are required, and {why}")
    pytest.skip(f"the browser tests are left out: {why}")


@pytest.fixture(scope="session")
def browser():
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next(filter(None, map(shutil.which, names)), None)
    if program is None:
        left_out(f"none of {', '.join(names)} is installed")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        left_out("playwright is not installed")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=list(FLAGS))
        yield started
        started.close()


@pytest.fixture
def visit(browser, site):
    """A function that opens a page; no error and no request to another site may have occurred."""
    contexts, wrong = [], []

    def opened(name, *, scheme="light", viewport=DESK, at=site, **options):
        context = browser.new_context(color_scheme=scheme, viewport=viewport, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: wrong.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        page.on("requestfailed", lambda request: wrong.append(f"failed: {request.url}"))
        page.on("request", lambda request: left(request.url, at))
        file, _, target = name.partition("#")
        page.goto(f"{(at / file).as_uri()}.html{'#' if target else ''}{target}")
        return page

    def left(url, at):
        if not url.startswith((at.as_uri(), "data:")):
            wrong.append(f"a request left the site: {url}")

    yield opened
    for context in contexts:
        context.close()
    assert not wrong
