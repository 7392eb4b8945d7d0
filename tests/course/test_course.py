"""What lessons call: the first cell and the sliders; and the table of lessons in the README."""

import re
from pathlib import Path

import pytest
from says import naming

from zero_mini.course import lesson

ROOT = Path(__file__).parents[2]
LESSONS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_the_first_cell_says_what_it_found(capsys, monkeypatch):
    monkeypatch.setattr(lesson, "NEEDED", ())
    lesson.say_what_is_here(ranks=10**6)
    said = r"Python 3\.\d+\.\d+\S*, torch 2\.\S+, \d+ cores; ranks run on the CPU and talk by gloo\.\n"
    assert re.fullmatch(said, capsys.readouterr().out)


def test_the_first_cell_says_how_to_install_what_is_missing(monkeypatch):
    monkeypatch.setattr(lesson, "NEEDED", ("matplotlib_of_nobody",))
    with pytest.raises(RuntimeError, match=naming("matplotlib_of_nobody", "pip install -e '.[lessons]'")):
        lesson.say_what_is_here()


@pytest.mark.parametrize("kind, last", [("all_reduce", 6), ("reduce_scatter", 3), ("all_gather", 3)])
def test_the_slider_stays_at_the_last_step(kind, last):
    pytest.importorskip("matplotlib")

    def shown(step: int) -> list[str]:
        return [text.get_text() for axes in lesson.ring_step(kind, 4, step).axes for text in axes.texts]

    assert shown(last) == shown(10) != shown(last - 1)
    assert len(lesson.ring_step(kind, 4, last + 1).texts) == len(lesson.ring_step(kind, 4, last).texts) + 1


def test_the_readme_lists_every_lesson_with_its_time():
    rows = re.findall(r"^\| \[`?(\d\d_\w+)`?\]\((\S+)\) \|.*\| \d+ min \|$", (ROOT / "README.md").read_text(), re.M)
    assert rows == [(path.stem, path.relative_to(ROOT).as_posix()) for path in LESSONS]


@pytest.mark.parametrize("path", [*ROOT.glob("*.md"), ROOT / "pyproject.toml", *LESSONS], ids=lambda path: path.name)
def test_no_link_has_a_placeholder(path):
    assert "OWNER" not in path.read_text()
