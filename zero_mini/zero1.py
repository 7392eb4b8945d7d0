"""Stage 1, P_os: every rank keeps 1/N of the optimizer's states, and updates 1/N of the parameters.

Source: arXiv 1910.02054, section 5.1 (memory) and 7.2.1 (volume).

    bytes a parameter   4 + 12/N   = 2 parameters + 2 gradients + 12/N optimizer   (fp32: 8 + 8/N)
    wire, elements      2 Psi      = reduce-scatter + all-gather, times (N-1)/N: as much as DDP

unlike ddp.py:
  - adopt:           the optimizer sees this rank's slice of each unit, not the whole
  - reduce:          a rank needs only the mean of its slice: reduce-scatter, half an all-reduce
  - publish:         each rank updated a different slice: all-gather, the other half
  - before_forward:  all gathers start at the end of the step; only here a unit waits for its own, so
                     its gather overlaps the forward of the units before it (none for the root, the first)
  - check_step:      a gather that no forward waited for must end before the next update
  - partial_norms:   for clipping, ranks gather the norms of their slices

    time -->     forward           backward                          step
    compute      u0 u1 u2          u2      u1      u0                update of 1/N
    wire       ..g1 g2                         r2      r1      r0          g0 g1..    r: half as long
    memory       parameters ####   gradients grow to ####            optimizer #...   optimizer: 1/N

  - k micro-batches:   as ddp.py: fp32 sums stay on the rank under no_sync(); 2 Psi for all k, the reduced half in fp32
  - tied parameter:    as ddp.py
  - frozen parameter:  2 bytes on every rank and 4/N (fp32 master); not gathered after a step
  - unused parameter:  as ddp.py; its slice is gathered with its unit
  - ranks that differ: as ddp.py

A parameter is hidden between the step and its unit's next forward: its new values may still be in
flight. A read waits for them (binding/out_of_turn.py).

Left out: sharded gradients. A rank keeps them whole, and uses 1/N of them; stage 2 shards them.
"""

import torch

from zero_mini.binding.watch import check_untouched, note_versions
from zero_mini.comm import Launched
from zero_mini.ddp import DDP
from zero_mini.flat import Reduction, Unit
from zero_mini.update.clip import slice_norm


class Zero1(DDP):
    """P_os: optimizer states sharded."""

    sharded = ("optimizer",)

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.arriving: dict[Unit, Launched] = {}  # each unit's all-gather in flight

    def adopt(self, unit: Unit, values: torch.Tensor) -> None:
        """The optimizer updates a slice: in fp32 a view of the parameters themselves."""
        if self.mixed or self.comm.reachable is not None:
            unit.full = self.comm.empty(unit.P, self.dtype, self.device).copy_(values)
        else:
            unit.full = values
        unit.master = unit.slice_of(values).clone() if self.mixed else unit.slice_of(unit.full)
        unit.full_views = unit.views(unit.full)
        unit.show(unit.full_views)

    def reduce(self, unit: Unit) -> None:
        """Write the mean of this rank's slice over it; the rest of the buffer stays allocated."""
        shard = unit.slice_of(unit.local_grad)
        work = self.comm.reduce_scatter(shard, unit.local_grad, unit.name)
        unit.reducing = Reduction(work, shard, unit.local_grad)

    def publish(self, unit: Unit) -> None:
        """This rank's slice -> full parameters of every rank, in place, without waiting."""
        self.arriving[unit] = self.comm.all_gather(unit.full, unit.slice_of(unit.full), unit.name)
        unit.hide()
        note_versions(unit)

    def before_forward(self, unit: Unit) -> None:
        """At the first use after a step: wait for the new values."""
        work = self.arriving.pop(unit, None)
        if work is not None:
            work.wait()
            check_untouched(unit)
            unit.show(unit.full_views)

    def check_step(self) -> None:
        """Wait for the gathers that no forward has waited for, before the next update."""
        for unit in list(self.arriving):
            self.before_forward(unit)
        super().check_step()

    def partial_norms(self, norm_type: float) -> torch.Tensor:
        """Each rank knows the norm of its slices; ranks gather them."""
        norms = torch.empty(self.world_size, dtype=self.master_dtype, device=self.device)
        self.comm.all_gather(norms, slice_norm(self, self.rank, norm_type).view(1), "norm").wait()
        return norms
