"""What training should cost in memory, by formula, and what it does cost, by looking.

Paper: section 3 (where the memory goes), 5 (stages), 7 (volume), tables 1 and 2. Psi is the number
of parameters, N the number of ranks; mixed precision with AdamW, where K = 12 bytes a parameter are
the fp32 master, the momentum and the variance:

                parameters  gradients   optimizer       a rank holds, bytes   a step sends, elements
    stage 0        2Psi        2Psi        12Psi        16Psi                        2Psi
    stage 1        2Psi        2Psi        12Psi/N      4Psi + 12Psi/N               2Psi
    stage 2        2Psi        2Psi/N      12Psi/N      2Psi + 14Psi/N               2Psi
    stage 3        2Psi/N      2Psi/N      12Psi/N      16Psi/N                      3Psi

In fp32 a parameter is its own master: 4 + 4 + 8 bytes. Volumes have the factor (N-1)/N of a ring.

Two ways to look. `walk` asks a handle for every tensor that it keeps alive and counts each distinct
storage once. `Recorder` trusts nobody: it sees the result of every operation and asks before the
next one which storages are gone. A formula is a claim; where walk and recorder agree it is a fact.

Left out: what the recorder cannot see, since no operation returns it. That is what a kernel
allocates and frees within itself, the buffers of gloo and NCCL, the CUDA context, cuBLAS workspaces
and the rounding and fragmentation of the CUDA allocator.
"""

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

OPTIMIZERS = {"AdamW": 2, "SGD with momentum": 1, "SGD": 0}  # fp32 numbers that each keeps for a parameter
CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "communication", "other")

aten = torch.ops.aten


# --- by formula -------------------------------------------------------------------------------


def model_state_bytes(
    psi: float,
    world_size: int,
    stage: int,
    compute_dtype_bytes: int = 2,
    accumulate: bool = False,
    optimizer: str = "AdamW",
) -> dict[str, float]:
    """Bytes of model states that the paper counts on one rank, by category.

    psi: elements. compute_dtype_bytes: 2 for bf16 and fp16 over an fp32 master, 4 for fp32.
    accumulate: gradients are summed over several micro-batches, in fp32. Section 5, figure 1.
    optimizer: one of `OPTIMIZERS`; the paper's is Adam, the others are counted as it counts.

    >>> model_state_bytes(7.5e9, 64, 1)
    {'parameters': 15000000000.0, 'gradients': 15000000000.0, 'optimizer': 1406250000.0}
    """
    _check(world_size, stage)
    if compute_dtype_bytes not in (2, 4):
        raise ValueError(f"compute_dtype_bytes must be 2 or 4, not {compute_dtype_bytes}")
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, not {optimizer!r}")
    shard = psi / world_size
    gradient_bytes = 4 if accumulate else compute_dtype_bytes
    # K: what the optimizer keeps; the master only where the parameters are not fp32 themselves.
    optimizer_bytes = 4 * OPTIMIZERS[optimizer] + (4 if compute_dtype_bytes == 2 else 0)
    return {
        "parameters": compute_dtype_bytes * (shard if stage >= 3 else psi),
        "gradients": gradient_bytes * (shard if stage >= 2 else psi),
        "optimizer": optimizer_bytes * (shard if stage >= 1 else psi),
    }


def built_state_bytes(
    psi: float,
    world_size: int,
    stage: int,
    compute_dtype_bytes: int = 2,
    accumulate: bool = False,
    root_numel: float = 0,
    largest_unit_numel: float = 0,
) -> dict[str, float]:
    """The same as `zero_mini` is built, which differs from the paper at stage 3 only.

    There each gather starts from the fp32 master, so no 16-bit shard is kept: 14Psi/N. In exchange
    the root's parameters are whole, and two slots of the largest unit are always there.

    >>> sum(built_state_bytes(1000, 10, 3).values()), sum(model_state_bytes(1000, 10, 3).values())
    (1400.0, 1600.0)
    """
    held = model_state_bytes(psi, world_size, stage, compute_dtype_bytes, accumulate)
    if stage == 3:
        if compute_dtype_bytes == 2:
            held["parameters"] = 0
        held["parameters"] += compute_dtype_bytes * root_numel
        held["communication"] = 2 * compute_dtype_bytes * largest_unit_numel
    return held


def wire_numel(psi: float, world_size: int, stage: int, micro_batches: int = 1) -> float:
    """Elements that one rank sends in one optimizer step (section 7), in a ring.

    A reduce-scatter or an all-gather of P elements counts P(N-1)/N, an all-reduce twice that.
    Stages 0 and 1 reduce once a step whatever the micro-batches; stage 2 reduces each and gathers
    once; stage 3 gathers for forward, gathers for backward and reduces, each time.

    >>> [wire_numel(1000, 2, stage, micro_batches=4) for stage in (0, 1, 2, 3)]
    [1000.0, 1000.0, 2500.0, 6000.0]
    """
    _check(world_size, stage)
    k = micro_batches
    return (2, 2, k + 1, 3 * k)[stage] * psi * (world_size - 1) / world_size


def largest_model(device_bytes: float, world_size: int, stage: int, mp: int = 1) -> float:
    """Parameters whose states fill devices of `device_bytes`, with `mp`-way model parallelism.

    Table 2's theory: nothing is left for activations.

    >>> largest_model(32e9, 64, 0) / 1e9, largest_model(32e9, 64, 3, mp=16) / 1e9
    (2.0, 2048.0)
    """
    return mp * device_bytes / sum(model_state_bytes(1, world_size, stage).values())


