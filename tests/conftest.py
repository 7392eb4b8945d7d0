"""What all tests share: pools of ranks."""

import contextlib
import functools
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from zero_mini.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """`ranks(n)` is the pool of n ranks that all tests share: `ranks(2).run(function, ...)`."""
    with contextlib.ExitStack() as pools:
        yield functools.cache(lambda n: pools.enter_context(Ranks(n)))


@pytest.fixture(scope="module")
def nccl():
    """Two ranks, one GPU each."""
    with Ranks(2, backend="nccl", timeout_s=240) as pool:
        yield pool


@pytest.fixture
def alone(monkeypatch):
    """In this process a job of one rank may start, whose process group does not outlive the test."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def record(request):
    """record(name, value): keep what was measured in a JSON file of its own, if --record says where."""
    return partial(write, request.config)


@pytest.fixture(scope="session")
def row(request) -> Iterator[Callable[..., None]]:
    """row(table, name, stage, **cells): one more row of a table, kept as `record` does when all tests have run."""
    tables: dict[str, list[dict]] = {}

    def add(table: str, name: str, stage: int | str, **cells: object) -> None:
        """Stages that share all cells share a row."""
        rows = tables.setdefault(table, [])
        alike = [row for row in rows if {**row, "stages": None} == {"what": name, **cells, "stages": None}]
        if not alike:
            rows.append({"what": name, **cells, "stages": [stage]})
        elif stage not in alike[0]["stages"]:
            alike[0]["stages"].append(stage)

    yield add
    for name, rows in tables.items():
        write(request.config, name, rows)


def write(config: pytest.Config, name: str, value: object, cards: int = 2) -> None:
    if folder := config.getoption("--record"):
        path = Path(folder) / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(compact(json.dumps({"machine": machine(cards), name: value}, indent=1)) + "\n")


def machine(cards: int) -> dict[str, object]:
    """What the numbers depend on."""
    if not torch.cuda.is_available():
        return {"torch": torch.__version__}
    return {
        "card": torch.cuda.get_device_name(0),
        "cards": cards,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }


@pytest.fixture(scope="session")
def fault(request) -> Iterator[Callable[[str, str, str], None]]:
    """fault(what, result, message): a row of saving.json, where --record says, or else as it was recorded."""
    rows: dict[str, dict] = {}
    recorded = Path(request.config.rootpath) / "zero_mini" / "measured" / "saving.json"

    def keep(what: str, result: str, message: str) -> None:
        rows[what] = {"fault": what, "result": result, "message": message}
        if not request.config.getoption("--record"):
            known = {row["fault"]: row["result"] for row in json.loads(recorded.read_text())}
            assert known.get(what) == result, f"{what}: record it again with pytest --record {recorded.parent}"

    yield keep
    if rows and (folder := request.config.getoption("--record")):
        path = Path(folder) / recorded.name
        old = {row["fault"]: row for row in json.loads(path.read_text())} if path.is_file() else {}
        path.write_text(json.dumps(list((old | rows).values()), indent=1) + "\n")


def compact(text: str) -> str:
    """Indented JSON, with a list that holds no other on one line."""
    return re.sub(
        r"\[\s[^][{}]*\]", lambda found: re.sub(r"\s+", " ", found[0]).replace("[ ", "[").replace(" ]", "]"), text
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Functions of test modules go to the ranks by value: they need no import there, and keep pytest's explanations
    # of a failed assert.
    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        cloudpickle.register_pickle_by_value(module)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", metavar="DIR", help="folder for what tests measure, as JSON")
