"""Works: a model, a batch, and how blocks are run; every system trains the same work.

    the weights    GPT-2's initial values, from seed 0, made on the device; a Llama's from seeds of their names
    the tokens     two batches a rank, in turn, so that the loss falls within ten steps
    the optimizer  AdamW, one group, a constant learning rate, no clipping

Tokens are as unevenly distributed as in a text, and each rank prefers other tokens. So a system that does not reduce
gradients would learn each rank's share of the vocabulary much faster, and its losses would differ.

Two are other people's works, with the numbers that they publish for N GPUs:

    "Qwen2.5-1.5B shape"   LLM.Q, with biases of qkv: 57,100 tokens/s a GPU on 8 x H100 (benchmarks/H100x8.md)
    "CS336 board"          Stanford's course, one step of 8.1 billion parameters and two sequences of 32,768 tokens on
                           two GPUs: 3.8 s on 2 x B200, the fastest entry of the class

Left out: reading data, accumulation over micro-batches, schedules: they are the same for all systems.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zero_mini.comparison.llama import LlamaConfig
from zero_mini.trainer.gpt import PRESETS, GPTConfig

BASELINE = "plain + 1/N update"
PLAIN = ("plain", BASELINE)
OURS = ("zero-0", "zero-1", "zero-2", "zero-3")
DDP = ("ddp", "ddp-bf16-hook", "ddp-zero1")
DEEPSPEED = ("deepspeed-1", "deepspeed-2", "deepspeed-3", "deepspeed-3 tuned")
PEERS = (*DDP, "fsdp2", "fsdp2-keep", "fsdp2 tuned", "fsdp2 tuned symmetric", *DEEPSPEED)
ON_CPU = (*OURS, "ddp", "ddp-zero1", "fsdp2", "fsdp2-keep", "fsdp2 tuned", *PLAIN)
COMPILED = (*OURS, "ddp", "fsdp2", "fsdp2 tuned", "fsdp2 tuned symmetric", *PLAIN)
ABLATIONS = (
    "ddp",
    "zero-3",
    "zero-3 no prefetch",
    "zero-3 storage resize",
    "zero-3 gathers as kernels",
    "zero-3 reductions at once",
    "zero-3 two communicators",
    "zero-3 16-bit shard",
    *PLAIN,
)
BOARD_SYSTEMS = (
    "zero-3",
    "zero-3 keep attention",
    "fsdp2",
    "fsdp2 tuned",
    "fsdp2 keep attention",
    "deepspeed-3",
    "deepspeed-3 tuned",
    BASELINE,
)
OFFLOADED = (
    "ddp",
    "zero-3",
    "zero-2 offload",
    "zero-3 offload",
    "fsdp2 offload",
    "deepspeed-2 offload",
    "deepspeed-3 offload",
    BASELINE,
)
ADAMW = {"betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}


@dataclass(frozen=True)
class Work:
    """A model and its batch, and the systems that train it by default."""

    name: str
    config: GPTConfig | LlamaConfig
    batch: int  # sequences a rank
    systems: tuple[str, ...] = (*OURS, *PEERS, *PLAIN)
    bf16: bool = True  # the computation; master copies are fp32
    checkpointing: bool = False  # a block's activations are computed again in backward
    compiled: bool = False  # a block's forward and backward are compiled by torch
    fused_loss: bool = False  # the code from the last norm to the loss is compiled too: fp32 logits are never stored
    loss_chunks: int = 1  # parts of the tokens whose logits exist at a time
    lr: float = 1e-4
    gate_steps: int = 10  # whose losses are compared
    timed_steps: int = 12
    short_steps: int = 5  # of a short sequence; it would be compiled again for that

    @property
    def tokens(self) -> int:
        """Tokens that a rank trains on in a step."""
        return self.batch * self.config.T


QWEN = LlamaConfig(L=28, d=1536, heads=12, kv_heads=2, ffn=8960, vocab=151_936, T=1024, tied=True)
QWEN_WORK = Work(
    "Qwen2.5-1.5B shape",
    QWEN,
    batch=16,
    systems=COMPILED,
    compiled=True,
    fused_loss=True,
    loss_chunks=4,
    lr=2e-5,
    short_steps=0,
)
QWEN_LARGE = replace(QWEN_WORK, name="Qwen2.5-1.5B shape batch 32", batch=32, loss_chunks=8)
BOARD = LlamaConfig(L=34, d=4096, heads=32, kv_heads=32, ffn=11008, vocab=151_936, T=32_768)
BOARD_WORK = Work(
    "CS336 board",
    BOARD,
    batch=1,
    systems=BOARD_SYSTEMS,
    checkpointing=True,
    compiled=True,
    fused_loss=True,
    loss_chunks=16,
    lr=5e-6,
    gate_steps=4,
    timed_steps=4,
    short_steps=0,
)
CPU_CONFIG = GPTConfig(L=4, d=256, heads=4, vocab=256, T=128)

WORKS = {
    work.name: work
    for work in (
        Work("1.5B", PRESETS["1.5B"], 8),
        Work(
            "1.5B checkpointed",
            PRESETS["1.5B"],
            16,
            (*OURS, "ddp", "fsdp2", "fsdp2 tuned", "deepspeed-3", "deepspeed-3 tuned", *PLAIN),
            checkpointing=True,
        ),
        Work("350M batch 8", PRESETS["350M"], 8),
        Work("350M batch 32", PRESETS["350M"], 32),
        Work("124M batch 32", PRESETS["124M"], 32),
        Work("1.5B compiled", PRESETS["1.5B"], 8, COMPILED, compiled=True),
        Work("1.5B compiled batch 16", PRESETS["1.5B"], 16, COMPILED, compiled=True, fused_loss=True),
        Work("1.5B offload", PRESETS["1.5B"], 8, OFFLOADED),
        QWEN_WORK,
        QWEN_LARGE,
        BOARD_WORK,
        Work("ablations", PRESETS["1.5B"], 8, ABLATIONS),
        Work("cpu", CPU_CONFIG, 8, ON_CPU, bf16=False, lr=1e-3),
        Work("cpu ablations", CPU_CONFIG, 8, ABLATIONS, bf16=False, lr=1e-3),
    )
}


def batches(work: Work, rank: int, world_size: int, device: torch.device) -> list[Tensor]:
    """The two batches (B, T + 1) of a rank: inputs are all but the last token of a row, targets all but the first."""
    V = work.config.vocab
    generator = torch.Generator().manual_seed(rank)
    chance = torch.rand(2, work.batch, work.config.T + 1, generator=generator)
    tokens = ((V * chance**4).long() + rank * V // world_size) % V  # half of them are in V/16 of the vocabulary
    return list(tokens.to(device))
