"""A Llama: the family of models that other systems publish their speed on.

Sources: Touvron et al., arXiv 2302.13971 (RMSNorm, RoPE, SwiGLU, no biases); Ainslie et al., arXiv 2305.13245 (query
heads that share keys and values); Su et al., arXiv 2104.09864 (RoPE).

Block:  x = x + attention(norm_1(x));  x = x + mlp(norm_2(x))
        attention   softmax(rotated q  rotated k^T) v; heads / kv_heads queries use the same key and value
        mlp         down(silu(gate) * up)
Model:  embed[tokens] -> L blocks -> norm -> logits = x @ head^T

    a block   qkv        (d + 2 kv_heads d / heads, d)        the root   embed   V d
              attn_out   (d, d)                                          head    V d, none if it is tied to embed
              gate, up   (ffn, d) each                                   norm    d
              down_out   (d, ffn)
              norms      2 d

Logits are as large as many blocks' activations (V is 100 d in small models), so the loss is computed for a chunk of
the tokens at a time, and its gradients with it (one_pass_loss.py). What computes a chunk is an attribute so that it
can be compiled: the fp32 logits of a chunk are then never stored.

Shapes: B sequences, T tokens in each, d channels, h heads of d / h channels, V vocabulary.

Left out: released weights, Qwen's biases of qkv, longer contexts by other bases, a key-value cache.
"""

import math
import zlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zero_mini.comparison.one_pass_loss import OnePassLoss, loss_and_gradient

ROPE_BASE = 10_000


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a model."""

    L: int  # blocks
    d: int  # channels
    heads: int  # of queries
    kv_heads: int  # of keys and values
    ffn: int  # channels inside the mlp
    vocab: int
    T: int  # tokens of a sequence
    tied: bool = False  # the head is the embedding

    def __post_init__(self) -> None:
        if self.d % (2 * self.heads) or self.heads % self.kv_heads:
            raise ValueError(f"need d % (2 heads) = heads % kv_heads = 0 (got {self.d}, {self.heads}, {self.kv_heads})")


def parameters_of_products(config: LlamaConfig) -> int:
    """Elements of the matrices that every token is multiplied by: those of the blocks, and the head.

    >>> parameters_of_products(LlamaConfig(L=28, d=1536, heads=12, kv_heads=2, ffn=8960, vocab=151_936, T=1024))
    1543569408
    """
    d, kv = config.d, config.kv_heads * config.d // config.heads
    return config.L * (d * (d + 2 * kv) + d * d + 3 * d * config.ffn) + config.vocab * d


def parameter_count(config: LlamaConfig) -> int:
    """Psi: the elements of all parameters, a tied matrix counted once."""
    embedding = 0 if config.tied else config.vocab * config.d
    return parameters_of_products(config) + embedding + (2 * config.L + 1) * config.d


def flops_per_token(config: LlamaConfig) -> int:
    """Floating-point operations for one token, forward and backward: 6 N_matmul + 12 L d T.

    As for GPT-2 (trainer/gpt.py), but the lookup of an embedding is not counted: it multiplies nothing.
    """
    return 6 * parameters_of_products(config) + 12 * config.L * config.d * config.T


def rotations(T: int, channels: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of the angle of each position and pair of channels: two (T, channels / 2), of the dtype of `like`."""
    rates = ROPE_BASE ** -(torch.arange(0, channels, 2, device=like.device) / channels)
    angles = torch.outer(torch.arange(T, device=like.device).float(), rates)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B, h, T, c): channel i and channel i + c/2 are a pair, turned by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class Block(nn.Module):
    """One transformer block: (B, T, d) to (B, T, d).

    Under checkpointing, each of its two methods is compiled instead of the whole: the second run ends before the last
    product, and attention stays an operator whose output can be kept.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        d, ffn = config.d, config.ffn
        self.channels, self.heads, self.kv_heads = d // config.heads, config.heads, config.kv_heads
        self.norm_1 = nn.RMSNorm(d, eps=1e-6)
        self.qkv = nn.Linear(d, (self.heads + 2 * self.kv_heads) * self.channels, bias=False)
        self.attn_out = nn.Linear(d, d, bias=False)
        self.norm_2 = nn.RMSNorm(d, eps=1e-6)
        self.gate = nn.Linear(d, ffn, bias=False)
        self.up = nn.Linear(d, ffn, bias=False)
        self.down_out = nn.Linear(ffn, d, bias=False)

    def before_attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, h, T, d / h), k and v (B, kv_heads, T, d / h)."""
        heads = self.qkv(self.norm_1(x)).unflatten(-1, (-1, self.channels)).transpose(1, 2)
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def before_last_product(self, x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """x with attention added (B, T, d), and the inside of the mlp (B, T, ffn)."""
        x = x + self.attn_out(attended.transpose(1, 2).flatten(2))
        h = self.norm_2(x)
        return x, F.silu(self.gate(h)) * self.up(h)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.before_attention(x, cos, sin)
        options = {"is_causal": True, "enable_gqa": self.heads != self.kv_heads}
        attended = F.scaled_dot_product_attention(q, k, v, **options)
        x, inside = self.before_last_product(x, attended)
        return x + self.down_out(inside)


class Llama(nn.Module):
    """`model(tokens, targets)`, both (B, T) int64, gives the mean cross entropy, an fp32 scalar.

    Its parameters have no values of use until `init_weight` gave them some: build it on the meta device or elsewhere.
    """

    def __init__(self, config: LlamaConfig, loss_chunks: int = 1) -> None:
        super().__init__()
        self.config, self.loss_chunks = config, loss_chunks
        self.loss_of_chunk = loss_and_gradient
        self.embed = nn.Embedding(config.vocab, config.d)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.L))
        self.norm = nn.RMSNorm(config.d, eps=1e-6)
        self.head = None if config.tied else nn.Linear(config.d, config.vocab, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)  # (B, T, d)
        cos, sin = rotations(tokens.shape[1], self.config.d // self.config.heads, x)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.loss(self.norm(x), targets)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """The mean cross entropy of (B, T, d) against (B, T), a chunk of the tokens at a time."""
        weight = (self.embed if self.head is None else self.head).weight
        return OnePassLoss.apply(x.flatten(0, 1), weight, targets.flatten(), self.loss_chunks, self.loss_of_chunk)


def init_weight(name: str, tensor: Tensor, L: int) -> None:
    """Give initial values to the parameter of that name, in place: they depend on its name and shape only.

    Matrices are N(0, 0.02), those that write into the residual stream scaled by 1 / sqrt(2 L); norms are 1. Systems
    create parameters in different orders, so each has its own random numbers.
    """
    if tensor.ndim < 2:
        tensor.fill_(1.0)
        return
    generator = torch.Generator(tensor.device).manual_seed(zlib.crc32(name.encode()))
    std = 0.02 / math.sqrt(2 * L) if name.endswith("_out.weight") else 0.02
    tensor.normal_(std=std, generator=generator)
