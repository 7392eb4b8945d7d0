"""environment.yml, pyproject.toml and the matrix of versions say the same."""

import re
from pathlib import Path

import pytest
from matrix import PYTHONS, QUICK, TORCHES
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib")
yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
ENVIRONMENT = (ROOT / "environment.yml").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def from_conda(line: str) -> Requirement:
    """conda's one `=` means every release that begins so; its name for torch is pytorch.

    >>> from_conda("numpy=1.26"), from_conda("pytorch >=2.9")
    (<Requirement('numpy==1.26.*')>, <Requirement('torch>=2.9')>)
    """
    return Requirement(re.sub(r"(?<![=<>!~])=(?!=)\s*([\d.]+)$", r"==\1.*", line).replace("pytorch", "torch"))


def disagreements(environment: str, project: dict) -> list[str]:
    """What environment.yml says against pyproject.toml."""
    conda = yaml.safe_load(environment)["dependencies"]
    pip = next(part["pip"] for part in conda if isinstance(part, dict))
    (own,) = [line.removeprefix("-e ") for line in pip if line.startswith("-e ")]
    named = [from_conda(part) for part in conda if isinstance(part, str)]
    named += [Requirement(line) for line in pip if not line.startswith("-e ")]
    extras = project["optional-dependencies"]
    known = {}
    for line in project["dependencies"] + sum(extras.values(), []):
        known.setdefault(Requirement(line).name, set()).add(Requirement(line).specifier)
    found = [
        f"{one} is {', '.join(map(str, known[one.name]))} in pyproject.toml"
        for one in named
        if known.get(one.name, {one.specifier}) != {one.specifier}
    ]
    python = next(one.specifier for one in named if one.name == "python")
    lowest = re.search(r"\d+\.\d+", str(python))[0]
    if lowest not in SpecifierSet(project["requires-python"]):
        found.append(f"python {lowest} is not {project['requires-python']}")
    wanted = Requirement(own.replace(".", project["name"], 1)).extras
    return found + [f"there is no extra {extra}" for extra in sorted(wanted - set(extras))]


def test_environment_yml_says_what_pyproject_toml_says():
    assert disagreements(ENVIRONMENT, PROJECT) == []
    assert yaml.safe_load(ENVIRONMENT)["name"] == PROJECT["name"]


def test_make_asks_for_the_python_that_pyproject_toml_asks_for():
    major, minor = re.search(r"sys.version_info < \((\d+), (\d+)\)", (ROOT / "Makefile").read_text()).groups()
    assert PROJECT["requires-python"] == f">={major}.{minor}"


SMALL_PROJECT = {
    "name": "small",
    "requires-python": ">=3.10",
    "dependencies": ["numpy>=1.26", "torch>=2.9"],
    "optional-dependencies": {"lint": ["ruff>=0.9"], "dev": ["small[lint]"]},
}


@pytest.mark.parametrize(
    "conda, pip, said",
    [
        (["python=3.12"], ["-e .[dev]"], []),
        (["python >=3.10", "make", "numpy>=1.26"], ["-e .", "ruff>=0.9"], []),
        (["python=3.9"], ["-e ."], ["python 3.9 is not >=3.10"]),
        (["python >=3.9"], ["-e ."], ["python 3.9 is not >=3.10"]),
        (["python=3.12"], ["-e .[dev,gpu]"], ["there is no extra gpu"]),
        (["python=3.12", "numpy=1.25"], ["-e ."], ["numpy==1.25.* is >=1.26 in pyproject.toml"]),
        (["python=3.12", "pytorch"], ["-e ."], ["torch is >=2.9 in pyproject.toml"]),
        (["python=3.12"], ["-e .", "ruff>=0.8"], ["ruff>=0.8 is >=0.9 in pyproject.toml"]),
    ],
)
def test_a_disagreement_is_found(conda, pip, said):
    assert disagreements(yaml.safe_dump({"dependencies": [*conda, {"pip": pip}]}), SMALL_PROJECT) == said


def test_the_matrix_begins_with_the_oldest_versions_that_are_promised_and_its_tests_exist():
    for path, _, name in (test.partition("::") for test in QUICK):
        assert (ROOT / path).exists() and (not name or f"def {name}(" in (ROOT / path).read_text()), name
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"
    assert f"torch>={TORCHES[0]}" in PROJECT["dependencies"]
