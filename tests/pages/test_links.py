"""Every link in documents, decks and lessons has the form of one that leads somewhere.

Within the repository: a file, and a heading in it. Elsewhere: https, at a host that is named here. Nothing is fetched.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

mistune = pytest.importorskip("mistune")  # the Markdown parser of nbconvert, and so of Jupyter

ROOT = Path(__file__).parents[2]
PLACES = ("*.md", "[!.]*/*.md", "slides/decks/*.md", "notebooks/*.ipynb")
DOCUMENTS = sorted({path for place in PLACES for path in ROOT.glob(place)})
HOSTS = ("arxiv.org", "marp.app")


def text_of(path: Path) -> str:
    if path.suffix == ".md":
        return path.read_text()
    cells = json.loads(path.read_text())["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def parse(text: str) -> list[dict]:
    return mistune.create_markdown(renderer="ast", plugins=["table", "url", "math"])(text)


def every(tokens: list[dict]) -> Iterator[dict]:
    """The tokens, and those within them."""
    for token in tokens:
        yield token
        yield from every(token.get("children", []))


def links(text: str) -> list[str]:
    return [token["attrs"]["url"] for token in every(parse(text)) if token["type"] in ("link", "image")]


def anchors(text: str) -> list[str]:
    """What GitHub calls each heading.

    >>> anchors("# In *one* line\\n\\n## What `zero1.py` adds, and why")
    ['in-one-line', 'what-zero1py-adds-and-why']
    """
    headings = [token for token in every(parse(text)) if token["type"] == "heading"]
    words = ["".join(part.get("raw", "") for part in every([heading])) for heading in headings]
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in words]


def wrong(link: str, path: Path) -> str | None:
    """What is wrong with a link that stands in the file `path`."""
    url = urlsplit(link)
    if url.scheme == "figure" and path.parent.name == "decks":
        return None  # a picture by name: assemble.py draws it, tests/pages/test_slides.py looks for it
    if url.scheme or url.netloc:
        if url.scheme != "https" or url.netloc not in HOSTS:
            return "not https at a host of HOSTS"
        if url.netloc == "arxiv.org" and not re.fullmatch(r"/abs/\d{4}\.\d{5}", url.path):
            return "not an abstract's address"
        return None
    target = path.parent / unquote(url.path) if url.path else path
    if not target.exists():
        return "no such file"
    if url.fragment and url.fragment not in anchors(text_of(target)):
        return "no such heading"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path):
    assert [(link, why) for link in links(text_of(path)) if (why := wrong(link, path))] == []


def test_links_are_found_wherever_they_stand():
    text = "| a |\n|---|\n| [b](c) |\n\n- [d][e] ![f](g) `[h](i)` https://j.k $[l](m)$\n\n[e]: n"
    assert links(text) == ["c", "n", "g", "https://j.k"]


@pytest.mark.parametrize(
    "link, why",
    [
        ("here.md", None),
        ("here.md#in-one-line", None),
        ("#in-one-line", None),
        ("https://arxiv.org/abs/1910.02054", None),
        ("there.md", "no such file"),
        ("here.md#in-two-lines", "no such heading"),
        ("#in-two-lines", "no such heading"),
        ("http://arxiv.org/abs/1910.02054", "not https at a host of HOSTS"),
        ("https://arxiv.org.example.com/abs/1910.02054", "not https at a host of HOSTS"),
        ("https://arxiv.org/pdf/1910.02054", "not an abstract's address"),
        ("figure:states", "not https at a host of HOSTS"),
    ],
)
def test_a_wrong_link_is_found(link, why, tmp_path):
    here = tmp_path / "here.md"
    here.write_text("## In *one* line\n")
    assert wrong(link, here) == why
