"""Offload: master copy and optimizer states in host memory, and the update on the CPU.

Source: ZeRO-Offload, arXiv 2101.06840, sections 3 (which tensors move) and 4 (when, and with several GPUs).

    bytes a parameter    on the GPU    in host memory        without it, on the GPU
    stage 1              2             14/N = 12/N + 2/N     4 + 12/N
    stage 2              2             14/N                  2 + 14/N
    stage 3              2/N           14/N                  14/N
    over PCIe, a step    2/N down (gradients), 2/N up (parameters): 16 bits each, whatever the optimizer keeps

plus gradients of at most three units on the GPU, also at stage 1. In host memory, sums of micro-batches take 4/N more.

No other split sends less: this one cuts the graph of a step only at edges of 2 bytes a parameter. Work that grows
with the number of tokens stays on the GPU; work that is done once a step is on the CPU (the paper's section 3.3).

unlike on_device.py, at stage 1, 2 or 3:
  - adopt:          moves the master to the host; stage 3 keeps a 16-bit slice (S) on the GPU, the source of gathers
  - receive:        copies a mean down, without waiting, while backward continues; a thread on the host adds the mean of
                    a further micro-batch, while this thread launches the GPU's kernels
  - wait_for_mean:  waits until the mean is in host memory: the host's only wait in a step
  - update_masters: one unit after the other: fp32 gradients of this unit, the optimizer's own step, a cast, a copy up
  - write_cast:     copies the cast up, while the next unit is updated
  - settle_cast:    gathers start when the cast is on the GPU

    time -->   backward                    step                            next forward
    GPU        u2     u1     u0                                            u0 u1 u2
    down              r2     r1     r0
    CPU                                    update u2   update u1  update u0
    up                                                 u2         u1     u0

The arithmetic is that of the same stage without offload: on a CPU the results are bit-identical. On a GPU,
torch's CPU optimizer replaces its CUDA one, and the last bits differ.

Left out: updates that run during the next forward (the paper's section 5.2, which changes results);
several NUMA nodes.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from zero_mini.binding.checks import is_known
from zero_mini.flat import Unit
from zero_mini.memory.inventory import states
from zero_mini.update import one_pass
from zero_mini.update.on_device import OnDevice

PART = 2**23  # elements that are updated at a time


class Link:
    """Copies between GPU and host, in order, on a separate stream. On a CPU they are ordinary copies.

    GPU memory belongs to the compute stream: the source of a copy down is kept until that stream waits
    for the copy, and only then freed.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.last_source: tuple[Tensor, torch.cuda.Event] | None = None  # the source of the last copy down
        self.staging: list[Tensor] = []  # two pinned buffers, alternately the source of copies up
        self.last_copies: list[torch.cuda.Event] = []  # the last copy from each

    def host_buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Host memory (numel), pinned on CUDA, so that copies run without waiting."""
        return torch.empty(numel, dtype=dtype, pin_memory=self.stream is not None)

    def copy(self, source: Tensor, target: Tensor) -> torch.cuda.Event | None:
        """source -> target, after all work now in the current stream; returns an event for its end."""
        if self.stream is None:
            target.copy_(source)
            return None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
        return self.stream.record_event()

    def down(self, source: Tensor, target: Tensor) -> torch.cuda.Event | None:
        """source on the GPU -> target on the host. The caller may drop the source at once."""
        event = self.copy(source, target)
        self.let_go()
        self.last_source = event and (source, event)
        return event

    def let_go(self) -> None:
        """The current stream waits for the last copy down; after that its source can be reused."""
        if self.last_source is not None:
            torch.cuda.current_stream(self.device).wait_event(self.last_source[1])
        self.last_source = None

    def staging_for(self, target: Tensor) -> Tensor:
        """Pinned memory of the target's size and dtype, whose last copy up has ended."""
        if self.stream is None:
            return target
        if not self.staging or self.staging[0].numel() < target.numel():
            self.staging = [self.host_buffer(target.numel(), target.dtype) for _ in range(2)]
            self.last_copies = [torch.cuda.Event(), torch.cuda.Event()]  # not recorded: nothing to wait for
        self.staging.reverse()
        self.last_copies.reverse()
        self.last_copies[0].synchronize()
        return self.staging[0][: target.numel()]

    def up(self, staged: Tensor, target: Tensor) -> torch.cuda.Event | None:
        """What was written to `staging_for(target)` -> target on the GPU."""
        if self.stream is None:
            return None
        self.last_copies[0] = self.copy(staged, target)
        return self.last_copies[0]


