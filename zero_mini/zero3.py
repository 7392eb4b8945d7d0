"""Stage 3, P_os+g+p: every rank keeps 1/N of the parameters too, and gathers a unit for its turn.

Source: arXiv 1910.02054, section 5.3 (memory) and 7.2.2 (volume); 6.2 and 6.3 (constant buffers,
C_B, and memory that is allocated once, M_D).

    bytes a parameter   14/N       = (2 gradients + 12 optimizer)/N, plus the root and two slots
                                     (fp32: 16/N). The paper's 16/N has a 16-bit shard too; here a
                                     gather casts the rank's slice from the fp32 master
    wire, elements      3 Psi      = all-gather for forward, all-gather for backward,
                                     reduce-scatter, times (N-1)/N; less what is still in a slot

unlike zero2.py:
  - adopt:            keeps a slice of the parameters, and nothing else
  - before_forward:   gathers the unit into its slot; begins to gather the unit after it
  - before_backward:  gathers the unit again; begins to gather the unit before it
  - publish:          sends nothing; the values in the slots are out of date
  - after_forward:    hides the unit's parameters: a read never shows the slot's next holder
  - fetch:            gathers for a module that is called on its own; any other read raises
  - after_backward:   raises if a gradient may be wrong, because the slot held another unit

    time -->     forward           backward                          step
    compute         u0 u1 u2       u2   u1   u0                      update of 1/N
    wire         g0 g1 g2               g0 r2   r1   r0
    slot 0          u0    u2       u2   u0   u0                      until publish
    slot 1             u1 u1       u1   u1   u1                      until publish
    memory       parameters two slots and the root's; gradients as stage 2; optimizer #...

  - k micro-batches:   as zero2.py, and each gathers what no slot holds: 16/N bytes, up to 3 Psi each
  - tied parameter:    within one block as ddp.py; shared by two blocks, it is the root's, which stays gathered
  - frozen parameter:  4/N (fp32 master) and separate slots; gathered in forward and in backward, not reduced
  - unused parameter:  as ddp.py; a unit whose forward no rank runs is not gathered, but reduced
  - ranks that differ: a gather needs all ranks, so all run the same units in the same order, also in evaluation.
                       Else the wait for a gather, or the step, raises and names the first difference

Two slots are enough: one unit computes while the next arrives. A unit always returns to the same
slot, because autograd saved views of that memory in forward, and will read them in backward.
No memory for parameters is allocated in a step, so it does not fragment. The last units of forward are
the first that backward needs: they are still in their slots, and are not gathered again.
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
    """The slot that a unit is gathered into, and its neighbours in the order of gathers."""

    slot: Slot
    views: list[torch.Tensor]  # of the slot's buffer, one a parameter
    track: bool  # True: slots of trainable units; False: of frozen ones. Unfreezing does not change it
    previous: Unit | None = None  # the unit before it in the last forward
    following: Unit | None = None  # the unit after it
    grads_when_vacated: int = 0  # how many gradients had arrived when another unit took the slot


class Zero3(Zero2):
    """P_os+g+p: optimizer states, gradients and parameters sharded."""

    sharded = ("optimizer", "gradients", "parameters")

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.slots: list[Slot] = []
        self.last_used: dict[bool, Unit] = {}  # track -> the unit that forward used last
        self.copies = Copies()  # copies that replaced views of hidden parameters

    def prepare(self) -> None:
        """Two slots that the blocks use in turns, each as large as its largest block; the root has its own."""
        blocks = [unit for unit in self.units if not unit.is_root]
        tracks = [[unit] for unit in self.units if unit.is_root]
        for trainable in (True, False):  # frozen units have slots of their own
            track = [unit for unit in blocks if unit.trainable is trainable]
            tracks += [track[0::2], track[1::2]]
        for track in filter(None, tracks):
            slot = Slot(self.comm.empty(max(unit.P for unit in track), self.dtype, self.device))
            self.slots.append(slot)
            for unit in track:
                unit.place = Place(slot, unit.views(slot.buffer), unit.trainable)

    def adopt(self, unit: Unit, values: torch.Tensor) -> None:
        """Keep a slice of the values. Between turns the unit's parameters are hidden."""
        unit.master = unit.slice_of(values).clone()
        unit.hide()

    def begin_forward(self) -> None:
        """Prefetching follows the order of the last forward; no unit follows its last one."""
        super().begin_forward()
        for unit in self.last_used.values():
            unit.place.following = None
        self.last_used = {}

    def before_forward(self, unit: Unit) -> None:
        """Gather this unit, unless it is in its slot; begin to gather the next one of the last forward."""
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
        """Hide the parameters: the slot will hold another unit, and a read must not show its values."""
        if not unit.is_root and unit not in self.backward.entered:
            unit.hide()

    def before_backward(self, unit: Unit) -> None:
        """Gather this unit, unless it is in its slot; begin to gather the unit before it in the last forward."""
        if unit not in self.backward.entered and not unit.is_root and unit.grads_arrived():
            raise RuntimeError(
                f"a gradient of {unit.name} arrived before its backward began, when its parameters need not have "
                "been in place: an output is hidden, perhaps kept as an attribute of the module; return it instead"
            )
        if not unit.is_root:
            self.hide_all_but(unit.modules[0])
        self.gather(unit)
        if not unit.is_root:
            self.prefetch(unit, unit.place.previous)  # before the next reductions: backward needs it sooner
        super().before_backward(unit)

    def after_backward(self, unit: Unit) -> None:
        """RuntimeError if a gradient arrived after another unit took the slot: it may come from wrong parameters."""
        slot = unit.place.slot
        if slot.holder is not unit and unit.grads_arrived() != unit.place.grads_when_vacated:
            holder = slot.holder.name if slot.holder else "nothing"
            raise RuntimeError(
                f"a gradient of {unit.name} arrived while its slot held {holder}: "
                "backward must go through units in the reverse order of forward"
            )
        super().after_backward(unit)

    def end_backward(self) -> None:
        """Hide the last units too: their turn is over."""
        self.hide_all_but(None)
        super().end_backward()

    def hide_all_but(self, module: torch.nn.Module | None) -> None:
        """Hide what backward has entered and left: all units but those of `module`, and the root."""
        for unit in self.backward.entered:
            if unit.modules[0] is not module and not unit.is_root:
                unit.hide()

    def check_late(self, unit: Unit) -> None:
        """RuntimeError for a block: only the root stays gathered from its first use to the step."""
        if not unit.is_root:
            raise RuntimeError(
                f"{unit.name} got a gradient outside its turn, when its parameters need not have been in place: "
                "an output is hidden, perhaps kept as an attribute of the module (return it instead), or one operation "
                "uses weights of two units (make them one unit: units=), or a gradient was set by hand (do it under "
                "zero.full_params(grads=True))"
            )

    def publish(self, unit: Unit) -> None:
        """Vacate the slot: its values are those before the step. The next forward gathers the new ones."""
        self.vacate(unit.place.slot)

    @torch.no_grad()
    def fetch(self, unit: Unit, what: str) -> None:
        """`what` reads the unit's parameters outside its turn: gather them if a module runs, else raise."""
        self.copies.check()
        if not forward_is_running(self.model):
            refuse(what)
        self.gather(unit)

    def check_write(self, unit: Unit, what: str) -> None:
        """A write to a slot does not change the master: discard it, and raise."""
        self.vacate(unit.place.slot)
        note_versions(unit)
        refuse(what)

    def after_operation(self, unit: Unit, result: object) -> object:
        """A block's turn ends after one operation; when backward reaches that operation, it begins another turn."""
        if unit.is_root:
            return result
        result = self.copies.detached_from(unit, result)
        hook_outputs(self, unit, None, result)
        self.after_forward(unit)
        return result

    def check_step(self) -> None:
        """Also raise if a copy that replaced a view of a parameter was written to."""
        self.copies.check()
        super().check_step()

    def replace(self, unit: Unit, values: torch.Tensor) -> None:
        """Vacate the slot too: its values are out of date."""
        super().replace(unit, values)
        self.vacate(unit.place.slot)

    def tensors(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """What stage 2 keeps alive, and the slots."""
        yield from super().tensors()
        for slot in self.slots:
            yield "communication", "slot", slot.buffer

    def gather(self, unit: Unit) -> None:
        """When this returns, the unit's parameters are in its slot (on CUDA: for later kernels)."""
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
        """master slices of all ranks -> slot, in place, after the last holder's work."""
        slot = unit.place.slot
        self.vacate(slot)
        full = slot.buffer[: unit.P]
        shard = unit.slice_of(full)
        shard.copy_(self.update.source(unit))
        slot.arriving = self.comm.all_gather(full, shard, unit.name)
        slot.holder = unit

    def vacate(self, slot: Slot) -> None:
        """Empty the slot, once its gather has ended, and hide the unit that it held."""
        if slot.arriving is not None:
            slot.arriving.wait()
        if slot.holder is not None:
            slot.holder.place.grads_when_vacated = slot.holder.grads_arrived() if self.backward.running else 0
            slot.holder.hide()
        slot.holder = slot.arriving = None
