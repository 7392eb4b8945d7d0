"""The lessons as they are committed: executed in order, clean, small; their exercises can be done and can be failed.

That they still run and print what is committed is checked by `pytest --nbval notebooks`, beside these tests.
"""

import copy
import re
from pathlib import Path
from statistics import median

import pytest

nbformat = pytest.importorskip("nbformat")

LESSONS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
LEAKS = re.compile(r"/home/|/root/|/tmp/|/Users/|[A-Z]:\\\\|Warning")


@pytest.fixture(params=LESSONS, ids=lambda path: path.stem)
def lesson(request):
    return nbformat.read(request.param, as_version=4)


def code_cells(lesson) -> list:
    return [cell for cell in lesson.cells if cell.cell_type == "code"]


def tagged(lesson, tag: str) -> list:
    return [cell for cell in code_cells(lesson) if tag in cell.metadata.get("tags", [])]


def test_cells_were_run_once_in_order_without_an_error(lesson):
    cells = code_cells(lesson)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not [out for cell in cells for out in cell.outputs if out.output_type == "error"]
    assert any("image/png" in out.get("data", {}) for cell in cells for out in cell.outputs)


def test_nothing_of_the_machine_is_left_in_the_file(lesson):
    assert set(lesson.metadata) <= {"kernelspec", "language_info"}
    for cell in code_cells(lesson):
        for out in cell.outputs:
            shown = out.get("text", "") + str({k: v for k, v in out.get("data", {}).items() if k != "image/png"})
            assert not LEAKS.search(shown), shown
            assert out.get("name") != "stderr", shown


def test_a_lesson_is_small_and_so_are_its_cells(lesson):
    lengths = [len([line for line in cell.source.splitlines() if line.strip()]) for cell in code_cells(lesson)]
    assert median(lengths) <= 5 and max(lengths) <= 20
    assert len(nbformat.writes(lesson)) < 300_000


def cleared(lesson):
    """The student's copy, as `make student` writes it."""
    clear = pytest.importorskip("nbgrader.preprocessors").ClearSolutions(enforce_metadata=False)
    return clear.preprocess(copy.deepcopy(lesson), {})[0]


def test_each_exercise_has_a_hint_a_stub_and_a_check(lesson):
    exercises, checks = tagged(lesson, "exercise"), tagged(lesson, "check")
    assert len(exercises) == len(checks) == 3
    assert sum("<details><summary>Hint" in cell.source for cell in lesson.cells) == 3
    stubs = tagged(cleared(lesson), "exercise")
    for stub, exercise in zip(stubs, exercises):
        assert "raise NotImplementedError" in stub.source and "SOLUTION" not in stub.source
        solution = exercise.source.split("### BEGIN SOLUTION")[1].split("### END SOLUTION")[0]
        assert not any(line.strip() in stub.source for line in solution.splitlines() if line.strip())


def test_a_student_s_copy_runs_up_to_the_first_check_and_each_stub_fails_its_own(lesson, tmp_path):
    nbclient = pytest.importorskip("nbclient")
    copied = cleared(lesson)
    client = nbclient.NotebookClient(copied, timeout=120, allow_errors=True, resources={"metadata": {"path": tmp_path}})
    client.execute()
    failed = [cell for cell in code_cells(copied) for out in cell.outputs if out.output_type == "error"]
    assert failed == tagged(copied, "check")
    for cell in failed:
        assert "NotImplementedError" in str(cell.outputs)
