"""A loss in chunks is the plain loss: the same numbers, to the bit where the order of summation is the same."""

import pytest
import torch
import torch.nn.functional as F
from says import naming
from torch.utils._python_dispatch import TorchDispatchMode

from zero_mini.activations.chunked_loss import cross_entropy_in_chunks
from zero_mini.trainer.gpt import GPT, GPTConfig
from zero_mini.zeroify import zeroify


def plain(x, weight, targets):
    return F.cross_entropy((x @ weight.T).float(), targets)


def outcome(n: int, dtype: torch.dtype, loss_of, **options) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x, weight = torch.randn(n, 16).to(dtype).requires_grad_(), torch.randn(50, 16).to(dtype).requires_grad_()
    loss = loss_of(x, weight, torch.randint(50, (n,)), **options)
    loss.backward()
    return loss.detach(), x.grad, weight.grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunks", [1, 2, 3, 8, 64, 100])
@pytest.mark.parametrize("n", [64, 63])
def test_loss_and_gradients_are_those_of_the_plain_loss(n, chunks, dtype):
    loss, x_grad, weight_grad = outcome(n, dtype, cross_entropy_in_chunks, chunks=chunks)
    true_loss, true_x, true_weight = outcome(n, dtype, plain)
    assert loss.dtype == true_loss.dtype == torch.float32
    assert torch.allclose(loss, true_loss, rtol=1e-6)
    eps = torch.finfo(dtype).eps
    assert torch.allclose(x_grad, true_x, rtol=4 * max(eps, 2**-23), atol=1e-7)  # fp32 inside, whatever x is
    # A sum over n tokens, in chunks: each of at most `chunks` additions rounds once more.
    slack = (chunks + 2) * max(eps, 2**-23)
    assert (weight_grad - true_weight).abs().max() <= slack * true_weight.abs().max()


class LargestTensor(TorchDispatchMode):
    """The most elements that any operation returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


@pytest.mark.parametrize("chunks", [1, 4])
def test_no_more_than_a_chunk_s_logits_exist_at_a_time(chunks):
    n, V = 256, 1000
    x, weight = torch.randn(n, 4, requires_grad=True), torch.randn(V, 4, requires_grad=True)
    with LargestTensor() as largest:
        cross_entropy_in_chunks(x, weight, torch.randint(V, (n,)), chunks).backward()
    assert largest.numel == n * V // chunks


@pytest.mark.parametrize("chunks", [0, -1])
def test_no_chunk_at_all_is_refused(chunks):
    with pytest.raises(ValueError, match=naming(1, chunks)):
        cross_entropy_in_chunks(torch.ones(2, 2), torch.ones(3, 2), torch.tensor([0, 1]), chunks)


def test_every_stage_trains_with_it_as_without_it(ranks):
    """The head's weight belongs to the root, which stage 3 keeps gathered for the whole turn."""

    def losses(stage: int, chunks: int) -> list[float]:
        torch.manual_seed(0)
        model = GPT(GPTConfig(L=3, d=16, heads=2, vocab=61, T=8), loss_chunks=chunks)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        zeroify(model, optimizer, stage=stage)
        tokens, found = torch.randint(61, (4, 9)), []
        for _ in range(4):
            loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    for stage in range(4):
        whole, parts = ranks(2).run(losses, stage, 1)[0], ranks(2).run(losses, stage, 4)[0]
        assert parts == pytest.approx(whole, rel=1e-5) and whole[-1] < whole[0]
