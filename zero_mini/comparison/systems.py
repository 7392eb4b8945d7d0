"""The systems that are compared, each written as its documentation recommends.

    zero-0 .. zero-3       this package; AdamW is torch's, fused, as it is for all
    ddp                    torch DDP under autocast: fp32 weights, fp32 gradients, fp32 on the wire
    ddp-bf16-hook          the same, with torch's hook that sends gradients in bf16
    ddp-zero1              DDP with torch's ZeroRedundancyOptimizer
    fsdp2, fsdp2-keep      torch's fully_shard, with and without resharding after forward
    deepspeed-1 .. -3      if it is installed
    ... offload            the optimizer in host memory: zero_mini's, FSDP2's CPUOffloadPolicy, DeepSpeed's CPU Adam
    zero-3 ...             stage 3 with one decision changed (ablations.py)
    plain                  forward and backward on one GPU, all in bf16: no ranks, no optimizer, an upper limit

For the floor of a step (scores.py) each system has the bytes a parameter that it sends, before the factor (N-1)/N: an
all-reduce counts twice, an all-gather, a reduce-scatter or a broadcast once.

Left out: tuning beyond what is written here.
"""

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zero_mini import zeroify
from zero_mini.comparison import ablations
from zero_mini.comparison.works import ADAMW, Work
from zero_mini.memory import formulas
from zero_mini.script import Script
from zero_mini.trainer.gpt import GPT


@dataclass
class Trainee:
    """A model in training. `step(tokens)` is timed, from forward to zero_grad; the loss stays on the device."""

    model: nn.Module
    step: Callable[[Tensor], Tensor]
    optimizer: torch.optim.Optimizer | None = None
    zero: Script | None = None
    can_be_walked: bool = True

    def state_bytes(self) -> int | None:
        """Bytes of parameters, gradients and optimizer states; None if this code cannot list them."""
        if not self.can_be_walked:
            return None
        if self.zero is not None:
            return sum(formulas.walk(self.zero).values())
        tensors = [t for param in self.model.parameters() for t in (param, param.grad) if t is not None]
        inner = getattr(self.optimizer, "optim", self.optimizer)  # ZeroRedundancyOptimizer's own
        for state in inner.state.values() if inner else ():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
        storages = [getattr(tensor, "_local_tensor", tensor).untyped_storage() for tensor in tensors]  # of a DTensor
        return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def make_model(work: Work, device: torch.device) -> GPT:
    """The unwrapped model: the same weights for every system, and blocks compiled or checkpointed as in the work.

    It replaces `forward`, not the call, so that hooks of a block are not compiled.
    """
    torch.manual_seed(0)
    with device:
        model = GPT(work.config)
    if work.compiled or work.fused_loss:
        from torch._dynamo import config

        config.recompile_limit = 64  # all blocks share one code object, which is compiled again for each shape
    if work.fused_loss:
        model.loss = torch.compile(model.loss, dynamic=False)
    for block in model.blocks:
        if work.compiled:
            block.forward = torch.compile(block.forward, dynamic=False)
        if work.checkpointing:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
    return model


def adamw(model: nn.Module, work: Work) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=work.lr, **ADAMW)


def stepper(call: Callable[..., Tensor], optimizer: torch.optim.Optimizer, autocast: bool = False):
    """The usual body of a training loop."""

    def step(tokens: Tensor) -> Tensor:
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=autocast):
            loss = call(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def build_zero(stage: int | type[Script], work: Work, device: torch.device, offload: str | None = None) -> Trainee:
    model = make_model(work, device)
    optimizer = adamw(model, work)
    dtype = torch.bfloat16 if work.bf16 else None
    zero = zeroify(model, optimizer, stage=stage, dtype=dtype, offload=offload)
    return Trainee(model, stepper(model, optimizer), optimizer, zero)


def build_ddp(variant: str, work: Work, device: torch.device) -> Trainee:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = make_model(work, device)
    wrapped = nn.parallel.DistributedDataParallel(
        model, device_ids=[device] if device.type == "cuda" else None, gradient_as_bucket_view=True
    )
    if variant == "bf16-hook":
        wrapped.register_comm_hook(None, bf16_compress_hook)
    if variant == "zero1":
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=False, lr=work.lr, **ADAMW
        )
    else:
        optimizer = adamw(model, work)
    return Trainee(model, stepper(wrapped, optimizer, autocast=work.bf16), optimizer)


def build_fsdp2(reshard_after_forward: bool, work: Work, device: torch.device, offload: bool = False) -> Trainee:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    model = make_model(work, device)
    policy = MixedPrecisionPolicy()
    if work.bf16:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    place = CPUOffloadPolicy() if offload else OffloadPolicy()
    for block in model.blocks:
        fully_shard(block, mp_policy=policy, reshard_after_forward=reshard_after_forward, offload_policy=place)
    fully_shard(model, mp_policy=policy, offload_policy=place)
    optimizer = adamw(model, work)
    return Trainee(model, stepper(model, optimizer), optimizer)


def build_deepspeed(stage: int, work: Work, device: torch.device, offload: bool = False) -> Trainee:
    # DeepSpeed reads a rank's place from the environment, even if torch.distributed is initialised already.
    place = {"RANK": dist.get_rank(), "WORLD_SIZE": dist.get_world_size(), "LOCAL_RANK": device.index or 0}
    os.environ.update({name: str(value) for name, value in place.items()})
    import deepspeed
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    model = make_model(work, device)
    sharding = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True}
    if stage < 3 and not offload and "compute_grad_norm" in DeepSpeedZeroConfig.model_fields:
        sharding["compute_grad_norm"] = False  # the other systems do not compute it either
    settings = {
        "train_micro_batch_size_per_gpu": work.batch,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": work.bf16},
        "zero_optimization": sharding,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # the default clips to a norm of 1
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }
    optimizer = adamw(model, work)
    if offload:
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # compiled at its first use

        sharding["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        options = {name: value for name, value in ADAMW.items() if name != "fused"}
        optimizer = DeepSpeedCPUAdam(model.parameters(), lr=work.lr, adamw_mode=True, **options)
    wrapped, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)

    def step(tokens: Tensor) -> Tensor:
        loss = wrapped(tokens[:, :-1], tokens[:, 1:])
        wrapped.backward(loss)
        wrapped.step()  # zeroes the gradients too
        return loss.detach()

    return Trainee(model, step, can_be_walked=False)


def build_plain(work: Work, device: torch.device) -> Trainee:
    model = make_model(work, device)
    if work.bf16:
        model.bfloat16()

    def step(tokens: Tensor) -> Tensor:
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        model.zero_grad()
        return loss.detach()

    return Trainee(model, step)


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
    "plain": System(build_plain, 0),
}


def build(system: str, work: Work, device: torch.device) -> Trainee:
    """The work's model in training under a system, on this rank. Collective, except for `plain`."""
    return SYSTEMS[system].build(work, device)


def missing(system: str) -> str | None:
    """The package that this system needs, if it is not installed; else None."""
    needs = "deepspeed" if system.startswith("deepspeed") else None
    return needs if needs and importlib.util.find_spec(needs) is None else None
