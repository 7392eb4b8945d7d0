"""What people say that ZeRO does, each as a run. rows.py has the claims and the verdicts.

    accuracy_and_speed    does it cost accuracy? does it converge faster?
    traffic_and_time      does it send less? is 1.5 x the traffic 1.5 x the time?
    memory_by_ranks       does it help on one GPU? do twice the ranks need half the memory? are activations sharded?
    work_of_a_rank        is it model parallelism?
    optimizers            does any optimizer work?
    peaks                 is the peak of stage 2 always below that of stage 1?

All of them run on ranks. What they are compared with is torch DDP, or a model in plain PyTorch.

Left out: GPUs. What was measured there is in zero_mini/measured/speed.json and docs/speed.md.
"""

import time
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from zero_mini import zeroify
from zero_mini.laboratory.task import (
    adamw,
    batch,
    byte_model,
    gap,
    gradient_of,
    held_out_loss,
    loss_of,
    momentum,
    parameters_of,
    train,
)
from zero_mini.memory.formulas import PlainTraining, walk
from zero_mini.memory.recorder import Recorder

STAGES = (0, 1, 2, 3)


def in_ulps(difference: Tensor, size: Tensor) -> Tensor:
    """How many units in the last place of `size` (fp32, > 0) a difference has.

    >>> in_ulps(torch.tensor([2**-22]), torch.tensor([1.5])).item()  # between 1 and 2 numbers are 2^-23 apart
    2.0
    """
    return difference.abs() / (torch.nextafter(size, size.new_tensor(torch.inf)) - size)


def accuracy_and_speed(steps: int = 300, seeds: int = 3) -> dict:
    """Every stage beside torch DDP: largest gap of a parameter, losses of this rank, loss on held-out text (last seed).

    "ulps": the largest gap of the first gradient at stage 2, in units in the last place of sum_r |g_r|, which may not
    exceed N - 1; "differ": the part of its elements that differ.
    """
    rank, N = dist.get_rank(), dist.get_world_size()
    gaps, losses, held_out = dict.fromkeys([f"stage {stage}" for stage in STAGES], 0.0), {}, {}
    for seed in range(seeds):
        model = byte_model(seed)
        losses[f"torch DDP, seed {seed}"] = train(DistributedDataParallel(model), adamw(model), steps, rank, N, seed)
        expected, held_out["torch DDP"] = parameters_of(model), held_out_loss(model)
        for stage in STAGES:
            model = byte_model(seed)
            zero = zeroify(model, adamw(model), stage)
            losses[f"stage {stage}, seed {seed}"] = train(model, zero.optimizer, steps, rank, N, seed)
            held_out[f"stage {stage}"] = held_out_loss(model)
            gaps[f"stage {stage}"] = max(gaps[f"stage {stage}"], gap(parameters_of(model), expected))
    model, twin = byte_model(), byte_model()
    loss_of(model, batch(0, rank, N)).backward()
    sizes = gradient_of(model).abs() / N
    dist.all_reduce(sizes)
    model.zero_grad()
    ddp = DistributedDataParallel(model)
    loss_of(ddp, batch(0, rank, N)).backward()
    zero = zeroify(twin, momentum(twin), 2)
    loss_of(twin, batch(0, rank, N)).backward()
    with zero.full_params(grads=True):
        difference = gradient_of(twin) - gradient_of(model)
    ulps = in_ulps(difference, sizes.clamp(min=torch.finfo(torch.float32).tiny)).max().item()
    differ = (difference != 0).float().mean().item()
    return {"gaps": gaps, "losses": losses, "held_out": held_out, "ulps": ulps, "differ": differ}


def traffic_and_time(steps: int = 30, layers: int = 12) -> dict[str, dict]:
    """Elements that a rank sends in a step, in units of Psi (N-1)/N, and milliseconds of a step, the median."""
    rank, N, found = dist.get_rank(), dist.get_world_size(), {}
    for stage in STAGES:
        model = byte_model(layers=layers)
        zero = zeroify(model, adamw(model), stage)
        train(model, zero.optimizer, 3, rank, N)
        times = []
        for step in range(steps):
            start = time.perf_counter()
            train(model, zero.optimizer, 1, rank, N, first=step)
            times.append(1e3 * (time.perf_counter() - start))
        psi, sent = sum(unit.P for unit in zero.units), sum(call.wire_numel(N) for call in zero.ledger)
        found[f"stage {stage}"] = {"sent": sent / (psi * (N - 1) / N), "step_ms": median(times)}
    return found


