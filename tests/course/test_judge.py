"""The judge of a student's my_zero.py: right files of two designs get all points, and each planted fault is named."""

import json
import linecache
import runpy
import sys
from pathlib import Path

import pytest

from zero_mini.course import judge as package
from zero_mini.course.judge import judge, mark_of
from zero_mini.course.judge.__main__ import main
from zero_mini.course.judge.checks import checks
from zero_mini.course.judge.trial import NAMES
from zero_mini.course.my_zero import begin, definitions, keep, solution
from zero_mini.course.ranks import Ranks

SOLUTION = Path(solution.__file__)
NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
OTHER = Path(__file__).with_name("other_designs.py")
SEND_0 = 'self.in_flight.append((i, grad, self.comm.all_reduce(grad, f"unit {i}")))'
POP = "        i, grad, work = self.in_flight.pop(0)\n"
SEND_1 = """            shard = self.slice_of(grad)
            self.in_flight.append((i, shard, grad, self.comm.reduce_scatter(shard, grad, f"unit {i}")))"""
GATHERS = "        for work in gathers:\n            work.wait()\n"
STEP_1 = '        gathers = [self.comm.all_gather(flat, shard.data, "flat") for'
STEP_1 += " flat, shard in zip(self.flats, self.shards)]\n"
BACKWARD_HOOK = "                module.register_full_backward_pre_hook(lambda *_, i=i: self.gather(i))\n"
WHOLE_STATES = """

class Zero1(Zero1):
    def __init__(self, model, make_optimizer):
        super().__init__(model, make_optimizer)
        self.whole = [nn.Parameter(flat) for flat in self.flats]
        self.optimizer = make_optimizer(self.whole)

    def step(self):
        for p, shard, flat in zip(self.whole, self.shards, self.flats):
            p.grad = torch.empty_like(flat)
            self.comm.all_gather(p.grad, shard.grad, "grad").wait()
        self.optimizer.step()
        self.optimizer.zero_grad()
"""
PILE = "\n\nclass Zero2(Zero2):\n    def arrived(self, i, _):\n        pass\n"
SAME_BUFFER = """

class Zero2(Zero2):
    def send(self, i):
        params, N = self.units[i], self.comm.world_size
        if not hasattr(self, "buffer"):
            self.buffer = self.flats[0].new_empty(max(len(flat) for flat in self.flats))
        grad = self.buffer[: len(self.flats[i])]
        grad.copy_(take_grads(params, N))
        shard = torch.empty_like(self.shards[i])
        self.in_flight.append((i, shard, grad, self.comm.reduce_scatter(shard, grad, f"unit {i}")))
"""
SUMS_FIRST = """

class Zero2(Zero2):
    def backward(self, loss, last=True):
        DDP.backward(self, loss, last)

    def send(self, i):
        if self.last:
            super().send(i)
"""
ROOT_AGAIN = "        self.send(len(self.units) - 1)\n"
TO_BITS, MICRO, WAITS, TRAFFIC, TRAFFIC_2, MEMORY, FROZEN, UNUSED, ON_3, ROUNDED, PEAK = range(11)

