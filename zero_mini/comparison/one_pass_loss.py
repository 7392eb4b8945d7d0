"""Cross entropy over a large vocabulary whose gradients are computed along with it, in forward.

    for each chunk of the tokens      logits = x W^T      loss      g = (softmax(logits) - one-hot) / n
                                      dx = g W            dW = dW + g^T x

activations/chunked_loss.py computes the logits of a chunk again in backward, and autograd adds up its chunks' dW:

    matrix products of n x d x V        3 in place of 4
    additions of a whole dW (V, d)      inside the products, in place of one a chunk
    kept until backward                 dx (n, d) and dW (V, d), in place of nothing

Source: Hsu et al., arXiv 2410.10989 (Liger kernel). n tokens, d channels, V vocabulary.

Left out: evaluation, which would compute gradients for nothing; a second backward through one loss, an error.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def loss_and_gradient(logits: Tensor, targets: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """logits (chunk, V), targets (chunk) -> the sum of the losses in fp32, and g (chunk, V) in the dtype of logits."""
    fp32 = logits.float()
    log_sum = fp32.logsumexp(dim=-1, keepdim=True)
    loss = (log_sum - fp32.gather(1, targets[:, None])).sum()
    is_target = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    return loss, (((fp32 - log_sum).exp() - is_target.float()) / n).to(logits.dtype)


class OnePassLoss(torch.autograd.Function):
    """Mean cross entropy, an fp32 scalar, of the logits x weight^T: x (n, d), weight (V, d), targets (n)."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, targets: Tensor, chunks: int, of_chunk: Callable) -> Tensor:
        dtypes = x.dtype, weight.dtype
        if torch.is_autocast_enabled(x.device.type):
            compute_dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = x.to(compute_dtype), weight.to(compute_dtype)
        losses, dx, dW = [], [], None
        for x_part, y_part in zip(x.chunk(chunks), targets.chunk(chunks)):
            loss, g = of_chunk(x_part @ weight.T, y_part, len(targets))
            losses.append(loss)
            dx.append(g @ weight)
            dW = g.T @ x_part if dW is None else dW.addmm_(g.T, x_part)
        ctx.save_for_backward(torch.cat(dx).to(dtypes[0]), dW.to(dtypes[1]))
        return torch.stack(losses).sum() / len(targets)

    @staticmethod
    def backward(ctx, grad: Tensor):
        dx, dW = ctx.saved_tensors  # after they were multiplied in place, autograd refuses a second backward
        return dx.mul_(grad), dW.mul_(grad), None, None, None
