"""Stage 3, P_os+g+p: every rank keeps 1/N of the parameters too, and gathers a unit for its turn.

Source: arXiv 1910.02054, section 5.3 (memory) and 7.2.2 (volume); 6.2 and 6.3 (constant buffers,
C_B, and memory that is allocated once, M_D).

    bytes a parameter   14/N       = (2 gradients + 12 optimizer)/N, the paper's 16/N less its
                                     16-bit shard: a slot's slice is cast from the fp32 master
                                     (fp32: 16/N), plus the root and two slots
    wire, elements      3 Psi      = all-gather for forward, all-gather for backward,
                                     reduce-scatter, times (N-1)/N; less what is still in a slot

unlike zero2.py:
  - own:              a slice of the parameters, and nothing else
  - before_forward:   gather the unit into its slot; begin to gather the unit after it
  - before_backward:  the same once more, towards the front
  - publish:          nothing to send; what the slots hold is out of date
  - after_forward:    its turn over, a unit's parameters are hidden: a read never shows the slot's next holder
  - fetch:            a module that is called by itself gets its parameters; any other read raises
  - on_grad:          raises if a gradient cannot be true, because the slot held another unit

    time -->     forward           backward                          step
    compute         u0 u1 u2       u2   u1   u0                      update own 1/N
    wire         g0 g1 g2               g0 r2   r1   r0
    slot 0          u0    u2       u2   u0   u0                      until publish
    slot 1             u1 u1       u1   u1   u1                      until publish
    memory       parameters two slots and 1/N; gradients as stage 2; optimizer #...

Two slots are enough for one unit to compute while the next arrives. A unit always returns to the
same slot, because autograd saved views of that memory in forward, and will read them in backward.
Nothing is allocated or copied out, so nothing fragments. The units at the end of forward are
the first that backward needs: they are still there, and are not gathered again.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

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


class Zero3(Zero2):
    """P_os+g+p: optimizer states, gradients and parameters sharded."""

    stage = 3

    def allocate(self) -> None:
        """Two slots that the blocks take in turns, as large as the largest; the root has its own."""
        super().allocate()
        blocks = [unit for unit in self.units if not unit.is_root]
        tracks = [[unit] for unit in self.units if unit.is_root]
        for unit in self.units:
            unit.track = unit.trainable  # as it is now: unfreezing changes no slot
        for trainable in (True, False):  # frozen units are gathered beside the others: own slots
            track = [unit for unit in blocks if unit.track is trainable]
            tracks += [track[0::2], track[1::2]]
        self.slots: list[Slot] = []
        for track in filter(None, tracks):
            buffer = self.comm.empty(max(unit.P for unit in track), self.dtype, self.device)
            self.slots.append(Slot(buffer))
            for unit in track:
                unit.slot = self.slots[-1]
                unit.slot_views = unit.views(buffer)
        self.last_used: dict[bool, Unit] = {}  # track of trainable units or of frozen ones -> where forward is
        self.copies = Copies()

    def own(self, unit: Unit, values: torch.Tensor) -> None:
        """A slice of the values; between turns the unit has no parameters at all."""
        unit.master = unit.own(values).clone()
        unit.previous = unit.following = None  # its neighbours in the order of the last forward
        unit.grads_when_vacated = 0
        unit.rest()

    def before_model(self) -> None:
        """The order of the last forward stays as the guess for prefetching; after its last unit comes none."""
        super().before_model()
        for unit in self.last_used.values():
            unit.following = None
        self.last_used = {}

    def before_forward(self, unit: Unit) -> None:
        """Gather this unit, unless it is there; begin to gather the one that followed it last time."""
        self.gather(unit)
        here = self.last_used.get(unit.track)
        if not self.in_backward and not unit.is_root and here is not unit:  # a recompute goes its own way
            unit.previous = here
            if unit.previous is not None:
                unit.previous.following = unit
            self.last_used[unit.track] = unit
            self.prefetch(unit, unit.following)

    def after_forward(self, unit: Unit) -> None:
        """Its slot will hold another unit: reading its parameters from now on must not show that one's."""
        if not unit.is_root and unit not in self.entered:
            unit.rest()

    def before_backward(self, unit: Unit) -> None:
        """Gather this unit, unless it is there; begin to gather the one that came before it."""
        if unit not in self.entered and not unit.is_root and unit.grads_arrived():
            raise RuntimeError(
                f"a gradient of {unit.name} arrived before its backward began, when its parameters need not have "
                "been in place: an output is hidden, perhaps kept as an attribute of the module; return it instead"
            )
        if not unit.is_root:
            self.rest_all_but(unit.modules[0])
        self.gather(unit)
        if not unit.is_root:
            self.prefetch(unit, unit.previous)  # ahead of the reductions that follow: it is needed sooner
        super().before_backward(unit)

    def on_grad(self, unit: Unit) -> None:
        """Gradients are true only if the unit's own parameters stood in the slot until the last arrived."""
        slot = unit.slot
        if slot.holder is not unit and unit.grads_arrived() != unit.grads_when_vacated:
            held = slot.holder.name if slot.holder else "nothing"
            raise RuntimeError(
                f"a gradient of {unit.name} arrived while its slot held {held}: "
                "backward must go through units in the reverse order of forward"
            )
        super().on_grad(unit)

    def after_backward(self) -> None:
        """The last units end their turn as well."""
        self.rest_all_but(None)
        super().after_backward()

    def rest_all_but(self, module: torch.nn.Module | None) -> None:
        """Backward has left all units but those of `module`, and the root."""
        for unit in self.entered:
            if unit.modules[0] is not module and not unit.is_root:
                unit.rest()

    def check_late(self, unit: Unit) -> None:
        """Only the root stays in place from its first use to the step. RuntimeError for a block."""
        if not unit.is_root:
            raise RuntimeError(
                f"{unit.name} got a gradient outside its turn, when its parameters need not have been in place: "
                "an output is hidden, perhaps kept as an attribute of the module; return it instead"
            )

    def publish(self, unit: Unit) -> None:
        """The next forward gathers what it needs: the slot's values are the last step's."""
        self.vacate(unit.slot)

    @torch.no_grad()
    def fetch(self, unit: Unit, what: str) -> None:
        """`what` needs the unit's parameters outside its turn: gather them for a module that runs on every rank."""
        self.copies.check()
        if not forward_is_running(self.model):
            refuse(what)
        self.gather(unit)

    def check_write(self, unit: Unit, what: str) -> None:
        """A write to a slot changes no master. Forget it, and raise."""
        self.vacate(unit.slot)
        note_versions(unit)
        refuse(what)

    def after_operation(self, unit: Unit, result: object) -> object:
        """A block's turn is over after one operation; backward begins another one when it comes to it."""
        if unit.is_root:
            return result
        result = self.copies.detached_from(unit, result)
        self.hook_outputs(unit, result)
        self.after_forward(unit)
        return result

    def check_step(self) -> None:
        """And that no copy was written to that stood for a view of a parameter."""
        self.copies.check()
        super().check_step()

    def replace(self, unit: Unit, values: torch.Tensor) -> None:
        """What a slot holds is out of date then."""
        super().replace(unit, values)
        self.vacate(unit.slot)

    def tensors(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """The slots as well."""
        yield from super().tensors()
        for slot in self.slots:
            yield "communication", "slot", slot.buffer

    def gather(self, unit: Unit) -> None:
        """The unit's parameters stand in its slot when this returns (on CUDA: for later kernels)."""
        if unit.slot.holder is not unit:
            self.launch_gather(unit)
        if unit.slot.arriving is not None:
            unit.slot.arriving.wait()
            unit.slot.arriving = None
        unit.show(unit.slot_views)

    def prefetch(self, unit: Unit, neighbour: Unit | None) -> None:
        """Begin to gather the neighbour into the other slot while this unit computes."""
        if neighbour is not None and neighbour.slot is not unit.slot and neighbour.slot.holder is not neighbour:
            self.launch_gather(neighbour)

    def launch_gather(self, unit: Unit) -> None:
        """master slices of all ranks -> slot, in place; the last holder's work precedes it."""
        slot = unit.slot
        self.vacate(slot)
        full = slot.buffer[: unit.P]
        shard = unit.own(full)
        shard.copy_(self.source(unit))
        slot.arriving = self.comm.all_gather(full, shard, unit.name)
        slot.holder = unit

    def source(self, unit: Unit) -> torch.Tensor:
        """The own slice (S), from which gathers start."""
        return unit.master

    def vacate(self, slot: Slot) -> None:
        """Whoever stands in the slot leaves it."""
        if slot.arriving is not None:
            slot.arriving.wait()
        if slot.holder is not None:
            slot.holder.grads_when_vacated = slot.holder.grads_arrived() if self.in_backward else 0
            slot.holder.rest()
        slot.holder = slot.arriving = None
