"""The systems that are compared, each written as its documentation recommends.

    zero-0 .. zero-3       this package; AdamW is torch's, fused, as it is for all
    ddp                    torch DDP under autocast: fp32 weights, fp32 gradients, fp32 on the wire
    ddp-bf16-hook          the same, with torch's hook that sends gradients in bf16
    ddp-zero1              DDP with torch's ZeroRedundancyOptimizer
    fsdp2, fsdp2-keep      torch's fully_shard, with and without resharding after forward
    deepspeed-1 .. -3      if it is installed
    ... tuned              with what their documentation says about speed (peers.py)
    ... keep attention     checkpointing that keeps attention's outputs and computes the rest of a block again
    ... offload            the optimizer in host memory: zero_mini's, FSDP2's CPUOffloadPolicy, DeepSpeed's CPU Adam
    zero-3 ...             stage 3 with one decision changed (ablations.py)
    plain                  forward and backward on one GPU, all in bf16: no ranks, no optimizer, an upper limit
    plain + 1/N update     and the update of as many parameters as a rank has at stages 1 to 3: what sharding is held to

For the floor of a step (scores.py) each system has the bytes a parameter that it sends, before the factor (N-1)/N: an
all-reduce counts twice, an all-gather, a reduce-scatter or a broadcast once.

Left out: tuning beyond what documentation says.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from zero_mini import zeroify
from zero_mini.activations.checkpointing import checkpoint
from zero_mini.activations.kept_outputs import ATTENTION
from zero_mini.comm import Comm
from zero_mini.comparison import ablations
from zero_mini.comparison.models import initialiser, make_model
from zero_mini.comparison.peers import build_ddp, build_deepspeed, build_fsdp2
from zero_mini.comparison.plain import build_plain
from zero_mini.comparison.trainee import Trainee, adamw, stepper
from zero_mini.comparison.works import BASELINE, Work
from zero_mini.script import Script


def build_zero(
    stage: int | type[Script],
    work: Work,
    device: torch.device,
    offload: str | None = None,
    keep_attention: bool = False,
    comm: Comm | None = None,
) -> Trainee:
    keeping = partial(partial, checkpoint, outputs_of=ATTENTION) if keep_attention else None
    model = make_model(work, device, keeping)
    optimizer = adamw(model, work)
    dtype = torch.bfloat16 if work.bf16 else None
    options = {"dtype": dtype, "initialise": initialiser(model), "offload": offload, "comm": comm, "device": device}
    zero = zeroify(model, optimizer, stage=stage, **options)
    return Trainee(model, stepper(model, optimizer), optimizer, zero)


def build_baseline(work: Work, device: torch.device) -> Trainee:
    return build_plain(work, device, updates=dist.get_world_size())


@dataclass(frozen=True)
class System:
    """How it is built, and two facts for the floor of its step."""

    build: Callable[[Work, torch.device], Trainee]
    sends: int  # bytes a parameter in bf16 works, ring convention, before (N-1)/N
    shards_update: bool = True  # a rank's optimizer updates 1/N of the parameters


SYSTEMS = {
    "zero-0": System(partial(build_zero, 0), 4, shards_update=False),
    "zero-1": System(partial(build_zero, 1), 4),
    "zero-2": System(partial(build_zero, 2), 4),
    "zero-3": System(partial(build_zero, 3), 6),
    "ddp": System(partial(build_ddp, ""), 8, shards_update=False),
    "ddp-bf16-hook": System(partial(build_ddp, "bf16-hook"), 4, shards_update=False),
    "ddp-zero1": System(partial(build_ddp, "zero1"), 12),
    "fsdp2": System(partial(build_fsdp2, True), 6),
    "fsdp2-keep": System(partial(build_fsdp2, False), 4),
    "deepspeed-1": System(partial(build_deepspeed, 1), 4),
    "deepspeed-2": System(partial(build_deepspeed, 2), 4),
    "deepspeed-3": System(partial(build_deepspeed, 3), 6),
    "fsdp2 tuned": System(partial(build_fsdp2, True, tuned=True), 6),
    "fsdp2 tuned symmetric": System(partial(build_fsdp2, True, tuned=True, symmetric=True), 6),
    "deepspeed-3 tuned": System(partial(build_deepspeed, 3, tuned=True), 6),
    "zero-3 keep attention": System(partial(build_zero, 3, keep_attention=True), 6),
    "fsdp2 keep attention": System(partial(build_fsdp2, True, keep_attention=True), 6),
    "zero-2 offload": System(partial(build_zero, 2, offload="host"), 4),
    "zero-3 offload": System(partial(build_zero, 3, offload="host"), 6),
    "fsdp2 offload": System(partial(build_fsdp2, True, offload=True), 6),
    "deepspeed-2 offload": System(partial(build_deepspeed, 2, offload=True), 4),
    "deepspeed-3 offload": System(partial(build_deepspeed, 3, offload=True), 6),
    "zero-3 no prefetch": System(partial(build_zero, ablations.NoPrefetch), 6),
    "zero-3 storage resize": System(partial(build_zero, ablations.StorageResize), 6),
    "zero-3 gathers as kernels": System(partial(build_zero, ablations.GathersAsKernels), 6),
    "zero-3 reductions at once": System(partial(build_zero, ablations.ReductionsAtOnce), 6),
    "zero-3 two communicators": System(partial(build_zero, ablations.TwoCommunicators), 6),
    "zero-3 16-bit shard": System(partial(build_zero, ablations.SixteenBitShard), 6),
    "plain": System(build_plain, 0),
    BASELINE: System(build_baseline, 0),
}


def build(system: str, work: Work, device: torch.device) -> Trainee:
    """The work's model in training under a system, on this rank. Collective, except for the plain ones."""
    return SYSTEMS[system].build(work, device)


def missing(system: str) -> str | None:
    """What this system needs and does not have here, in words; None if nothing is missing."""
    if system.startswith("deepspeed") and importlib.util.find_spec("deepspeed") is None:
        return "deepspeed is not installed"
    if "symmetric" in system and not hasattr(FSDPModule, "set_symm_mem_for_comm"):
        return f"torch {torch.__version__} has no set_symm_mem_for_comm"
    return None
