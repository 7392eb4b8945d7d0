"""The lessons as they are committed: executed in order, clean, small; their exercises can be done and can be failed.

That they still run and print what is committed, solutions included, is checked by `pytest --nbval notebooks`, beside
these tests.
"""

import ast
import copy
import re
import symtable
from pathlib import Path
from statistics import median

import pytest

nbformat = pytest.importorskip("nbformat")

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
LESSONS = sorted(NOTEBOOKS.glob("*.ipynb"))
LEAKS = re.compile(r"(?<![\w.:/])/(home|root|tmp|Users|opt|usr|work|var|mnt)/|[A-Z]:\\|warning|\bat 0x", re.I)
SHORTER = {  # what a check needs, and whose length or size a stub cannot tell
    "has_master=True, scale=1.0, steps=500": "has_master=True, scale=1.0, steps=50",
    "ranks.run(train_by_hand, 30)": "ranks.run(train_by_hand, 3)",
    "ranks.run(train, stage, 30)": "ranks.run(train, stage, 3)",
    "run(ours, n)[0] for n in (2, 3, 4)": "run(ours, n)[0] for n in (2,)",
}


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
    for cell in lesson.cells:
        assert set(cell.metadata) <= {"tags"}
        assert not LEAKS.search(cell.source), cell.source
    for out in (out for cell in code_cells(lesson) for out in cell.outputs):
        data = out.get("data", {})
        assert set(data) <= {"text/plain", "image/png"}  # no widget, whose state would have to be here too
        shown = out.get("text", "") + data.get("text/plain", "")
        assert not LEAKS.search(shown), shown
        assert out.get("name") != "stderr", shown


def test_what_is_a_leak_is_found_and_what_is_none_is_not():
    leaks = ("/tmp/x.py:3: UserWarning: no", r"C:\Users", "saved '/home/me/a.png'", "<object at 0x7f>")
    for text in leaks:
        assert LEAKS.search(text), text
    for text in ("https://example.org/home/tmp/", "P/N numbers", "notebooks/tmp/"):
        assert not LEAKS.search(text), text


def test_only_tagged_cells_print_long_fractions_as_losses_and_times_are(lesson):
    for cell in code_cells(lesson):
        if "nbval-ignore-output" not in cell.metadata.get("tags", []):
            for out in cell.outputs:
                shown = out.get("text", "") + out.get("data", {}).get("text/plain", "")
                assert not re.search(r"\d\.\d{3}|\de-?\d", shown), shown


def test_a_lesson_is_small_and_so_are_its_cells(lesson):
    given = [cell for cell in code_cells(lesson) if "exercise" not in cell.metadata.get("tags", [])]
    lengths = [len([line for line in cell.source.splitlines() if line.strip()]) for cell in given]
    assert median(lengths) <= 5 and max(lengths) <= 20
    assert len(nbformat.writes(lesson)) < 300_000


def test_a_lesson_asks_for_a_prediction_and_its_first_cell_looks_at_the_installation(lesson):
    assert any("**Predict before you run:**" in " ".join(cell.source.split()) for cell in lesson.cells)
    first = code_cells(lesson)[0]
    assert "say_what_is_here()" in first.source and "nbval-ignore-output" in first.metadata.tags


def test_each_term_of_the_glossary_is_in_the_lesson_that_it_names():
    rows = re.findall(r"^\| (.+?) \| .+ \| .+ \| (\d\d) \|$", (NOTEBOOKS / "GLOSSARY.md").read_text(), re.M)
    terms = [(term, number) for row, number in rows for term in row.split(", ")]
    assert terms and len(dict(terms)) == len(terms)  # no term twice
    words = {}
    for path in LESSONS:
        cells = nbformat.read(path, as_version=4).cells
        words[path.stem[:2]] = " ".join(" ".join(cell.source for cell in cells if cell.cell_type == "markdown").split())
    for term, number in terms:
        assert re.search(rf"(?<![\w-]){re.escape(term)}", words[number], re.I), f"lesson {number} does not say {term}"


def cleared(lesson):
    """The student's copy, as `make student` writes it."""
    clear = pytest.importorskip("nbgrader.preprocessors").ClearSolutions(enforce_metadata=False)
    return clear.preprocess(copy.deepcopy(lesson), {})[0]


