"""Cross entropy over a large vocabulary, a part of the tokens at a time.

Logits are the largest tensor of a small GPT: for n tokens and V words n V numbers, in 16 bits, once more in fp32 for
the exponentials, and once more as their gradient.

    bytes at the peak, n tokens      12 n V            GPT-2, 8 x 1024 tokens: 4.9 GB
    in k chunks                      12 n V / k        and one more matrix product of the head, in backward

    tokens   [ chunk 0 | chunk 1 | chunk 2 ]
    forward    logits -> sum,  freed; then the next
    backward                       logits again -> gradients, freed; then the one before

Each chunk is a checkpoint (checkpointing.py): its logits are not kept, but computed again. A token's logits do not
depend on other tokens, so the gradient of x is that of the whole, but for the last bit where n is no power of two.
The gradient of `weight` is a sum over tokens, and is added up in another order.

Left out: computing the gradient along with the loss in forward, which saves the second product and needs its own
backward.
"""

import torch.nn.functional as F
from torch import Tensor

from zero_mini.activations.checkpointing import checkpoint


def cross_entropy_in_chunks(x: Tensor, weight: Tensor, targets: Tensor, chunks: int = 1) -> Tensor:
    """Mean cross entropy, an fp32 scalar, of the logits x weight^T.

    x (n, d), weight (V, d), targets (n). One chunk is the plain way: all logits at once, kept for backward.
    ValueError if chunks < 1.
    """
    if chunks < 1:
        raise ValueError(f"the tokens of a loss must be cut into at least 1 chunk (got {chunks})")
    if chunks == 1:
        return cross_entropy(x, weight, targets, "mean")
    parts = zip(x.chunk(chunks), targets.chunk(chunks))
    sums = [checkpoint(cross_entropy, x_part, weight, y_part, "sum") for x_part, y_part in parts]
    return sum(sums[1:], sums[0]) / len(targets)


def cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, reduction: str) -> Tensor:
    """Cross entropy of all tokens at once, in fp32: bf16 has 8 bits, too few for a sum over 50304 exponentials."""
    return F.cross_entropy(F.linear(x, weight).float(), targets, reduction=reduction)
