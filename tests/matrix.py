"""Other Pythons, other releases of torch: a quick part of the tests on each pair. `make matrix` runs this.

    python tests/matrix.py --python 3.12 --torch 2.9 newest

Each pair gets a virtual environment of its own, by pip alone, which is gone afterwards. A Python is the `python3.12`
of the PATH. On Linux pip's own index has torch with CUDA, several GB; these tests need none of it:

    python tests/matrix.py --index-url https://download.pytorch.org/whl/cpu

Left out: whatever depends on neither version (pictures, slides, damaged files), and what takes long (`make test`).
"""

import argparse
import itertools
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
TORCHES = ("2.9", "2.11", "newest")

QUICK = (
    "zero_mini",  # the examples in docstrings
    "tests/book/test_paper.py",  # every number the paper prints
    "tests/book/test_parity.py::test_every_stage_trains_as_torch_ddp_does",  # to the bit at N = 2, on awkward models
    "tests/book/test_parity.py::test_every_stage_trains_rare_models_as_torch_ddp_does",
    "tests/book/test_parity.py::test_bf16_is_torch_ddp_with_a_bf16_copy_to_the_bit",
    "tests/book/test_wire.py",  # what is sent, counted and seen by torch's profiler
    "tests/update/test_one_pass.py",  # torch's optimizers, whose kernels and states change from release to release
    "tests/book/test_compile.py",  # torch.compile
    "tests/checkpoint/test_checkpoint.py::test_a_resumed_run_is_the_uninterrupted_one_to_the_bit",
    "tests/trainer/test_train_gpt.py::test_weights_written_by_two_ranks_at_stage_3_start_one_rank_at_stage_0",
    "tests/trainer/test_train_gpt.py::test_losses_depend_neither_on_the_stage_nor_on_the_number_of_ranks",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--python", nargs="+", default=PYTHONS, metavar="3.N")
    parser.add_argument("--torch", nargs="+", default=TORCHES, metavar="2.N", help="or: newest")
    parser.add_argument("--index-url", metavar="URL", help="where pip looks for torch")
    options = parser.parse_args()
    rows = [attempt(*pair, options.index_url) for pair in itertools.product(options.python, options.torch)]
    print(f"\n{'python':8}{'torch':16}{'passed':>8}{'failed':>8}{'skipped':>8}")
    for python, torch, *result in rows:
        print(
            f"{python:8}{torch:16}" + "".join(f"{cell:>8}" if isinstance(cell, int) else f"  {cell}" for cell in result)
        )
    sys.exit(any(row[3:4] != (0,) for row in rows))


def attempt(python: str, torch: str, index_url: str | None) -> tuple[str | int, ...]:
    """A row of the table: python, torch, then passed, failed, skipped; or a word why these are not known."""
    print(f"\n--- Python {python}, torch {torch}", flush=True)
    if not shutil.which(f"python{python}") or subprocess.run([f"python{python}", "--version"]).returncode:
        return python, torch, f"no python{python} on the PATH"
    (ROOT / ".matrix").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / ".matrix") as folder:
        subprocess.run([f"python{python}", "-m", "venv", folder], check=True)
        here, report = f"{folder}/bin/python", f"{folder}/report.xml"
        release = "torch" if torch == "newest" else f"torch=={torch}.*"
        pip = [here, "-m", "pip", "install", "--quiet"]
        if subprocess.run([*pip, release, *(["--index-url", index_url] if index_url else [])]).returncode:
            return python, torch, f"pip could not install {release}"
        if subprocess.run([*pip, "--editable", f"{ROOT}[test]", release]).returncode:
            return python, torch, "pip could not install the package and its tests"
        torch = subprocess.check_output([here, "-c", "import torch; print(torch.__version__)"], text=True).strip()
        status = subprocess.run([here, "-m", "pytest", "-q", "--junit-xml", report, *QUICK], cwd=ROOT).returncode
        return (python, torch, *counts(Path(report))) if status in (0, 1) else (python, torch, f"pytest: {status}")


def counts(report: Path) -> tuple[int, int, int]:
    """passed, failed, skipped."""
    suite = ElementTree.parse(report).find("testsuite")
    tests, failures, errors, skipped = (int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped"))
    return tests - failures - errors - skipped, failures + errors, skipped


if __name__ == "__main__":
    main()
