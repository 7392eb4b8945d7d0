"""What lessons call: the first cell and the sliders; and the addresses where lessons can be opened."""

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


def repository() -> str:
    """The address in pyproject.toml; Python 3.10 has no tomllib."""
    line = r'^Repository = "https://github\.com/([\w.-]+/[\w.-]+)"'
    return re.search(line, (ROOT / "pyproject.toml").read_text(), re.M)[1]


def test_the_readme_lists_every_lesson_with_its_time_and_two_badges():
    rows = re.findall(r"^\| `(\d\d_\w+)` \|.*\| \d+ min \| (.*) \|$", (ROOT / "README.md").read_text(), re.M)
    assert [name for name, _ in rows] == [path.stem for path in LESSONS]
    for name, badges in rows:
        file = f"{repository()}/blob/main/notebooks/{name}.ipynb"
        assert badges == (
            f"[![Colab][colab]](https://colab.research.google.com/github/{file}) "
            f"[![Kaggle][kaggle]](https://kaggle.com/kernels/welcome?src=https://github.com/{file})"
        )


@pytest.mark.parametrize("path", [ROOT / "README.md", *LESSONS], ids=lambda path: path.stem)
def test_the_repository_has_the_address_that_pyproject_gives(path):
    found = set(re.findall(r"github(?:\.com)?/([\w.-]+/zero_mini)\b", path.read_text()))
    assert found == {repository()}, "`make address` writes pyproject.toml's address into README.md and the lessons"
