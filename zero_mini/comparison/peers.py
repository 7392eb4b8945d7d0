"""The systems of others, each built as its documentation recommends: torch's DDP and FSDP2, DeepSpeed."""

import os
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero_mini.activations.kept_outputs import ATTENTION
from zero_mini.comparison.models import give_values, make_model, torch_checkpointed
from zero_mini.comparison.trainee import Trainee, adamw, stepper
from zero_mini.comparison.works import ADAMW, Work


def build_ddp(variant: str, work: Work, device: torch.device) -> Trainee:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = make_model(work, device)
    give_values(model, device)
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


def build_fsdp2(
    reshard_after_forward: bool,
    work: Work,
    device: torch.device,
    offload: bool = False,
    keep_attention: bool = False,
) -> Trainee:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    model = make_model(work, device, partial(torch_checkpointed, operators=ATTENTION) if keep_attention else None)
    policy = MixedPrecisionPolicy()
    if work.bf16:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    place = CPUOffloadPolicy() if offload else OffloadPolicy()
    for block in model.blocks:
        fully_shard(block, mp_policy=policy, reshard_after_forward=reshard_after_forward, offload_policy=place)
    fully_shard(model, mp_policy=policy, offload_policy=place)
    give_values(model, device)
    optimizer = adamw(model, work)
    return Trainee(model, stepper(model, optimizer), optimizer)


def build_deepspeed(stage: int, work: Work, device: torch.device, offload: bool = False) -> Trainee:
    # DeepSpeed reads a rank's place from the environment, even if torch.distributed is initialised already.
    place = {"RANK": dist.get_rank(), "WORLD_SIZE": dist.get_world_size(), "LOCAL_RANK": device.index or 0}
    os.environ.update({name: str(value) for name, value in place.items()})
    import deepspeed
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    # Its hooks are at every layer inside a block, so blocks are not compiled. Its masters are copies of bf16 values.
    model = make_model(replace(work, compiled=False, fused_loss=False), device)
    give_values(model, device, torch.bfloat16 if work.bf16 else torch.float32)
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
