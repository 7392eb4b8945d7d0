"""One line turns an ordinary model and optimizer into a sharded pair.

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    zero = zeroify(model, optimizer, stage=2)                    # the only new line
    for x, y in loader:
        loss = model(x, y)
        loss.backward()
        zero.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

Both objects can be used as before: the model keeps its classes, names and state_dict keys, the
optimizer its param groups; a scheduler may be built on it before or after. zeroify() needs both
at once, because the optimizer gets this rank's slices in place of the model's parameters.
"""

import os
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from zero_mini.binding import checks, hooks, pieces, watch
from zero_mini.binding.parameter import HeldParameter, set_grad
from zero_mini.binding.state_dict import hook_state_dicts, load_optimizer_states
from zero_mini.binding.units import make_units
from zero_mini.comm import Comm
from zero_mini.ddp import DDP
from zero_mini.script import Script
from zero_mini.update.loss_scale import LossScaler
from zero_mini.update.on_device import OnDevice
from zero_mini.wire.copy_engine import gather_by_copy_engines
from zero_mini.zero1 import Zero1
from zero_mini.zero2 import Zero2
from zero_mini.zero3 import Zero3

STAGES = (DDP, Zero1, Zero2, Zero3)


def zeroify(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    stage: int | type[Script] = 2,
    *,
    dtype: torch.dtype | None = None,
    units: Sequence[nn.Module | Sequence[nn.Module]] | None = None,
    device: torch.device | str | None = None,
    initialise: Callable[[str, torch.Tensor], None] | None = None,
    elementwise: bool = False,
    group: dist.ProcessGroup | None = None,
    scaler: LossScaler | None = None,
    offload: str | os.PathLike | None = None,
    comm: Comm | None = None,
) -> Script:
    """Train `model` with `optimizer` at ZeRO stage 0 (plain data parallelism), 1, 2 or 3.

    stage        a number, or a class that overrides moments of a stage (script.py has the list).
    dtype        what the model computes in; None: the dtype of its parameters. With torch.bfloat16
                 the optimizer keeps the parameters' own dtype as master copy (mixed precision). With
                 torch.float16 the loss must be scaled too: zero.scale(loss).backward().
    units        modules whose parameters are gathered and reduced together: each entry is a module or a list of
                 consecutive modules; None: the model's repeated blocks, that is the children of its ModuleLists and
                 Sequentials, and on a GPU small ones joined (`units.units_by_size`). The rest is the root unit.
    device       where to train; None: this rank's GPU if the group's backend is NCCL, else where
                 the model is. A model on the CPU is moved one unit at a time.
    initialise   gives values to parameters that were built on the meta device, called as
                 initialise(name, tensor) one unit at a time, so that at stage 3 no rank ever holds a whole model.
    elementwise  True promises that an optimizer not listed in checks.py updates each element independently.
    group        the ranks that share the states; None: all of them. Its time-out limits how long a rank waits for the
                 others: dist.new_group(timeout=timedelta(minutes=5)), or init_process_group(timeout=...) for all.
    scaler       how the loss scale begins and grows in fp16; None: from 2**16, as torch's does.
    offload      "host": master copy and optimizer states are in host memory, and the CPU updates them; a folder:
                 they are in files there. Stages 1 to 3.
    comm         the collectives, in place of `group`: an instance of a subclass of Comm.

    Every rank must call it with the same model; all take rank 0's values. Returns the handle: clip_grad_norm_,
    no_sync, scale, stepped, full_params, named_parameters, add_penalty, updating, state_dict, load_state_dict, memory,
    ledger, wait.
    ValueError or RuntimeError, on every rank, if it cannot train this model and optimizer with these arguments.

    If no rank uses a parameter in a step, its value, states and step count do not change, as in torch when a gradient
    is None. requires_grad_() may be called at any time for parameters that are in a param group.
    """
    checks.check_comm(comm, group)
    if comm is None:
        checks.check_process_group(group)
        comm = Comm(group)
    if device is None:
        on_gpu = comm.is_nccl or any(param.is_cuda for param in model.parameters())
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else "cpu"
    device = torch.device(device)
    plan = checks.Plan(
        model,
        optimizer,
        stage,
        dtype,
        units,
        elementwise,
        can_initialise=initialise is not None,
        offload=offload,
        scaler=scaler,
        on_gpu=device.type == "cuda",
    )
    checks.check_everywhere(plan, comm)
    dtype = dtype or plan.dtype
    if scaler is None and dtype == torch.float16:
        scaler = LossScaler()
    states = {name: optimizer.state[param] for name, param in model.named_parameters() if param in optimizer.state}
    all_units = make_units(model, plan.blocks, plan.group_of, comm.rank, comm.world_size)
    build = STAGES[stage] if isinstance(stage, int) else stage
    make = maker_of_update(offload)
    zero = build(model, optimizer, all_units, comm, dtype, device, scaler, make_update=make)
    with gather_by_copy_engines(comm, all_units if build.sharded else []):
        take_over(zero, initialise)
    load_optimizer_states(zero, states)  # states that the constructor made, as Adagrad's does
    hook_state_dicts(zero)
    hooks.hook_optimizer(zero)
    return zero


def take_over(zero: Script, initialise: Callable[[str, torch.Tensor], None] | None) -> None:
    """Each unit's values become what the stage keeps of them, unit by unit: the peak is the states and one unit."""
    zero.comm.follow(zero)
    zero.prepare()
    hooks.keep_in_buffers(zero.model)
    for unit in zero.units:
        values = unit.take_values(initialise, zero.master_dtype, zero.device)
        zero.comm.broadcast(values, unit.name).wait()
        unit.nan_views = [values.new_full((), float("nan"), dtype=zero.dtype).expand(s) for s in unit.shapes]
        zero.adopt(unit, values)
        del values  # stages 1 to 3 keep a part of them; the rest must not wait for the next unit
        zero.update.adopt(unit)
        watch.note_versions(unit)
        for param in unit.params:
            set_grad(param, None)
            param.unit = unit
            param.__class__ = type(param) if isinstance(param, HeldParameter) else HeldParameter
        unit.stage = weakref.ref(zero)
    zero.model.to(zero.device)  # only buffers are left to move
    zero.sync_buffers()
    zero.comm.ledger.end_step()
    for unit in zero.trainable:
        pieces.make_pieces(zero, unit)
    pieces.point_optimizer_to_pieces(zero)
    zero.update.ready()
    hooks.connect(zero)


def maker_of_update(offload: str | os.PathLike | None) -> Callable[[Script], OnDevice]:
    """What builds `zero.update`, which updates the masters."""
    if offload is None:
        return OnDevice
    if offload == "host":
        from zero_mini.update.offload import Offload

        return Offload
    from zero_mini.update.disk import OnDisk  # it needs fcntl, which not every system has

    return partial(OnDisk, folder=Path(offload))
