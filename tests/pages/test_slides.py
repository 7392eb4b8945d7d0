"""The lecture slides: what a deck names exists, every slide has notes and a source, and what is built can be shown.

Pictures and error messages are made here too; HTML and PDF where Node.js, slides/node_modules and a browser are.
"""

import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from says import naming, tells

ROOT = Path(__file__).parents[2]
SLIDES = ROOT / "slides"
DECKS = sorted((SLIDES / "decks").glob("*.md"))


@pytest.fixture(scope="module")
def assemble():
    """slides/assemble.py; its neighbours are found from it."""
    sys.path.insert(0, str(SLIDES))
    yield importlib.import_module("assemble")
    sys.path.remove(str(SLIDES))


@pytest.fixture
def deck(tmp_path, assemble):
    """Write a deck of 12 good slides with one more: what is wrong with it?"""

    def problems(slide: str) -> list[str]:
        good = '# Good\n\n<!-- _footer: "arXiv 1910.02054, section 5" -->\n<!-- ' + "word " * 20 + "-->\n"
        path = tmp_path / "9_deck.md"
        path.write_text("---\nmarp: true\n---\n" + "\n---\n\n".join([*[good] * 12, slide]))
        return assemble.problems(path)

    return problems


NOTES = "\n<!-- " + "word " * 20 + "-->\n"
SOURCE = '\n<!-- _footer: "arXiv 1910.02054, section 5" -->\n'


def test_there_are_five_decks_in_order():
    assert [path.name[:2] for path in DECKS] == [f"{place}_" for place in range(1, len(DECKS) + 1)]
    assert len(DECKS) >= 5


@pytest.mark.parametrize("path", DECKS, ids=lambda path: path.stem)
def test_what_a_deck_names_exists_and_its_slides_have_notes_and_sources(assemble, path):
    assert assemble.problems(path) == []


def test_nothing_is_left_to_write():
    assert not [path.name for path in DECKS if "TODO" in path.read_text()]


@pytest.mark.parametrize("path", DECKS, ids=lambda path: path.stem)
def test_a_deck_is_self_contained(path):
    """No address to fetch from, no HTML, and the settings that the theme needs."""
    text = path.read_text()
    assert not re.search(r"https?://|<img|<script|url\(", text)
    front = text.split("---")[1]
    assert "theme: zero_mini" in front and "paginate: true" in front and "marp: true" in front


def test_the_readme_lists_the_decks():
    listed = re.findall(r"^\| `(\d_\w+)` \|", (SLIDES / "README.md").read_text(), re.M)
    assert listed == [path.stem for path in DECKS]


# --- the checks themselves --------------------------------------------------------------------


def test_a_good_slide_is_good(deck):
    assert deck("# Fine\n" + SOURCE + NOTES) == []


@pytest.mark.parametrize(
    "wrong, things",
    [
        ("```python zero_mini.zero1.Zero1.publishes\n```\n", ["Zero1.publishes"]),
        ("```python zero_mini.zero3.Zero3.no_sync\n```\n", ["Zero3.no_sync"]),  # it is Zero2's
        ("```python zero_mini.zero4.Zero4\n```\n", ["zero4.Zero4"]),
        ('```python zero_mini.comm.Comm.launch from "if nothing" to "return"\n```\n', ["'if nothing'"]),
        ('```text zero_mini.zero1 paragraph "space -->"\n```\n', ["'space -->'"]),
        ("```python zero_mini.zero1.Zero1.publish\nold code\n```\n", []),
        ("```text said by nobody\n```\n", ["messages.py", "nobody"]),
        ("{{memory/memory/stages/7/peak_bytes:GB}}", ["'7'", "0, 1, 2, 3"]),
        ("{{memories/peak_bytes:GB}}", ["zero_mini/measured/memories.json"]),
        ("{{memory}}", ["{{"]),
        ("![w:900](figure:stats)", ["figures.py", "'stats'"]),
    ],
)
def test_a_name_that_is_gone_fails(deck, wrong, things):
    (found,) = deck(f"# Wrong\n\n{wrong}{SOURCE}{NOTES}")
    assert tells(found, "9_deck.md", 13, "Wrong", *things)


