"""The model of a work, before a system wraps it: the same weights for every system.

A GPT has its values from the start. A Llama may be too large for one GPU, so it is built on the meta device: systems
that shard parameters give each rank its part of the values, the others call `give_values` first.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from zero_mini.comparison import llama
from zero_mini.comparison.works import Work
from zero_mini.trainer import gpt


def psi_and_flops(work: Work) -> tuple[int, int]:
    """The number of parameters, and the floating-point operations for a token."""
    formulas = llama if isinstance(work.config, llama.LlamaConfig) else gpt
    return formulas.parameter_count(work.config), formulas.flops_per_token(work.config)


def make_model(work: Work, device: torch.device, checkpointed: Callable | None = None) -> gpt.GPT | llama.Llama:
    """The unwrapped model, a Llama without values; blocks are compiled or checkpointed as in the work.

    `checkpointed(forward)` is a block's forward with checkpointing, else torch's. This replaces `forward`, not the
    call, so that hooks of a block are not compiled.
    """
    torch.manual_seed(0)
    if isinstance(work.config, llama.LlamaConfig):
        with torch.device("meta"):
            model = llama.Llama(work.config, work.loss_chunks)
    else:
        with device:
            model = gpt.GPT(work.config, work.loss_chunks)
    if work.compiled or work.fused_loss:
        from torch._dynamo import config

        config.recompile_limit = 64  # all blocks share one code object, which is compiled again for each shape
    if work.fused_loss:
        compile_method(model, "loss_of_chunk" if isinstance(model, llama.Llama) else "loss")
    in_parts = work.checkpointing and isinstance(model, llama.Llama)
    for block in model.blocks:
        for name in ("before_attention", "before_last_product") if in_parts else ("forward",):
            if work.compiled:
                compile_method(block, name)
        if work.checkpointing:
            block.forward = (checkpointed or torch_checkpointed)(block.forward)
    return model


def compile_method(module: nn.Module, name: str) -> None:
    setattr(module, name, torch.compile(getattr(module, name), dynamic=False))


def torch_checkpointed(forward: Callable, operators: Sequence = ()) -> Callable:
    """torch's checkpointing, which keeps the outputs of `operators`."""
    options = {"use_reentrant": False, "preserve_rng_state": False}
    if operators:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, list(operators))
    return partial(checkpoint, forward, **options)


def initialiser(model: nn.Module) -> Callable[[str, Tensor], None] | None:
    """For zeroify(initialise=...): what gives values to parameters on the meta device; None if there are none."""
    if not any(param.is_meta for param in model.parameters()):
        return None
    return partial(llama.init_weight, L=model.config.L)


@torch.no_grad()
def give_values(model: nn.Module, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
    """Parameters on the meta device get memory and values; a DTensor gets its part of them."""
    initialise = initialiser(model)
    if initialise is None:
        return
    from torch.distributed.tensor import DTensor, distribute_tensor

    model.to(dtype).to_empty(device=device)
    for _, param, values in new_values(model, initialise, device):
        if isinstance(param, DTensor):
            values = distribute_tensor(values, param.device_mesh, param.placements, src_data_rank=None)
        param.copy_(values)


@torch.no_grad()
def initial_values(work: Work, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Names and fp32 values of the parameters, one after the other: what masters begin with in every system."""
    model = make_model(work, device)
    initialise = initialiser(model)
    if initialise is None:
        yield from ((name, param.detach()) for name, param in model.named_parameters())
    else:
        yield from ((name, values) for name, _, values in new_values(model, initialise, device))


def new_values(
    model: nn.Module, initialise: Callable[[str, Tensor], None], device: torch.device
) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
    """Each parameter's name, the parameter, and fp32 values for it."""
    for name, param in model.named_parameters():
        values = torch.empty(param.shape, device=device)
        initialise(name, values)
        yield name, param, values
