"""Every refusal of zeroify(), with its reason and the remedy.

Each rank checks its own arguments, then ranks exchange the results: if one has a reason to refuse, or
two have different arguments, every rank raises, so that no rank waits for one that has stopped.

Left out: mistakes that appear only during training (watch.py, parameter.py, zero3.py).
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from zero_mini.binding.parameter import HeldParameter
from zero_mini.binding.units import find_blocks, units_by_size
from zero_mini.comm import Comm
from zero_mini.update.loss_scale import LossScaler

# Optimizers that update each element from its own gradient and state only.
ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "NAdam", "RAdam", "Adamax", "Rprop", "ASGD")


def known_class(optimizer: torch.optim.Optimizer) -> type | None:
    """The class of torch.optim that does the update: its own, or a base class if it overrides no method."""
    known_classes = [getattr(torch.optim, name) for name in ELEMENTWISE]
    for cls in type(optimizer).__mro__:
        if cls in known_classes:
            return cls
        if any(
            callable(value) and hasattr(torch.optim.SGD, name) and name != "__init__"
            for name, value in vars(cls).items()
        ):
            return None
    return None


def is_known(optimizer: torch.optim.Optimizer) -> bool:
    return known_class(optimizer) is not None


def check_process_group(group: dist.ProcessGroup | None) -> None:
    """RuntimeError if there is no process group, or this rank is not in it."""
    if not dist.is_initialized():
        raise RuntimeError(
            "zeroify needs a process group: start with torchrun and call torch.distributed.init_process_group() first"
        )
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise RuntimeError(f"rank {dist.get_rank()} is not in the group: call zeroify() on its ranks alone")


def check_comm(comm: Comm | None, group: dist.ProcessGroup | None) -> None:
    """ValueError if it is no Comm, or if there is a group beside it."""
    if comm is not None and not isinstance(comm, Comm):
        raise ValueError(f"comm must be an instance of a subclass of Comm, as ThrottledComm() (got {comm!r})")
    if comm is not None and group is not None:
        raise ValueError("comm stands in place of group, and both were given: give the group to the comm, Comm(group)")


def as_list(unit: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """A ModuleList, and a slice of one, is a list: it is never called itself."""
    is_called = isinstance(unit, nn.Module) and not isinstance(unit, nn.ModuleList)
    return [unit] if is_called or not isinstance(unit, Iterable) else list(unit)


class Plan:
    """The arguments of zeroify() on one rank; `reason` says why they are refused, or is None."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        stage: int | type,
        dtype: torch.dtype | None,
        units: Sequence[nn.Module | Sequence[nn.Module]] | None,
        elementwise: bool,
        can_initialise: bool,
        offload: str | os.PathLike | None = None,
        scaler: LossScaler | None = None,
        on_gpu: bool = False,
    ):
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer (got a {type(optimizer).__name__})")
        self.model, self.optimizer, self.stage, self.compute_dtype = model, optimizer, stage, dtype
        if isinstance(units, Iterable):
            units = [as_list(unit) for unit in units]  # a generator can be read once
        self.names = {id(module): name for name, module in model.named_modules()}
        self.params = dict(model.named_parameters())
        self.group_of = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self.reason = (
            self.refuse_stage(stage)
            or self.refuse_dtype(dtype)
            or self.refuse_scaler(scaler)
            or self.refuse_offload(offload)
            or self.refuse_parameters(can_initialise)
            or self.refuse_batch_norm(on_gpu)
            or self.refuse_units(units)
            or self.refuse_optimizer(elementwise)
        )
        if self.reason is None:
            if units is None:
                units = units_by_size(model) if on_gpu else [block for _, block in find_blocks(model)]
            blocks = map(as_list, units)
            self.blocks = [(" to ".join(self.names[id(m)] for m in dict.fromkeys((b[0], b[-1]))), b) for b in blocks]
            self.dtype = next(iter(self.params.values())).dtype

    def refuse_stage(self, stage: int | type) -> str | None:
        if isinstance(stage, type) and hasattr(stage, "sharded") or stage in (0, 1, 2, 3):
            return None
        return f"stage must be 0, 1, 2 or 3, or a class as Zero2 (got {stage!r})"

    def refuse_dtype(self, dtype: torch.dtype | None) -> str | None:
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            return f"dtype must be a floating-point one, as torch.bfloat16, or None (got {dtype!r})"
        return None

    def refuse_scaler(self, scaler: LossScaler | None) -> str | None:
        self.scaler = scaler
        if scaler is not None and not isinstance(scaler, LossScaler):
            return f"scaler must be a LossScaler, as LossScaler(scale=4.0), or None (got {scaler!r})"
        return None

    def refuse_offload(self, offload: str | os.PathLike | None) -> str | None:
        self.offload = offload
        if offload is None:
            return None
        if not isinstance(offload, (str, os.PathLike)) or not os.fspath(offload):
            return f"offload must be 'host', a folder or None (got {offload!r})"
        if self.stage == 0 or getattr(self.stage, "sharded", None) == ():
            return "offload at stage 0 would keep a copy of all states for every rank: choose stage 1, 2 or 3"
        kind = type(self.optimizer)
        if any(group.get("capturable") for group in self.optimizer.param_groups):
            return f"{kind.__name__} is capturable, which only CUDA tensors are, and offload updates on the CPU"
        if offload == "host":
            return None
        folder = Path(offload)
        if not folder.is_dir():
            return f"offload: {folder} is no folder; make it first, or pass 'host'"
        if not os.access(folder, os.W_OK | os.X_OK):
            return f"offload: {folder} cannot be written to; choose another folder"
        if not is_known(self.optimizer):
            return (
                f"offload to a folder calls step() for one unit after the other, and {kind.__name__} may count its "
                "calls; use offload='host', or one of torch.optim's"
            )
        return None

    def refuse_parameters(self, can_initialise: bool) -> str | None:
        for name, param in self.params.items():
            if isinstance(param, HeldParameter):
                return f"{name} is already held by zeroify(): wrap a model once"
            if isinstance(param, nn.parameter.UninitializedParameter):
                return f"{name} is not initialised yet (a lazy module): run one forward before zeroify()"
            if param.is_meta and not can_initialise:
                return f"{name} is on the meta device, without values: pass zeroify(initialise=function(name, tensor))"
            if param.layout != torch.strided or not param.dtype.is_floating_point:
                kind = f"{param.layout} of {param.dtype}"
                return f"{name} is {kind}: only dense real floating-point parameters can be flattened"
        at_address: dict[int, str] = {}
        for name, param in self.params.items():
            if not param.is_meta and param.numel():
                first = at_address.setdefault(param.data_ptr(), name)
                if first != name and (param.requires_grad or self.params[first].requires_grad):
                    return (
                        f"{first} and {name} are two parameters in one memory, and each would get memory of its own; "
                        "make them one parameter (a.weight = b.weight, without .data)"
                    )
        for name, buffer in self.model.named_buffers():
            if buffer.is_meta:
                return f"the buffer {name} is on the meta device: build it on a real one, only parameters start there"
        for what in ("dtype", "device"):
            names = {getattr(param, what): name for name, param in self.params.items()}
            if len(names) > 1:
                (one, a), (two, b) = list(names.items())[:2]
                return f"the {what} of {a} is {one}, of {b} it is {two}: bring the model to one {what} before zeroify()"
        if not any(param.requires_grad for param in self.params.values()):
            return f"{type(self.model).__name__} has no parameter that requires a gradient: there is nothing to train"
        for name, module in self.model.named_modules():
            if getattr(module, "sparse", False) is True:
                kind = type(module).__name__
                return f"{name}.weight produces sparse gradients ({kind}(sparse=True)); set sparse=False"
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
                return (
                    f"{name}.weight is changed in forward ({type(module).__name__}(max_norm={module.max_norm})), by "
                    "each rank for its own data; set max_norm=None, and clip the rows under zero.full_params()"
                )
        return None

    def refuse_batch_norm(self, on_gpu: bool) -> str | None:
        for name, module in self.model.named_modules():
            is_torchs = type(module).forward is nn.BatchNorm1d.forward
            if on_gpu or not is_torchs or module.weight is None or module.running_mean is None:
                continue
            dtype, kept = self.compute_dtype or module.weight.dtype, module.running_mean.dtype
            ones, statistics = torch.ones(1, dtype=dtype), torch.ones(1, dtype=kept)
            try:
                nn.functional.batch_norm(ones[None], statistics, statistics, weight=ones, bias=ones)
            except RuntimeError:
                return (
                    f"{type(module).__name__} {name!r} would have parameters of {dtype}, and statistics of {kept}"
                    ", which torch refuses on a CPU; leave dtype out, or build it with affine=False"
                )
        return None

    def refuse_units(self, units: Sequence[nn.Module | Sequence[nn.Module]] | None) -> str | None:
        if units is not None and not isinstance(units, Iterable):
            return f"units must be a list (got a {type(units).__name__}); for one unit pass a list of one"
        if not all(as_list(unit) for unit in units or ()):
            return "units: one of them is an empty list; leave it out"
        units = [module for unit in units or () for module in as_list(unit)]
        for index, unit in enumerate(units):
            if id(unit) not in self.names:
                slice_of = "; a slice is a new module: pass list(slice)" if isinstance(unit, nn.Sequential) else ""
                return f"units: {type(unit).__name__} is not a module of {type(self.model).__name__}{slice_of}"
            if any(unit is other for other in units[:index]):
                return f"units: {self.names[id(unit)]} is named twice; name it once"
            for inner in unit.modules():
                if inner is not unit and any(inner is other for other in units):
                    where = f"{self.names[id(inner)]} lies inside {self.names[id(unit)]}"
                    return f"units must not be nested: {where}; name one of them"
        return None

    def refuse_optimizer(self, elementwise: bool) -> str | None:
        kind = type(self.optimizer)
        for name, value in vars(self.optimizer).items():
            if isinstance(value, torch.optim.Optimizer):
                return (
                    f"{kind.__name__} wraps the {type(value).__name__} in its .{name}, and would read and write "
                    f"parameters outside of that one's step(); pass optimizer.{name}, and do without the wrapper"
                )
        if not elementwise and not is_known(self.optimizer):
            return (
                f"{kind.__name__} may look at whole tensors, and a shard would change its result; known to be safe are "
                f"torch.optim's {', '.join(ELEMENTWISE)}; pass elementwise=True if yours is"
            )
        if any(state.get("step", 1) > 0 for state in self.optimizer.state.values()):
            return f"{kind.__name__} already has state for {len(self.optimizer.state)} parameters: wrap before a step"
        names = {id(param): name for name, param in self.params.items()}
        for index, group in enumerate(self.optimizer.param_groups):
            for position, param in enumerate(group["params"]):
                if id(param) not in names:
                    place = f"group {index}, parameter {position} {tuple(param.shape)}"
                    return f"{place} is not a parameter of the model; for two modules pass nn.ModuleList([one, other])"
        for name, param in self.params.items():
            if param.requires_grad and id(param) not in self.group_of:
                return f"{name} requires a gradient but is in no param group: give it to the optimizer or freeze it"
        return None

    def arguments(self) -> dict[str, str]:
        """The arguments that must be the same on every rank: name in the error message -> value as text."""
        optimizer = type(self.optimizer)
        descriptions = {
            "stage": str(self.stage),
            "dtype": str(self.compute_dtype),
            "scaler": str(self.scaler),
            "offload": "host" if self.offload == "host" else "a folder" if self.offload else "none",
            "optimizer": f"{optimizer.__module__}.{optimizer.__qualname__}",
        }
        for index, group in enumerate(self.optimizer.param_groups):
            descriptions[f"param group {index}"] = ", ".join(
                f"{key} {value}" for key, value in group.items() if key != "params"
            )
        for name, param in self.params.items():
            group = self.group_of.get(id(param))
            grad = f"group {group}" if param.requires_grad else "frozen"
            descriptions[f"parameter {name!r}"] = f"{tuple(param.shape)} {param.dtype}, {grad}"
        for name, buffer in self.model.named_buffers():
            descriptions[f"buffer {name!r}"] = f"{tuple(buffer.shape)} {buffer.dtype}"
        descriptions["units"] = ", ".join(name for name, _ in self.blocks) or "none"
        return descriptions


