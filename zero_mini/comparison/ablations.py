"""Stage 3 with one decision taken otherwise, to measure what the decision is worth.

    no prefetch          a unit is gathered when its turn begins, and computing waits for it
    storage resize       each unit has a buffer of its own, whose memory is given back out of turn, as FSDP2 does;
                         zero3.py has two slots that are never given back
    gathers as kernels   gathers take multiprocessors, like reductions, and queue with them
    reductions at once   sent as soon as they are collected, at the start of the next unit's backward
    two communicators    the same kernels, but a gather need not wait for the reduction launched before it

All of them compute what stage 3 computes, to the bit. Only the benchmark uses them, by `zeroify(stage=<class>)`, so
the stages have no switches.

Left out: the ablations of whole stages; stages 0, 1 and 2 are those.
"""

import torch
import torch.distributed as dist

from zero_mini.flat import Unit
from zero_mini.zero3 import Slot, Zero3


class NoPrefetch(Zero3):
    """Nothing travels before its turn."""

    def prefetch(self, unit: Unit, neighbour: Unit | None) -> None:
        """The neighbour gathers itself, later."""


class GathersAsKernels(Zero3):
    """One communicator for all, whose kernels run in the order of their launch."""

    def prepare(self) -> None:
        """Ordinary memory for the slots."""
        self.comm.gathering, self.comm.reachable = self.comm.group, None
        super().prepare()


class ReductionsAtOnce(Zero3):
    """The wire does not wait for the middle of a unit."""

    def after_backward(self, unit: Unit) -> None:
        """Collected, and sent."""
        super().after_backward(unit)
        self.send_ready()


class TwoCommunicators(Zero3):
    """Gathers have a communicator, and so a queue, of their own. The ledger stays one."""

    def prepare(self) -> None:
        """Ordinary memory for the slots, and a second group of the same ranks."""
        self.comm.gathering, self.comm.reachable = dist.new_group(dist.get_process_group_ranks(self.comm.group)), None
        super().prepare()


class StorageResize(GathersAsKernels):
    """Each block in a buffer of its own, empty out of turn. The views of it that autograd saved stay valid."""

    def prepare(self) -> None:
        """As many slots as units, without memory but for the root's."""
        super().prepare()
        for unit in self.units:
            unit.place.slot = Slot(torch.empty(unit.P, dtype=self.dtype, device=self.device))
            unit.place.views = unit.views(unit.place.slot.buffer)
        self.slots = [unit.place.slot for unit in self.units]
        self.given_back = {unit.place.slot for unit in self.units if not unit.is_root}
        for slot in self.given_back:
            slot.buffer.untyped_storage().resize_(0)

    def launch_gather(self, unit: Unit) -> None:
        """Memory first."""
        buffer = unit.place.slot.buffer
        buffer.untyped_storage().resize_(unit.P * buffer.element_size())
        super().launch_gather(unit)

    def after_forward(self, unit: Unit) -> None:
        """Its turn over, a unit's memory goes back to the allocator."""
        super().after_forward(unit)
        if not unit.is_root and unit not in self.backward.entered:
            self.vacate(unit.place.slot)

    def after_backward(self, unit: Unit) -> None:
        """The same in backward, once its gradients are there."""
        super().after_backward(unit)
        if not unit.is_root:
            self.vacate(unit.place.slot)

    def vacate(self, slot: Slot) -> None:
        """An empty slot has no memory, but for the root's."""
        was_taken = slot.holder is not None
        super().vacate(slot)
        if was_taken and slot in self.given_back:
            slot.buffer.untyped_storage().resize_(0)
