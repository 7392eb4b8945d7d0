"""environment.yml, pyproject.toml and the matrix of versions say the same."""

import re
from pathlib import Path

import pytest
from matrix import PYTHONS, TORCHES
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib")
yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[1]
ENVIRONMENT = (ROOT / "environment.yml").read_text()


@pytest.fixture
def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def from_conda(line: str) -> Requirement:
    """conda's one `=` means every release that begins so.

    >>> from_conda("numpy=1.26"), from_conda("numpy >=1.26")
    (<Requirement('numpy==1.26.*')>, <Requirement('numpy>=1.26')>)
    """
    return Requirement(re.sub(r"(?<![=<>!~])=(?!=)\s*([\d.]+)$", r"==\1.*", line))


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


def test_environment_yml_says_what_pyproject_toml_says(project):
    assert disagreements(ENVIRONMENT, project) == []
    assert yaml.safe_load(ENVIRONMENT)["name"] == project["name"]


@pytest.mark.parametrize(
    "right, wrong, said",
    [
        ("python=3.12", "python=3.9", "python 3.9 is not >=3.10"),
        ("python=3.12", "python >=3.9", "python 3.9 is not >=3.10"),
        (".[dev]", ".[dev,gpu]", "there is no extra gpu"),
        ("  - pip\n", "  - pip\n  - numpy=1.25\n", "numpy==1.25.* is >=1.26 in pyproject.toml"),
        ("-e .[dev]", "-e .[dev]\n      - torch>=2.8", "torch>=2.8 is >=2.9 in pyproject.toml"),
    ],
)
def test_a_disagreement_is_found(project, right, wrong, said):
    assert right in ENVIRONMENT
    assert disagreements(ENVIRONMENT.replace(right, wrong), project) == [said]


def test_the_matrix_begins_with_the_oldest_versions_that_are_promised(project):
    assert project["requires-python"] == f">={PYTHONS[0]}"
    assert f"torch>={TORCHES[0]}" in project["dependencies"]
