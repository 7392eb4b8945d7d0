"""Decks as they are built: code, numbers, pictures and sources put in where decks/*.md name them.

    python slides/assemble.py            decks/NAME.md -> build/NAME.md, for build.mjs to make HTML and PDF of

In a deck (Marp Markdown, https://marp.app):

    ```python zero_mini.zero1.Zero1.publish                the source of what has this name, its docstring too
    ```python zero_mini.script.Script.finish_reduction without docstring
    ```python zero_mini.comm.Comm.launch from "first" to "raise"   lines from one with these words to one with those
    ```text zero_mini.zero1 paragraph "time -->"           the paragraph of its docstring that begins so
    ```text said by hang                                   what a function of messages.py returns
    {{memory/memory/stages/0/peak_bytes:GB}}               a number of zero_mini/measured/memory.json, in GB
    ![words w:1168](figure:states)                         a picture of figures.py, 1168 of a slide's 1280 pixels wide
    <!-- _footer: "arXiv 1910.02054, section 5.1" -->      where the rest of the slide is from
    <!-- words -->                                         what the teacher says

A fence that names something is empty in the deck. The footer of the built slide also names every file that a number,
a picture or code came from, and the machine, so that nothing measured stands there without its source.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import io
import re
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

from zero_mini.course.lesson import recorded

HERE = Path(__file__).parent
BUILD = HERE / "build"
sys.path += [str(HERE.parent / "tests"), str(HERE.parent / "tests" / "book")]  # slides show tests too
SLIDES = range(12, 19)  # in a deck
WORDS = 15  # of notes, at least
SMALLEST_PX = 17  # letters of a picture, on a slide 1280 pixels wide
CODE_PX = (24, 22, 20, 18)  # sizes of code, of which theme.css has a class each
CODE_WIDTH_PX, LETTER = 1136, 0.6  # of a line; of a letter of Source Code Pro, for each pixel of its size
UNITS = {"kB": 1e3, "MB": 1e6, "GB": 1e9, "billion": 1e9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
FENCE = re.compile(r"^```(?P<language>\w+) +(?P<what>[^\n]+)\n(?P<body>.*?)^```$", re.M | re.S)
NUMBER = re.compile(r"\{\{(?P<path>[^{}:]+):(?P<form>[^{}]+)\}\}")
FIGURE = re.compile(r"!\[(?P<alt>[^\]]*)\]\(figure:(?P<name>[\w-]+)\)")
COMMENT = re.compile(r"<!--(.*?)-->", re.S)
FOOTER = re.compile(r"<!--\s*_footer:\s*\"(.*?)\"\s*-->", re.S)
CLASS = re.compile(r"<!--\s*_class:\s*(.*?)\s*-->")
DIRECTIVE = re.compile(r"\s*_?[a-z]\w*:\s")
QUANTITY = re.compile(r"\d[\d.,]*\s*(?:[kMGT]i?B|ms|us|%|x faster|TFLOP|tokens/s|billion)(?!\w)")
SOURCE = re.compile(r"arXiv \d{4}\.\d{5}|\.(?:py|md|json|ipynb)\b")
FILE = re.compile(r"(?:zero_mini|tests|notebooks|slides)/[\w./-]+\.(?:py|md|json|ipynb)")


class DeckError(ValueError):
    """What a deck names is not there, or a slide is not as slides have to be."""


@dataclass
class Slide:
    """One slide of a deck as it is written."""

    text: str
    sources: list[str] = field(default_factory=list)  # files that what was put in came from

    @property
    def title(self) -> str:
        found = re.search(r"^#+ (.*)$", self.text, re.M)
        return found[1] if found else self.text.strip()[:40]

    @property
    def notes(self) -> str:
        return "\n\n".join(c.strip() for c in COMMENT.findall(self.text) if not DIRECTIVE.match(c))

    @property
    def footer(self) -> str:
        found = FOOTER.search(self.text)
        return " ".join(found[1].split()) if found else ""

    @property
    def shown(self) -> str:
        """What is not a comment."""
        return COMMENT.sub("", self.text)


def read_deck(path: Path) -> tuple[str, list[Slide]]:
    """(front matter, slides) of a deck."""
    opening, front, body = re.split(r"^---$\n?", path.read_text(), maxsplit=2, flags=re.M)
    if opening.strip():
        raise DeckError(f"{path.name} has text before its front matter: begin with a line of ---")
    slides, lines, in_fence = [], [], False
    for line in body.splitlines():
        in_fence ^= line.startswith("```")
        if line == "---" and not in_fence:
            slides.append(Slide("\n".join(lines)))
            lines = []
        else:
            lines.append(line)
    return front, [*slides, Slide("\n".join(lines))]


def decks() -> list[Path]:
    return sorted((HERE / "decks").glob("*.md"))


# --- what is put in ---------------------------------------------------------------------------


def find(name: str):
    """The object of that dotted name; DeckError if there is none."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[cut:]:
            if attribute not in vars(found):  # not what a class only inherits
                raise DeckError(f"{'.'.join(parts[:cut])} has no {'.'.join(parts[cut:])}: the name has changed")
            found = vars(found)[attribute]
        return found
    raise DeckError(f"there is no module {parts[0]}")


