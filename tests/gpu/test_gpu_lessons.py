"""The lessons on real GPUs: the same cells print the same on NCCL as on the laptop where they were written.

pytest -m gpu tests/gpu/test_gpu_lessons.py --record zero_mini/measured      # two CUDA devices
"""

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from conftest import write

LESSONS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason=f"needs two GPUs, has {torch.cuda.device_count()}"),
]


@pytest.fixture(scope="module")
def cells(request):
    """Per lesson, how many of its cells printed what is committed, and how many did not."""
    found: dict[str, dict[str, int]] = {}
    yield found
    write(request.config, "lessons", {"cells": found}, cards=2)


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.stem)
def test_a_lesson_prints_on_nccl_what_is_committed(lesson, cells, tmp_path):
    pytest.importorskip("nbval")
    report = tmp_path / "cells.xml"
    command = [sys.executable, "-m", "pytest", "--nbval", "--nbval-current-env", "-q", "-m", "gpu or not gpu"]
    command += ["-p", "no:cacheprovider", f"--junitxml={report}", str(lesson)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580)
    results = list(ElementTree.parse(report).getroot().iter("testcase"))
    failed = sum(len(cell) > 0 for cell in results)
    cells[lesson.stem] = {"passed": len(results) - failed, "failed": failed}
    assert done.returncode == 0, done.stdout[-4000:]
