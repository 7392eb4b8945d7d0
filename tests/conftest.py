"""What all tests share: pools of ranks, records, and a script that is run both ways."""

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

from zero_mini.course.ranks import Ranks

pytest.register_assert_rewrite("both_ways")  # before its import: a failed assert shows the values, as in a test module
from both_ways import EXACT, PRECISIONS, STAGES, Compare, Note  # noqa: E402


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """`ranks(n)` is the pool of n ranks that all tests share: `ranks(2).run(function, ...)`."""
    with contextlib.ExitStack() as pools:
        yield functools.cache(lambda n: pools.enter_context(Ranks(n)))


@pytest.fixture(scope="module")
def nccl():
    """Two ranks, one GPU each."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, has {torch.cuda.device_count()}")
    with Ranks(2, backend="nccl", timeout_s=240) as pool:
        yield pool


@pytest.fixture(scope="module", params=[2, 4, 8], ids="N = {}".format)
def gpus(request):
    """So many ranks, one GPU each."""
    if torch.cuda.device_count() < request.param:
        pytest.skip(f"needs {request.param} GPUs, has {torch.cuda.device_count()}")
    with Ranks(request.param, backend="nccl", timeout_s=240) as pool:
        yield pool


@pytest.fixture
def alone(monkeypatch):
    """In this process a job of one rank may start, whose process group does not outlive the test."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)  # the trainer takes all cores for an update on the host
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def one_thread():
    """As on the ranks: with several threads a product adds up in another order, and small ones are slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def record(request):
    """record(name, value, cards=N): keep what N GPUs measured in a JSON file of its own, if --record says where."""
    return partial(write, request.config)


@pytest.fixture(scope="session")
def row(request) -> Iterator[Callable[..., None]]:
    """row(table, what, stage, **cells): a row of a table, which has to be there, or is kept as `record` does.

    Stages that share all cells share a row. The cell `says` is a message, whose numbers may be others each time. All
    other cells have to be as recorded, with the release of torch that they were recorded with: another one may do for
    itself what raised, or raise. What is recorded replaces the rows that had its `what`; all others stay.
    """
    folder = request.config.getoption("--record")
    measured = Path(folder or Path(request.config.rootpath) / "zero_mini" / "measured")
    recorded = functools.cache(lambda table: json.loads((measured / f"{table}.json").read_text()))
    tables: dict[str, list[dict]] = {}

    def keep(table: str, what: str, stage: int | str = "any", **cells: object) -> None:
        rows = tables.setdefault(table, [])
        alike = [row for row in rows if {**row, "stages": None} == {"what": what, **cells, "stages": None}]
        if not alike:
            rows.append({"what": what, **cells, "stages": [stage]})
        elif stage not in alike[0]["stages"]:
            alike[0]["stages"].append(stage)

    def compare(table: str, what: str, stage: int | str = "any", **cells: object) -> None:
        known, fixed = recorded(table), {"what": what, **cells, "says": None, "stages": None}
        if release(known["machine"]["torch"]) == release(torch.__version__):
            alike = [row for row in known[table] if {**row, "says": None, "stages": None} == fixed]
            stages = [stage for row in alike for stage in row["stages"]]
            assert stage in stages, f"{what} {cells}, stage {stage}: not in {table}.json; pytest --record {measured}"

    yield keep if folder else compare
    for table, rows in tables.items():
        old = recorded(table)[table] if (measured / f"{table}.json").is_file() else []
        rows = [row for alike in (by_what(old) | by_what(rows)).values() for row in alike]
        write(request.config, table, rows, cards=0)


@pytest.fixture(
    params=PRECISIONS,
    ids=lambda param: f"stage{param[0]}-{'bf16' if param[1] else 'fp32'}",
)
def compare(request, ranks, row) -> Compare:
    """compare(script): see both_ways.py."""
    return Compare(ranks, *request.param, noting(request, row, request.param[0]))


@pytest.fixture(params=STAGES, ids=lambda stage: f"stage{stage}")
def compare_fp32(request, ranks, row) -> Compare:
    """For tests of many cases."""
    return Compare(ranks, request.param, EXACT, noting(request, row, request.param))


def noting(request, row, stage: int) -> Note:
    return lambda result, says: row("models", request.node.originalname, stage, result=result, says=says)


def by_what(rows: list[dict]) -> dict[str, list[dict]]:
    return {what: [row for row in rows if row["what"] == what] for what in dict.fromkeys(row["what"] for row in rows)}


def release(version: str) -> str:
    """2.13.0+cpu -> 2.13.0"""
    return version.partition("+")[0]


def write(config: pytest.Config, name: str, value: object, *, cards: int) -> None:
    if folder := config.getoption("--record"):
        path = Path(folder) / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(compact(json.dumps({"machine": machine(cards), name: value}, indent=1)) + "\n")


def machine(cards: int) -> dict[str, object]:
    """What the numbers depend on. cards: the GPUs that took part; 0: the CPU alone did."""
    if not cards:
        return {"torch": torch.__version__}
    return {
        "card": torch.cuda.get_device_name(0),
        "cards": cards,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }


def compact(text: str) -> str:
    """Indented JSON, with a list that holds no other on one line."""
    return re.sub(
        r"\[\s[^][{}]*\]", lambda found: re.sub(r"\s+", " ", found[0]).replace("[ ", "[").replace(" ]", "]"), text
    )


# Two processes run a file each (Makefile). One of these that begins last would leave a core idle for most of it.
LONG = (
    *("test_parity", "test_judge", "test_checkpoint", "test_offload", "test_resume", "test_train_gpt"),
    *("test_ordinary_habits", "test_strangers", "test_unusual_models", "test_activations", "test_benchmark"),
    *("test_gradients", "test_parameters", "test_properties", "test_notebooks", "test_slides", "test_llama"),
    *("test_faults", "test_memory", "test_simulate", "test_mutants", "test_compile"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))
    # Functions of test modules go to the ranks by value: they need no import there, and keep pytest's explanations
    # of a failed assert.
    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        cloudpickle.register_pickle_by_value(module)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", metavar="DIR", help="folder for what tests measure, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--record") and config.getoption("numprocesses", None):
        raise pytest.UsageError("--record writes a table when all its tests have run, in one process: leave out -n")
