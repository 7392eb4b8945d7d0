"""Holes are counted as by hand, and an arena has none: same bits, and an error where it would give something else."""

import pytest
import torch
from says import naming
from torch import nn

from zero_mini.activations.checkpointing import checkpoint, checkpoint_blocks
from zero_mini.memory.fragmentation import ALIGN, Arena, Fragmentation, of_segments


def test_holes_of_a_snapshot_counted_by_hand():
    segments = [
        {"total_size": 10, "blocks": [{"size": 6, "state": "active_allocated"}, {"size": 4, "state": "inactive"}]},
        {"total_size": 20, "blocks": [{"size": 7, "state": "inactive"}, {"size": 13, "state": "active_allocated"}]},
        {"total_size": 5, "blocks": [{"size": 5, "state": "active_pending_free"}]},  # not to be had yet
    ]
    found = of_segments(segments)
    assert found == Fragmentation(35, 24, 7) and found.free_bytes == 11
    assert found.scattered == pytest.approx(4 / 11)
    assert of_segments([]) == Fragmentation(0, 0, 0) and of_segments([]).scattered == 0


def layers(L: int = 5) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Dropout(0.2), nn.Linear(24, 6)) for _ in range(L)]
    return nn.Sequential(*blocks)


def gradients(model: nn.Module, times: int = 1) -> list[torch.Tensor]:
    for _ in range(times):
        x = torch.randn(8, 6, requires_grad=True)
        model(x * 1).square().sum().backward()
    return [x.grad, *(param.grad for param in model.parameters())]


@pytest.mark.parametrize("times", [1, 3])
def test_from_an_arena_come_the_bits_of_a_plain_run(times):
    arena, model, same = Arena(5 * ALIGN, "cpu"), layers(), layers()
    torch.manual_seed(1)
    expected = gradients(same, times)
    checkpoint_blocks(model, keep=arena)
    torch.manual_seed(1)
    found = gradients(model, times)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert arena.used_bytes == 0


def test_inputs_lie_one_behind_the_other_and_a_graph_that_is_gone_gives_its_room_back():
    arena, model = Arena(5 * ALIGN, "cpu"), layers()
    checkpoint_blocks(model, keep=arena)
    x = torch.randn(8, 6, requires_grad=True)
    y = model(x * 1)
    assert arena.used_bytes == 5 * ALIGN  # 8 x 6 x 4 bytes each, rounded up
    del y
    assert arena.used_bytes == 0
    gradients(model)


def test_an_arena_that_is_too_small_says_so():
    model = layers()
    checkpoint_blocks(model, keep=Arena(4 * ALIGN, "cpu"))
    with pytest.raises(RuntimeError, match=naming("2,048", 192)):
        gradients(model)


def test_backwards_in_the_order_of_forwards_are_refused_before_anything_is_overwritten():
    arena, layer = Arena(9 * ALIGN, "cpu"), nn.Linear(6, 6)

    def forward() -> torch.Tensor:
        return checkpoint(layer, torch.randn(8, 6, requires_grad=True) * 1, host=arena).sin().sum()

    first, second = forward(), forward()
    with pytest.raises(RuntimeError, match=naming("1,024", 512)):
        first.backward()
    second.backward()


def test_a_second_backward_is_refused():
    arena, layer = Arena(9 * ALIGN, "cpu"), nn.Linear(6, 6)
    loss = checkpoint(layer, torch.randn(8, 6, requires_grad=True) * 1, host=arena).sin().sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="arena"):
        loss.backward()
