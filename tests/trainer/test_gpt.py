import math

import pytest
import torch
from says import naming
from torch import nn

from zero_mini.trainer.gpt import GPT, PRESETS, GPTConfig, generate, init_weights, param_groups, parameter_count

SMALL = GPTConfig(L=2, d=32, heads=4, vocab=64, T=16)


def small(config: GPTConfig = SMALL) -> GPT:
    torch.manual_seed(0)
    return GPT(config)


def random_tokens(*shape: int) -> torch.Tensor:
    return torch.randint(SMALL.vocab, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("preset", PRESETS)
def test_the_formula_counts_every_parameter_once(preset: str):
    with torch.device("meta"):
        model = GPT(PRESETS[preset])
    assert parameter_count(PRESETS[preset]) == sum(p.numel() for p in model.parameters())


def test_a_later_token_never_changes_earlier_logits():
    model, tokens = small(), random_tokens(3, 16)
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % SMALL.vocab
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9], rtol=0, atol=0)
    assert not torch.equal(before[:, 9], after[:, 9])


def test_the_head_is_the_embedding_and_has_no_name_of_its_own():
    model = small()
    assert [name for name, p in model.named_parameters() if SMALL.vocab in p.shape] == ["wte.weight"]
    model(torch.zeros(1, 1, dtype=torch.int64)).sum().backward()
    # As an input only row 0 is used; as the head every row is.
    assert model.wte.weight.grad.abs().sum(1).gt(0).all()


def test_an_untrained_model_finds_all_tokens_about_equally_likely():
    loss = small()(random_tokens(8, 16), random_tokens(8, 17)[:, 1:])
    assert loss.dtype == torch.float32 and loss.shape == ()
    assert loss.item() == pytest.approx(math.log(SMALL.vocab), abs=0.1)


def test_the_loss_is_the_mean_negative_log_probability_of_the_targets():
    model, tokens = small(), random_tokens(2, 17)
    x, y = tokens[:, :-1], tokens[:, 1:]
    by_hand = -model(x).double().log_softmax(-1).gather(-1, y[..., None]).mean()
    assert model(x, y).item() == pytest.approx(by_hand.item(), rel=1e-6)


def test_bf16_parameters_give_an_fp32_loss():
    model, tokens = small().bfloat16(), random_tokens(2, 16)
    assert model(tokens).dtype == torch.bfloat16
    assert model(tokens, tokens).dtype == torch.float32


def test_initial_values_are_gpt2s_in_a_model_and_in_a_block_built_later():
    with torch.device("meta"):
        model = GPT(GPTConfig(L=8, d=128, heads=4))
    block = model.blocks[3].to_empty(device="cpu")
    init_weights(block, L=8)
    assert block.fc.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.mlp_out.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert block.attn_out.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert block.ln_1.weight.eq(1).all() and block.ln_1.bias.eq(0).all() and block.qkv.bias.eq(0).all()


def test_dropout_acts_in_training_and_not_in_eval():
    model, tokens = small(GPTConfig(L=2, d=32, heads=4, vocab=64, T=16, dropout=0.5)), random_tokens(2, 16)
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_equal_seeds_generate_equal_text_longer_than_the_model_sees():
    model, prompt = small(), random_tokens(2, 3)
    first, again, other = (
        generate(model, prompt, 20, generator=torch.Generator().manual_seed(seed)) for seed in (5, 5, 6)
    )
    assert first.shape == (2, 23) and torch.equal(first[:, :3], prompt)
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert model.training and not first.is_inference()


@pytest.mark.parametrize("temperature", [0, 1e-6])
def test_a_cold_temperature_takes_the_likeliest_token(temperature: float):
    model, prompt = small().eval(), random_tokens(1, 5)
    assert generate(model, prompt, 1, temperature)[0, -1] == model(prompt)[0, -1].argmax()
    assert not model.training


def test_matrices_decay_and_frozen_or_tied_parameters_are_not_listed_twice():
    model = small()
    model.head = nn.Linear(32, 64, bias=False)
    model.head.weight = model.wte.weight
    model.wpe.weight.requires_grad_(False)
    decay, spared = param_groups(model, weight_decay=0.1)
    assert (decay["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    assert len(decay["params"]) == 1 + 4 * SMALL.L
    assert all(p.ndim >= 2 for p in decay["params"]) and all(p.ndim == 1 for p in spared["params"])
    listed = decay["params"] + spared["params"]
    assert sum(p.numel() for p in listed) == parameter_count(SMALL) - model.wpe.weight.numel()


@pytest.mark.parametrize(
    "shape, things",
    [
        (dict(L=2, d=130, heads=4), ["d=130", "heads=4", 128, 132]),  # the nearest that would do
        (dict(L=2, d=3, heads=4), ["d=3", "heads=4", 4]),
        (dict(L=0, d=8, heads=4), ["L", 0]),
        (dict(L=1, d=8.0, heads=4), ["d", 8.0]),
        (dict(L=1, d=8, heads=4, dropout=1.0), ["dropout", 1.0]),
    ],
)
def test_a_shape_that_cannot_be_built_is_refused(shape: dict, things: list):
    with pytest.raises(ValueError, match=naming(*things)):
        GPTConfig(**shape)


def test_more_tokens_than_positions_are_refused():
    with pytest.raises(ValueError, match=naming(17, 16)):
        small()(random_tokens(1, 17))
