"""The lessons on real GPUs: the same cells print the same on NCCL as on the laptop where they were written.

pytest -m gpu tests/test_gpu_lessons.py --record zero_mini/measured      # two CUDA devices
"""

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

LESSONS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason=f"needs two GPUs, has {torch.cuda.device_count()}"),
]


def test_lessons_print_on_nccl_what_is_committed(record, tmp_path):
    pytest.importorskip("nbval")
    report = tmp_path / "cells.xml"
    command = [sys.executable, "-m", "pytest", "--nbval", "--nbval-current-env", "-q", "-m", "gpu or not gpu"]
    command += ["-p", "no:cacheprovider", f"--junitxml={report}", *map(str, LESSONS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580)
    cells = ElementTree.parse(report).getroot().iter("testcase")
    results: dict[str, dict[str, int]] = {}
    for cell in cells:
        lesson = results.setdefault(cell.get("classname").split(".")[-2], {"passed": 0, "failed": 0})
        lesson["failed" if len(cell) else "passed"] += 1
    record("lessons", {"cells": results})
    assert done.returncode == 0, done.stdout[-4000:]
    assert len(results) == len(LESSONS)
