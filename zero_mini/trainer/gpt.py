"""GPT-2, the model of all lessons.

Source: Radford et al. 2019 (GPT-2), the model that the paper trains (arXiv 1910.02054, section 10).

Block:  x = x + attention(ln_1(x));  x = x + mlp(ln_2(x))        pre-LayerNorm, biases, GELU(tanh)
Model:  wte[tokens] + wpe[positions] -> L blocks -> ln_f -> logits = x @ wte.T

Parameters, with Psi as in the paper and V the vocabulary:

    a block   ln_1, ln_2            4 d
              qkv       (3d, d)     3 d^2 + 3 d
              attn_out  (d, d)        d^2 +   d
              fc        (4d, d)     4 d^2 + 4 d
              mlp_out   (d, 4d)     4 d^2 +   d      together 12 d^2 + 13 d
    the root  wte V d,  wpe T d,  ln_f 2 d

    Psi = V d + T d + L (12 d^2 + 13 d) + 2 d

For ZeRO a block is a unit, and all other parameters are the root. The head is tied to `wte` by *use*: the
forward multiplies by `wte.weight`, so there is one Parameter under one name and `state_dict` holds it once.

Shapes: B sequences, T tokens in each, d channels, V vocabulary.

Left out: key-value cache. Released weights are stored transposed and under other names: gpt2_file.py reads them.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zero_mini.activations.chunked_loss import cross_entropy_in_chunks


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a model. ValueError if such a model cannot be built.

    >>> GPTConfig(L=2, d=130, heads=4)
    Traceback (most recent call last):
    ValueError: d=130 is not a multiple of heads=4; nearest: 128, 132 (--width, --heads)
    """

    L: int  # blocks
    d: int  # channels
    heads: int
    vocab: int = 256
    T: int = 128  # longest sequence
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("L", "d", "heads", "vocab", "T"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number > 0 (got {value})")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1 (got {self.dropout})")
        if self.d % self.heads:
            below = self.d - self.d % self.heads
            nearest = ", ".join(str(d) for d in (below, below + self.heads) if d)
            raise ValueError(
                f"d={self.d} is not a multiple of heads={self.heads}; nearest: {nearest} (--width, --heads)"
            )


# GPT-2 has 50257 tokens; 50304 is the next multiple of 128, a size at which matrix products are faster.
PRESETS = {
    "nano": GPTConfig(L=8, d=96, heads=4, T=64),
    "124M": GPTConfig(L=12, d=768, heads=12, vocab=50304, T=1024),
    "350M": GPTConfig(L=24, d=1024, heads=16, vocab=50304, T=1024),
    "774M": GPTConfig(L=36, d=1280, heads=20, vocab=50304, T=1024),
    "1.5B": GPTConfig(L=48, d=1600, heads=25, vocab=50304, T=1024),
}


def parameter_count(config: GPTConfig) -> int:
    """Psi: the elements of all parameters, the tied matrix counted once.

    >>> parameter_count(GPTConfig(L=12, d=768, heads=12, vocab=50257, T=1024))  # GPT-2 "small" as released
    124439808
    """
    L, d = config.L, config.d
    return config.vocab * d + config.T * d + L * (12 * d**2 + 13 * d) + 2 * d


def flops_per_token(config: GPTConfig) -> int:
    """Floating-point operations for one token, forward and backward: 6 Psi + 12 L d T.

    Source: arXiv 2204.02311 (PaLM), appendix B. A multiply and an add for every parameter in forward and
    twice that in backward; 12 d T a block for the attention scores and their weighted sum, without a
    discount for the causal mask. `wpe` is counted though it multiplies nothing: 0.6 % of Psi at 124M, and
    less for larger models.

    >>> flops_per_token(GPTConfig(L=1, d=8, heads=1, vocab=16, T=4)) - 12 * 1 * 8 * 4
    6288
    """
    return 6 * parameter_count(config) + 12 * config.L * config.d * config.T


