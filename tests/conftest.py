"""What all tests share: pools of ranks."""

import contextlib
import functools
from collections.abc import Callable, Iterator

import cloudpickle
import pytest

from zero_mini.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """`ranks(n)` is the pool of n ranks that all tests share: `ranks(2).run(function, ...)`."""
    with contextlib.ExitStack() as pools:
        yield functools.cache(lambda n: pools.enter_context(Ranks(n)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Functions of test modules go to the ranks by value: they need no import there, and keep pytest's explanations
    # of a failed assert.
    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        cloudpickle.register_pickle_by_value(module)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", metavar="DIR", help="folder for what the gpu tests measure, as JSON")
