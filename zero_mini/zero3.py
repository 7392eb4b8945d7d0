"""Stage 3, P_os+g+p: every rank keeps 1/N of the parameters too, and gathers a unit for its turn.

Source: arXiv 1910.02054, section 5.3 (memory) and 7.2.2 (volume); 6.2 and 6.3 (constant buffers,
C_B, and memory that is allocated once, M_D).

    bytes a parameter   14/N       = (2 gradients + 12 optimizer)/N, the paper's 16/N less its
                                     16-bit shard: a slot's slice is cast from the fp32 master
                                     (fp32: 16/N), plus the root and two slots
    wire, elements      3 Psi      = all-gather for forward, all-gather for backward,
                                     reduce-scatter, times (N-1)/N; less what is still in a slot

unlike zero2.py:
  - adopt:            a slice of the parameters, and nothing else
  - before_forward:   gather the unit into its slot; begin to gather the unit after it
  - before_backward:  the same once more, towards the front
  - publish:          nothing to send; what the slots hold is out of date
  - after_forward:    the unit's parameters are hidden: a read never shows the slot's next holder
  - fetch:            a module that is called by itself gets its parameters; any other read raises
  - after_backward:   raises if a gradient cannot be true, because the slot held another unit

    time -->     forward           backward                          step
    compute         u0 u1 u2       u2   u1   u0                      update of 1/N
    wire         g0 g1 g2               g0 r2   r1   r0
    slot 0          u0    u2       u2   u0   u0                      until publish
    slot 1             u1 u1       u1   u1   u1                      until publish
    memory       parameters two slots and 1/N; gradients as stage 2; optimizer #...

  - k micro-batches:   as zero2.py, and each gathers anew: 16/N bytes, 3 Psi each
  - tied parameter:    within one block as ddp.py; shared by two blocks, it is the root's, which stays gathered
  - frozen parameter:  in slots of its own; gathered in forward and again in backward, not reduced
  - unused parameter:  as ddp.py; a unit whose forward no rank runs is not gathered, but reduced
  - ranks that differ: as ddp.py; an evaluation on one rank alone waits for the others' gathers, and is named

Two slots are enough for one unit to compute while the next arrives. A unit always returns to the
same slot, because autograd saved views of that memory in forward, and will read them in backward.
Nothing is allocated or copied out, so nothing fragments. The units at the end of forward are
the first that backward needs: they are still there, and are not gathered again.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from zero_mini.binding.hooks import hook_outputs
from zero_mini.binding.out_of_turn import Copies, forward_is_running, refuse
from zero_mini.binding.watch import note_versions
from zero_mini.comm import Launched
from zero_mini.flat import Unit
from zero_mini.zero2 import Zero2


@dataclass(eq=False)
class Slot:
    """Memory for one gathered unit at a time."""

    buffer: torch.Tensor
    holder: Unit | None = None
    arriving: Launched | None = None  # the holder's all-gather, not waited for yet


@dataclass(eq=False)
class Place:
    """Where a unit is gathered to, and when."""

    slot: Slot
    views: list[torch.Tensor]  # of the slot's buffer, one a parameter
    track: bool  # of trainable units, or of frozen ones; unfreezing changes no slot
    previous: Unit | None = None  # the neighbours in the order of the last forward
    following: Unit | None = None
    grads_when_vacated: int = 0  # how many gradients had arrived when another unit took the slot


class Zero3(Zero2):
    """P_os+g+p: optimizer states, gradients and parameters sharded."""

    sharded = ("optimizer", "gradients", "parameters")

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.slots: list[Slot] = []
        self.last_used: dict[bool, Unit] = {}  # track of trainable units or of frozen ones -> where forward is
        self.copies = Copies()  # that stood for views of a hidden parameter

    def prepare(self) -> None:
        """Two slots that the blocks take in turns, as large as the largest; the root has its own."""
        blocks = [unit for unit in self.units if not unit.is_root]
        tracks = [[unit] for unit in self.units if unit.is_root]
        for trainable in (True, False):  # frozen units are gathered beside the others: own slots
            track = [unit for unit in blocks if unit.trainable is trainable]
            tracks += [track[0::2], track[1::2]]
        for track in filter(None, tracks):
            slot = Slot(self.comm.empty(max(unit.P for unit in track), self.dtype, self.device))
            self.slots.append(slot)
            for unit in track:
                unit.place = Place(slot, unit.views(slot.buffer), unit.trainable)

    def adopt(self, unit: Unit, values: torch.Tensor) -> None:
        """A slice of the values; between turns the unit has no parameters at all."""
        unit.master = unit.slice_of(values).clone()
        unit.hide()

    def begin_forward(self) -> None:
        """The order of the last forward stays as the guess for prefetching; after its last unit comes none."""
        super().begin_forward()
        for unit in self.last_used.values():
            unit.place.following = None
        self.last_used = {}

    def before_forward(self, unit: Unit) -> None:
        """Gather this unit, unless it is there; begin to gather the one that followed it last time."""
        self.gather(unit)
        track = unit.place.track
        before = self.last_used.get(track)
        # Activation checkpointing runs forwards inside a backward: they are not part of the prefetch order.
        if not self.backward.running and not unit.is_root and before is not unit:
            unit.place.previous = before
            if before is not None:
                before.place.following = unit
            self.last_used[track] = unit
            self.prefetch(unit, unit.place.following)

    def after_forward(self, unit: Unit) -> None:
        """Its slot will hold another unit: reading its parameters from now on must not show that one's."""
        if not unit.is_root and unit not in self.backward.entered:
            unit.hide()

    def before_backward(self, unit: Unit) -> None:
        """Gather this unit, unless it is there; begin to gather the one that came before it."""
        if unit not in self.backward.entered and not unit.is_root and unit.grads_arrived():
            raise RuntimeError(
                f"a gradient of {unit.name} arrived before its backward began, when its parameters need not have "
                "been in place: an output is hidden, perhaps kept as an attribute of the module; return it instead"
            )
        if not unit.is_root:
            self.hide_all_but(unit.modules[0])
        self.gather(unit)
        if not unit.is_root:
            self.prefetch(unit, unit.place.previous)  # ahead of the reductions that follow: it is needed sooner
        super().before_backward(unit)

    def after_backward(self, unit: Unit) -> None:
        """Gradients are true only if the unit's own parameters stood in the slot until the last arrived."""
        slot = unit.place.slot
        if slot.holder is not unit and unit.grads_arrived() != unit.place.grads_when_vacated:
            holder = slot.holder.name if slot.holder else "nothing"
            raise RuntimeError(
                f"a gradient of {unit.name} arrived while its slot held {holder}: "
                "backward must go through units in the reverse order of forward"
            )
        super().after_backward(unit)

    def end_backward(self) -> None:
        """The last units end their turn as well."""
        self.hide_all_but(None)
        super().end_backward()

    def hide_all_but(self, module: torch.nn.Module | None) -> None:
        """Backward has left all units but those of `module`, and the root."""
        for unit in self.backward.entered:
            if unit.modules[0] is not module and not unit.is_root:
                unit.hide()

    def check_late(self, unit: Unit) -> None:
        """Only the root stays in place from its first use to the step. RuntimeError for a block."""
        if not unit.is_root:
            raise RuntimeError(
                f"{unit.name} got a gradient outside its turn, when its parameters need not have been in place: "
                "an output is hidden, perhaps kept as an attribute of the module; return it instead"
            )

    def publish(self, unit: Unit) -> None:
        """The next forward gathers what it needs: the slot's values are the last step's."""
        self.vacate(unit.place.slot)

    @torch.no_grad()
    def fetch(self, unit: Unit, what: str) -> None:
        """`what` needs the unit's parameters outside its turn: gather them for a module that runs on every rank."""
        self.copies.check()
        if not forward_is_running(self.model):
            refuse(what)
        self.gather(unit)

    def check_write(self, unit: Unit, what: str) -> None:
        """A write to a slot changes no master. Forget it, and raise."""
        self.vacate(unit.place.slot)
        note_versions(unit)
        refuse(what)

    def after_operation(self, unit: Unit, result: object) -> object:
        """A block's turn is over after one operation; backward begins another one when it comes to it."""
        if unit.is_root:
            return result
        result = self.copies.detached_from(unit, result)
        hook_outputs(self, unit, result)
        self.after_forward(unit)
        return result

    def check_step(self) -> None:
        """And that no copy was written to that stood for a view of a parameter."""
        self.copies.check()
        super().check_step()

    def replace(self, unit: Unit, values: torch.Tensor) -> None:
        """What a slot holds is out of date then."""
        super().replace(unit, values)
        self.vacate(unit.place.slot)

    def tensors(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """The slots as well."""
        yield from super().tensors()
        for slot in self.slots:
            yield "communication", "slot", slot.buffer

    def gather(self, unit: Unit) -> None:
        """The unit's parameters stand in its slot when this returns (on CUDA: for later kernels)."""
        if unit.place.slot.holder is not unit:
            self.launch_gather(unit)
        if unit.place.slot.arriving is not None:
            unit.place.slot.arriving.wait()
            unit.place.slot.arriving = None
        unit.show(unit.place.views)

    def prefetch(self, unit: Unit, neighbour: Unit | None) -> None:
        """Begin to gather the neighbour into the other slot while this unit computes."""
        if (
            neighbour is not None
            and neighbour.place.slot is not unit.place.slot
            and neighbour.place.slot.holder is not neighbour
        ):
            self.launch_gather(neighbour)

    def launch_gather(self, unit: Unit) -> None:
        """master slices of all ranks -> slot, in place; the last holder's work precedes it."""
        slot = unit.place.slot
        self.vacate(slot)
        full = slot.buffer[: unit.P]
        shard = unit.slice_of(full)
        shard.copy_(self.update.source(unit))
        slot.arriving = self.comm.all_gather(full, shard, unit.name)
        slot.holder = unit

    def vacate(self, slot: Slot) -> None:
        """The slot's holder leaves it, once its gather has ended."""
        if slot.arriving is not None:
            slot.arriving.wait()
        if slot.holder is not None:
            slot.holder.place.grads_when_vacated = slot.holder.grads_arrived() if self.backward.running else 0
            slot.holder.hide()
        slot.holder = slot.arriving = None
