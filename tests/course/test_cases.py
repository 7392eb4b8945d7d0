"""The ten faults of lesson 09: what is recorded is what is planted, and the judge knows right from wrong."""

import re
from pathlib import Path

import pytest

from zero_mini.course import cases
from zero_mini.course.cases import FAULTS, NAMES, PLANTED, judge, observe, seen

NUMBERS = range(1, len(FAULTS) + 1)


def test_there_are_ten_faults_and_more_names():
    names = [name for name, *_ in FAULTS]
    assert len(FAULTS) == len(PLANTED) == 10 and len(set(names)) == 10
    assert set(names) < set(NAMES)


@pytest.mark.parametrize("number", NUMBERS)
def test_the_right_name_and_rank_alone_are_accepted(number):
    right, rank, look = FAULTS[number - 1]
    judge(number, (right, rank))
    for name in set(NAMES) - {right}:
        with pytest.raises(AssertionError, match=re.escape(look)) as error:
            judge(number, (name, rank))
        assert NAMES[name] in str(error.value) and right not in str(error.value)  # it does not give the answer away
    for other in {None, *range(cases.N)} - {rank, None if right == "ranks run units in another order" else rank}:
        with pytest.raises(AssertionError, match=re.escape(look)):
            judge(number, (right, other))


@pytest.mark.parametrize("answer", ["a rank died", ("a rank died",), ("it broke", 2)])
def test_an_answer_that_is_none_says_what_is_expected(answer):
    with pytest.raises(AssertionError, match=r"is not \(name, rank or None\)|none of the names"):
        judge(3, answer)


@pytest.mark.parametrize("number", NUMBERS)
def test_no_record_names_its_fault(number):
    for hint in (PLANTED[number - 1].__name__, FAULTS[number - 1][0], "/"):
        assert hint not in seen(number)


@pytest.mark.parametrize("number", [3, 4, 6, 7, 10])  # those that say the same in every run, and wait for nobody
def test_what_is_recorded_is_what_is_planted(number):
    def lasting(text):  # without the ports of connections, and the lines of call stacks
        return re.sub(r"\[[\d.:]+\]:\d+", "", text.split("Traceback")[0]).splitlines()[:1]

    assert lasting(observe(number)) == lasting(seen(number))


@pytest.mark.parametrize("number", [1, 6, 8])  # the reports with a call stack
def test_a_report_quotes_the_lines_that_were_planted(number):
    script = Path(cases.__file__).read_text()
    frames = re.findall(r'File "cases\.py", line \d+, in (\w+)\n    (.*)', seen(number))
    assert len(frames) == seen(number).count('"cases.py"') > 0, "a line of the script is missing: record it again"
    assert [line for _, line in frames if line.strip() not in script] == []
    assert all(f"{name}(" not in line for name, line in frames), "a line of another function: record it again"
