"""Grade a student's my_zero.py from outside: values, waits, traffic and memory. The protocol is docs/my_zero.md.

    judge("my_zero.py", stages=[1])           in a lesson: prints a line a check, returns the Report
    make grade FILE=my_zero.py                all stages in the file; --json for a classroom tool

A check looks at what the code cannot report about itself: parameters against torch DDP's, elements that torch hands to
the backend, bytes of all tensors alive. How the code does it (layout, number of buffers, overlap) is not judged.
"""

import ast
import contextlib
import json
import os
import re
import shutil
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

from zero_mini.course.judge.checks import Check, Fault, checks
from zero_mini.course.judge.trial import NAMES
from zero_mini.course.ranks import RankError, Ranks

TIMEOUT_S = 60.0  # of one run; a right file needs a second
HANGS = 2  # after so many runs that did not end, or an error in the first, the rest of a stage is not tried


@dataclass(frozen=True)
class Mark:
    """A check's result."""

    stage: int
    check: str
    points: int
    of: int
    fault: Fault | None
    found: str = ""  # the number that was measured, of a right file

    def __str__(self) -> str:
        line = (
            f"{'ok   ' if self.fault is None else 'WRONG'} {self.points}/{self.of}  {NAMES[self.stage]}: {self.check}"
        )
        if self.fault is None:
            return f"{line}: {self.found}" if self.found else line
        if self.fault.kind == "not run":
            return f"{line}: not run, {self.fault.meaning}"
        return f"{line}\n      expected {self.fault.expected}; came {self.fault.came}\n      -> {self.fault.meaning}"


@dataclass
class Report:
    """All marks of a file."""

    marks: list[Mark] = field(default_factory=list)

    @property
    def points(self) -> int:
        return sum(mark.points for mark in self.marks)

    @property
    def of(self) -> int:
        return sum(mark.of for mark in self.marks)

    @property
    def is_full(self) -> bool:
        return self.points == self.of > 0

    def __str__(self) -> str:
        return "\n".join([*map(str, self.marks), f"{self.points} of {self.of} points"])

    def to_json(self) -> str:
        marks = [{**asdict(mark), "class": NAMES[mark.stage]} for mark in self.marks]
        return json.dumps({"points": self.points, "of": self.of, "marks": marks}, indent=1)


def judge(path: str | os.PathLike, stages: list[int] | None = None, show: bool = True) -> Report:
    """Run all checks of these stages (None: those whose classes the file has), in a temporary folder.

    FileNotFoundError, SyntaxError, or ValueError if the file has none of the four classes.
    """
    names = {node.name for node in ast.parse(Path(path).read_text()).body if isinstance(node, ast.ClassDef)}
    if stages is None:
        stages = [stage for stage, name in enumerate(NAMES) if name in names]
    missing = [NAMES[stage] for stage in stages if NAMES[stage] not in names]
    if missing or not stages:
        raise ValueError(f"no class {' or '.join(missing or NAMES)} in it: docs/my_zero.md has the protocol")
    report = Report()
    hangs = dict.fromkeys(stages, 0)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as exits:
        copy = shutil.copy(path, Path(folder) / "my_zero.py")
        pools = {N: exits.enter_context(Ranks(N, TIMEOUT_S, device="cpu")) for N in (2, 3, 4)}  # started when used
        for stage in stages:
            for check in checks(stage):
                mark = mark_of(pools[check.world_size], copy, stage, check, hangs)
                report.marks.append(mark)
                if show:
                    print(mark)
    if show:
        if not report.is_full:
            print("Begin with the first WRONG: later ones often have the same cause.")
        print(f"{report.points} of {report.of} points")
    return report


def mark_of(ranks: Ranks, path: str, stage: int, check: Check, hangs: dict[int, int]) -> Mark:
    """Run one check; an error of the student's code is a fault like any other."""
    if hangs[stage] >= HANGS:
        fault = Fault("not run", "an end", "errors in earlier runs")
    else:
        try:
            with contextlib.redirect_stdout(None):
                fault = check.run(ranks, path, stage)
        except RankError as error:
            did_not_end = "did not finish" in str(error)
            hangs[stage] += HANGS if check.name == checks(stage)[0].name else did_not_end
            kind = "hang" if did_not_end else kind_of_error(str(error))
            fault = Fault(kind, "an end without an error", in_one_line(str(error)))
    found = "" if fault or not check.found else check.found(ranks, path, stage)
    return Mark(stage, check.name, 0 if fault else check.points, check.points, fault, found)


def kind_of_error(report: str) -> str:
    """Of a rank's error: gloo gave up, a name is missing, torch refused a tensor for its size, or another."""
    first = report.strip().splitlines()[0]
    if "died of SIGABRT" in first:
        return "died"
    if "NameError" in first:
        return "import"
    return "sizes" if "RuntimeError" in first and re.search("size|shape|split", first, re.IGNORECASE) else "error"


def in_one_line(report: str) -> str:
    """A rank's error, and the line of the student's file where it was raised; for a hang the line of each rank."""
    first, *rest = report.strip().splitlines()
    places, rank = {}, ""
    for line in rest:
        if begins := re.match(r"rank \d+ is at", line):
            rank = begins.group() + " "
        if found := re.search(r'my_zero\.py", line (\d+), in (\w+)', line):
            places.setdefault(rank, []).append(f"line {found[1]}, in {found[2]}")
    innermost = [f"{rank}my_zero.py, " + " -> ".join(lines[-2:]) for rank, lines in places.items()]  # and its caller
    return "; ".join([first.rstrip("."), *innermost])