@pytest.mark.parametrize(
    "slide, told",
    [
        ("# No source\n" + NOTES, "source"),
        ("# A number\n\nIt takes 12 GB.\n\n{{memory/memory/stages/0/peak_bytes:GB}}\n" + NOTES, "12 GB"),
        ('# Gone\n\n<!-- _footer: "zero_mini/zero4.py" -->\n' + NOTES, "zero_mini/zero4.py"),
        ("# Silent\n" + SOURCE, "notes"),
    ],
)
def test_a_slide_without_source_or_notes_fails(deck, slide, told):
    (found,) = deck(slide)
    assert told in found


def test_a_deck_has_twelve_to_eighteen_slides(deck):
    slide = "# Fine\n" + SOURCE + NOTES
    assert deck("\n---\n\n".join([slide] * 6)) == []
    (found,) = deck("\n---\n\n".join([slide] * 7))
    assert tells(found, 19, 12, 18)


def test_the_footer_names_what_was_put_in_and_the_machine(assemble):
    number, code = "{{memory/memory/stages/0/peak_bytes:GB}}", "```python zero_mini.zero1.Zero1.publish\n```"
    slide = assemble.Slide(f'{number}\n\n{code}\n<!-- _footer: "a" -->')
    built = assemble.assemble(slide)
    footer = assemble.Slide(built).footer
    assert footer == "a · zero_mini/measured/memory.json: 2 x H200, torch 2.11.0 · zero_mini/zero1.py"
    assert "2.26 GB" in built and "def publish(self, unit: Unit) -> None:" in built


def test_code_is_as_large_as_its_longest_line_allows(assemble):
    assert "code-24" in assemble.with_code_size("```python\n" + "x" * 78 + "\n```")
    assert "question code-18" in assemble.with_code_size("<!-- _class: question -->\n```python\n" + "x" * 105 + "\n```")
    with pytest.raises(assemble.DeckError, match=naming(106)):
        assemble.with_code_size("```python\n" + "x" * 106 + "\n```")


# --- what is built ----------------------------------------------------------------------------


def figures_used() -> list[tuple[str, int]]:
    found = [re.findall(r"w:(\d+)\]\(figure:([\w-]+)\)", path.read_text()) for path in DECKS]
    return sorted({(name, int(width)) for deck in found for width, name in deck})


@pytest.mark.parametrize("name, width", figures_used())
def test_a_picture_can_be_drawn_and_read_from_the_back_row(assemble, name, width):
    pytest.importorskip("matplotlib")
    from test_plots import check_layout

    drawn = importlib.import_module("figures").FIGURES[name].draw()
    check_layout(drawn, grows=True)
    assert assemble.smallest_letters_px(drawn, width) >= assemble.SMALLEST_PX


def test_every_picture_is_shown_somewhere(assemble):
    pytest.importorskip("matplotlib")
    assert set(importlib.import_module("figures").FIGURES) == {name for name, _ in figures_used()}


def test_the_lock_file_names_exact_versions_and_no_registry():
    wanted = json.loads((SLIDES / "package.json").read_text())["devDependencies"]
    lock = (SLIDES / "package-lock.json").read_text()
    locked = json.loads(lock)["packages"]
    assert all(locked[f"node_modules/{name}"]["version"] == version for name, version in wanted.items())
    assert all(entry.get("integrity") for path, entry in locked.items() if path)
    assert '"resolved"' not in lock


@pytest.mark.timeout(900)  # two browsers, each for all slides
def test_decks_become_html_and_pdf_that_a_browser_can_show():
    """The whole of `make slides`, as it is run there."""
    if shutil.which("node") is None:
        pytest.skip("Node.js is not installed: slides are not built here")
    if not (SLIDES / "node_modules").is_dir():
        pytest.skip("slides/node_modules is not there: `npm ci` in slides/, or `make slides`")
    pytest.importorskip("matplotlib")
    look = ["node", "-e", "import('./browser.mjs').then(({findBrowser}) => findBrowser([]))"]
    if subprocess.run(look, cwd=SLIDES, capture_output=True).returncode:
        pytest.skip("no Chrome or Chromium is installed: slides are not built here")
    for command in ([sys.executable, "assemble.py"], ["node", "build.mjs"], ["node", "check.mjs"]):
        done = subprocess.run(command, cwd=SLIDES, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    for path in DECKS:
        html = (SLIDES / "build" / f"{path.stem}.html").read_text()
        assert "data:font/woff2" in html and 'src="figures/' not in html
        assert (SLIDES / "build" / f"{path.stem}.pdf").stat().st_size > 10_000