def source_of(name: str) -> str:
    found = find(name)
    if isinstance(found, property):
        found = found.fget
    return textwrap.dedent(inspect.getsource(found)).rstrip()


def without_docstring(source: str) -> str:
    """The same definition less its docstring.

    >>> print(without_docstring('def f():\\n    \\"\\"\\"Says so.\\"\\"\\"\\n    return 1'))
    def f():
        return 1
    """
    definition = ast.parse(source).body[0]
    first = definition.body[0]
    if not (isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str)):
        raise DeckError(f"{definition.name} has no docstring to leave out")
    lines = source.splitlines()
    rest = lines[first.end_lineno :]
    while rest and not rest[0].strip():
        rest = rest[1:]
    return "\n".join(lines[: first.lineno - 1] + rest)


def lines_between(source: str, first: str, last: str) -> str:
    """From the line with the words `first` to the next one with `last`.

    >>> lines_between("a = 1\\nb = 2\\nc = 3", "b =", "c")
    'b = 2\\nc = 3'
    """
    lines = source.splitlines()
    begin = next((at for at, line in enumerate(lines) if first in line), None)
    end = next((at for at, line in enumerate(lines) if begin is not None and at >= begin and last in line), None)
    if end is None:
        raise DeckError(f"no lines from {first!r} to {last!r}")
    return textwrap.dedent("\n".join(lines[begin : end + 1]))


def paragraph(docstring: str, first: str) -> str:
    """The paragraph that begins with these words.

    >>> paragraph("One.\\n\\n  Two\\n  three.", "Two")
    'Two\\nthree.'
    """
    for found in re.split(r"\n\s*\n", docstring):
        if found.strip().startswith(first):
            return textwrap.dedent(found.strip("\n"))
    raise DeckError(f"no paragraph begins with {first!r}")


def fence(what: str) -> tuple[str, str]:
    """What a fence of a deck asks for -> (text, the file that it is from)."""
    if said := re.fullmatch(r"said by (\w+)", what):
        messages = importlib.import_module("messages")
        if said[1] not in vars(messages):
            raise DeckError(f"messages.py has no {said[1]}")
        return getattr(messages, said[1])(), "slides/messages.py"
    asked = re.fullmatch(
        r'(?P<name>[\w.]+)(?P<bare> without docstring)?(?: from "(?P<first>[^"]+)" to "(?P<last>[^"]+)")?'
        r'(?: paragraph "(?P<paragraph>[^"]+)")?',
        what,
    )
    if asked is None:
        raise DeckError(f"cannot read the fence {what!r}: see the head of assemble.py")
    file = Path(inspect.getsourcefile(inspect.getmodule(inspect.unwrap(as_function(find(asked["name"]))))))
    try:
        if asked["paragraph"]:
            text = paragraph(inspect.getdoc(find(asked["name"])), asked["paragraph"])
        else:
            text = source_of(asked["name"])
            text = without_docstring(text) if asked["bare"] else text
            text = lines_between(text, asked["first"], asked["last"]) if asked["first"] else text
    except DeckError as error:
        raise DeckError(f"{asked['name']}: {error}") from None
    return text, f"{file.parent.name}/{file.name}"