class Block(nn.Module):
    """One transformer block: (B, T, d) to (B, T, d)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        d = config.d
        self.heads = config.heads
        self.ln_1 = nn.LayerNorm(d)
        self.qkv = nn.Linear(d, 3 * d)
        self.attn_out = nn.Linear(d, d)
        self.ln_2 = nn.LayerNorm(d)
        self.fc = nn.Linear(d, 4 * d)
        self.mlp_out = nn.Linear(4 * d, d)
        self.dropout = nn.Dropout(config.dropout)

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, heads, T, d / heads)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        p = self.dropout.p if self.training else 0.0
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        return self.dropout(self.attn_out(x.transpose(1, 2).flatten(2)))

    def mlp(self, x: Tensor) -> Tensor:
        return self.dropout(self.mlp_out(F.gelu(self.fc(x), approximate="tanh")))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """GPT-2 of any shape and any floating dtype.

    `forward(tokens)` gives logits (B, T, V) in the dtype of the parameters; `forward(tokens, targets)` gives the
    mean cross entropy in nats as an fp32 scalar. Both arguments are (B, T) int64; more than `config.T` tokens
    raise ValueError. With `loss_chunks` > 1 logits are computed for a part of the tokens at a time
    (activations/chunked_loss.py). If it is built under `torch.device("meta")`, call `init_weight` for its values later.
    """

    def __init__(self, config: GPTConfig, loss_chunks: int = 1) -> None:
        super().__init__()
        self.config, self.loss_chunks = config, loss_chunks
        self.wte = nn.Embedding(config.vocab, config.d)
        self.wpe = nn.Embedding(config.T, config.d)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.L))
        self.ln_f = nn.LayerNorm(config.d)
        init_weights(self, config.L)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        T = tokens.shape[1]
        if T > self.config.T:
            raise ValueError(f"{T} tokens, the model has {self.config.T} positions; crop them or raise T")
        x = self.wte(tokens) + self.wpe(torch.arange(T, device=tokens.device))
        x = self.dropout(x)  # (B, T, d)
        for block in self.blocks:
            x = block(x)
        x = self.ln_f(x)
        return F.linear(x, self.wte.weight) if targets is None else self.loss(x, targets)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """The mean cross entropy of (B, T, d) against (B, T). A method, so that it can be compiled or replaced."""
        return cross_entropy_in_chunks(x.flatten(0, 1), self.wte.weight, targets.flatten(), self.loss_chunks)


def init_weights(module: nn.Module, L: int) -> None:
    """Give GPT-2's initial values to a whole GPT of L blocks, or to one Block of it, in place."""
    for name, parameter in module.named_parameters():
        init_weight(name, parameter.detach(), L)


def init_weight(name: str, tensor: Tensor, L: int) -> None:
    """Give GPT-2's initial values to the one parameter of that name, in place."""
    mean, std = init_rule(name, tensor.shape, L)
    if std:
        nn.init.normal_(tensor, mean, std)
    else:
        nn.init.constant_(tensor, mean)


def init_rule(name: str, shape: torch.Size, L: int) -> tuple[float, float]:
    """The mean and the standard deviation of a parameter's initial values.

    Matrices are N(0, 0.02); those that write into the residual stream are scaled by 1 / sqrt(2 L), because
    2 L of them add up there. LayerNorm starts as the identity, biases at zero.

    >>> init_rule("ln_f.weight", torch.Size([8]), L=2), init_rule("wte.weight", torch.Size([16, 8]), L=2)
    ((1.0, 0.0), (0.0, 0.02))
    """
    if len(shape) < 2:
        return (1.0 if name.endswith("weight") else 0.0), 0.0
    return 0.0, 0.02 / math.sqrt(2 * L) if name.endswith("_out.weight") else 0.02


def param_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Optimizer groups: weight decay for matrices (ndim >= 2), none for biases and norms.

    A tied parameter occurs once; frozen ones are left out, and so is a group without parameters.

    >>> [(g["weight_decay"], len(g["params"])) for g in param_groups(nn.Linear(2, 2), 0.1)]
    [(0.1, 1), (0.0, 1)]
    """
    trainable = [p for p in model.parameters() if p.requires_grad]  # parameters() lists a shared one once
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


@torch.no_grad()  # not inference_mode: parameters gathered in it could not be trained afterwards
def generate(
    model: GPT,
    tokens: Tensor,
    steps: int,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Continue `tokens` (B, T0) by `steps` sampled tokens: (B, T0 + steps). Temperature 0 takes the likeliest.

    Under stage 3 a forward is a collective, so every rank must call this with the same arguments, and it always
    generates `steps` tokens. They are drawn on the CPU by `generator` (a CPU one): with the same seed all ranks
    write the same text. The model sees the last `config.T` tokens, in eval mode.
    """
    if tokens.shape[1] == 0 or temperature < 0:
        raise ValueError(f"need a token to continue and temperature >= 0 (got {tokens.shape[1]} tokens, {temperature})")
    was_training = model.training
    model.eval()
    try:
        for _ in range(steps):
            logits = model(tokens[:, -model.config.T :])[:, -1].float().cpu()  # (B, V)
            if temperature == 0:
                following = logits.argmax(-1, keepdim=True)
            else:
                probabilities = (logits / temperature).softmax(-1)
                following = torch.multinomial(probabilities, 1, generator=generator)
            tokens = torch.cat([tokens, following.to(tokens.device)], dim=1)
    finally:
        model.train(was_training)
    return tokens