def test_each_exercise_has_a_hint_a_stub_and_a_check(lesson):
    exercises, checks = tagged(lesson, "exercise"), tagged(lesson, "check")
    assert len(exercises) == len(checks) == 3
    assert sum("<details><summary>Hint" in cell.source for cell in lesson.cells) == 3
    student = cleared(lesson)
    assert not any("SOLUTION" in cell.source for cell in student.cells)
    for stub, exercise in zip(tagged(student, "exercise"), exercises):
        assert "raise NotImplementedError" in stub.source
        solution = exercise.source.split("### BEGIN SOLUTION")[1].split("### END SOLUTION")[0]
        assert not any(line.strip() in stub.source for line in solution.splitlines() if line.strip())
    for check in checks:
        assert "assert " in check.source


def names(cell) -> tuple[set[str], set[str]]:
    """(names of the notebook that a cell reads, names that it binds or changes); those of its loops are its own.

    >>> reads, binds = names(nbformat.v4.new_code_cell("for x in z: A.b = lambda y: x + y"))
    >>> sorted(reads), sorted(binds)
    (['A', 'z'], ['A'])
    """
    code = re.sub("^%.*", "", cell.source, flags=re.M)
    scopes, reads, loops = [symtable.symtable(code, "", "exec")], set(), set()
    binds = {symbol.get_name() for symbol in scopes[0].get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Attribute(value, ctx=ast.Store()) | ast.Subscript(value, ctx=ast.Store()):
                binds.add(ast.unparse(value))
            case ast.Call(ast.Name("setattr"), [owner, *_]):
                binds.add(ast.unparse(owner))
            case ast.For():
                loops |= {name.id for name in ast.walk(node.target) if isinstance(name, ast.Name)}
    for scope in scopes:
        reads |= {symbol.get_name() for symbol in scope.get_symbols() if symbol.is_referenced() and symbol.is_global()}
        scopes += scope.get_children()
    return reads - loops, binds - loops


def around_exercises(lesson) -> list:
    """Exercises and checks, the cells after them that read what these bind, and all that these cells need."""
    cells, theirs = [(cell, *names(cell)) for cell in code_cells(lesson)], set()
    chosen = []
    for cell, reads, binds in cells:
        if {"exercise", "check"} & set(cell.metadata.get("tags", [])) or reads & theirs:
            chosen.append((cell, reads, binds))
            theirs |= binds
    while True:  # a function may need what is defined after it
        needed = set().union(*(reads for _, reads, _ in chosen))
        more = [entry for entry in cells if entry[2] & needed and entry not in chosen]
        if not more:
            return [entry[0] for entry in cells if entry in chosen]
        chosen += more


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """One for all lessons: to import torch takes longer than most of them. Each begins with %reset."""
    nbclient = pytest.importorskip("nbclient")
    place = {"metadata": {"path": tmp_path_factory.mktemp("kernel")}}
    starter = nbclient.NotebookClient(nbformat.v4.new_notebook(), resources=place)
    manager = starter.create_kernel_manager()
    starter.start_new_kernel()
    starter.start_new_kernel_client()
    yield manager
    starter._cleanup_kernel()


def test_the_trainings_that_are_shortened_are_there():
    sources = [cell.source for path in LESSONS for cell in code_cells(nbformat.read(path, as_version=4))]
    assert all(any(long in source for source in sources) for long in SHORTER)


def test_in_a_student_s_copy_each_stub_fails_its_check_and_nothing_else_fails(lesson, kernel):
    """All that a stub can reach is run: the other cells are those of the lesson, which nbval runs, in full length."""
    nbclient = pytest.importorskip("nbclient")
    copied = cleared(lesson)
    for cell in code_cells(copied):
        for long, short in SHORTER.items():
            cell.source = cell.source.replace(long, short)
    copied.cells = [nbformat.v4.new_code_cell("%reset -f"), *around_exercises(copied)]
    nbclient.NotebookClient(copied, km=kernel, timeout=120, allow_errors=True).execute()
    failed = [cell for cell in code_cells(copied) for out in cell.outputs if out.output_type == "error"]
    said = [f"{out.ename}: {out.evalue}" for cell in failed for out in cell.outputs if out.output_type == "error"]
    assert failed == tagged(copied, "check"), "\n".join(said)
    for cell in failed:
        assert "NotImplementedError" in str(cell.outputs)
