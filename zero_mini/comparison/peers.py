"""The systems of others, each built as its documentation recommends: torch's DDP and FSDP2, DeepSpeed.

Tuned, they follow the parts of their documentation on speed too:

    fsdp2 tuned        each block prefetches the next two explicitly, in forward and in backward; the root is gathered
                       when a step begins (torch's FSDP2 tutorial)
    ... symmetric      and collectives use symmetric memory on a communicator with the zero-CTA policy: all-gathers by
                       copy engines (FSDPModule.set_symm_mem_for_comm)
    deepspeed-3 tuned  the buckets and thresholds that transformers and DeepSpeed derive from d where a configuration
                       says "auto"

FSDP2 reduces gradients in bf16, as this package and DeepSpeed do. torch's examples reduce in fp32, which sends twice as
much.

DeepSpeed rounds a model to bf16 and copies its fp32 masters from that, so all of them begin at bf16 numbers. bf16 has
8 bits, so an update below 2^-9 of a weight leaves its bf16 value as it was, until several have added up. At a learning
rate of 5e-6 the first update changes 8 % of weights from N(0, 0.02): the smallest. The masters of the other systems
begin anywhere between two bf16 numbers, and weights of every size change, 15 % of all: a large one more rarely, but by
more. In a Llama of 4 blocks and 4096 channels the third loss is then 9.86 in place of 8.57. So DeepSpeed's masters get
the fp32 values too, by the function that its documentation has for this (safe_set_full_fp32_param).
"""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zero_mini.activations.kept_outputs import ATTENTION
from zero_mini.comparison.models import give_values, initial_values, make_model, torch_checkpointed
from zero_mini.comparison.trainee import Trainee, adamw, stepper
from zero_mini.comparison.works import ADAMW, Work
from zero_mini.wire.copy_engine import ZERO_CTAS

PREFETCHED = 2  # blocks


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
    tuned: bool = False,
    symmetric: bool = False,
) -> Trainee:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    model = make_model(work, device, partial(torch_checkpointed, operators=ATTENTION) if keep_attention else None)
    options = {"offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy()}
    if work.bf16:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    if symmetric:
        options["mesh"] = mesh_of_copiers()
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard_after_forward, **options)
    fully_shard(model, **options)
    if symmetric:
        for module in (model, *model.blocks):
            module.set_symm_mem_for_comm()
    give_values(model, device)
    optimizer = adamw(model, work)
    return Trainee(model, stepper(prefetching(model) if tuned else model, optimizer), optimizer)


def prefetching(model: nn.Module) -> Callable[..., Tensor]:
    """The call of a model under FSDP2 that gathers ahead of time."""
    blocks = list(model.blocks)
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[index + 1 :][:PREFETCHED])
        block.set_modules_to_backward_prefetch(blocks[:index][::-1][:PREFETCHED])

    def call(*inputs: Tensor) -> Tensor:
        model.unshard(async_op=True)
        return model(*inputs)

    return call


def mesh_of_copiers() -> DeviceMesh:
    """All ranks, with a communicator that gathers without thread blocks where it can."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.cta_policy = ZERO_CTAS
    return DeviceMesh.from_group(dist.new_group(pg_options=options), "cuda")


def build_deepspeed(
    stage: int, work: Work, device: torch.device, offload: bool = False, tuned: bool = False
) -> Trainee:
    # DeepSpeed reads a rank's place from the environment, even if torch.distributed is initialised already.
    place = {"RANK": dist.get_rank(), "WORLD_SIZE": dist.get_world_size(), "LOCAL_RANK": device.index or 0}
    os.environ.update({name: str(value) for name, value in place.items()})
    import deepspeed
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    work = replace(work, compiled=False, fused_loss=False)  # its hooks are at every layer inside a block
    model = make_model(work, device)
    give_values(model, device, torch.bfloat16 if work.bf16 else torch.float32)
    sharding = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True}
    if stage < 3 and not offload and "compute_grad_norm" in DeepSpeedZeroConfig.model_fields:
        sharding["compute_grad_norm"] = False  # the other systems do not compute it either
    if tuned:
        d = work.config.d
        sharding |= {"reduce_bucket_size": d * d, "sub_group_size": 10**9}
        sharding |= {"stage3_prefetch_bucket_size": 9 * d * d // 10, "stage3_param_persistence_threshold": 10 * d}
        sharding |= {"stage3_max_live_parameters": 10**9, "stage3_max_reuse_distance": 10**9}
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
    if work.bf16:
        parameters = dict(model.named_parameters())
        for name, values in initial_values(work, device):
            deepspeed.utils.safe_set_full_fp32_param(parameters[name], values)

    def step(tokens: Tensor) -> Tensor:
        loss = wrapped(tokens[:, :-1], tokens[:, 1:])
        wrapped.backward(loss)
        wrapped.step()  # zeroes the gradients too
        return loss.detach()

    return Trainee(model, step, can_be_walked=False)