def check_everywhere(plan: Plan, comm: Comm) -> None:
    """ValueError on every rank if any rank has a reason to refuse, or if two ranks have different arguments."""
    arguments = plan.arguments() if plan.reason is None else {}
    rows = comm.host.gather((plan.reason, arguments))
    for rank, (reason, _) in enumerate(rows):
        if reason is not None:
            raise ValueError(reason if reason == plan.reason else f"rank {rank}: {reason}")
    _, first = rows[0]
    for rank, (_, other) in enumerate(rows):
        if list(first) != list(other) or first != other:
            raise ValueError(f"ranks were given different things: {first_difference(first, other, rank)}")


def first_difference(first: dict[str, str], other: dict[str, str], rank: int) -> str:
    """The first entry in which two ordered descriptions differ.

    >>> first_difference({"parameter 'fc.weight'": "(64, 32)"}, {"parameter 'fc.weight'": "(64, 16)"}, rank=1)
    "parameter 'fc.weight' is (64, 32) on rank 0 but (64, 16) on rank 1; build the same everywhere"
    """
    for (a, one), (b, two) in zip(first.items(), other.items()):
        if a != b:
            return f"{a} on rank 0 stands where rank {rank} has {b}; build the same everywhere"
        if one != two:
            return f"{a} is {one} on rank 0 but {two} on rank {rank}; build the same everywhere"
    raise AssertionError("descriptions end with the same entry, so a longer one differs before")
