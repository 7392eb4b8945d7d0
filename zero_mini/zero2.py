"""Stage 2, P_os+g: a gradient is kept by the rank that will use it, and freed everywhere else.

Source: arXiv 1910.02054, section 5.2 (memory) and 7.2.1 (volume).

    bytes a parameter   2 + 14/N   = 2 parameters + (2 gradients + 12 optimizer)/N  (fp32: 4 + 12/N)
    wire, elements      2 Psi      for one micro-batch; (k+1) Psi for k of them, times (N-1)/N

unlike zero1.py:
  - reduce:   the mean goes to a new shard (S); the whole buffer (P) is freed when its reduction has ended,
              two units later or at the end of the backward
  - no_sync:  changes nothing, since holding whole gradients back would undo the saving

    time -->     forward           backward                          step
    compute      u0 u1 u2          u2      u1      u0                update of 1/N
    wire       ..g1 g2                         r2      r1      r0          g0 g1..
    memory       parameters ####   gradients 1/N + up to five units  optimizer #...
                                   whole: two in flight, one collected, one in backward, the root's

  - k micro-batches:   each is reduced, and added to the shard, which is fp32 then: 2 + 16/N bytes, (k+1) Psi
  - tied parameter:    as ddp.py
  - frozen parameter:  as zero1.py
  - unused parameter:  as ddp.py; more than five whole gradients exist if such a unit holds back those after it
  - ranks that differ: as ddp.py
"""

import contextlib
from collections import deque
from collections.abc import Iterator

import torch

from zero_mini.flat import Reduction, Unit
from zero_mini.zero1 import Zero1


class Zero2(Zero1):
    """P_os+g: optimizer states and gradients sharded."""

    sharded = ("optimizer", "gradients")

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.sending: deque[Unit] = deque()  # units whose whole gradients are in flight

    def reduce(self, unit: Unit) -> None:
        """Write the mean of this rank's slice to new memory, so that the whole buffer can be freed."""
        if len(self.sending) == 2:
            self.finish_reduction(self.sending.popleft())  # frees its buffer
        shard = torch.empty_like(unit.slice_of(unit.local_grad))
        work = self.comm.reduce_scatter(shard, unit.local_grad, unit.name)
        unit.reducing = Reduction(work, shard, unit.local_grad)
        self.sending.append(unit)

    def end_backward(self) -> None:
        """Free the last whole buffers too."""
        super().end_backward()
        while self.sending:
            self.finish_reduction(self.sending.popleft())

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Changes nothing at this stage."""
        yield
