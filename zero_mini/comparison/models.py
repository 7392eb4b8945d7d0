"""The model of a work, before a system wraps it: the same weights for every system."""

from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zero_mini.binding.units import merge_blocks
from zero_mini.comparison.works import Work
from zero_mini.trainer.gpt import GPT

UNIT_NUMEL = 25_000_000  # parameters: one block of the 1.5B model, two of 350M, four of 124M


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


def blocks_of_units(model: nn.Module, device: torch.device) -> list[list[nn.Module]]:
    """The blocks of each unit. On a GPU small blocks share one; on a CPU each block is a unit."""
    return merge_blocks(model, UNIT_NUMEL if device.type == "cuda" else 1)
