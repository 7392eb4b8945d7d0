"""Stage 3 with one decision changed, to measure the effect of that decision.

    no prefetch          a unit is gathered when its turn begins, and the computation waits for the gather
    storage resize       each unit has a buffer of its own, whose memory is freed outside of its turn, as in FSDP2;
                         zero3.py has two slots that are never freed
    gathers as kernels   gathers occupy SMs, like reductions, and queue with them
    reductions at once   sent as soon as they are collected, at the start of the next unit's backward
    two communicators    the same kernels, but a gather need not wait for the reduction launched before it
    16-bit shard         a shard in the dtype of the computation is kept too, as the paper's 16/N counts it: the update
                         writes it, and a gather need not cast

All of them compute what stage 3 computes, to the bit. Only the benchmark uses them, by `zeroify(stage=<class>)`, so
the stages have no switches.

Left out: ablations of whole stages; those are stages 0, 1 and 2.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist

from zero_mini.flat import Unit
from zero_mini.update.on_device import OnDevice
from zero_mini.zero3 import Slot, Zero3


class NoPrefetch(Zero3):
    """A unit is gathered in its own turn."""

    def prefetch(self, unit: Unit, neighbour: Unit | None) -> None:
        """Do nothing: the neighbour is gathered in its turn."""


class GathersAsKernels(Zero3):
    """One communicator for all collectives; its kernels run in the order of launch."""

    def prepare(self) -> None:
        """Ordinary memory for the slots."""
        self.comm.gathering, self.comm.reachable = self.comm.group, None
        super().prepare()


class ReductionsAtOnce(Zero3):
    """A reduction is sent at once, not half-way through the next unit's backward."""

    def after_backward(self, unit: Unit) -> None:
        """Collect the gradients, and send them."""
        super().after_backward(unit)
        self.send_ready()


class TwoCommunicators(Zero3):
    """Gathers have a communicator of their own, and so a queue of their own. There is still one ledger."""

    def prepare(self) -> None:
        """Ordinary memory for the slots, and a second group of the same ranks."""
        self.comm.gathering, self.comm.reachable = dist.new_group(dist.get_process_group_ranks(self.comm.group)), None
        super().prepare()


class ShardFollows(OnDevice):
    """The update writes the 16-bit shards, not zero3.py's gathers."""

    def cast_of(self, unit: Unit) -> torch.Tensor:
        """The unit's shard."""
        return self.zero.shards[unit]


class SixteenBitShard(Zero3):
    """Each unit's slice is kept in the dtype of the computation too: 2 Psi/N bytes."""

    def __init__(self, *args, make_update, **options):
        self.shards: dict[Unit, torch.Tensor] = {}  # (S); in fp32 the master itself
        super().__init__(*args, make_update=ShardFollows, **options)

    def adopt(self, unit: Unit, values: torch.Tensor) -> None:
        """Make the shard."""
        super().adopt(unit, values)
        self.shards[unit] = unit.master
        if self.mixed:
            self.shards[unit] = self.comm.empty(unit.S, self.dtype, self.device).copy_(unit.master)

    def launch_gather(self, unit: Unit) -> None:
        """Shards of all ranks -> slot, without a cast."""
        slot = unit.place.slot
        self.vacate(slot)
        slot.arriving = self.comm.all_gather(slot.buffer[: unit.P], self.shards[unit], unit.name)
        slot.holder = unit

    def tensors(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """And the shards."""
        yield from super().tensors()
        for unit, shard in self.shards.items():
            yield "parameters", unit.name, shard


class StorageResize(GathersAsKernels):
    """Each block has a buffer of its own, empty outside of its turn. Views that autograd saved stay valid."""

    def prepare(self) -> None:
        """As many slots as units, without memory but for the root's."""
        super().prepare()
        for unit in self.units:
            unit.place.slot = Slot(torch.empty(unit.P, dtype=self.dtype, device=self.device))
            unit.place.views = unit.views(unit.place.slot.buffer)
        self.slots = [unit.place.slot for unit in self.units]
        self.resized_slots = {unit.place.slot for unit in self.units if not unit.is_root}
        for slot in self.resized_slots:
            slot.buffer.untyped_storage().resize_(0)

    def launch_gather(self, unit: Unit) -> None:
        """Memory first."""
        buffer = unit.place.slot.buffer
        buffer.untyped_storage().resize_(unit.P * buffer.element_size())
        super().launch_gather(unit)

    def after_forward(self, unit: Unit) -> None:
        """At the end of its forward a unit's memory returns to the allocator."""
        super().after_forward(unit)
        if not unit.is_root and unit not in self.backward.entered:
            self.vacate(unit.place.slot)

    def after_backward(self, unit: Unit) -> None:
        """The same in backward, when the unit's gradients exist."""
        super().after_backward(unit)
        if not unit.is_root:
            self.vacate(unit.place.slot)

    def vacate(self, slot: Slot) -> None:
        """Free the memory of an empty slot, unless it is the root's."""
        had_holder = slot.holder is not None
        super().vacate(slot)
        if had_holder and slot in self.resized_slots:
            slot.buffer.untyped_storage().resize_(0)
