"""What the figures are drawn from, by hand-counted cases."""

import pytest

from zero_mini.comm import Call
from zero_mini.plots import moments, ring, states


@pytest.mark.parametrize("N", [2, 3, 4, 5])
def test_a_ring_ends_where_its_collective_says(N):
    everyone = frozenset(range(N))
    for rank, chunks in enumerate(ring.ring_steps("reduce_scatter", N)[-1]):
        assert chunks[rank] == everyone
    for chunks in ring.ring_steps("all_gather", N)[-1]:
        assert chunks == [frozenset({r}) for r in range(N)]
    for chunks in ring.ring_steps("all_reduce", N)[-1]:
        assert chunks == [everyone] * N


@pytest.mark.parametrize("N", [2, 3, 4, 5])
@pytest.mark.parametrize("kind", ring.KINDS)
def test_in_each_step_every_rank_receives_one_chunk_and_a_ring_sends_what_the_ledger_counts(kind, N):
    states = ring.ring_steps(kind, N)
    if kind == "all_reduce":  # between its halves unfinished chunks are forgotten
        halves = [ring.ring_steps("reduce_scatter", N), states[N - 1 :]]
    else:
        halves = [states]
    steps = 0
    for half in halves:
        for before, after in zip(half, half[1:]):
            steps += 1
            for rank in range(N):
                assert sum(a != b for a, b in zip(after[rank], before[rank])) == 1
    P = 12 * N
    assert steps * P / N == Call(kind, "demo", P, 4).wire_numel(N)


def test_what_has_no_ring_is_refused():
    with pytest.raises(ValueError, match="reduce_scatter, all_gather, all_reduce.*'gossip'"):
        ring.ring_steps("gossip", 3)
    with pytest.raises(ValueError, match="two ranks or more"):
        ring.ring_steps("all_gather", 1)


def test_the_ring_is_drawn_with_every_cell_named():
    pytest.importorskip("matplotlib")
    figure = ring.draw_ring("all_reduce", 3)
    shown = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert len(shown) == 5 * 9 and shown.count("all") == 3 + 6 + 9
    step = ring.draw_ring_step("all_gather", 4, 99)
    assert [text.get_text() for text in step.axes[0].texts] == ["0", "1", "2", "3"] * 4
    sent = ring.draw_sent({"all_reduce": {2: 1.0, 4: 1.5}, "all_gather": {2: 0.5, 4: 0.75}})
    assert [tuple(points.get_offsets()[1]) for points in sent.axes[0].collections] == [(3.95, 1.5), (4.0, 0.75)]


def test_bars_of_states_are_as_long_as_what_was_measured():
    pytest.importorskip("matplotlib")
    measured = {"stage 0": {"parameters": 200, "gradients": 200, "optimizer": 1200, "other": 4}}
    formula = {"stage 0": {"parameters": 200.0, "gradients": 200.0, "optimizer": 1200.0}}
    axes = states.draw_states(measured, formula, psi=100).axes[0]
    widths = [round(bar.get_width(), 6) for bar in axes.patches]
    assert widths == [2, 2, 12, 0.04, 2, 2, 12]
    texts = [text.get_text() for text in axes.texts]
    assert {"parameters", "gradients", "optimizer", "2.0", "12.0", "16.0"} == set(texts)


def test_memory_through_a_step_is_drawn_as_high_as_it_was():
    pytest.importorskip("matplotlib")
    series = {name: [0, 0, 0, 0] for name in states.COLOURS} | {
        "parameters": [4_000_000] * 4,
        "gradients": [0, 1e6, 2e6, 0],
    }
    recording = series, [("start", 0), ("forward", 1), ("backward", 2), ("step", 3)]
    figure = moments.draw_moments({"all": recording, "last": moments.last_step(recording)})
    for axes, peak, marks in zip(figure.axes, (6.0, 6.0), ([1, 2, 3], [0, 1, 2])):
        texts = [text.get_text().strip() for text in axes.texts]
        assert texts == [f"{peak:.2f}", "forward", "backward", "step"]
        assert [text.get_position()[0] for text in axes.texts[1:]] == marks
    assert [text.get_text() for text in figure.legends[0].texts] == ["parameters", "gradients"]
