"""Stage 1, P_os: every rank keeps 1/N of the optimizer's states, and updates 1/N of the parameters.

Source: arXiv 1910.02054, section 5.1 (memory) and 7.2.1 (volume).

    bytes a parameter   4 + 12/N   = 2 parameters + 2 gradients + 12/N optimizer   (fp32: 8 + 8/N)
    wire, elements      2 Psi      = reduce-scatter + all-gather, times (N-1)/N: as much as DDP

unlike ddp.py:
  - own:             the optimizer sees this rank's slice of each unit, not the whole
  - reduce:          a rank needs the mean of its slice alone: reduce-scatter, half an all-reduce
  - publish:         each rank updated another slice: all-gather, the other half
  - before_forward:  all gathers start at the end of the step; each is waited for only here, so it
                     hides behind the forward of the units before (the root's comes first, and cannot)
  - check_step:      a gather that no forward waited for must end before its values change
  - partial_norms:   for clipping, ranks tell each other their slices' norms

    time -->     forward           backward                          step
    compute      u0 u1 u2          u2      u1      u0                update own 1/N
    wire       ..g1 g2   <-new             r2      r1      r0  <-half      g0 g1..
    memory       parameters ####   gradients grow to ####            optimizer #... <-new

Between the step and its unit's next forward a parameter is hidden: its new values may still be on the
wire, and old ones must not be taken for new. A read waits for them (binding/out_of_turn.py).

Left out: gradients are kept whole although a rank uses 1/N of them. That is stage 2.
"""

import torch

from zero_mini.binding.watch import check_untouched, note_versions
from zero_mini.comm import Launched
from zero_mini.ddp import DDP
from zero_mini.flat import Unit


class Zero1(DDP):
    """P_os: optimizer states sharded."""

    stage = 1

    def allocate(self) -> None:
        """Nothing to allocate; `arriving` holds each unit's all-gather under way."""
        self.arriving: dict[Unit, Launched] = {}

    def own(self, unit: Unit, values: torch.Tensor) -> None:
        """A slice. Without mixed precision it is a view of the parameters themselves."""
        unit.full = self.comm.empty(unit.P, self.dtype, self.device).copy_(values)
        unit.master = unit.own(values).clone() if self.mixed else unit.own(unit.full)
        unit.show(unit.views(unit.full))

    def reduce(self, unit: Unit) -> None:
        """The mean of the own slice, written over it; the rest of the buffer stays allocated."""
        shard = unit.own(unit.grad)
        work = self.comm.reduce_scatter(shard, unit.grad, unit.name)
        unit.reducing = (work, shard, unit.grad)

    def publish(self, unit: Unit) -> None:
        """Own slice -> everyone's full parameters, in place and without waiting."""
        self.arriving[unit] = self.comm.all_gather(unit.full, unit.own(unit.full), unit.name)
        unit.rest()
        note_versions(unit)

    def before_forward(self, unit: Unit) -> None:
        """First use since the step: the new values must have arrived."""
        work = self.arriving.pop(unit, None)
        if work is not None:
            work.wait()
            check_untouched(unit)
            unit.show(unit.views(unit.full))

    def check_step(self) -> None:
        """Values that no forward has waited for yet must be off the wire before they are updated."""
        for unit in list(self.arriving):
            self.before_forward(unit)
        super().check_step()

    def partial_norms(self, norm_type: float) -> torch.Tensor:
        """Each rank knows its slices' norm, and tells the others."""
        norms = torch.empty(self.world_size, dtype=self.master_dtype, device=self.device)
        self.comm.all_gather(norms, self.slice_norm(self.rank, norm_type).view(1), "norm").wait()
        return norms
