"""When: the moments of a training step, the same at every stage. What: ddp.py, zero1.py, zero2.py, zero3.py.

A stage is a class that overrides the moments it changes:

    prepare           once                   memory that lives as long as training does
    adopt             a unit, at the start   what does this rank keep of its values?
    begin_forward     a forward              buffers are made equal, as torch DDP does
    before_forward    a unit                 its parameters are needed
    after_forward     a unit                 its parameters have been used
    before_backward   a unit                 its parameters are needed again
    after_backward    a unit                 backward has moved on: collect its gradients
    send_ready        entering, half-way     what was collected before goes on the wire
    reduce            a unit                 its gradients go on the wire
    finish_reduction  a unit                 its mean has arrived, and is added to what is there
    end_backward      a backward             what has not been sent goes now
    check_step        an update or a clip    ranks agree, and nothing else wrote gradients or parameters
    begin_step        a step                 the optimizer's update (update/), or none if fp16 overflowed
    after_step        a step                 every unit's new values are published
    publish           a unit                 the new values reach the ranks that compute with them

A unit in a backward:   its gradient is                  until

    idle                nowhere                          before_backward
    entered             in .grad, as autograd writes it  after_backward
    collected           in unit.local_grad               reduce
    sent                in flight: unit.reducing         finish_reduction
    reduced             in unit.mean_grad

One unit's turn in a backward at stage 2, from call to call:

    hooks.enter_backward                               the first gradient of the unit's output
      hooks.begin_backward                             only in the first unit of a backward
      send_ready
      before_backward(unit)
        after_backward(the unit before)                flat.take_grads: .grad -> unit.local_grad
    hooks.halfway -> send_ready -> send(the unit before)
      Zero2.reduce
        finish_reduction(the unit sent two before)     which frees its whole gradient
        Comm.reduce_scatter -> Comm.launch -> Ledger.note

Two rules keep ranks together. Collectives start in the same order on every rank: reductions in reverse unit order, and
a unit that is not ready holds back those after it. A unit is collected when backward has moved on to the next one, not
when all its gradients exist: a parameter without a gradient on this rank counts as zero.

A reduction starts when the next unit is half-way through its backward. An NCCL reduction occupies SMs and slows a
matrix product that runs beside it; attention, which is the middle of most blocks, is slowed less.

Left out: gradients as views into the buffer, static-graph tricks, join() for ranks with unequal numbers of batches.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from zero_mini.binding import agreement, full_params, hooks, pieces, state_dict, watch
from zero_mini.binding.parameter import NO_COPY, HeldParameter
from zero_mini.comm import Comm
from zero_mini.flat import Unit
from zero_mini.memory import inventory
from zero_mini.update import clip, loss_scale
from zero_mini.update.factor import Factor
from zero_mini.update.on_device import OnDevice


@dataclass
class Backward:
    """What the running backward keeps; a new one for the next."""

    running: bool = False
    collecting: bool = False  # it brings gradients to the parameters: torch.autograd.grad() does not
    entered: list[Unit] = field(default_factory=list)  # units that backward has reached and not yet left
    unsent: list[Unit] = field(default_factory=list)  # units whose reduction this backward still owes
    ready: set[Unit] = field(default_factory=set)  # those of them whose gradients are collected


class Script:
    """The handle that `zeroify` returns. It changes model and optimizer in place."""

    sharded: tuple[str, ...] = ()  # what each rank has 1/N of: "optimizer", "gradients", "parameters"

    def __init__(self, model, optimizer, units, comm, dtype, device, scaler=None, make_update=OnDevice):
        """Every attribute is created here, or in the stage's own __init__; zeroify.py then takes the parameters over.

        make_update    make_update(self) builds `self.update`; zeroify() passes it as a keyword. A stage may take it
                       out of its arguments and pass a subclass of OnDevice: SixteenBitShard in comparison/ablations.py.
        """
        self.model: torch.nn.Module = model
        self.optimizer: torch.optim.Optimizer = optimizer
        self.units: list[Unit] = units
        self.comm: Comm = comm
        self.rank, self.world_size, self.device = comm.rank, comm.world_size, device
        self.dtype = dtype  # of the model's computation
        self.master_dtype = units[0].params[0].dtype  # of what the optimizer sees: the dtype that the model came in
        self.mixed = self.dtype != self.master_dtype  # else there is no second copy
        self.trainable = [unit for unit in units if unit.trainable]
        self.update = make_update(self)  # updates the masters, and holds what that needs
        self.factor = Factor(scaler)  # by which gradients are still to be multiplied
        self.backward = Backward()
        self.syncing = True  # a backward sends its gradients: False under no_sync()
        self.means_due = False  # the pieces have not been given all gradients that were reduced
        self.backwards = 0  # how many have sent gradients since zero_grad()
        self.pieces_open = False  # the optimizer may read and write its pieces: only during a step
        self.buffers_due = True  # the next forward makes buffers equal
        self.showing_whole = False  # under full_params(), where hooks do nothing
        self.open_calls: list[contextlib.ExitStack] = []  # of state_dict(); a module's lies inside its parent's
        names = [(name, *name.rpartition(".")) for name, _ in model.named_buffers()]
        self.buffers = [(name, model.get_submodule(path), key) for name, path, _, key in names]
        self.model_layout = watch.Layout(model)

    # --- the moments -------------------------------------------------------------------------

    def prepare(self) -> None:
        """Once: buffers that live as long as training does."""

    def adopt(self, unit: Unit, values: torch.Tensor) -> None:
        """Once: values (P) are the same on all ranks. Set unit.master, and unit.full if the rank keeps all of them."""
        raise NotImplementedError

    @torch.no_grad()
    def begin_forward(self) -> None:
        """A forward of the whole model begins: forget what the last one left, also if it raised."""
        self.backward = Backward()
        pieces.set_open(self, False)  # a step that failed has left them open
        for unit in self.units:
            unit.pending.clear()
        if self.buffers_due:
            with self.comm.host.doing("a forward"):
                self.sync_buffers()

    def before_forward(self, unit: Unit) -> None:
        """The unit's parameters are needed."""

    def after_forward(self, unit: Unit) -> None:
        """The unit's parameters have been used."""

    def before_backward(self, unit: Unit) -> None:
        """Backward has reached the unit, so it has left the units before."""
        entered = self.backward.entered
        # A module with trainable and frozen parameters has two units. The root's backward spans all the others.
        for other in [u for u in entered if u.modules[0] is not unit.modules[0]]:
            if not other.pending.total() and not other.is_root and not unit.is_root:
                self.after_backward(other)
        if unit not in entered:
            entered.append(unit)

    def after_backward(self, unit: Unit) -> None:
        """Backward has left the unit: collect its gradients."""
        self.backward.entered.remove(unit)
        if unit.trainable and self.backward.collecting:
            unit.take_grads(self.master_dtype)
            self.backward.ready.add(unit)

    def send_ready(self) -> None:
        """What has been collected goes on the wire, as far as it is next in order."""
        unsent, ready = self.backward.unsent, self.backward.ready
        while self.syncing and unsent and unsent[-1] in ready:
            self.send(unsent.pop())

    def send(self, unit: Unit) -> None:
        """Launch the reduction of what was collected."""
        self.finish_reduction(unit)  # of an earlier micro-batch, at stages 0 and 1
        self.reduce(unit)
        unit.local_grad = None  # `reducing` keeps the buffer for as long as it is needed
        self.update.after_reduce(unit)

    def reduce(self, unit: Unit) -> None:
        """Launch the mean of the unit's gradients: unit.local_grad (P) -> unit.reducing.

        It may overwrite unit.local_grad or put another tensor there: `send` forgets it afterwards.
        """
        raise NotImplementedError

    def finish_reduction(self, unit: Unit) -> None:
        """If the unit's gradients are in flight: wait, and add their mean to what is there."""
        if unit.reducing is not None:
            unit.reducing.work.wait()
            mean, unit.reducing = unit.reducing.mean, None
            self.update.receive(unit, mean)

    def end_backward(self) -> None:
        """The end of the outermost backward: collect and send what is left, in the order of every rank."""
        self.send_ready()
        for unit in list(self.backward.entered):
            self.after_backward(unit)
        for unit in self.units:
            if unit.grads_arrived():
                self.check_late(unit)
        if self.backward.collecting:
            for unit in reversed(self.backward.unsent):
                if unit not in self.backward.ready:  # it was not used here; it may have been on other ranks
                    unit.take_grads(self.master_dtype)
                if self.syncing:
                    self.send(unit)
            if self.syncing:
                for unit in reversed(self.trainable):
                    if unit.local_grad is not None:  # sent, and collected again, as under re-entrant checkpointing
                        self.send(unit)
                self.means_due = True
                self.backwards += 1
        self.backward = Backward()
        self.update.end_backward()

    def collect_means(self) -> None:
        """Wait for every mean; in fp16, see whether one has overflowed."""
        self.check_step()
        self.wait()
        loss_scale.look_for_overflow(self)

    def check_step(self) -> None:
        """RuntimeError if gradients or parameters were written from outside, or ranks sent different collectives."""
        state_dict.close_broken_calls(self)
        self.model_layout.check()
        agreement.agree(self)

    @torch.no_grad()
    def begin_step(self) -> None:
        """optimizer.step() was called: update the masters, or prepare it for the optimizer's own step."""
        state_dict.refuse_step_inside(self)
        pieces.set_open(self, True)
        if self.factor.scaler is not None:
            self.collect_means()
        if self.factor.overflow:
            loss_scale.skip(self)
        else:
            self.update.step()

    @torch.no_grad()
    def after_step(self) -> None:
        """Publish every unit's new values, in the order in which the next forward needs them."""
        pieces.set_open(self, False)
        for unit in self.trainable if not self.factor.overflow else []:
            self.update.settle_cast(unit)
            self.publish(unit)
            watch.count_update(unit)
        self.comm.ledger.end_step()
        loss_scale.end_step(self)

    def publish(self, unit: Unit) -> None:
        """The rank's own part of the parameters is new: bring it to the other ranks."""

    def sync_buffers(self) -> None:
        """The model's buffers become rank 0's."""
        for name, module, key in self.buffers:
            buffer = module._buffers.get(key)  # it may have been replaced
            if buffer is not None and buffer.numel():
                self.comm.broadcast(buffer, name).wait()

    # --- outside a turn (binding/out_of_turn.py, binding/full_params.py) ---------------------

    @torch.no_grad()
    def fetch(self, unit: Unit, what: str) -> None:
        """`what` needs the unit's parameters outside its turn: they are here, or in flight."""
        self.before_forward(unit)

    def check_write(self, unit: Unit, what: str) -> None:
        """`what` has written to them. RuntimeError where the master does not follow."""
        watch.check_untouched(unit)

    def after_operation(self, unit: Unit, result: object) -> object:
        """They were used outside a turn; returns the result. They stay in place."""
        return result

    def check_late(self, unit: Unit) -> None:
        """Gradients came that no moment collected. They are true where parameters stay in place."""

    def unfreeze(self, param: HeldParameter) -> None:
        """requires_grad_(True) of a parameter that was frozen at zeroify()."""
        pieces.unfreeze(self, param)
        hooks.hook_middle(self, param.unit)

    def replace(self, unit: Unit, values: torch.Tensor) -> None:
        """Other values (P), the same on all ranks, from outside the script."""
        self.update.replace(unit, values)

    def partial_norms(self, norm_type: float) -> torch.Tensor:
        """The norm of each rank's slices of the gradient (N)."""
        raise NotImplementedError

    def tensors(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """(category, label, tensor) of everything that is kept alive here, views included (memory/inventory.py)."""
        return inventory.tensors(self)

    # --- what a training loop calls ----------------------------------------------------------

    clip_grad_norm_ = clip.clip_grad_norm_
    scale = loss_scale.scale
    named_parameters = full_params.named_parameters
    add_penalty = full_params.add_penalty
    full_params = full_params.full_params
    updating = pieces.updating
    load_state_dict = state_dict.load_state_dict
    state_dict = state_dict.state_dict
    memory = inventory.memory
    places, ledger = property(inventory.places), property(inventory.ledger)
    stepped, scaler = property(loss_scale.stepped), property(loss_scale.scaler)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally; the first backward outside reduces the sum, once."""
        before, self.syncing = self.syncing, False
        try:
            yield
        finally:
            self.syncing = before

    def wait(self) -> None:
        """Return when every gradient that a backward has sent is where the optimizer reads it."""
        for unit in self.units:
            self.update.wait_for_mean(unit)

    @torch.no_grad()
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget every gradient, also those in flight. Stands in for both objects' zero_grad."""
        self.factor.forget()
        self.factor.overflow, self.means_due, self.backwards = None, False, 0
        pieces.set_open(self, False)
        self.wait()
        for unit in self.units:
            unit.forget_grads(set_to_none)

    def __reduce_ex__(self, protocol):
        raise RuntimeError(NO_COPY)
