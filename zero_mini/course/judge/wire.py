"""The wire under a student's code: what is sent is counted, and what is not waited for has not arrived.

Both look from outside. `Traffic` counts where torch hands collectives to a backend, below every Python name for them.
`asynchronous` decides when collectives happen: if not before somebody waits, a result that is read early is an old one.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

COLLECTIVES = """all_reduce broadcast reduce_scatter reduce_scatter_tensor reduce_scatter_single all_gather
    all_gather_into_tensor all_gather_single reduce gather scatter all_to_all all_to_all_single""".split()

FEW = 256  # whole numbers; a larger tensor of them could be parameters in disguise


class Traffic(TorchDispatchMode):
    """Counts fp32 elements that this rank sends, by ring algorithms (arXiv 1910.02054, section 7.1).

    A tensor of another dtype counts by its bytes; a few whole numbers, as hosts say them to each other, do not count.
    """

    def __init__(self):
        super().__init__()
        self.calls: list[tuple[str, float]] = []  # (operation, elements sent)

    @property
    def sent(self) -> float:
        return sum(elements for _, elements in self.calls)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            name = func.name().removeprefix("c10d::").strip("_")
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            tensors = [tensor for tensor in tensors if tensor.is_floating_point() or tensor.numel() > FEW]
            if tensors and "recv" not in name:
                self.calls.append((name, elements_sent(name, args, dist.get_world_size())))
        return func(*args, **(kwargs or {}))


def elements_sent(name: str, args: tuple, N: int) -> float:
    """By a call of a c10d operation: all of what arrives or leaves, whichever is larger, but for this rank's part."""
    if name == "send":
        return numel(args[0])
    largest = max(numel(arg) for arg in args)
    return largest * (N - 1) / N * (2 if name.startswith("allreduce") else 1)


def numel(tree: object) -> float:
    return sum(leaf.nbytes for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)) / 4


class Late:
    """A work that starts when it is waited for, after those that were launched before it."""

    def __init__(self, queue: "list[Late]", launch: Callable[[], dist.Work]):
        self.queue, self.launch, self.work = queue, launch, None
        queue.append(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        while self.work is None:
            first = self.queue.pop(0)
            first.work = first.launch()
            first.work.wait()
        return True

    def is_completed(self) -> bool:
        return self.wait()

    def get_future(self) -> torch.futures.Future:
        self.wait()
        return self.work.get_future()


@contextlib.contextmanager
def asynchronous(when: str) -> Iterator[None]:
    """Within, asynchronous collectives of floating point happen when waited for ("late") or launched ("prompt").

    At the end those that nobody waited for are run, so that no rank is left waiting.
    """
    queue: list[Late] = []

    def flush() -> None:
        while queue:
            queue[-1].wait()

    def call(original: Callable, *args, async_op: bool = False, **options):
        floats = any(isinstance(arg, torch.Tensor) and arg.is_floating_point() for arg in tree_leaves(args))
        if async_op and floats:
            work = Late(queue, functools.partial(original, *args, async_op=True, **options))
            if when == "prompt":
                work.wait()
            return work
        if floats:
            flush()
        return original(*args, async_op=async_op, **options)

    originals = {name: getattr(dist, name) for name in COLLECTIVES if hasattr(dist, name)}
    for name, original in originals.items():
        setattr(dist, name, functools.partial(call, original))
    try:
        yield
        flush()
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