class Offload(OnDevice):
    """`zero` is the handle of stage 1, 2 or 3."""

    def __init__(self, zero) -> None:
        super().__init__(zero)
        self.link = Link(zero.device)
        self.resident: dict[Unit, Tensor] = {}  # stage 3: this rank's slice (S), in the model's dtype, on the GPU
        self.landing: dict[Unit, Tensor] = {}  # where a mean (S) arrives in host memory
        self.sums: dict[Unit, Tensor] = {}  # of several micro-batches (S), in the master's dtype
        self.falling: dict[Unit, Callable[[], object]] = {}  # means in flight to the host: a function that waits
        self.adder = ThreadPoolExecutor(1)  # adds means, while this thread launches the GPU's kernels
        self.rising: dict[Unit, torch.cuda.Event | None] = {}  # casts in flight to the GPU
        self.sent: deque[Unit] = deque()  # units whose reduction may be in flight
        largest = max(unit.S for unit in zero.units)
        self.scratch = torch.empty(min(PART, largest), dtype=zero.master_dtype)  # fp32 gradients of one part
        self.addend: Tensor | None = None  # an fp32 copy of one part, to add to sums

    def adopt(self, unit: Unit) -> None:
        """Move the master to the host."""
        if unit.full is None:
            self.resident[unit] = unit.master.to(self.zero.dtype)
        unit.master = unit.master.to("cpu", copy=True)

    def source(self, unit: Unit) -> Tensor:
        """The slice that stayed on the GPU."""
        return self.resident[unit]

    def on_gpu(self, unit: Unit) -> Tensor:
        """This rank's slice (S) of the model's parameters."""
        return self.resident[unit] if unit.full is None else unit.slice_of(unit.full)

    def after_reduce(self, unit: Unit) -> None:
        """Finish all reductions but the last two, and copy their means to the host."""
        self.sent.append(unit)
        if len(self.sent) > 2:
            self.zero.finish_reduction(self.sent.popleft())

    def end_backward(self) -> None:
        """Finish the last reductions, and copy their means to the host."""
        while self.sent:
            self.zero.finish_reduction(self.sent.popleft())

    def receive(self, unit: Unit, mean: Tensor) -> None:
        """Start to copy the mean to the host. Waits only for an earlier mean of this unit."""
        self.land(unit)
        place = self.landing.get(unit)
        if unit.mean_grad is not None and unit.mean_grad is place:
            if unit not in self.sums:
                self.sums[unit] = torch.empty(unit.S, dtype=self.zero.master_dtype)
            unit.mean_grad = self.sums[unit].copy_(place)
        if place is None or place.dtype != mean.dtype:
            self.landing[unit] = place = self.link.host_buffer(unit.S, mean.dtype)
        event = self.link.down(mean, place)
        if unit.mean_grad is not None:
            unit.mean_grad = unit.mean_grad.to(self.zero.master_dtype)
            self.falling[unit] = self.adder.submit(self.add, unit.mean_grad, place, event).result
            return
        unit.mean_grad = place
        if event is not None:
            self.falling[unit] = event.synchronize

    def add(self, total: Tensor, mean: Tensor, event: torch.cuda.Event | None) -> None:
        """total (S) += mean (S), once it has arrived."""
        if event is not None:
            event.synchronize()
        if self.addend is None:
            self.addend = torch.empty_like(self.scratch)
        for part, addend in zip(total.split(PART), mean.split(PART)):
            part.add_(self.addend[: addend.numel()].copy_(addend))

    def land(self, unit: Unit) -> None:
        """Wait until the unit's mean is in host memory, and added to the sum.

        Its entry in `falling` stays until then: an interrupted wait can be repeated, and a failed addition
        raises each time, so that no incomplete sum is used.
        """
        if unit in self.falling:
            self.falling[unit]()
            del self.falling[unit]

    def wait_for_mean(self, unit: Unit) -> None:
        """Wait until the mean is in host memory."""
        super().wait_for_mean(unit)
        self.land(unit)

    def applies_factor(self) -> bool:
        """True for torch's optimizers: to an fp32 copy of one unit's gradient. Others may count their calls."""
        return is_known(self.zero.optimizer)

    def update_masters(self) -> None:
        """Update one unit after the other, in the order in which means arrive."""
        zero = self.zero
        self.link.let_go()
        if zero.factor.value is not None:
            zero.factor.value = zero.factor.value.to("cpu")
        self.update_all([unit for unit in reversed(zero.trainable) if unit.holds_gradient])

    def update_all(self, units: list[Unit]) -> None:
        """Update all units that have a gradient."""
        for unit in units:
            self.update(unit)

    def update(self, unit: Unit) -> None:
        """Update one unit, and start to copy its cast to the GPU."""
        self.wait_for_mean(unit)
        if one_pass.is_fusible(self.zero.optimizer):
            self.rise(unit, lambda staging: self.update_in_parts(unit, staging))
        else:
            self.update_by_own_step(unit)
            self.write_cast(unit)

    def update_in_parts(self, unit: Unit, staging: Tensor) -> None:
        """AdamW, and the cast to `staging`, in parts so small that the fp32 gradient stays in the CPU's caches."""
        pieces = list(unit.used_pieces(unit.mean_grad))
        if len(pieces) < len(unit.pieces):
            staging.copy_(unit.master)
        for (group, piece, grad), (_, _, cast) in zip(pieces, unit.used_pieces(staging)):
            state = one_pass.state_of(self.zero.optimizer, piece)
            state["step"] += 1
            tensors = (piece.detach(), grad, state["exp_avg"], state["exp_avg_sq"], cast)
            for master, grad, *rest in zip(*(tensor.split(PART) for tensor in tensors)):
                upcast = self.scratch[: grad.numel()].copy_(grad)
                if self.zero.factor.value is not None:
                    upcast.mul_(self.zero.factor.value)
                one_pass.update(master, upcast, *rest, state["step"], None, self.zero.optimizer.param_groups[group])
            piece.grad = None

    def update_by_own_step(self, unit: Unit) -> None:
        """Run the step of the optimizer's class while param groups hold only this unit's pieces."""
        grad = unit.mean_grad.to(self.zero.master_dtype)
        if self.zero.factor.value is not None:
            grad = grad * self.zero.factor.value
        groups = self.zero.optimizer.param_groups
        all_params = [group["params"] for group in groups]
        for group in groups:
            group["params"] = []
        for group, piece, part in unit.used_pieces(grad):
            piece.grad = part
            groups[group]["params"].append(piece)
        try:
            step_without_hooks(self.zero.optimizer)
        finally:
            for group, params in zip(groups, all_params):
                group["params"] = params
            for _, piece in unit.pieces:
                piece.grad = None

    def write_cast(self, unit: Unit) -> None:
        """Copy a cast of the master to the GPU."""
        self.rise(unit, lambda staging: staging.copy_(unit.master))

    def rise(self, unit: Unit, write: Callable[[Tensor], object]) -> None:
        """`write` fills a buffer (S) in host memory; copy it to the GPU."""
        target = self.on_gpu(unit)
        staging = self.link.staging_for(target)
        write(staging)
        self.rising[unit] = self.link.up(staging, target)

    def settle_cast(self, unit: Unit) -> None:
        """The cast must arrive before it is published: the current stream waits, the host does not."""
        super().settle_cast(unit)
        self.wait_for_rising(unit)

    def wait_for_rising(self, unit: Unit) -> None:
        event = self.rising.pop(unit, None)
        if event is not None:
            torch.cuda.current_stream(self.zero.device).wait_event(event)

    def replace(self, unit: Unit, values: Tensor) -> None:
        """Also replace the slice on the GPU."""
        super().replace(unit, values)
        self.on_gpu(unit).copy_(unit.slice_of(values))

    def tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        """The slices on the GPU, and what is in host memory between steps."""
        for unit, shard in self.resident.items():
            yield "parameters", unit.name, shard
        yield from self.host_tensors()

    def host_tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        """What is in host memory, (category, label, tensor)."""
        for unit in self.zero.units:
            yield from states(self.zero, unit)
            if unit.mean_grad is not None:
                yield "gradients", unit.name, unit.mean_grad
        for place in (self.landing, self.sums):
            for unit, gradient in place.items():
                yield "gradients", unit.name, gradient
        for buffer in self.link.staging:
            yield "communication", "on their way up", buffer
        for scratch in (self.scratch, self.addend):
            if scratch is not None:
                yield "gradients", "fp32 of a part", scratch


def step_without_hooks(optimizer: torch.optim.Optimizer) -> None:
    """The step of the optimizer's class. Its hooks do not run: they are for the step that the user calls."""
    step = type(optimizer).step
    if getattr(step, "hooked", False):  # torch wraps it when an optimizer of the class is created
        step = step.__wrapped__
    step(optimizer)
