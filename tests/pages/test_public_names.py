"""docs/public_names.md: every name on it exists, and every name that pages and lessons import is on it."""

import ast
import importlib
import inspect
import json
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from zero_mini import zeroify

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "public_names.md").read_text()
LESSONS = sorted((ROOT / "notebooks").glob("*.ipynb"))
IMPORTING = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *LESSONS]


def first_cells(text: str) -> list[str]:
    return re.findall(r"^\| `([\w.]+)` \|", text, re.M)


def listed() -> dict[str, set[str]]:
    """Module -> its names: by the heading above a table, or in a row that begins with a module."""
    names: dict[str, set[str]] = {}
    for heading, section in re.findall(r"^### `(zero_mini[\w.]*)`$(.*?)(?=^#|\nThe arguments|\Z)", PAGE, re.M | re.S):
        found = {name for name in first_cells(section) if not name.startswith("zero_mini.")}
        if found:
            names[heading] = found
    for module, cell in re.findall(r"^\| `(zero_mini\.[\w.]+)` \| ((?:`\w+`(?:, )?)+) \|$", PAGE, re.M):
        names.setdefault(module, set()).update(re.findall(r"`(\w+)`", cell))
    return names


def imported(code: str) -> set[tuple[str, str]]:
    """(module, name) of what it takes from zero_mini."""
    nodes = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)]
    found = [(node.module, alias.name) for node in nodes for alias in node.names if node.module]
    return {(module, name) for module, name in found if module.split(".")[0] == "zero_mini"}


def code_of(path: Path) -> str:
    if path.suffix == ".md":
        return "\n".join(re.findall(r"^```python\n(.*?)^```$", path.read_text(), re.M | re.S))
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    return "\n".join(re.sub("^%.*", "", "".join(cell["source"]), flags=re.M) for cell in cells)


@pytest.mark.parametrize("module", listed())
def test_every_name_exists(module):
    if module.startswith("zero_mini.course.plots."):
        pytest.importorskip("matplotlib")
    for name in listed()[module]:
        assert hasattr(importlib.import_module(module), name), name


@pytest.mark.parametrize("path", IMPORTING, ids=lambda path: path.name)
def test_what_pages_and_lessons_import_is_listed(path):
    known = listed()
    for module, name in imported(code_of(path)):
        whole = f"{module}.{name}"  # a module
        assert name in known.get(module, set()) or whole in known, f"from {module} import {name}"


def test_the_arguments_of_zeroify_are_listed():
    table = PAGE.partition("The arguments of `zeroify`")[2].partition("###")[0]
    assert first_cells(table) == list(inspect.signature(zeroify).parameters)


def test_the_handle_has_what_is_listed(alone):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = torch.nn.Linear(2, 2)
    zero = zeroify(model, torch.optim.SGD(model.parameters(), lr=0.1))
    names = [name.removeprefix("zero.") for name in first_cells(PAGE) if name.startswith("zero.")]
    assert {"clip_grad_norm_", "full_params", "no_sync"} <= set(names)
    assert [name for name in names if not hasattr(zero, name)] == []


def test_new_imports_of_the_changelog_exist():
    rows = re.findall(r"^\| `(zero_mini\.\w+)` \| `(zero_mini[\w.]+)` \|$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert len(rows) == len(dict(rows)) > 0
    for _, new in rows:
        assert importlib.util.find_spec(new), new
