"""Stage 2, P_os+g: a gradient is kept by the rank that will use it, and freed everywhere else.

Source: arXiv 1910.02054, section 5.2 (memory) and 7.2.1 (volume).

    bytes a parameter   2 + 14/N   = 2 parameters + (2 gradients + 12 optimizer)/N  (fp32: 4 + 12/N)
    wire, elements      2 Psi      for one micro-batch; (k+1) Psi for k of them, times (N-1)/N

unlike zero1.py:
  - reduce:   the mean goes to a new shard (S); the whole buffer (P) is freed once it was sent.
              At most two are on the wire at a time; beside them are only the unit being collected,
              the one in backward and the root's (more only if a unit holds back those after it)
  - no_sync:  changes nothing, since holding whole gradients back would undo the saving: every
              micro-batch is reduced, and added to the shard in the master's precision

    time -->     forward           backward                          step
    compute      u0 u1 u2          u2      u1      u0                update own 1/N
    wire       g0 g1 g2                    r2      r1      r0
    memory       parameters ####   gradients ##.. two units + 1/N    optimizer #...
                                             ^-new
"""

import contextlib
from collections import deque
from collections.abc import Iterator

import torch

from zero_mini.flat import Unit
from zero_mini.zero1 import Zero1


class Zero2(Zero1):
    """P_os+g: optimizer states and gradients sharded."""

    stage = 2

    def allocate(self) -> None:
        """`sending` holds the units whose whole gradients are still in use by the wire."""
        super().allocate()
        self.sending: deque[Unit] = deque()

    def reduce(self, unit: Unit) -> None:
        """The mean of the own slice, in memory of its own, so that the buffer can go."""
        if len(self.sending) == 2:
            self.finish(self.sending.popleft())  # frees its buffer
        shard = torch.empty_like(unit.own(unit.grad))
        work = self.comm.reduce_scatter(shard, unit.grad, unit.name)
        unit.reducing = (work, shard, unit.grad)
        self.sending.append(unit)

    def after_backward(self) -> None:
        """Free the last whole buffers too."""
        super().after_backward()
        while self.sending:
            self.finish(self.sending.popleft())

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Changes nothing at this stage."""
        yield
