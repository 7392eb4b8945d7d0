"""Units: parameters that are gathered and reduced together, in one flat buffer that N ranks can share.

A collective needs one contiguous buffer whose size is a multiple of N; a model has many small tensors
of any size. A `Unit` is the map between the two. Shape letters, used everywhere in this package:

    P   elements of a unit's flat buffer, padding included
    N   ranks (the world size)
    S   elements of one rank's slice, S = P/N

    weight (2, 4)           bias (2)     padding
    w00 w01 ... ... w13     b0 b1 - -    - - - -          flat buffer, P (drawn with ALIGN = 4)
    |<-- rank 0, S -->|<---- rank 1, S ---->|             N = 2

A slice may begin or end inside a tensor: half a matrix is as good as a whole one, because the
optimizers that ZeRO supports update each element independently. So all slices have the same number of
elements, whatever shapes the model has.

Inside a unit the parameters are sorted by the optimizer's param group, so that a group is one *run*
of the buffer and this rank's part of it is one *piece*, a view: weight decay, learning rate and
schedulers keep working on groups. If no rank used a parameter in a step, but other parameters of its
run were used, it becomes a run of its own. The optimizer then skips its piece and counts no
step for it, as torch does when a gradient is None. Each parameter starts on an ALIGN boundary, so
that kernels see aligned memory as they do in an unsharded model. Gaps are zero, and stay zero: their
gradient is zero.

Left out: parameters of several dtypes in one model, and sparse ones (see binding/checks.py).
"""

import operator
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import repeat
from typing import TYPE_CHECKING, NamedTuple
from weakref import ReferenceType

import torch
from torch import nn
from torch._utils import _flatten_dense_tensors

from zero_mini.binding.parameter import (
    HeldParameter,
    HiddenParameter,
    give_memory,
    grad_of,
    plainly,
    set_data,
    set_grad,
)

if TYPE_CHECKING:
    from zero_mini.comm import Launched

ALIGN = 32  # elements: 128 bytes in fp32, 64 in bf16


