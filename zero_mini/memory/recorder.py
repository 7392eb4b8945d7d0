"""Every allocation of a region, with its category and lifetime, on a CPU or a GPU.

    before each operation   which storages are gone?       (weak references)
    after it                which are new?                 a Block, and an Event with its bytes
    at each mark            which category has each?       the owner's list (memory.Owner)

Left out: memory that no operation returns: what a kernel allocates and frees within itself, the buffers of gloo and
NCCL, the CUDA context, cuBLAS workspaces and the rounding and fragmentation of the CUDA allocator.
"""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zero_mini.memory.formulas import CATEGORIES, Owner, distinct_storages, storages_of

aten = torch.ops.aten


def live_bytes(device: torch.device | str, recorder: "Recorder | None" = None) -> int:
    """Bytes alive on `device`: the allocator's count on CUDA, the count of `recorder` on the CPU.

    ValueError for the CPU without a recorder, because torch does not count CPU memory.
    """
    if torch.device(device).type == "cuda":
        return torch.cuda.memory_allocated(device)
    if recorder is None:
        raise ValueError("torch counts no CPU memory: pass a Recorder entered before the model")
    return recorder.live_bytes()


@dataclass
class Block:
    """One storage, from allocation to free. Its category may be set after it was freed."""

    storage: weakref.ref  # dead when the memory is freed, not when the last Python name goes
    nbytes: int
    born: int  # index of a moment; -1 if it existed before the region
    category: str = "other"


@dataclass
class Event:
    """A block is allocated, resized or freed: a change by `delta_bytes`."""

    moment: int  # index into Recorder.moments
    op: str  # the operation that allocated it, or "free", "resize", "known", "found"
    delta_bytes: int
    block: Block

    @property
    def category(self) -> str:
        return self.block.category


class Recorder(TorchDispatchMode):
    """Records every storage that is allocated and freed in a region, on one type of device.

        with Recorder() as recorder:
            model = ...
            zero = zeroify(model, optimizer, stage=2)
            recorder.follow(zero)
            recorder.mark("forward")
            ...

    A storage has one category for all its life. The owner is asked at each mark; its answer overrides
    all others. A storage that it does not list is a gradient if autograd accumulates it into a leaf
    (with re-entrant checkpointing a block's input is a leaf too), a communication buffer if it is
    passed to a collective, an activation if it is still alive at the end of a moment called "forward"
    or if checkpointing recomputes it in backward, temporaries included. The rest is other.

    Frees and resizes are noticed at the next operation, mark or query; none is missed. A tensor
    from before the region counts from its first use ("found") unless it is in `known` or the owner
    lists it. Backward is seen on CUDA too, because autograd passes the mode on to its threads. Costs:
    every operation looks at all live storages (about 10 times slower for small tensors), and where
    gradients are summed autograd adds out of place, as it does while any dispatch mode is on.
    """

    def __init__(self, known: Iterable[torch.Tensor] = (), device: str = "cpu") -> None:
        super().__init__()
        self.device = device
        self.events: list[Event] = []
        self.moments: list[tuple[str, int]] = [("start", 0)]  # (label, index of its first event)
        self.peak_bytes = 0
        self._live: dict[int, Block] = {}  # by address, which is unique among live storages
        self._live_bytes = 0
        self._owner: Owner | None = None
        for tensor in known:
            self._meet_all(tensor, "known")

    def follow(self, owner: Owner) -> None:
        """From now on ask `owner` for categories."""
        self._owner = owner
        self._look()

    def mark(self, label: str) -> None:
        """Start a moment. Storages that a moment called "forward" leaves alive are activations."""
        self._look()
        if self.moments[-1][0] == "forward":
            for block in self._live.values():
                if block.born == len(self.moments) - 1:
                    self._guess(block, "activations")
        self.moments.append((label, len(self.events)))

    def __exit__(self, exc_type, exc_value, traceback):
        if exc_type is None:
            self._look()
        self._live.clear()  # frees after the region are not recorded
        return super().__exit__(exc_type, exc_value, traceback)

    def live_bytes(self) -> int:
        """Bytes alive now; after the region, those at its end."""
        self._notice_the_dead()
        return self._live_bytes

    def timeline(self) -> dict[str, list[int]]:
        """Bytes alive after each event, one series a category: ready to be stacked in a plot."""
        now = dict.fromkeys(CATEGORIES, 0)
        series = {category: [] for category in CATEGORIES}
        for event in self.events:
            now[event.category] += event.delta_bytes
            for category in CATEGORIES:
                series[category].append(now[category])
        return series

    def peak(self) -> dict[str, int]:
        """Bytes by category at the event where their sum was highest (the first such)."""
        instants = list(zip(*self.timeline().values(), strict=True))
        highest = max(instants, key=sum, default=(0,) * len(CATEGORIES))
        return dict(zip(CATEGORIES, highest, strict=True))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._notice_the_dead()
        inputs = self._meet_all((args, kwargs), "found")
        result = func(*args, **(kwargs or {}))
        outputs = self._meet_all(result, str(func))

        node = torch._C._current_autograd_node()  # None outside of backward
        if func.namespace == "c10d":
            for block in inputs + outputs:
                self._guess(block, "communication")
        elif node is None:
            pass
        elif torch.is_grad_enabled():
            for block in outputs:
                self._guess(block, "activations")
        elif node.name().endswith("AccumulateGrad") and func in (
            aten.detach.default,  # the parameter had no gradient and takes this one
            aten.add_.Tensor,  # it had one, to which this is added
        ):
            for block in inputs:
                self._guess(block, "gradients")
        return result

    def _guess(self, block: Block, category: str) -> None:
        if block.category == "other":
            block.category = category

    def _look(self) -> None:
        self._notice_the_dead()
        if self._owner is not None:
            for category, storage in distinct_storages(self._owner):
                for block in self._meet(storage, "found"):
                    block.category = category

    def _meet_all(self, tree: object, op: str) -> list[Block]:
        blocks = []
        for leaf in tree_leaves(tree):
            if isinstance(leaf, torch.Tensor):
                for storage in storages_of(leaf):
                    blocks += self._meet(storage, op)
        return blocks

    def _meet(self, storage: torch.UntypedStorage, op: str) -> list[Block]:
        """The block of `storage`, new or known; none if it is on another device."""
        if storage.device.type != self.device:
            return []
        block = self._live.get(storage._cdata)
        if block is None:
            born = -1 if op in ("known", "found") else len(self.moments) - 1
            block = self._live[storage._cdata] = Block(weakref.ref(storage), 0, born)
        else:
            op = "resize"
        self._resize(block, storage.nbytes(), op)
        return [block]

    def _notice_the_dead(self) -> None:
        for address, block in list(self._live.items()):
            storage = block.storage()
            if storage is None:
                del self._live[address]
                self._resize(block, 0, "free")
            elif storage.nbytes() != block.nbytes:
                self._resize(block, storage.nbytes(), "resize")

    def _resize(self, block: Block, nbytes: int, op: str) -> None:
        delta_bytes = nbytes - block.nbytes
        if delta_bytes:
            self.events.append(Event(len(self.moments) - 1, op, delta_bytes, block))
            block.nbytes = nbytes
            self._live_bytes += delta_bytes
            self.peak_bytes = max(self.peak_bytes, self._live_bytes)
