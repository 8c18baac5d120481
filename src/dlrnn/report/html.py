"""HTML in a few lines: text is escaped, always; only what `tag` made is markup."""

from collections.abc import Iterable
from html import escape

VOID = {"meta", "link", "img", "input", "br"}


class Html(str):
    """Markup; any other string is text."""

    __slots__ = ()


Child = str | None | Iterable["Child"]


def tag(name: str, /, *children: Child, **attributes: object) -> Html:
    """An element. `class_` is class, `data_t` is data-t; None and False are left out."""
    written = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in VOID:
        return Html(f"<{name}{written}>")
    return Html(f"<{name}{written}>{join(*children)}</{name}>")


def join(*children: Child) -> Html:
    """One after the other."""
    return Html("".join(_content(child) for child in children))


def _content(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Html):
        return child
    if isinstance(child, str):
        return escape(child, quote=False)
    return "".join(_content(each) for each in child)


def _attribute(key: str, value: object) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escape(str(value))}"'
