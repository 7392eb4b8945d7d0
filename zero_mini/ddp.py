"""Stage 0, data parallelism: every rank keeps everything; gradients are averaged.

Source: arXiv 1910.02054, section 3.1 (memory) and 7.1 (volume); PyTorch DDP, arXiv 2006.15704.

    bytes a parameter   16         = 2 parameters + 2 gradients + 12 optimizer (mixed precision)
    wire, elements      2 Psi      = one all-reduce, times (N-1)/N

The optimizer's 12 are an fp32 master copy, momentum and variance. In fp32 there is no master copy:
4 parameters + 4 gradients + 8 optimizer. These are the bytes after backward. In the step gradients
become fp32, 2 bytes more for each, unless the update is fused (update/one_pass.py).

    time -->   forward           backward                          step
    compute    u0 u1 u2          u2      u1      u0                update
    wire                                     r2      r1      r0
    memory     parameters ####   gradients grow to ####            optimizer ####

  - k micro-batches:   under no_sync() sums stay on the rank, in fp32: gradients take 4 bytes. The last micro-batch
                       sends the sum, so the wire is 2 Psi for all k, of 4 bytes each
  - tied parameter:    lies in one unit; its gradient is the sum of its uses. Shared by two blocks, it is the root's
  - frozen parameter:  has a unit of its own: 2 + 4 bytes (fp32 master), no gradient; nothing is sent
  - unused parameter:  counts as zero where another rank used it; if no rank did, the optimizer skips it
  - ranks that differ: may run different units, since an unused one counts as zero. If ranks launch different
                       collectives, as when one alone calls state_dict(), the step raises and names the first difference
"""

import torch

from zero_mini.flat import Reduction, Unit
from zero_mini.script import Script
from zero_mini.update.clip import slice_norm


class DDP(Script):
    """Parameters, gradients and optimizer states whole on every rank."""

    def adopt(self, unit: Unit, values: torch.Tensor) -> None:
        """The optimizer updates all of them. Without mixed precision the parameters are the master."""
        unit.master = values
        unit.full = values.to(self.dtype)
        unit.full_views = unit.views(unit.full)
        unit.show(unit.full_views)

    def reduce(self, unit: Unit) -> None:
        """Every rank needs all of the mean: all-reduce, in place."""
        work = self.comm.all_reduce(unit.local_grad, unit.name)
        unit.reducing = Reduction(work, unit.local_grad, unit.local_grad)

    def partial_norms(self, norm_type: float) -> torch.Tensor:
        """All slices are here. They are summed slice by slice, so that the norm is the same float at every stage."""
        return torch.stack([slice_norm(self, rank, norm_type) for rank in range(self.world_size)])
