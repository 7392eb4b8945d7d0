"""What training should cost in memory, by formula, and what it does cost, by listing its tensors.

Paper: section 3 (where the memory goes), 5 (stages), 7 (volume), tables 1 and 2. Psi is the number
of parameters, N the number of ranks; mixed precision with AdamW, where K = 12 bytes a parameter are
the fp32 master, the momentum and the variance:

                parameters  gradients   optimizer       a rank holds, bytes   a step sends, elements
    stage 0        2Psi        2Psi        12Psi        16Psi                        2Psi
    stage 1        2Psi        2Psi        12Psi/N      4Psi + 12Psi/N               2Psi
    stage 2        2Psi        2Psi/N      12Psi/N      2Psi + 14Psi/N               2Psi
    stage 3        2Psi/N      2Psi/N      12Psi/N      16Psi/N                      3Psi

In fp32 a parameter is its own master: 4 + 4 + 8 bytes. Volumes have the factor (N-1)/N of a ring.

Two measurements. `walk` asks a handle for every tensor that it keeps alive and counts each distinct
storage once. recorder.py does not depend on such a list: it sees every operation. The tests compare
both with the formula.

Left out: activations, which no handle keeps and no formula of the stages covers.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

OPTIMIZERS = {"AdamW": 2, "SGD with momentum": 1, "SGD": 0}  # fp32 numbers that it keeps for a parameter
CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "communication", "other")
# The methods that return the parts of a sparse tensor. (indices() raises for one that is not coalesced.)
SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}

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
    optimizer: one of `OPTIMIZERS`; the paper has Adam only, the others are counted in the same way.

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
    # K: the optimizer's states, and the master where the parameters are not fp32 themselves.
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
    root_numel: float = 0,
    largest_unit_numel: float = 0,
) -> dict[str, float]:
    """The same bytes as `zero_mini` allocates them, which differ from the paper at stage 3 only.

    There each gather starts from the fp32 master, so no 16-bit shard is kept: 14Psi/N. In exchange
    the root's parameters are whole, and two slots of the largest unit are always there.

    >>> sum(built_state_bytes(1000, 10, 3).values()), sum(model_state_bytes(1000, 10, 3).values())
    (1400.0, 1600.0)
    """
    states = model_state_bytes(psi, world_size, stage, compute_dtype_bytes)
    if stage == 3:
        if compute_dtype_bytes == 2:
            states["parameters"] = 0
        states["parameters"] += compute_dtype_bytes * root_numel
        states["communication"] = 2 * compute_dtype_bytes * largest_unit_numel
    return states


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

    As in the theoretical part of table 2, no memory is reserved for activations.

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
    """One model and its optimizer in plain PyTorch, as an `Owner`.

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
        for tensor in tensors_in(self.optimizer.state):
            yield "optimizer", "state", tensor
        for name, buffer in self.model.named_buffers():
            yield "other", name, buffer


def walk(owner: Owner, device: torch.device | str | None = None) -> dict[str, int]:
    """Bytes that `owner` keeps alive, by category, each storage counted once and whole.

    A storage that two tensors share belongs to the category named first. `device` limits the count
    to one type of device ("cpu", "cuda"). ValueError if a category is not one of `CATEGORIES`.
    """
    nbytes = dict.fromkeys(CATEGORIES, 0)
    for category, storage in distinct_storages(owner):
        if device is None or storage.device.type == torch.device(device).type:
            nbytes[category] += storage.nbytes()
    return nbytes


def distinct_storages(owner: Owner) -> Iterator[tuple[str, torch.UntypedStorage]]:
    seen = set()
    for category, label, tensor in owner.tensors():
        if category not in CATEGORIES:
            raise ValueError(f"{label!r} is listed as {category!r}, which is none of {CATEGORIES}")
        for storage in storages_of(tensor):
            # A meta storage has a size but no memory.
            if storage._cdata not in seen and storage.device.type != "meta":
                seen.add(storage._cdata)
                yield category, storage


def storages_of(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """The memory of a tensor: one storage, or those of a sparse tensor's indices and values.

    >>> [storage.nbytes() for storage in storages_of(torch.eye(3).to_sparse())]  # 2 x 3 int64, 3 fp32
    [48, 12]
    """
    if tensor.layout in SPARSE_PARTS:
        return [getattr(tensor, part)().untyped_storage() for part in SPARSE_PARTS[tensor.layout]]
    return [tensor.untyped_storage()]


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """The tensors of an optimizer's state, which may lie in lists, tuples and dicts, beside None and numbers.

    >>> [tensor.item() for tensor in tensors_in({"step": 3, "sums": [torch.tensor(1), (None, torch.tensor(2))]})]
    [1, 2]
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, (list, tuple, deque, set)):
        for each in value:
            yield from tensors_in(each)