def round_up(numel: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `numel`.

    >>> round_up(5, 4), round_up(8, 4), round_up(0, 4)
    (8, 8, 0)
    """
    return -(-numel // multiple) * multiple


def count_none(grads: list) -> int:
    """How many of `grads` are None. (`in` and `count` would compare tensors by value.)"""
    return sum(map(operator.is_, grads, repeat(None)))


class Reduction(NamedTuple):
    """A unit's gradients in flight."""

    work: "Launched"  # or any object with a wait(), which is called once
    mean: torch.Tensor  # shaped like the master, of any float dtype: it has the mean when work.wait() has returned
    buffer: torch.Tensor  # (P) the collective uses it until the mean has arrived


@dataclass(eq=False)
class Unit:
    """Parameters of one module, or a few, that are gathered, reduced and freed as one flat buffer.

    Either all need a gradient, or none does: a module with both kinds becomes two units.
    """

    name: str  # the module's name in the model; "root" for parameters of no block
    modules: tuple[nn.Module, ...]  # the unit's turn: from the first one's forward to the last one's
    names: list[str]
    params: list[nn.Parameter]
    groups: list[int]  # the optimizer's param group of each, ascending
    rank: int
    world_size: int
    is_root: bool = False  # its turn contains the turns of all other units
    is_grouped: bool = True  # its parameters are in the optimizer's param groups; frozen ones need not be
    middle: nn.Parameter | None = None  # its gradient arrives half-way through the unit's backward
    full: torch.Tensor | None = None  # (P) what the model computes with; stage 3 has none
    full_views: list[torch.Tensor] = field(default_factory=list)  # of `full`, one a parameter
    master: torch.Tensor | None = None  # (P) or (S) what this rank's optimizer updates
    local_grad: torch.Tensor | None = None  # (P) this rank's gradients, not reduced yet
    mean_grad: torch.Tensor | None = None  # shaped like master: the mean over ranks
    pieces: list[tuple[int, nn.Parameter]] = field(default_factory=list)  # (group, view of master)
    reducing: "Reduction | None" = None  # in flight
    pending: Counter = field(default_factory=Counter)  # module -> its forward calls whose backward has not started yet
    used: int = 0  # bit i: on this rank params[i] got a gradient since zero_grad()
    used_anywhere: int = 0  # the same for any rank; ranks exchange it at the step
    apart: set[int] = field(default_factory=set)  # indices of params that are a run of their own
    place: object | None = None  # at stage 3: the slot it is gathered into (zero3.Place)
    stage: ReferenceType | None = None  # the handle that trains it
    is_whole: bool = False  # its parameters are whole now, under zero.full_params()
    shows_grads: bool = False  # gradients are whole too, under zero.full_params(grads=True)
    nan_views: list[torch.Tensor] = field(default_factory=list)  # one NaN in each parameter's shape: uses no memory
    visible: list[torch.Tensor] = field(default_factory=list)  # what its parameters are now: `nan_views` if hidden
    versions: list[int] = field(default_factory=list)  # each parameter's count of writes (binding/watch.py)

    def __post_init__(self):
        """Lay the parameters out; allocate nothing."""
        self.trainable = self.params[0].requires_grad
        self.offsets, end = [], 0
        for param in self.params:
            self.offsets.append(end)
            end = round_up(end + param.numel(), ALIGN)
        self.P = round_up(max(end, 1), ALIGN * self.world_size)  # max: all tensors of a unit may have 0 elements
        self.S = self.P // self.world_size
        self.shapes = [param.shape for param in self.params]
        # empty_like keeps the strides of a dense tensor (for example channels_last); other strides become dense.
        self.strides = [torch.empty_like(param, device="meta").stride() for param in self.params]
        ends = self.offsets[1:] + [self.P]
        self.gaps = [
            (start + param.numel(), end)
            for start, param, end in zip(self.offsets, self.params, ends)
            if start + param.numel() < end
        ]
        self.is_dense = not self.gaps and all(param.is_contiguous() for param in self.params)
        self.find_runs()

    @property
    def holds_gradient(self) -> bool:
        return any(state is not None for state in (self.local_grad, self.mean_grad, self.reducing))

    @property
    def hides_gradient(self) -> bool:
        """A parameter's .grad would be None although there is a gradient."""
        return self.holds_gradient and not self.shows_grads

    def slice_of(self, buffer: torch.Tensor, rank: int | None = None) -> torch.Tensor:
        """buffer (P) -> this rank's (or another's) slice (S), a view."""
        rank = self.rank if rank is None else rank
        return buffer[rank * self.S : (rank + 1) * self.S]

    def part_of_master(self, values: torch.Tensor) -> torch.Tensor:
        """values (P) -> the part of them that the master has: all, or this rank's slice; a view."""
        return values if self.master.numel() == self.P else self.slice_of(values)

    def start_of(self, owned: torch.Tensor) -> int:
        """Where in the flat buffer `owned` begins: all of it (P), or this rank's slice (S)."""
        return 0 if owned.numel() == self.P else self.rank * self.S

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """buffer (P) -> one view a parameter, in its own shape."""
        start = buffer.storage_offset()
        layout = zip(self.shapes, self.strides, self.offsets)
        return [buffer.as_strided(shape, stride, start + offset) for shape, stride, offset in layout]

    def take_values(
        self, initialise: Callable[[str, torch.Tensor], None] | None, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A new buffer (P) with the parameters' values and zeros in the gaps; one by one they become views of it.

        A parameter built on the meta device gets its values from initialise(name, tensor), in the buffer itself. The
        memory of any other is free as soon as it is copied, so that there are never two copies of the whole unit.
        """
        buffer = torch.empty(self.P, dtype=dtype, device=device)
        with torch.no_grad():
            for name, param, view in zip(self.names, self.params, self.views(buffer)):
                if param.is_meta:
                    tensor = view.detach()
                    initialise(name, tensor)
                    if (tensor.data_ptr(), tensor.stride()) != (view.data_ptr(), view.stride()):
                        view.copy_(tensor)  # it was given other memory, by `tensor.data = ...`
                    give_memory(param, view)
                else:
                    view.copy_(param)
                    set_data(param, view)
            if self.gaps:
                torch._foreach_zero_([buffer[start:end] for start, end in self.gaps])
        return buffer

    def grads(self) -> list[torch.Tensor | None]:
        """Each parameter's .grad: a gradient that is not in a flat buffer yet, or None."""
        with plainly():
            return list(map(grad_of, self.params))

    def grads_arrived(self) -> int:
        """How many parameters have a .grad that is not in a flat buffer yet."""
        return len(self.params) - count_none(self.grads())

    def note_used(self, grads: list[torch.Tensor | None]) -> None:
        """Remember which parameters got a gradient."""
        if not count_none(grads):
            self.used = (1 << len(grads)) - 1
        else:
            self.used |= sum(1 << index for index, grad in enumerate(grads) if grad is not None)

    def take_grads(self, accumulate_dtype: torch.dtype) -> None:
        """Move every parameter's .grad into `local_grad` (P): the first is copied, later ones are added.

        Sums of several micro-batches are kept in `accumulate_dtype`: bf16 would stall (512 times
        1.0 adds up to 256). A parameter without a gradient counts as zero.
        """
        grads = self.grads()
        self.note_used(grads)
        with plainly():
            if self.local_grad is None and self.is_dense and not count_none(grads):
                self.local_grad = _flatten_dense_tensors(grads)  # one operation, same result as the next branch
            elif self.local_grad is None:
                self.local_grad = torch.empty(self.P, dtype=self.params[0].dtype, device=self.params[0].device)
                self.fill(self.local_grad, grads)
            else:
                self.local_grad = self.local_grad.to(accumulate_dtype)
                pairs = [(view, grad) for view, grad in zip(self.views(self.local_grad), grads) if grad is not None]
                if pairs:
                    torch._foreach_add_(*map(list, zip(*pairs)))
            for param in self.params:
                set_grad(param, None)

    def forget_grads(self, set_to_none: bool) -> None:
        """Drop the gradients; without `set_to_none`, zeros replace those that exist."""
        zeros = torch.zeros_like(self.master) if self.holds_gradient and not set_to_none else None
        self.local_grad, self.mean_grad = None, zeros
        if set_to_none:
            self.used = 0
        with plainly():
            for tensor in (*self.params, *(piece for _, piece in self.pieces)):
                set_grad(tensor, None)

    def fill(self, buffer: torch.Tensor, tensors: list) -> torch.Tensor:
        """buffer (P) <- one tensor a parameter; zero where it is None and in the gaps."""
        views = self.views(buffer)
        pairs = [(view, tensor) for view, tensor in zip(views, tensors) if tensor is not None]
        without_tensor = [view for view, tensor in zip(views, tensors) if tensor is None]
        zero_views = without_tensor + [buffer[start:end] for start, end in self.gaps]
        with torch.no_grad():
            if pairs:
                torch._foreach_copy_(*map(list, zip(*pairs)))
            if zero_views:
                torch._foreach_zero_(zero_views)
        return buffer

    def show(self, views: list[torch.Tensor]) -> None:
        """Give the parameters the memory of these views; `nan_views` hides them."""
        if views is not self.visible:
            cls = HiddenParameter if views is self.nan_views else HeldParameter
            with plainly():
                for param, view in zip(self.params, views):
                    set_data(param, view)
                    param.__class__ = cls
            self.visible = views

    def hide(self) -> None:
        """Outside the unit's turn, parameters keep shapes but have no memory or values."""
        self.show(self.nan_views)

    def by_group(self, owned: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        """owned, (P) or a slice (S) -> [(group, view)], one for each run that overlaps it."""
        return [(run.group, owned[run.low : run.high]) for run in self.runs[owned.numel()]]

    def used_pieces(self, owned: torch.Tensor) -> Iterator[tuple[int, nn.Parameter, torch.Tensor]]:
        """Yield (group, piece, its part of `owned`) for each piece that any rank used since zero_grad()."""
        for run, (group, piece), (_, view) in zip(self.runs[owned.numel()], self.pieces, self.by_group(owned)):
            bits_of_run = (1 << run.after) - (1 << run.first)
            if self.used_anywhere & bits_of_run:
                yield group, piece, view

    def find_runs(self) -> None:
        """`runs`: {P: the runs of the whole buffer, S: those that overlap this rank's slice}."""
        self.runs = {self.P: self._runs(0, self.P), self.S: self._runs(self.rank * self.S, self.S)}

    def _runs(self, begin: int, numel: int) -> list["Run"]:
        """The runs that overlap buffer[begin:][:numel], counted from `begin`."""
        runs, first = [], 0
        for after in range(1, len(self.params) + 1):
            is_end = after == len(self.params)
            if is_end or self.groups[after] != self.groups[first] or {first, after} & self.apart:
                low = max(self.offsets[first] - begin, 0)
                high = min((self.P if is_end else self.offsets[after]) - begin, numel)
                if low < high:
                    runs.append(Run(self.groups[first], first, after, low, high))
                first = after
        return runs


@dataclass(frozen=True)
class Run:
    """params[first:after] of a unit, one piece for the optimizer, and their range in its buffer or in a slice of it."""

    group: int
    first: int
    after: int
    low: int
    high: int