def as_function(found):
    return found.fget if isinstance(found, property) else found


def number(path: str, form: str) -> tuple[str, str]:
    """A measured number in words, and its source.

    >>> number("memory/memory/stages/0/peak_bytes", "GB")[0], number("parity/parity", "count")[0]
    ('2.26 GB', '60')
    """
    name, *keys = path.split("/")
    try:
        value = kept = recorded(name)
    except FileNotFoundError:
        raise DeckError(f"{path}: there is no zero_mini/measured/{name}.json") from None
    machine = kept.get("machine")
    for key in keys:
        if isinstance(value, list):  # rows are counted from 0
            value = dict(zip(map(str, range(len(value))), value))
        if key not in value:
            raise DeckError(f"{path}: measured/{name}.json has no {key!r} there, but {', '.join(list(value)[:6])}")
        value = value[key]
        machine = value.get("machine", machine) if isinstance(value, dict) else machine
    if form in UNITS:
        value = value / UNITS[form]
        shown = f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
        shown = f"{value:.2f}" if 1 <= value < 10 else f"{value:.1f}" if 10 <= value < 100 else shown
        return f"{shown} {form}", source(name, machine)
    if form == "count":
        return str(len(value)), source(name, machine)
    return format(value, form), source(name, machine)


def source(name: str, machine: dict) -> str:
    if "card" in machine:
        on = f"{machine['cards']} x {machine['card'].removeprefix('NVIDIA ')}"
    else:
        on = f"{machine['cores']} CPU cores"
    return f"zero_mini/measured/{name}.json: {on}, torch {machine['torch'].partition('+')[0]}"


def figure(alt: str, name: str) -> str:
    """Draw the picture of that name; an image that shows it. DeckError if its letters would be too small."""
    from figures import FIGURES

    width = re.search(r"\bw:(\d+)", alt)
    if width is None:
        raise DeckError(f"say how wide the picture {name} is: w:1168 is the whole slide")
    drawn = FIGURES[name].draw()
    letters = smallest_letters_px(drawn, int(width[1]))
    if letters < SMALLEST_PX:
        raise DeckError(
            f"the letters of {name} are {letters:.1f} pixels high at w:{width[1]}, and need {SMALLEST_PX}: "
            "make it wider, or its letters larger in figures.py"
        )
    folder = BUILD / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.svg").write_bytes(svg(drawn))
    return f"![{alt}](figures/{name}.svg)"


def picture_source(name: str) -> str:
    """A record's file and machine, or the file that FIGURES names. DeckError if there is no such picture."""
    from figures import FIGURES

    if name not in FIGURES:
        raise DeckError(f"figures.py has no {name!r}, but {', '.join(FIGURES)}")
    return FIGURES[name].source if ".py" in FIGURES[name].source else number(FIGURES[name].source, "count")[1]


def smallest_letters_px(drawn, width_px: int) -> float:
    """Of all that is written in the picture, when it is so wide."""
    from matplotlib.text import Text

    across_in = drawn.get_tightbbox().width + 0.1
    sizes = [t.get_fontsize() for t in drawn.findobj(Text) if t.get_text().strip() and t.get_visible()]
    return min(sizes) / 72 / across_in * width_px


def svg(drawn) -> bytes:
    """Letters as outlines: they look the same where their font is not installed."""
    import matplotlib

    written = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": "zero_mini"}):
        drawn.savefig(written, format="svg", bbox_inches="tight", pad_inches=0.05, metadata={"Date": None})
    return written.getvalue()


# --- decks ------------------------------------------------------------------------------------


