"""Stage 0, data parallelism: every rank keeps everything; gradients are averaged.

Source: arXiv 1910.02054, section 3.1 (memory) and 7.1 (volume); PyTorch DDP, arXiv 2006.15704.

    bytes a parameter   16         = 2 parameters + 2 gradients + 12 optimizer (mixed precision)
    wire, elements      2 Psi      = one all-reduce, times (N-1)/N

The optimizer's 12 are an fp32 master copy, momentum and variance. In fp32 there is no master copy:
4 parameters + 4 gradients + 8 optimizer. These are the bytes after backward. In the step of mixed
precision gradients become fp32, 2 bytes more for each, unless update/one_pass.py knows the optimizer.

All four stages follow one script, whose moments are the methods below. A stage is a class that
overrides the moments it changes, and what follows from them:

    allocate          once                   memory that lives as long as training does
    own               a unit, at the start   what does this rank's optimizer update?
    before_model      a forward              buffers are made equal, as torch DDP does
    before_forward    a unit                 its parameters are needed
    after_forward     a unit                 its parameters have been used
    before_backward   a unit                 its parameters are needed again
    on_grad           a unit                 backward has moved on: collect its gradients
    send_ready        a unit, half-way       what was collected before goes on the wire
    reduce            a unit                 its gradients go on the wire
    finish, at_hand   a unit                 its mean has arrived; it is where the optimizer reads it
    after_backward    a backward             what has not been sent goes now
    check_step        a step                 ranks agree (binding/agreement.py), nothing else has changed anything
    begin_step        a step                 skip it (fp16), or one of the next two
    update_masters    a step                 the optimizer's update is known: do it, unit by unit
    before_step       a step                 it is not: every mean has arrived, for the optimizer to use
    after_step        a step                 every unit's new values are published
    follow            a unit                 the cast that the model computes with follows the master
    publish           a unit                 the new values reach those who compute with them

    time -->   forward           backward                          step
    compute    u0 u1 u2          u2      u1      u0                update
    wire                                 r2      r1      r0
    memory     parameters ####   gradients grow to ####            optimizer ####

Two rules keep ranks together. Collectives start in the same order on every rank whatever its data
did: reductions in reverse unit order, and a unit that is not ready holds back those after it, up
to the end of the backward. And a unit is ready when backward has moved on to the next one, not
when all its gradients exist: a parameter without a gradient on this rank counts as zero. What no
rank used in a step the optimizer leaves alone, as it leaves a gradient that is None.

Three more serve what comes without a moment of the script (binding/out_of_turn.py): fetch, a parameter is read outside
its turn; after_operation, that is over; check_late, a gradient came that no moment collected (the step collects it).

It is sent when the next unit is half through its backward. A reduction holds some of the GPU's
multiprocessors, and a matrix product that runs beside it waits for them; attention, which is what
most transformers have half-way, minds less.

Left out: gradients as views into the buffer (a copy saved), static-graph tricks, join() for ranks
with unequal numbers of batches.
"""

import contextlib
import weakref
from collections.abc import Iterator

import torch

from zero_mini.binding import agreement, pieces, watch
from zero_mini.binding.full_params import Whole
from zero_mini.binding.hooks import Hooks
from zero_mini.binding.parameter import HeldParameter, plainly, set_grad
from zero_mini.comm import Comm
from zero_mini.flat import Unit
from zero_mini.memory.inventory import Inventory
from zero_mini.update import one_pass
from zero_mini.update.clip import Clipping
from zero_mini.update.loss_scale import Scaling