# (stage, what is replaced, by what, the check that finds it, the fault's kind)
PLANTED = {
    "sums": (0, SEND_0, "grad *= self.comm.world_size; " + SEND_0, TO_BITS, "summed"),
    "divided twice": (0, SEND_0, "grad /= self.comm.world_size; " + SEND_0, TO_BITS, "divided twice"),
    "frozen sent": (0, "if p.requires_grad and id(p)", "if id(p)", FROZEN, "error"),
    "root twice": (2, "        while self.in_f", ROOT_AGAIN + "        while self.in_f", TRAFFIC, "extra collectives"),
    "no import": (0, "self.optimizer.step()", "dist.barrier(); self.optimizer.step()", TO_BITS, "import"),
    "no copies": (0, "{name: p.detach().clone()", "{name: p.detach()", FROZEN, "not copies"),
    "no wait": (0, POP + "        work.wait()\n", POP, WAITS, "early"),
    "sends every micro-batch": (0, "if self.last:", "if True:", TRAFFIC_2, "every micro-batch"),
    "no root": (0, "[*units, (None, rest)]", "units", TO_BITS, "unchanged root"),
    "own gradients": (0, "self.comm.all_reduce(grad,", "self.comm.all_reduce(grad.clone(),", TO_BITS, "ranks differ"),
    "unused counts": (0, "            if missing:", "            if missing < 0:", UNUSED, "unused"),
    "no all-gather": (1, STEP_1 + GATHERS, "", TO_BITS, "one slice"),
    "no padding": (1, "(0, -len(flat) % N)", "(0, 0)", ON_3, "sizes"),
    "all-reduce": (1, SEND_1, SEND_1.replace("reduce_scatter(shard, grad,", "all_reduce(grad,"), TRAFFIC, "all-reduce"),
    "whole states": (1, None, WHOLE_STATES, MEMORY, "whole states"),
    "gathers not waited for": (1, GATHERS, "", WAITS, "early"),
    "keeps p.grad": (2, "        p.grad = None\n    return flat", "        pass\n    return flat", TO_BITS, "stale"),
    "pile": (2, None, PILE, PEAK, "pile"),
    "overwrites": (2, "p.grad = shard if p.grad is None else p.grad + shard", "p.grad = shard", MICRO, "micro-batches"),
    "buffer in flight": (2, None, SAME_BUFFER, WAITS, "early"),
    "sums first": (2, None, SUMS_FIRST, TRAFFIC_2, "summed before"),
    "stale slots": (3, "self.holds = [None, None]  # the", "pass  # the", TO_BITS, "unchanged"),
    "no gather in backward": (3, BACKWARD_HOOK, "", TO_BITS, "other block"),
    "root not gathered": (3, "            if not is_block:\n", "            if False:\n", TO_BITS, "unchanged root"),
    "slots of the first block": (3, "new_empty(max(sizes))", "new_empty(sizes[0])", ON_3, "sizes"),
    "slots are given": (3, "p.detach().clone()) for p in", "p.detach()) for p in", TO_BITS, "full parameters"),
    "kept whole": (3, "self.slots[i % 2][: len(self.flats[i])]", "self.flats[i]", MEMORY, "whole"),
}  # fmt: skip


@pytest.fixture(scope="module")
def pools():
    pools = {N: Ranks(N, timeout_s=60, device="cpu") for N in (2, 3, 4)}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("path", [SOLUTION, OTHER], ids=["solution", "other design"])
def test_right_files_of_two_designs_get_all_points(path, stage, pools):
    marks = [mark_of(pools[check.world_size], path, stage, check, {stage: 0}) for check in checks(stage)]
    assert [str(mark) for mark in marks if mark.fault] == []
    assert sum(mark.points for mark in marks) == sum(mark.of for mark in marks) >= 19


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_loses_points_and_is_named(fault, pools, tmp_path):
    stage, old, new, number, kind = PLANTED[fault]
    text = SOLUTION.read_text()
    assert old is None or text.count(old) >= 1
    wrong = tmp_path / "my_zero.py"
    wrong.write_text(text + new if old is None else text.replace(old, new, 1))
    check = checks(stage)[number]
    mark = mark_of(pools[check.world_size], wrong, stage, check, {stage: 0})
    assert mark.points == 0 < mark.of and mark.fault.kind == kind, mark