def assemble(slide: Slide, pictures: bool = True) -> str:
    """The slide with everything put in. `pictures`: False leaves them out, which is quick."""

    def put_fence(match: re.Match) -> str:
        if match["body"].strip():
            raise DeckError(f"the fence {match['what']!r} is not empty: it would be replaced")
        text, came_from = fence(match["what"])
        note(came_from)
        return f"```{match['language']}\n{text}\n```"

    def put_number(match: re.Match) -> str:
        text, came_from = number(match["path"].strip(), match["form"].strip())
        note(came_from)
        return text

    def put_figure(match: re.Match) -> str:
        note(picture_source(match["name"]))
        return figure(match["alt"], match["name"]) if pictures else match[0]

    def note(came_from: str) -> None:
        if came_from not in slide.sources and came_from not in slide.footer:
            slide.sources.append(came_from)

    text = NUMBER.sub(put_number, slide.text)
    if "{{" in text:
        raise DeckError("a {{ that is no number: write {{FILE/KEY/KEY:FORM}}")
    text = with_code_size(FIGURE.sub(put_figure, FENCE.sub(put_fence, text)))
    footer = " · ".join(filter(None, [slide.footer, *slide.sources]))
    text = FOOTER.sub("", text)
    return f'{text}\n\n<!-- _footer: "{footer}" -->\n' if footer else text


def with_code_size(text: str) -> str:
    """The slide with the class of the largest code that fits, unless it names one; DeckError if none does."""
    lines = [line for block in re.findall(r"^```\w+\n(.*?)^```$", text, re.M | re.S) for line in block.splitlines()]
    asked = CLASS.search(text)
    if not lines or (asked and "code-" in asked[1]):
        return text
    widest = max(lines, key=len)
    size = next((size for size in CODE_PX if len(widest) * LETTER * size <= CODE_WIDTH_PX), None)
    if size is None:
        raise DeckError(f"a line of {len(widest)} characters does not fit: {widest.strip()!r}")
    both = " ".join(filter(None, [asked and asked[1], f"code-{size}"]))
    return f"<!-- _class: {both} -->\n{CLASS.sub('', text)}"


def problems(path: Path) -> list[str]:
    """What is wrong with a deck but for its pictures: one line each, with the slide's number and title."""
    _, slides = read_deck(path)
    found = []
    if len(slides) not in SLIDES:
        found.append(f"{path.name}: {len(slides)} slides; a lecture has {SLIDES.start} to {SLIDES.stop - 1}")
    for place, slide in enumerate(slides, start=1):
        where = f"{path.name}, slide {place} ({slide.title})"
        try:
            assemble(slide, pictures=False)
        except DeckError as error:
            found.append(f"{where}: {error}")
        if len(slide.notes.split()) < WORDS:
            found.append(f"{where}: {len(slide.notes.split())} words of notes; say at least {WORDS}")
        if place > 1 and not SOURCE.search(" ".join([slide.footer, *slide.sources])):
            found.append(f'{where}: no source: <!-- _footer: "arXiv ..., section ..." --> or a file of the project')
        if QUANTITY.search(slide.shown) and not SOURCE.search(slide.footer):
            found.append(f"{where}: {QUANTITY.search(slide.shown)[0]!r} is written by hand and has no source")
        for file in FILE.findall(slide.footer):
            if not (HERE.parent / file).exists():
                found.append(f"{where}: its source {file} does not exist")
    return found


def main() -> None:
    BUILD.mkdir(exist_ok=True)
    for old in BUILD.glob("*.md"):
        old.unlink()
    wrong = [line for path in decks() for line in problems(path)]
    for path in decks() if not wrong else []:
        front, slides = read_deck(path)
        built = []
        for place, slide in enumerate(slides, start=1):
            try:
                built.append(assemble(slide))
            except DeckError as error:
                wrong.append(f"{path.name}, slide {place} ({slide.title}): {error}")
        (BUILD / path.name).write_text(f"---\n{front}---\n" + "\n---\n".join(built))
        left = [f"slide {place}" for place, slide in enumerate(slides, start=1) if "TODO" in slide.text]
        print(f"{path.name}: {len(slides)} slides" + (f", TODO on {', '.join(left)}" if left else ""))
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