def _check(world_size: int, stage: int) -> None:
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage must be 0, 1, 2 or 3, not {stage}")
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, not {world_size}")


# --- by walking -------------------------------------------------------------------------------


class Owner(Protocol):
    """Anything that can list what it keeps alive: the handle of `zeroify`, `PlainTraining`."""

    def tensors(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yields (category, label, tensor)."""
        ...


@dataclass
class PlainTraining:
    """One model and its optimizer in plain PyTorch, listed as the handle of `zeroify` lists itself.

    >>> model = torch.nn.Linear(10, 10, bias=False)
    >>> walk(PlainTraining(model, torch.optim.SGD(model.parameters())))["parameters"]
    400
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer

    def tensors(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield "parameters", name, parameter
            if parameter.grad is not None:
                yield "gradients", name, parameter.grad
        for state in self.optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    yield "optimizer", name, value
        for name, buffer in self.model.named_buffers():
            yield "other", name, buffer


def walk(owner: Owner, device: torch.device | str | None = None) -> dict[str, int]:
    """Bytes that `owner` keeps alive, by category, each storage counted once and whole.

    A storage that two tensors share belongs to the category named first. `device` limits the count
    to one type of device ("cpu", "cuda"). ValueError if a category is not one of `CATEGORIES`.
    """
    held = dict.fromkeys(CATEGORIES, 0)
    for category, storage in _distinct_storages(owner):
        if device is None or storage.device.type == torch.device(device).type:
            held[category] += storage.nbytes()
    return held


def _distinct_storages(owner: Owner) -> Iterator[tuple[str, torch.UntypedStorage]]:
    seen = set()
    for category, label, tensor in owner.tensors():
        if category not in CATEGORIES:
            raise ValueError(f"{label!r} is listed as {category!r}, which is none of {CATEGORIES}")
        storage = tensor.untyped_storage()
        # A meta storage says how large it would be; it has no memory.
        if storage._cdata not in seen and storage.device.type != "meta":
            seen.add(storage._cdata)
            yield category, storage


def live_bytes(device: torch.device | str, recorder: "Recorder | None" = None) -> int:
    """Bytes alive on `device`: as the allocator counts on CUDA, as `recorder` counts on the CPU.

    ValueError for the CPU without a recorder, since torch does not count there.
    """
    if torch.device(device).type == "cuda":
        return torch.cuda.memory_allocated(device)
    if recorder is None:
        raise ValueError("torch counts no CPU memory: pass a Recorder entered before the model")
    return recorder.live_bytes()


# --- by recording -----------------------------------------------------------------------------


@dataclass
class Block:
    """One storage, from birth to death. What it was for may become clear after its death."""

    storage: weakref.ref  # dies with the memory, not with the last Python name for it
    nbytes: int
    born: int  # index of a moment; -1 if it was there before the region
    category: str = "other"


@dataclass
class Event:
    """A block appears, grows, shrinks or dies by `delta_bytes`."""

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

    A storage has one category for all its life. The owner's word, asked at each mark, counts most.
    Where it has none: a gradient is what autograd gives to a leaf (with re-entrant checkpointing a
    block's input is one too); a communication buffer is what a collective is given; an activation
    is what a moment called "forward" leaves behind, or what checkpointing recomputes in backward,
    its temporaries included. The rest is other.

    Frees and resizes are noticed at the next operation, mark or question; none is missed. A tensor
    from before the region counts from its first use ("found") unless it is in `known` or the owner
    lists it. Backward is seen on CUDA too: autograd takes the mode along into its threads. Costs:
    every operation looks at all live storages (about 10 times slower for small tensors), and where
    gradients meet autograd adds out of place, as it does while any dispatch mode is on.
    """

    def __init__(self, known: Iterable[torch.Tensor] = (), device: str = "cpu") -> None:
        super().__init__()
        self.device = device
        self.events: list[Event] = []
        self.moments: list[tuple[str, int]] = [("start", 0)]  # (label, index of its first event)
        self.peak_bytes = 0
        self._live: dict[int, Block] = {}  # by address, which is free again only after a death
        self._live_bytes = 0
        self._owner: Owner | None = None
        for tensor in known:
            self._meet(tensor.untyped_storage(), "known")

    def follow(self, owner: Owner) -> None:
        """From now on `owner` says which storage is what."""
        self._owner = owner
        self._look()

    def mark(self, label: str) -> None:
        """Starts a moment. What one called "forward" leaves behind are activations."""
        self._look()
        if self.moments[-1][0] == "forward":
            for block in self._live.values():
                if block.born == len(self.moments) - 1:
                    self._guess(block, "activations")
        self.moments.append((label, len(self.events)))

    def __exit__(self, exc_type, exc_value, traceback):
        if exc_type is None:
            self._look()
        self._live.clear()  # what dies after the region is no part of its story
        return super().__exit__(exc_type, exc_value, traceback)

    def live_bytes(self) -> int:
        """Bytes alive now; after the region, at its end."""
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
            for category, storage in _distinct_storages(self._owner):
                for block in self._meet(storage, "found"):
                    block.category = category

    def _meet_all(self, tree: object, op: str) -> list[Block]:
        blocks = []
        for leaf in tree_leaves(tree):
            if isinstance(leaf, torch.Tensor):
                blocks += self._meet(leaf.untyped_storage(), op)
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
