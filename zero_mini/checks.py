"""Every refusal of zeroify(), with its reason and the remedy.

What one rank can see for itself is checked first, then what ranks must agree on; each rank raises
the same error, so that nobody waits for a rank that has left.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from zero_mini.comm import Comm
from zero_mini.held import HeldParameter

# Their update of an element looks at that element's gradient and state alone.
ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "NAdam", "RAdam", "Adamax", "Rprop", "ASGD")


def check_stage(stage: int) -> None:
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage must be 0, 1, 2 or 3 (got {stage!r})")


def check_process_group() -> None:
    if not dist.is_initialized():
        raise RuntimeError(
            "zeroify needs a process group: start with torchrun and call torch.distributed.init_process_group() first"
        )


def check_units(model: nn.Module, units: Sequence[nn.Module], names: dict[int, str]) -> None:
    for unit in units:
        if id(unit) not in names:
            raise ValueError(f"units: {type(unit).__name__} is not a module of {type(model).__name__}")
    for outer in units:
        for inner in outer.modules():
            if inner is not outer and any(inner is unit for unit in units):
                raise ValueError(
                    f"units must not be nested: {names[id(inner)]} lies inside {names[id(outer)]}; name one of them"
                )


def check_all(model: nn.Module, optimizer: torch.optim.Optimizer, comm: Comm, elementwise: bool, can_initialise: bool) -> None:
    """Raise on every rank if any rank has a reason to."""
    reason = find_reason(model, optimizer, elementwise, can_initialise)
    layout = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in model.named_parameters()]
    layout += [(name, tuple(b.shape), str(b.dtype), None) for name, b in model.named_buffers()]
    groups = [len(group["params"]) for group in optimizer.param_groups]
    for rank, (other, _, _) in enumerate(gathered := comm.host_gather((reason, layout, groups))):
        if other is not None:
            raise ValueError(other if other == reason else f"rank {rank}: {other}")
    _, first, first_groups = gathered[0]
    for rank, (_, other, other_groups) in enumerate(gathered):
        for index, (a, b) in enumerate(zip(first, other)):
            if a != b:
                raise ValueError(
                    f"ranks built different models: tensor {index} is {describe(a)} on rank 0 but {describe(b)} "
                    f"on rank {rank}; build the model from the same arguments everywhere"
                )
        if len(first) != len(other):
            raise ValueError(f"ranks built different models: rank 0 has {len(first)} tensors, rank {rank} {len(other)}")
        if first_groups != other_groups:
            raise ValueError(
                f"ranks built different param groups: {first_groups} parameters on rank 0, {other_groups} on rank {rank}"
            )


def describe(entry: tuple) -> str:
    """
    >>> describe(("fc.weight", (64, 32), "torch.float32", True))
    "'fc.weight' (64, 32) torch.float32"
    >>> describe(("fc.weight", (64, 32), "torch.float32", False))
    "'fc.weight' (64, 32) torch.float32, frozen"
    """
    name, shape, dtype, requires_grad = entry
    return f"{name!r} {shape} {dtype}" + (", frozen" if requires_grad is False else "")


def find_reason(
    model: nn.Module, optimizer: torch.optim.Optimizer, elementwise: bool, can_initialise: bool
) -> str | None:
    """Why this model and optimizer cannot be sharded, or None."""
    named = dict(model.named_parameters())
    names = {id(param): name for name, param in named.items()}
    if not any(param.requires_grad for param in named.values()):
        return f"{type(model).__name__} has no parameter that requires a gradient: there is nothing to train"
    for name, param in named.items():
        if isinstance(param, HeldParameter):
            return f"{name} is already held by zeroify(): wrap a model once"
        if isinstance(param, nn.parameter.UninitializedParameter):
            return f"{name} is not initialised yet (a lazy module): run one forward before zeroify()"
        if param.is_meta and not can_initialise:
            return f"{name} is on the meta device and has no values: pass zeroify(initialise=function(name, tensor))"
        if param.layout != torch.strided or not param.dtype.is_floating_point:
            return f"{name} is {param.layout} of {param.dtype}: only dense real floating-point ones can be flattened"
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            return f"the buffer {name} is on the meta device: build it on a real one, only parameters are initialised here"
    for what in ("dtype", "device"):
        seen = {getattr(param, what): name for name, param in named.items()}
        if len(seen) > 1:
            (one, a), (two, b) = list(seen.items())[:2]
            return f"the {what} of {a} is {one}, of {b} it is {two}: bring the model to one {what} before zeroify()"
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True:
            return f"{name}.weight produces sparse gradients ({type(module).__name__}(sparse=True)); set sparse=False"
    if type(optimizer).__name__ not in ELEMENTWISE and not elementwise:
        return (
            f"{type(optimizer).__name__} may look at whole tensors, and a shard would change its result; "
            f"known to be safe: {', '.join(ELEMENTWISE)}; pass elementwise=True if yours is"
        )
    if optimizer.state:
        return f"{type(optimizer).__name__} already has state for {len(optimizer.state)} parameters: wrap before a step"
    grouped = set()
    for index, group in enumerate(optimizer.param_groups):
        for position, param in enumerate(group["params"]):
            if id(param) not in names:
                return f"group {index}, parameter {position} {tuple(param.shape)} is not a parameter of the model"
            grouped.add(id(param))
    for name, param in named.items():
        if param.requires_grad and id(param) not in grouped:
            return f"{name} requires a gradient but is in no param group: give it to the optimizer or freeze it"
    return None
