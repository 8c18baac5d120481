"""Hooks of MkDocs: pages from files outside docs/, and the navigation of docs/log/."""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
INCLUDED = {
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
    "changelog.md": "CHANGELOG.md",
}
"""Pages of the site that are files of the repository's root, where GitHub looks for them."""


def on_config(config: Any) -> Any:
    """Add the pages of docs/log/ to the navigation."""
    logs = sorted(path.name for path in (ROOT / "docs" / "log").glob("*.md"))
    if logs:
        config.nav.append({"Log": [f"log/{name}" for name in logs]})
    return config


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Fill the included pages, and turn links to root files into links to their pages."""
    name = page.file.src_uri
    if name == "results.md":  # its tables are wide
        page.meta["hide"] = ["toc"]
    if name in INCLUDED:
        text = (ROOT / INCLUDED[name]).read_text()
        return re.sub(r"\]\(([^)]*)\)", lambda link: f"]({_from_root(link[1])})", text)
    up = "../" * name.count("/")
    for target, source in INCLUDED.items():
        markdown = markdown.replace(f"]({up}../{source}", f"]({up}{target}")
    return markdown


def _from_root(link: str) -> str:
    """A link of a root file, as seen from the site's root."""
    pages = {source: target for target, source in INCLUDED.items()}
    path, hash_, anchor = link.partition("#")
    return f"{pages.get(path, path.removeprefix('docs/'))}{hash_}{anchor}"