def memory_by_ranks(sizes: tuple[int, ...] = (1, 2, 4), rows: int = 64) -> dict[str, dict[str, int]]:
    """Bytes of states, and of activations, at each stage when groups of n ranks share the states.

    Every rank has `rows` examples, whatever n is. "plain" is plain PyTorch.
    """
    found = {}
    model = byte_model(layers=12)
    optimizer = adamw(model)
    train(model, optimizer, 1)
    found["plain"] = kept_by(model, PlainTraining(model, optimizer), rows)
    for n in sizes:
        group, _ = dist.new_subgroups(n)
        for stage in STAGES:
            model = byte_model(layers=12)
            zero = zeroify(model, adamw(model), stage, group=group)
            train(model, zero.optimizer, 1)
            found[f"stage {stage}, N = {n}"] = kept_by(model, zero, rows)
    return found


def kept_by(model: nn.Module, owner, rows: int) -> dict[str, int]:
    """Bytes after a backward by category; activations are what autograd saved in forward, less the parameters."""
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    examples = batch(1, rows=rows)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = loss_of(model, examples)
    for _, _, tensor in owner.tensors():
        saved.pop(tensor.untyped_storage().data_ptr(), None)
    loss.backward()
    if hasattr(owner, "wait"):
        owner.wait()
    return walk(owner) | {"activations": sum(saved.values())}


def work_of_a_rank(rows: int = 64) -> dict:
    """FLOPs of this rank's forward and backward, and the weights that its matrix products read, at each stage.

    "plain": one process with the same part of the batch; "plain, all rows": with the whole batch.
    """
    rank, N = dist.get_rank(), dist.get_world_size()
    found = {}
    cases = {"plain": None, "plain, all rows": None} | {f"stage {stage}": stage for stage in STAGES}
    for name, stage in cases.items():
        model, read = byte_model(), []
        if stage is not None:
            zeroify(model, momentum(model), stage)
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(
                    lambda module, args, out, read=read: read.append(args[0].shape[1] * out.shape[1])
                )
        part = batch(0, rows=rows) if name == "plain, all rows" else batch(0, rank, N, rows)
        with FlopCounterMode(display=False) as counter:
            loss_of(model, part).backward()
        found[name] = {"flops": counter.get_total_flops(), "weights": sum(read)}
    return found


def optimizers(steps: int = 3) -> dict[str, dict]:
    """What zeroify says to torch's optimizers, and how far from torch DDP each is at stage 2, if made to run."""
    rank, N, found = dist.get_rank(), dist.get_world_size(), {}
    for name in ("SGD", "AdamW", "Adagrad", "RMSprop", "Adafactor"):
        make = getattr(torch.optim, name)
        model = byte_model()
        train(DistributedDataParallel(model), make(model.parameters(), lr=1e-2), steps, rank, N)
        expected, message = parameters_of(model), ""
        model = byte_model()
        try:
            zeroify(model, make(model.parameters(), lr=1e-2), 2)
        except ValueError as error:
            message = str(error)
        model = byte_model()
        zero = zeroify(model, make(model.parameters(), lr=1e-2), 2, elementwise=True)
        train(model, zero.optimizer, steps, rank, N)
        found[name] = {"refused": message, "gap": gap(parameters_of(model), expected)}
    return found


def peaks(layers: int = 12) -> dict[str, int]:
    """The most bytes alive in the second step, on a model of many units and on one of one unit."""
    rank, N, found = dist.get_rank(), dist.get_world_size(), {}
    for units in ("many units", "one unit"):
        for stage in (1, 2):
            with Recorder() as recorder:
                model = byte_model(layers=layers)
                blocks = None if units == "many units" else [list(model)]
                zero = zeroify(model, adamw(model), stage, units=blocks)
                train(model, zero.optimizer, 1, rank, N)
                recorder.peak_bytes = 0
                train(model, zero.optimizer, 1, rank, N, first=1)
                found[f"{units}, stage {stage}"] = recorder.peak_bytes
    return found