def test_a_file_is_graded_in_a_folder_of_its_own_and_the_report_is_json(tmp_path, monkeypatch):
    monkeypatch.setattr(package, "checks", lambda stage: checks(stage)[:1])
    path = tmp_path / "my_zero.py"
    path.write_text(SOLUTION.read_text())
    report = judge(path, [0, 1], show=False)
    found = json.loads(report.to_json())
    assert (found["points"], found["of"]) == (8, 8) and report.is_full
    assert [mark["class"] for mark in found["marks"]] == ["DDP", "Zero1"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["my_zero.py"]


@pytest.mark.parametrize("text, named", [("x = 1", "DDP"), ("class DDP(:", "invalid syntax"), (None, "No such file")])
def test_a_file_without_a_stage_is_refused_in_one_line(text, named, tmp_path, monkeypatch, capsys):
    path = tmp_path / "my_zero.py"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(sys, "argv", ["judge", str(path)])
    assert main() == 2
    said = capsys.readouterr().err
    assert named in said and len(said.splitlines()) == 1


def test_a_report_that_cannot_be_written_is_refused_before_grading(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["judge", str(SOLUTION), "--json", "/dev/null/report.json"])
    monkeypatch.setattr("zero_mini.course.judge.__main__.judge", lambda *_: pytest.fail("it graded"))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and "/dev/null/report.json" in capsys.readouterr().err.splitlines()[-1]


def test_make_grade_s_command_has_a_status(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["judge", str(tmp_path / "none.py")])
    monkeypatch.delitem(sys.modules, "zero_mini.course.judge.__main__")
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("zero_mini.course.judge", run_name="__main__")
    assert ended.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("lesson", range(1, 5))
def test_a_lesson_begins_with_the_classes_before_it_and_keeps_the_student_s_own(lesson, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = NAMES[: lesson - 1]
    module = begin(lesson)
    assert [name for name in NAMES if hasattr(module, name)] == list(names)
    keep(type_from_a_cell("class Zero9:\n    def step(self):\n        return 1"))
    keep(type_from_a_cell("class Zero9:\n    def step(self):\n        return 2"))  # the later one replaces it
    module = begin(lesson)
    assert module.Zero9().step() == 2 and list(definitions(Path("my_zero.py").read_text())).count("Zero9") == 1
    if names:  # a class that is only a stub is not the student's own
        keep(type_from_a_cell(f"class {names[-1]}:\n    def step(self):\n        raise NotImplementedError()"))
        assert hasattr(begin(lesson), names[-1]) and not hasattr(begin(lesson), "Zero9")
        keep(type_from_a_cell("class Zero8:\n    def step(self):\n        return 3"))
        assert "Zero9" in Path("my_zero.py.own").read_text()  # nothing is lost, whatever is written afterwards


def test_a_file_that_is_not_python_is_not_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my_zero.py").write_text(SOLUTION.read_text().replace("class Zero1(DDP):", "class Zero1(DDP)"))
    with pytest.raises(SyntaxError) as error:
        begin(3)
    assert error.value.filename == "my_zero.py" and "class Zero1(DDP)\n" in Path("my_zero.py").read_text()


@pytest.mark.parametrize(
    "said, kind",
    [("rank 0 died of SIGABRT", "died"), ("rank 1 raised NameError: name 'dist' is not defined", "import"),
     ("rank 1 raised RuntimeError: shapes do not fit", "sizes"), ("rank 1 raised KeyError: 'shape'", "error")],
)  # fmt: skip
def test_an_error_has_a_kind(said, kind):
    assert package.kind_of_error(said + "\n\nTraceback: RuntimeError: sizes") == kind


def test_an_error_comes_with_the_line_of_the_student_s_file(pools, tmp_path):
    wrong = tmp_path / "my_zero.py"
    lines = (
        SOLUTION.read_text().replace("        self.optimizer.step()\n", "        self.optimiser.step()\n").splitlines()
    )
    wrong.write_text("\n".join(lines))
    mark = mark_of(pools[2], wrong, 1, checks(1)[0], {1: 0})
    number = lines.index("        self.optimiser.step()") + 1
    assert mark.fault.kind == "error" and f"line {number}, in step" in mark.fault.came


def type_from_a_cell(source: str) -> type:
    """A class that was defined in a cell: it has no file, and linecache has its lines."""
    cell = f"<cell {hash(source)}>"
    linecache.cache[cell] = (len(source), None, source.splitlines(keepends=True), cell)
    names: dict = {}
    exec(compile(source, cell, "exec"), names)
    return next(value for value in names.values() if isinstance(value, type))


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("0[1-4]_*.ipynb")), ids=lambda path: path.stem)
def test_a_lesson_has_the_solution_of_its_stage(path):
    lines = [line for cell in json.loads(path.read_text())["cells"] for line in "".join(cell["source"]).splitlines()]
    code = "\n".join(line for line in lines if "SOLUTION" not in line)
    name = NAMES[int(path.stem[:2]) - 1]
    text = SOLUTION.read_text()
    node = definitions(text)[name]
    assert "\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno]) in code