class DDP(Hooks, Whole, Inventory, Clipping, Scaling):
    """The script, and stage 0. Made by `zeroify`; it changes model and optimizer in place.

    `master_dtype` is what the optimizer sees (the dtype the model came in), `dtype` what the model
    computes in; where they are equal there is no second copy.
    """

    stage = 0

    def __init__(self, model, optimizer, units: list[Unit], comm: Comm, dtype, device, initialise=None, scaler=None):
        self.model, self.optimizer, self.units, self.comm = model, optimizer, units, comm
        self.rank, self.world_size, self.device = comm.rank, comm.world_size, device
        self.dtype, self.master_dtype = dtype, units[0].params[0].dtype
        self.mixed = self.dtype != self.master_dtype
        self.trainable = [unit for unit in units if unit.trainable]
        self.syncing = True  # a backward sends what it brings: not under no_sync()
        self.buffers_due = True  # at the next forward
        self.followed = False  # the step has written casts too, so that `follow` has nothing left to do
        self.means_due = False  # a backward has brought gradients that the pieces have not been given
        self.shards_open = False  # pieces are closed: the optimizer reads and writes them in a step alone
        self.forget_backward()
        self.forget_coefficient()
        self.begin_scaling(scaler)
        self.allocate()
        for unit in units:  # one at a time: the peak is the final states plus two units
            unit.materialise(initialise, device)
            values = unit.flatten(self.master_dtype, device)
            comm.broadcast(values, unit.name).wait()
            unit.nothing = [values.new_full((), float("nan"), dtype=dtype).expand(s) for s in unit.shapes]
            self.own(unit, values)
            watch.note_versions(unit)
            for param in unit.params:
                set_grad(param, None)
                param.unit = unit
                param.__class__ = type(param) if isinstance(param, HeldParameter) else HeldParameter
            unit.stage = weakref.ref(self)
        model.to(device)  # what is left: buffers
        parts = [(name, *name.rpartition(".")) for name, _ in model.named_buffers()]
        self.buffers = [(name, model.get_submodule(path), key) for name, path, _, key in parts]
        self._sync_buffers()
        comm.end_step()
        for unit in self.trainable:
            pieces.make_pieces(self, unit)
        pieces.point_optimizer_to_pieces(self)
        self.connect()
        self.model_layout = watch.Layout(model)

    # --- the moments -------------------------------------------------------------------------

    def allocate(self) -> None:
        """Once: buffers that live as long as training does. Stage 0 needs none."""

    def own(self, unit: Unit, values: torch.Tensor) -> None:
        """Once: values (P) are the same on all ranks. Stage 0 owns them whole."""
        unit.full = values.to(self.dtype)
        unit.master = values
        unit.show(unit.views(unit.full))

    @torch.no_grad()
    def before_model(self) -> None:
        """A forward of the whole model begins: forget what the last one left, also if it raised."""
        self.forget_backward()
        pieces.set_open(self, False)  # a step that failed has left them open
        for unit in self.units:
            unit.outstanding = 0
        if self.buffers_due:
            self._sync_buffers()

    def before_forward(self, unit: Unit) -> None:
        """The unit's parameters are needed. Stage 0 has them."""

    def after_forward(self, unit: Unit) -> None:
        """The unit's parameters have been used. Stage 0 keeps them."""

    def before_backward(self, unit: Unit) -> None:
        """Backward has reached the unit, so it has left those before. The root is around all: it ends no turn."""
        for left in [u for u in self.entered if u.modules[0] is not unit.modules[0]]:
            if left.outstanding == 0 and not left.is_root and not unit.is_root:
                self.on_grad(left)
        if unit not in self.entered:
            self.entered.append(unit)

    def on_grad(self, unit: Unit) -> None:
        """The unit's gradients are complete: collect them."""
        self.entered.remove(unit)
        if unit.trainable and self.collecting:
            unit.take_grads(self.master_dtype)
            self.ready.add(unit)

    def send_ready(self) -> None:
        """What has been collected goes on the wire, as far as it is next in order."""
        while self.syncing and self.unsent and self.unsent[-1] in self.ready:
            self.send(self.unsent.pop())

    def reduce(self, unit: Unit) -> None:
        """Launch the mean of the unit's gradients. Stage 0 wants all of it on every rank."""
        work = self.comm.all_reduce(unit.grad, unit.name)
        unit.reducing = (work, unit.grad, unit.grad)

    def finish(self, unit: Unit) -> None:
        """If the unit's gradients are on their way: wait, and add them to what is there."""
        if unit.reducing is None:
            return
        work, result, _ = unit.reducing
        work.wait()
        unit.reducing = None
        if unit.own_grad is None:
            unit.own_grad = result
        else:  # a further micro-batch: sums are kept in the master's precision
            unit.own_grad = unit.own_grad.to(self.master_dtype) + result

    def at_hand(self, unit: Unit) -> None:
        """The unit's mean is where the optimizer reads it."""
        self.finish(unit)

    def after_backward(self) -> None:
        """The end of the outermost backward: nothing may be left behind."""
        self.send_ready()
        for unit in list(self.entered):
            self.on_grad(unit)
        for unit in self.units:
            if unit.grads_arrived():
                self.check_late(unit)
        if self.collecting:
            for unit in reversed(self.unsent):
                if unit not in self.ready:  # it was not used here; it may have been on other ranks
                    unit.take_grads(self.master_dtype)
                if self.syncing:
                    self.send(unit)
        if self.syncing and self.collecting:
            for unit in reversed(self.trainable):
                if unit.grad is not None:  # sent, and has come again, as under re-entrant checkpointing
                    self.send(unit)
            self.means_due = True
        self.forget_backward()

    def check_late(self, unit: Unit) -> None:
        """Gradients came that no moment collected. They are true where parameters stay in place, as here."""

    @torch.no_grad()
    def begin_step(self) -> None:
        """The optimizer's step has been called: hand it its gradients, or do what it would."""
        self.check_nothing_is_whole()
        pieces.set_open(self, True)
        self.followed = False
        if self.scaler is not None:
            self.collect_means()
        if self.overflow:
            self.skip()
        elif self.updates_itself():
            self.check_step()
            self.update_masters()
            self.followed = True  # a master without a gradient has not changed
        else:
            self.before_step()

    def updates_itself(self) -> bool:
        """Is there an update that takes means as they come, and multiplies the coefficient in as it reads them?"""
        return one_pass.suits(self)

    def update_masters(self) -> None:
        """That update: new masters, and their casts."""
        one_pass.step(self)

    @torch.no_grad()
    def before_step(self) -> None:
        """Every mean has arrived, in the master's dtype, as the pieces' .grad. May be called twice."""
        self.collect_means()
        for unit in self.trainable:
            if unit.own_grad is not None:
                unit.own_grad = unit.own_grad.to(self.master_dtype)
                if self.coefficient is not None:
                    unit.own_grad.mul_(self.coefficient.to(unit.own_grad.device))
                with plainly():
                    for _, piece, grad in unit.used_pieces(unit.own_grad):
                        set_grad(piece, grad)
        self.means_due = False
        self.forget_coefficient()

    def collect_means(self) -> None:
        """Wait for every mean; in fp16, see whether one has overflowed."""
        self.check_step()
        for unit in self.units:
            self.at_hand(unit)
        self.look_for_overflow()

    def check_step(self) -> None:
        """See that nothing but the script has brought a gradient or changed a parameter, and that ranks agree."""
        self.close_broken_calls()
        self.model_layout.check()
        agreement.agree(self)

    @torch.no_grad()
    def after_step(self) -> None:
        """Publish every unit's new values, in the order in which the next forward needs them."""
        pieces.set_open(self, False)
        for unit in self.trainable if not self.overflow else []:
            if not self.followed:
                self.follow(unit)
            self.publish(unit)
        self.comm.end_step()
        self.end_scaling()

    def follow(self, unit: Unit) -> None:
        """The optimizer has changed the master: so does what is kept of it to compute with."""
        if self.mixed and unit.full is not None:
            unit.kept(unit.full).copy_(unit.master)

    def publish(self, unit: Unit) -> None:
        """The own part of `full` is new. At stage 0 that is all of it."""

    # --- what the training loop calls --------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally; the first backward outside reduces the sum, once."""
        before, self.syncing = self.syncing, False
        try:
            yield
        finally:
            self.syncing = before

    @torch.no_grad()
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget every gradient, also those on their way. Stands in for both objects' zero_grad."""
        self.forget_coefficient()
        self.overflow, self.means_due = None, False
        pieces.set_open(self, False)
        for unit in self.units:
            self.at_hand(unit)
            zeros = torch.zeros_like(unit.master) if unit.holds_gradient and not set_to_none else None
            unit.grad, unit.own_grad = None, zeros
            if set_to_none:
                unit.used = 0
            with plainly():
                for tensor in (*unit.params, *(piece for _, piece in unit.pieces)):
                    set_grad(tensor, None)

    def updating(self) -> contextlib.AbstractContextManager:
        """Within, the optimizer's parameters may be changed outside step(), as schedule-free's eval() does.

        At the end the model follows. Collective. `optimizer.eval()` and `optimizer.train()` do so by themselves.
        """
        return pieces.updating(self)

    def unfreeze(self, param: HeldParameter) -> None:
        """requires_grad_(True) of a parameter that was frozen at zeroify()."""
        pieces.unfreeze(self, param)

    # --- an operation outside a turn, for binding/out_of_turn.py --------------------------------------

    @torch.no_grad()
    def fetch(self, unit: Unit, what: str) -> None:
        """`what` needs the unit's parameters outside its turn: they are here, or on their way."""
        self.before_forward(unit)

    def check_write(self, unit: Unit, what: str) -> None:
        """`what` has written to them. RuntimeError where the master does not follow."""
        watch.check_untouched(unit)

    def after_operation(self, unit: Unit, result: object) -> object:
        """They were used outside a turn; returns the result. Here they stay in place."""
        return result

    # --- values from outside the script, for binding/full_params.py ----------------------------------------

    def replace(self, unit: Unit, values: torch.Tensor) -> None:
        """Other values (P), the same on all ranks, from outside the script: keep what is kept of them."""
        unit.master.copy_(unit.kept(values))
        if unit.full is not None:
            unit.full.copy_(values)

    # --- its own business -------------------------------------------------------------------

    def forget_backward(self) -> None:
        """No backward is running: it has ended, or failed."""
        self.in_backward = self.collecting = False  # collecting: it brings gradients to the parameters
        self.entered: list[Unit] = []  # units backward has reached and not yet left
        self.unsent: list[Unit] = []  # units whose reduction this backward still owes
        self.ready: set[Unit] = set()  # those of them whose gradients have been collected

    def send(self, unit: Unit) -> None:
        self.finish(unit)  # an earlier micro-batch's
        self.reduce(unit)
        unit.grad = None  # `reducing` keeps the buffer for as long as it is needed

    def _sync_buffers(self) -> None:
        for name, module, key in self.buffers:
            buffer = module._buffers.get(key)  # it may have been replaced
            if buffer is not None and buffer.numel():
                self.comm.broadcast(buffer, name).wait()
