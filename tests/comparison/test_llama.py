"""The benchmark's Llama: its block, what its formulas count, and that systems train it alike from the meta device."""

import itertools
import math
import os
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from test_benchmark import TINY, row
from torch.distributed.tensor import DTensor

from zero_mini.comparison import llama, scores, systems
from zero_mini.comparison.llama import LlamaConfig, rotate, rotations
from zero_mini.comparison.models import initial_values, make_model, psi_and_flops
from zero_mini.comparison.one_pass_loss import OnePassLoss, loss_and_gradient
from zero_mini.comparison.works import BASELINE, WORKS, Work
from zero_mini.course.ranks import run

LLAMA = replace(
    TINY, config=LlamaConfig(L=3, d=64, heads=4, kv_heads=2, ffn=96, vocab=256, T=32, tied=True), loss_chunks=4
)


@pytest.fixture(scope="module")
def llama_ddp(ranks) -> dict:
    return row(ranks, "ddp", LLAMA)


CHANGES = [{}, {"checkpointing": True}, {"bf16": True}]


@pytest.mark.parametrize(
    "system, change",  # what recomputes or computes the loss does not know of stage 1, nor of an update of 1/N
    [*itertools.product(["zero-3", "fsdp2"], CHANGES), *itertools.product(["zero-1", BASELINE], CHANGES[::2])],
)
def test_a_llama_starts_on_the_meta_device_and_trains_as_under_torch_ddp(ranks, llama_ddp, system, change):
    found = row(ranks, system, replace(LLAMA, **change))
    compared = 1 if system == BASELINE else None
    distance = scores.distance(found["losses"][:compared], llama_ddp["losses"][:compared])
    assert distance < (0.03 if "bf16" in change else 1e-5)


@pytest.mark.parametrize("system", ["zero-3 keep attention", "fsdp2 keep attention"])
def test_attention_kept_under_checkpointing_changes_nothing(ranks, llama_ddp, system):
    found = row(ranks, system, replace(LLAMA, checkpointing=True))
    assert scores.distance(found["losses"], llama_ddp["losses"]) < 1e-5


@pytest.mark.parametrize("name", [name for name, work in WORKS.items() if isinstance(work.config, LlamaConfig)])
def test_the_formulas_of_a_llama_count_what_the_model_has(name):
    work = replace(WORKS[name], compiled=False, fused_loss=False)
    model = make_model(work, torch.device("cpu"))  # on the meta device
    sizes = {name: param.numel() for name, param in model.named_parameters()}
    psi, flops = psi_and_flops(work)
    assert psi == sum(sizes.values())
    matrices = sum(param.numel() for param in model.parameters() if param.ndim == 2)
    if not work.config.tied:
        matrices -= sizes["embed.weight"]
    assert flops == 6 * matrices + 12 * work.config.L * work.config.d * work.config.T


def test_a_block_equals_attention_and_mlp_written_out():
    config = LLAMA.config
    block = llama.Block(config)
    x = torch.randn(2, 7, config.d)
    cos, sin = rotations(7, 16, x)
    h = block.norm_1(x)
    q, k, v = (h @ w.T for w in block.qkv.weight.split([64, 32, 32]))
    heads = []
    for index in range(4):
        shared = index // 2  # two heads of queries use one of keys and values
        a = rotate(q[None, ..., 16 * index :][..., :16], cos, sin)[0]
        b = rotate(k[None, ..., 16 * shared :][..., :16], cos, sin)[0]
        weights = (a @ b.transpose(1, 2) / 4).masked_fill(torch.ones(7, 7).triu(1).bool(), -math.inf).softmax(-1)
        heads.append(weights @ v[..., 16 * shared :][..., :16])
    x_1 = x + torch.cat(heads, -1) @ block.attn_out.weight.T
    gate, up = (block.norm_2(x_1) @ w.T for w in (block.gate.weight, block.up.weight))
    expected = x_1 + (gate * gate.sigmoid() * up) @ block.down_out.weight.T
    torch.testing.assert_close(block(x, cos, sin), expected)


def test_a_product_of_rotated_vectors_depends_on_their_distance_alone():
    q, k = (torch.randn(16).expand(1, 1, 10, 16) for _ in range(2))
    cos, sin = rotations(10, 16, q)
    products = (rotate(q, cos, sin) @ rotate(k, cos, sin).transpose(-1, -2))[0, 0]
    for distance in (-3, 0, 4):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert abs(products[3, 1] - products[3, 2]) > 1e-3


def test_a_pair_of_channels_is_turned_by_its_position_times_its_rate():
    x = torch.randn(1, 1, 10, 16)
    first, second = x.double().chunk(2, dim=-1)
    angles = torch.arange(10.0).double()[:, None] * 10_000.0 ** (-torch.arange(8) / 8)  # RoPE's
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    found = rotate(x, *rotations(10, 16, x)).double()
    torch.testing.assert_close(found, torch.cat([turned.real, turned.imag], -1), rtol=1e-5, atol=1e-5)


def test_initial_values_of_a_llama_have_the_spread_of_their_kind():
    for name, std in (("blocks.0.gate.weight", 0.02), ("blocks.1.down_out.weight", 0.02 / math.sqrt(2 * 8))):
        weight = torch.empty(200, 200)
        llama.init_weight(name, weight, L=8)
        assert weight.std().item() == pytest.approx(std, rel=0.05)
    norm = torch.empty(3)
    llama.init_weight("norm.weight", norm, L=8)
    assert norm.tolist() == [1, 1, 1]


SHAPES = {"gpt": replace(TINY, bf16=True), "llama": replace(LLAMA, bf16=True)}


def masters(system: str, work: Work) -> tuple[dict[str, torch.Tensor], ...]:
    """The fp32 values from which training begins, and what they should be."""
    os.environ["DS_ACCELERATOR"] = "cpu"  # read when deepspeed is imported
    model = systems.build(system, work, torch.device("cpu")).model
    if system.startswith("deepspeed"):
        from deepspeed.utils import safe_get_full_fp32_param as full
    else:
        full = DTensor.full_tensor
    found = {name: full(param).detach().clone() for name, param in model.named_parameters()}
    return found, dict(initial_values(work, torch.device("cpu")))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("system", ["fsdp2", "deepspeed-2", "deepspeed-3"])
def test_masters_begin_with_the_same_fp32_values_in_bf16_works(system, shape):
    """Masters that begin with rounded values ignore small updates, and the losses differ from those of the others."""
    if reason := systems.missing(system):
        pytest.skip(reason)
    found, expected = run(masters, 2, system, SHAPES[shape])[0]
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found[name], values), name
    matrix = found["blocks.1.attn_out.weight"]
    assert (matrix != matrix.bfloat16()).float().mean() > 0.9


@pytest.mark.parametrize("autocast", [False, True])
def test_the_one_pass_loss_has_the_value_and_the_gradients_of_autograd(autocast):
    x, weight, targets = torch.randn(10, 8), torch.randn(40, 8), torch.randint(40, (10,))
    results = []
    for function in (
        lambda x, weight: OnePassLoss.apply(x, weight, targets, 3, loss_and_gradient),
        lambda x, weight: F.cross_entropy(F.linear(x, weight).float(), targets),
    ):
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = function(*leaves)
        (3 * loss).backward()
        results.append([loss.detach(), *(leaf.grad for leaf in leaves)])
    tolerance = 0.02 if autocast else 1e-5
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
