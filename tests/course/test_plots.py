"""Pictures draw what was measured: pure functions against cases counted by hand, what is drawn against the input."""

import json
from pathlib import Path

import pytest
import torch
from says import naming, tells

import zero_mini
from zero_mini.comm import Call
from zero_mini.course.plots import (
    bugs,
    claims,
    curves,
    exponents,
    frame,
    gantt,
    lines,
    loss_scales,
    moments,
    ownership,
    peaks,
    per_parameter,
    sent,
    simulated,
    states,
    steps,
    tradeoff,
    wire_time,
)
from zero_mini.course.plots.gantt import Span
from zero_mini.course.plots.holdings import Holding, Layout, holdings, layout
from zero_mini.course.plots.moments import Story
from zero_mini.laboratory import verdict as verdicts
from zero_mini.memory.formulas import model_state_bytes, walk
from zero_mini.memory.recorder import Recorder
from zero_mini.memory.timeline import Kernel, length
from zero_mini.trainer.gpt import GPT, GPTConfig
from zero_mini.zeroify import zeroify

pytest.importorskip("matplotlib")
MEASURED = Path(zero_mini.__file__).parent / "measured"
KINDS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")


def measured(name):
    return json.loads((MEASURED / f"{name}.json").read_text())


def texts(figure):
    """Everything written in a picture."""
    written = [text for axes in figure.axes for text in (*axes.texts, axes.title, axes._left_title)]
    return [text.get_text() for text in (*figure.texts, *written)]


def check_layout(figure, grows=False):
    """It can be drawn, no text leaves the page (unless the page will grow to hold it), and none lies on another."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure).draw()
    written = list(figure.texts)
    for axes in figure.axes:
        written += [*axes.texts, axes._left_title, axes.xaxis.label, axes.yaxis.label]
        for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            ticks = zip(axis.get_ticklocs(), axis.get_ticklabels())
            written += [label for place, label in ticks if min(low, high) <= place <= max(low, high)]
    page = figure.bbox
    boxes = [(text.get_text(), text.get_window_extent()) for text in written if text.get_text().strip()]
    for index, (text, box) in enumerate(boxes):
        inside = page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1
        assert grows or inside, text
        for other, over in boxes[:index]:
            across, down = min(box.x1, over.x1) - max(box.x0, over.x0), min(box.y1, over.y1) - max(box.y0, over.y0)
            assert across <= 2 or down <= 6, (text, other)  # pixels of 1120: boxes are higher than their letters


def train(stage, dtype):
    """The walk after a backward, Adam's counters, each unit's holdings, a layout, the story, a moment of it, Psi."""
    with Recorder() as recorder:
        torch.manual_seed(0)
        model = GPT(GPTConfig(L=3, d=32, heads=2, T=16))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        zero = zeroify(model, optimizer, stage=stage, dtype=dtype)
        recorder.follow(zero)
        tokens = torch.randint(256, (2, 16))
        for _ in range(2):
            recorder.mark("forward")
            loss = model(tokens, tokens)
            recorder.mark("backward")
            loss.backward()
            del loss
            for unit in zero.trainable:
                zero.finish_reduction(unit)
            held = walk(zero)
            kept = [holdings(zero, unit) for unit in zero.units]
            recorder.mark("step")
            before_step = sum(values[-1] for values in recorder.timeline().values())
            optimizer.step()
            optimizer.zero_grad()
            recorder.mark("end")
    counters = 4 * sum(len(unit.pieces) for unit in zero.units)
    psi = sum(unit.P for unit in zero.units)
    return held, counters, kept, layout(zero.units[1]), moments.last_step(recorder), before_step, psi


# --- rings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("N", [1, 2, 3, 4, 5])
def test_a_ring_ends_as_the_collective_should(N):
    everyone, nobody = frozenset(range(N)), frozenset()
    assert steps.ring_steps("all_reduce", N)[-1] == [[everyone] * N] * N
    assert steps.ring_steps("broadcast", N)[-1] == [[frozenset([0])] * N] * N
    assert steps.ring_steps("all_gather", N)[-1] == [[frozenset([c]) for c in range(N)]] * N
    own = [[everyone if r == c else nobody for c in range(N)] for r in range(N)]
    assert steps.ring_steps("reduce_scatter", N)[-1] == own


@pytest.mark.parametrize("N", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_sends_as_many_elements_as_the_ledger_counts(kind, N):
    P = 60  # N divides it
    sent = [0] * N
    for step in steps.ring_sends(kind, N):
        assert len({rank for rank, _ in step}) == len(step)  # one wire a rank
        for rank, _ in step:
            sent[rank] += P // N
    counted = Call(kind, "unit", P, 4).wire_numel(N)
    if kind == "broadcast":  # the first sends all of it and the last nothing: the ledger has the mean
        assert sum(sent) / N == counted
    else:
        assert sent == [counted] * N


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_sends_what_it_does_not_have_and_no_data_is_added_twice(kind):
    N = 4
    states_, sends = steps.ring_steps(kind, N), steps.ring_sends(kind, N)
    assert len(states_) == len(sends) + 1
    for number, (state, moves) in enumerate(zip(states_, sends)):
        for rank, chunk in moves:
            assert state[rank][chunk]
            if "reduce" in kind and number < N - 1:
                assert not state[rank][chunk] & state[(rank + 1) % N][chunk]


def test_two_ranks_reduce_and_scatter_in_one_step_counted_by_hand():
    zero, one, both, none = map(frozenset, ([0], [1], [0, 1], []))
    assert steps.ring_steps("reduce_scatter", 2) == [[[zero, zero], [one, one]], [[both, none], [none, both]]]


def test_a_ring_of_another_kind_or_size_is_refused():
    with pytest.raises(ValueError, match="all_to_all"):
        steps.ring_sends("all_to_all", 2)
    with pytest.raises(ValueError, match=naming(0, 1)):
        steps.ring_steps("broadcast", 0)


def test_the_steps_are_drawn_cell_by_cell():
    for kind, N, step in (("all_reduce", 4, None), ("all_reduce", 5, 3), ("all_gather", 2, None), ("broadcast", 3, 2)):
        check_layout(steps.draw_steps(kind, N, step))
    figure = steps.draw_steps("all_reduce", 3)
    for axes, state in zip(figure.axes, steps.ring_steps("all_reduce", 3), strict=True):
        cells = [text.get_text() for text in axes.texts if text.get_text() and "rank" not in text.get_text()]
        assert cells == [steps.written(cell, 3) for row in state for cell in row if cell]
    assert len(steps.draw_steps("all_gather", 5, step=2).axes) == 1
    assert any(tells(text, 4, "P/3", "2 P (N-1)/N") for text in texts(figure))


# --- states ---------------------------------------------------------------------------------------


def test_the_bars_are_as_long_as_what_was_measured_and_as_the_papers_formula():
    given = states.from_measured(measured("memory"))
    figure = states.draw_states(**given)
    check_layout(figure)
    bars = [patch.get_width() for patch in figure.axes[0].patches]
    expected = []
    for stage, held in given["held"].items():
        for row in (held, model_state_bytes(given["psi"], 2, stage)):
            expected += [nbytes for category, nbytes in row.items() if nbytes]
    assert bars == expected
    assert {" 1,992 MB", " 979 MB", "  paper 996", "747"} <= set(texts(figure))


# --- moments and ownership, from a run ------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_what_two_ranks_hold_adds_up_to_the_walk_and_is_drawn_so(ranks, dtype):
    stories, held_by, bars = {}, {}, {}
    for stage in range(4):
        results = ranks(2).run(train, stage, dtype)
        for held, counters, kept, *_ in results:
            mine = sum(holding.nbytes for unit in kept for holding in unit)
            resident = held["parameters"] + held["gradients"] + held["optimizer"]
            assert mine == resident - counters
        held, _, _, flat, story, before_step, psi = results[0]
        bars[stage], stories[f"stage {stage}"] = held, story
        held_by[stage] = [holding for result in results for holding in result[2][1]]
        lent = {(holding.rank, holding.low, holding.high) for holding in held_by[stage] if holding.use == "lent"}
        assert lent == ({(0, 0, flat.P), (1, 0, flat.P)} if stage == 3 else set())
        assert [label for label, _ in story.phases] == ["forward", "backward", "step"]
        assert len(story.totals) == 1 + sum(count for _, count in story.phases)
        assert story.totals[story.phases[0][1] + story.phases[1][1]] == before_step
    check_layout(states.draw_states(bars, psi, 2, dtype.itemsize))

    figure = moments.draw_moments(stories, "a tiny GPT")
    check_layout(figure)
    for axes, story in zip(figure.axes, stories.values(), strict=True):
        peak = next(line for line in axes.lines if line.get_marker() == "o")
        assert list(peak.get_ydata()) == [max(story.totals)]
        tops = [bands.get_paths()[0].get_extents().y1 for bands in axes.collections]
        assert max(tops) == max(story.totals)

    figure = ownership.draw_ownership(flat, held_by)
    check_layout(figure)
    places = [(stage, rank) for stage in range(4) for rank in range(2)]
    for axes, (stage, rank) in zip(figure.axes, places, strict=True):
        mine = [holding for holding in held_by[stage] if holding.rank == rank and holding.use != "lent"]
        filled = [patch for patch in axes.patches if patch.get_fc()[3] > 0]  # outlines and hatches are clear
        assert sum(patch.get_width() * patch.get_height() for patch in filled) == sum(h.nbytes for h in mine)


def test_a_story_is_the_last_step_of_a_recording_counted_by_hand():
    with Recorder() as recorder:
        kept = [torch.ones(100)]
        for size in (10, 20):
            recorder.mark("forward")
            kept.append(torch.ones(size))
            recorder.mark("backward")
            del kept[-1]
            recorder.mark("end")
        kept.append(torch.ones(1000))
    story = moments.last_step(recorder)
    assert story.phases == [("forward", 1), ("backward", 1)]
    assert story.totals == [400, 480, 400]
    assert story.series["activations"] == [0, 80, 0]


def test_stories_of_different_phases_are_not_drawn_on_one_scale():
    series = {category: [0, 1] for category in moments.ORDER}
    with pytest.raises(ValueError, match="phases"):
        moments.draw_moments({"a": Story([("forward", 1)], series), "b": Story([("step", 1)], series)})


def test_bytes_that_are_lent_are_not_counted_as_held_and_fill_no_area():
    flat = Layout("u", 8, [("w", 0, 6), ("b", 6, 2)])
    lent = Holding(0, "parameters", "bfloat16", 2, 0, 8, "lent")
    held = [lent, Holding(0, "master", "float32", 4, 0, 4), Holding(1, "master", "float32", 4, 4, 8)]
    figure = ownership.draw_ownership(flat, {3: held})
    assert [h.nbytes for h in held] == [0, 16, 16]
    assert {"16.0 B = 2 P", "parameters bf16", "master fp32", "w", "b"} <= set(texts(figure))


def test_a_thinned_story_keeps_its_phases_its_beginning_and_its_peak():
    totals = [5, 1, 9, 2, 8, 3]
    series = {category: [0] * 6 for category in moments.ORDER} | {"activations": totals}
    thin = Story([("forward", 4), ("backward", 1)], series).thinned(2)
    assert thin.phases == [("forward", 2), ("backward", 1)]
    assert thin.totals == [5, 9, 8, 3]
    assert Story([("forward", 4), ("step", 1)], series).thinned(9).totals == totals
    assert Story([("forward", 0), ("step", 5)], series).thinned(1).phases == [("forward", 0), ("step", 1)]


def test_the_recorded_step_of_two_gpus_is_drawn_with_its_machine():
    shown = moments.from_measured(measured("moments"), 1, 2)
    assert list(shown["stories"]) == ["stage 1", "stage 2"] and "2 x NVIDIA" in shown["title"]
    for story in shown["stories"].values():
        assert len(story.totals) == 1 + sum(count for _, count in story.phases)
    check_layout(moments.draw_moments(**shown))


# --- gantt ----------------------------------------------------------------------------------------


# ms        0    1    2    3    4    5    6
# compute   [ forward ]    [backward][step]
# wire           [ gather  ]    [reduce ]
SPANS = [
    Span(0, "compute", "forward blocks.0", 0, 2),
    Span(0, "wire", "all_gather blocks.1", 1, 3),
    Span(0, "compute", "backward blocks.0", 3, 5),
    Span(0, "wire", "reduce_scatter blocks.0", 4, 6),
    Span(0, "compute", "step", 5, 5.5),
]


def test_exposed_is_what_the_wire_does_alone():
    assert gantt.exposed(SPANS) == [(2, 3), (5.5, 6)]
    assert gantt.exposed([span for span in SPANS if span.lane == "wire"]) == [(1, 3), (4, 6)]
    assert gantt.exposed([span for span in SPANS if span.lane == "compute"]) == []
    around = [Span(0, "compute", "forward", 0, 1), Span(0, "compute", "forward", 2, 9), Span(0, "wire", "copy", 0, 3)]
    assert gantt.exposed(around) == [(1, 2)]


def test_kernels_become_spans_of_milliseconds_on_two_lanes():
    kernels = [
        Kernel("nvjet_tst", 7, 5000, 6000),
        Kernel("ncclDevKernel_AllReduce_Sum", 9, 5500, 6500),
        Kernel("Memcpy PtoP", 9, 6500, 7000),
        Kernel("FusedAdam", 7, 6600, 6800),
    ]
    spans = gantt.from_kernels(kernels, rank=1)
    assert [(span.lane, span.kind) for span in spans] == [
        ("compute", "matmul"),
        ("wire", "all_reduce"),
        ("wire", "all_gather"),
        ("compute", "optimizer"),
    ]
    assert [(span.start, span.end) for span in spans] == [(0, 1), (0.5, 1.5), (1.5, 2), (1.6, 1.8)]
    assert {span.rank for span in spans} == {1}
    assert gantt.from_kernels([]) == []
    assert [span.start for span in gantt.from_kernels(kernels, begin=4000)] == [1, 1.5, 2.5, 2.6]


def test_what_computes_without_a_gap_is_one_bar_and_two_collectives_stay_two():
    def span(lane: str, label: str, start: float, end: float, rank: int = 0) -> Span:
        return Span(rank, lane, label, start, end)

    separate = [span("compute", "matmul", 3, 4), span("compute", "copy", 4, 5), span("compute", "matmul", 5, 6)]
    separate += [span("wire", "all_gather", 0, 1), span("wire", "all_gather", 1, 2), span("compute", "copy", 5, 6, 1)]
    assert gantt.joined(separate) == sorted(separate, key=lambda span: span.start)
    touching = [span("compute", "matmul", 0, 1), span("wire", "all_gather", 0.5, 2), span("compute", "matmul", 1, 3)]
    assert gantt.joined(touching) == [span("wire", "all_gather", 0.5, 2), span("compute", "matmul", 0, 3)]


@pytest.mark.parametrize("name", ["gantt_0", "gantt_1", "gantt_3"])
def test_the_recorded_windows_of_two_gpus_are_drawn_with_their_machine(name):
    shown = gantt.from_measured(measured(name), name)
    assert {(span.rank, span.lane) for span in shown["spans"]} == {(r, lane) for r in (0, 1) for lane in gantt.LANES}
    figure = gantt.draw_gantt(**shown)
    check_layout(figure)
    assert any("2 x NVIDIA" in text for text in texts(figure))


def test_bars_lie_where_the_spans_say():
    both = SPANS + [Span(1, span.lane, span.label, span.start, span.end) for span in SPANS]
    figure = gantt.draw_gantt(both, "Stage 3", "invented")
    check_layout(figure)
    drawn = []
    for bars in figure.axes[0].collections:
        drawn.append([(path.get_extents().x0, path.get_extents().x1) for path in bars.get_paths()])
    rank = [[(0, 2), (3, 5), (5, 5.5)], [(1, 3), (4, 6)], [(2, 3), (5.5, 6)]]
    assert drawn == rank + rank
    assert texts(figure).count(f"exposed {length(gantt.exposed(SPANS)):.2f} ms") == 2
    with pytest.raises(ValueError, match="lunch"):
        gantt.draw_gantt([Span(0, "compute", "lunch", 0, 1)])


# --- curves ---------------------------------------------------------------------------------------


def test_the_lines_are_the_measured_losses_and_their_differences():
    losses = curves.from_measured(measured("training"))
    assert list(losses) == [0, 1, 2, 3] and [step for step, _ in losses[0]] == list(range(5, 45, 5))
    figure = curves.draw_curves(losses, "124M")
    check_layout(figure)
    upper, lower = figure.axes
    for line, curve in zip(upper.lines, losses.values(), strict=True):
        assert list(zip(*line.get_data())) == curve
    for line, curve in zip(lower.lines[1:], curves.differences(losses).values(), strict=True):
        assert list(zip(*line.get_data())) == curve
    most = max(abs(value) for curve in curves.differences(losses).values() for _, value in curve)
    assert f"Losses: at most {most:.2g} apart" in texts(figure)


def test_plain_lists_that_are_equal_are_said_to_be():
    figure = curves.draw_curves({0: [3.0, 2.0], 3: [3.0, 2.0]})
    check_layout(figure)
    assert "Losses: equal to the bit" in texts(figure)
    figure = curves.draw_curves({"torch DDP": [3.0, 2.0], 0: [3.0, 2.0], 1: [3.0, 2.5], 2: [3, 2], 3: [3, 2]})
    assert len(figure.axes[0].lines) == 5 and " torch DDP" in texts(figure)
    with pytest.raises(ValueError, match="steps"):
        curves.draw_curves({0: [3.0, 2.0], 3: [3.0]})


# --- labels ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("places", [[], [1.0], [0, 0, 0], [5, 4, 4.5, 0], [0, 0.9, 1.8, 9]])
def test_spread_labels_are_a_gap_apart_and_in_order(places):
    moved = frame.spread(places, 1.0)
    order = sorted(range(len(places)), key=places.__getitem__)
    lines = [moved[index] for index in order]
    assert all(b - a >= 1 - 1e-9 for a, b in zip(lines, lines[1:]))
    assert sum(moved) == pytest.approx(sum(places))


def test_bars_of_states_are_as_long_as_what_was_measured():
    pytest.importorskip("matplotlib")
    measured = {"stage 0": {"parameters": 200, "gradients": 200, "optimizer": 1200, "other": 4}}
    formula = {"stage 0": {"parameters": 200.0, "gradients": 200.0, "optimizer": 1200.0}}
    axes = per_parameter.draw_per_parameter(measured, formula, psi=100).axes[0]
    widths = [round(bar.get_width(), 6) for bar in axes.patches]
    assert widths == [2, 2, 12, 0.04, 2, 2, 12]
    texts = [text.get_text() for text in axes.texts]
    assert {"parameters", "gradients", "optimizer", "2.0", "12.0", "16.0"} == set(texts)


def test_what_one_rank_sends_is_drawn_where_it_was_measured():
    figure = sent.draw_sent({"all_reduce": {2: 1.0, 4: 1.5}, "all_gather": {2: 0.5, 4: 0.75}})
    check_layout(figure)
    axes = figure.axes[0]
    dots = [points.get_offsets().tolist() for points in axes.collections]
    assert dots == [[[2.0, 1.0], [4.0, 1.5]], [[2.0, 0.5], [4.0, 0.75]]]
    for line, points in zip(axes.lines[1:], dots):  # the first is the way through rank 0
        curve = {round(x, 1): y for x, y in zip(*line.get_data())}
        assert [curve[x] for x, _ in points] == [y for _, y in points]


def test_times_of_collectives_are_drawn_where_they_were_measured():
    shown = wire_time.from_measured(measured("collectives"))
    figure = wire_time.draw_wire_time(**shown)
    check_layout(figure)
    (axes,) = figure.axes
    *lines, both = axes.lines
    for line, points in zip(lines, shown["measured"].values(), strict=True):
        assert dict(zip(*line.get_data())) == points
    halves = shown["measured"]["reduce_scatter"], shown["measured"]["all_gather"]
    assert dict(zip(*both.get_data())) == {nbytes: sum(half[nbytes] for half in halves) for nbytes in halves[0]}


def test_a_rate_is_what_one_rank_sends_in_a_second():
    kinds = {"all_reduce": {2**20: 10.0, 2**30: 8000.0}, "all_gather": {2**20: 9.0, 2**30: 4000.0}}
    written = texts(wire_time.draw_wire_time(kinds, N=4))
    assert f"all_reduce, {1.5 * 2**30 / 8e6:.0f} GB/s" in written  # 2 (N-1)/N of the buffer
    assert f"all_gather, {0.75 * 2**30 / 4e6:.0f} GB/s" in written


def test_a_histogram_of_exponents_has_a_bar_for_each_and_says_what_is_lost():
    numbers = torch.tensor([2.0**-30, 2.0**-26, 2.0**-25, 1.5 * 2.0**-24, -1.0, 1.9, 0.0, float("inf"), float("nan")])
    counts = exponents.exponents([numbers.view(3, 3)])
    assert counts == {-30: 1, -26: 1, -25: 1, -24: 1, 0: 2}
    halves = numbers[:6].half()
    # 2^-25 lies in the middle between zero and the smallest number; it is rounded to the even one, zero.
    assert (halves == 0).tolist() == [True, True, True, False, False, False]
    assert exponents.share_lost({e: c for e, c in counts.items() if e != -25}) == 2 / 5
    rows = {f"times 2^{power}": {"of a": exponents.times(counts, power), "of b": {-3: 1, -1: 3}} for power in (0, 8)}
    figure = exponents.draw_exponents(rows)
    check_layout(figure)
    for axes, power in zip(figure.axes, (0, 8), strict=True):
        bars = [bar for bar in axes.patches if bar.get_width() == pytest.approx(0.9)]
        assert [round(bar.get_x() + 0.45 - 0.5) for bar in bars] == [e + power for e in counts]
        assert [bar.get_height() * 6 for bar in bars] == pytest.approx(list(counts.values()))
        (line,) = axes.lines
        assert list(zip(*line.get_data())) == [(-3.5, 0), (-2.5, 0.25), (-1.5, 0), (-0.5, 0.75), (0.5, 0)]


def test_the_scale_is_drawn_step_by_step_with_its_skipped_steps():
    figure = loss_scales.draw_loss_scales([8.0, 4.0, 4.0, 8.0], [False, True, True, False])
    check_layout(figure)
    scale, skipped = figure.axes[0].lines
    assert list(zip(*scale.get_data())) == [(0, 3), (1, 2), (2, 2), (3, 3)]
    assert list(zip(*skipped.get_data())) == [(0, 3), (3, 3)]
    with pytest.raises(ValueError, match=naming(2, 1)):
        loss_scales.draw_loss_scales([1.0, 2.0], [True])


def test_a_dot_lies_at_its_bytes_and_its_time():
    dots = {"all kept": [(44e9, 198.0, "stage 0"), (35e9, 191.0, "")], "every block": [(20e9, 240.0, "stage 0")]}
    figure = tradeoff.draw_tradeoff(dots, "Time and memory", "invented", law=[(43e9, 198.0), (21e9, 240.0)])
    check_layout(figure)
    (axes,) = figure.axes
    drawn = [[tuple(place) for place in points.get_offsets().tolist()] for points in axes.collections]
    assert drawn == [[(44.0, 198.0), (35.0, 191.0)], [(20.0, 240.0)]]
    assert [tuple(map(float, line.get_xydata()[0])) for line in axes.lines] == [(43.0, 198.0), (21.0, 240.0)]
    assert {"all kept", "every block", "stage 0"} <= set(texts(figure))


def test_a_legend_has_the_marks_of_the_dots():
    figure = tradeoff.draw_tradeoff({name: [(1e9, 1.0, "")] for name in "abcd"}, "Time and memory")
    assert [text.get_text() for text in figure.texts if text.get_text() in list("●■▲◆")] == ["●", "■", "▲", "◆"]


def test_a_peak_is_cut_into_its_parts():
    kept, again = {"states": 20e9, "activations": 22e9, "logits": 3e9}, {"states": 20e9, "gradients": 5e9}
    figure = peaks.draw_peaks(
        {"stage 0": {"all kept": kept, "again": again}, "stage 3": {"all kept": kept}}, "Peak", "x"
    )
    check_layout(figure)
    (axes,) = figure.axes
    bars = [(bar.get_x(), bar.get_width()) for bar in axes.patches]
    assert bars == [(0, 20), (20, 22), (42, 3), (0, 20), (20, 5), (0, 20), (20, 22), (42, 3)]
    assert {"stage 0", "stage 3", "all kept", "again", "45.0", "25.0", "states", "gradients"} <= set(texts(figure))
    assert len({bar.get_facecolor() for bar in axes.patches}) == 4


def test_what_a_simulated_rank_held_lies_on_the_papers_bars():
    given = {0: (16e9, 18e9), 1: (4.2e9, 5e9), 2: None}
    figure = simulated.draw_simulated(given, 1e9, 64, 2, "invented")
    check_layout(figure)
    (axes,) = figure.axes
    ends = [bar.get_x() + bar.get_width() for bar in axes.patches][2::3]
    assert ends == pytest.approx([16, 4 + 12 / 64, 2 + 14 / 64])
    marks = [(mark.get_marker(), *mark.get_xydata()[0]) for mark in axes.lines]
    assert marks == [("o", 16, 0.5), ("^", 18, 0.5), ("o", 4.2, 1.5), ("^", 5, 1.5)]
    assert {"out of memory", "paper 16.0", "states 4.20, peak 5.00"} <= set(texts(figure))


def test_a_dot_s_name_stands_to_its_left_where_another_dot_is_in_the_way():
    given = {"here": [(20e9, 900.0, "in the way"), (24e9, 905.0, "free"), (40e9, 100.0, "far")]}
    figure = tradeoff.draw_tradeoff(given, "Time and memory", time="ms for a billion")
    check_layout(figure)
    assert figure.axes[0].get_ylabel() == "ms for a billion"
    sides = {text.get_text(): text.get_ha() for text in figure.axes[0].texts}
    assert sides == {"in the way": "right", "free": "left", "far": "left"}


def test_a_bug_s_losses_lie_over_the_healthy_ones_and_their_difference_on_the_strip():
    healthy, other, odd = [3.0, 2.0, 1.0], [3.5, 2.0, 1.25], "gradients are sums, not means"
    given = {"1 · loud": (healthy, [3.0, 4.0, 5.0]), "2 · silent": (healthy, healthy), f"3 · {odd}": (other, healthy)}
    figure = bugs.draw_bugs(given, [healthy, other], "invented")
    check_layout(figure)
    for losses, apart, pair in zip(figure.axes[::2], figure.axes[1::2], given.values(), strict=True):
        assert [list(line.get_ydata()) for line in losses.lines] == list(pair)
        (line,), (strip,) = apart.lines, apart.patches
        assert list(line.get_ydata()) == [with_it - without for without, with_it in zip(*pair)]
        assert strip.get_y() == -0.5 and strip.get_height() == 1.0  # two healthy ones are 0.5 apart
    assert {axes.get_ylim() for axes in figure.axes[1::2]} == {(-1.25, 1.25)}  # one scale for all differences
    assert {*given, "difference: at most 4.00", "no difference, to the bit"} <= set(texts(figure))
    with pytest.raises(ValueError, match=naming(3, 1)):
        bugs.draw_bugs({"1 · short": (healthy, [3.0])}, [healthy, other])


def test_a_square_stands_where_a_check_found_a_bug():
    found = {"late": {"one process": True, "memory": False}, "large": {"one process": False, "memory": True}}
    figure = bugs.draw_findings(found, "invented")
    check_layout(figure)
    (axes,) = figure.axes
    squares = [text.get_position() for text in axes.texts if text.get_text() == "■"]
    assert squares == [(0.5, 0.5), (1.5, 1.5)]
    (axes,) = bugs.draw_findings({"stuck": {"one process": "hangs", "memory": True}}, "invented").axes
    assert [text.get_text() for text in axes.texts if text.get_position()[1] == 0.5] == ["hangs", "■"]
    assert {"late", "large", "one process", "memory"} <= set(texts(figure))
    with pytest.raises(ValueError, match=naming("'large'", "memory")):
        bugs.draw_findings(found | {"large": {"memory": True}})


def test_waits_of_all_ranks_have_one_scale():
    figure = bugs.draw_waits([[50.0, 60.0], [2.0, 3.0]], "invented")
    check_layout(figure)
    assert [[bar.get_height() for bar in axes.patches] for axes in figure.axes] == [[50.0, 60.0], [2.0, 3.0]]
    assert len({axes.get_ylim() for axes in figure.axes}) == 1 and {"rank 0", "rank 1"} <= set(texts(figure))


# --- claims ---------------------------------------------------------------------------------------


def row(claim, verdict, *measured):
    return {"claim": claim, "verdict": verdict, "measured": [verdicts.bars(*each) for each in measured]}


def test_a_bar_is_as_long_as_what_was_measured_and_has_its_number_and_unit():
    given = [
        row("one", "no: shown", ("kept", "MB", {"stage 1": 4.0, "server": 1.5}), ("late", "", {"stage 2": 0.0})),
        row("two", "it depends: on N", ("above", "", {"padded": -0.25, "dropped": 0.125})),
        row("three", "not refuted by these numbers", ("below 3", "steps", {"stage 3": 1234, "torch DDP": None})),
    ]
    figure = claims.draw_claims(given, "Title", "note")
    check_layout(figure)
    everything = [bars for each in given for bars in each["measured"]]
    for axes, drawn in zip(figure.axes, everything, strict=True):
        assert [bar.get_width() for bar in axes.patches] == [value or 0 for value in drawn["values"].values()]
        assert axes.get_xlim()[0] <= 0 <= axes.get_xlim()[1]  # no scale hides its zero
        assert all(
            min(axes.get_xlim()) <= bar.get_x() + bar.get_width() <= max(axes.get_xlim()) for bar in axes.patches
        )
    written = [[text.get_text() for text in axes.texts] for axes in figure.axes]
    assert written == [["4 MB", "1.5 MB"], ["0"], ["-0.25", "0.125"], ["1,234 steps", "never"]]
    assert {"one", "no", "it depends", "on N", "open", "not refuted by these numbers", "late"} <= set(texts(figure))


def test_a_verdict_has_a_colour_and_a_word_and_stages_differ_from_the_rest():
    given = [row(word, f"{word}: shown", ("x", "", {"stage 1": 1.0, "DDP": 1.0})) for word in verdicts.ANSWERS]
    figure = claims.draw_claims(given)
    pills = {text.get_text(): text.get_bbox_patch().get_facecolor() for text in figure.texts if text.get_bbox_patch()}
    assert set(pills) == set(verdicts.ANSWERS) and len(set(pills.values())) == 3
    for axes in figure.axes:
        ours, other = (bar.get_facecolor() for bar in axes.patches)
        assert ours != other


@pytest.mark.parametrize("columns", [1, 2])
def test_the_recorded_claims_are_drawn_and_every_text_has_room(columns):
    found = measured("myths")["myths"]["rows"]
    for at in range(0, len(found), columns):
        some = found[at : at + columns]
        figure = claims.draw_claims(some)
        check_layout(figure)
        drawn = [[bar.get_width() for bar in axes.patches] for axes in figure.axes]
        assert drawn == [list(bars["values"].values()) for each in some for bars in each["measured"]]


# --- lines and dots -------------------------------------------------------------------------------


@pytest.mark.parametrize("log", ["", "x", "y", "xy"])
def test_lines_and_dots_lie_where_they_are_and_share_a_colour_if_they_share_a_name(log):
    predicted = {"stage 0": {1.0: 4.0, 8.0: 0.5}, "a": {8.0: 0.25, 1.0: 2.0}}
    figure = lines.draw_lines(predicted, {"a": {2.0: 1.5}, "b": {4.0: 3.0}}, "Title", "note", "MB/s", "s", log)
    check_layout(figure)
    (axes,) = figure.axes
    assert [dict(zip(*line.get_data())) for line in axes.lines] == list(predicted.values())
    assert [dots.get_offsets().tolist() for dots in axes.collections] == [[[2.0, 1.5]], [[4.0, 3.0]]]
    colours = [line.get_color() for line in axes.lines]
    from matplotlib.colors import to_hex

    a, b = (to_hex(dots.get_facecolor()[0]) for dots in axes.collections)
    assert a == colours[1] != colours[0] and b not in colours
    assert {"stage 0", "a", "b"} <= set(texts(figure))


# --- commands -------------------------------------------------------------------------------------


def page_of(record):
    return frame.page(1.0, record["title"])


@pytest.mark.parametrize(
    "record, picture, named",
    [
        ("none.json", "a.png", "none.json cannot be read"),
        ("other.json", "a.png", "other.json is not a record of this picture"),
        ("text.json", "a.png", "text.json is not a record of this picture"),
        ("one.json", "none/a.png", "none/a.png cannot be written"),
        ("one.json", "a.abc", "a.abc cannot be written"),
    ],
)
def test_a_command_that_cannot_draw_says_so_in_one_line(record, picture, named, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, text in (("one", '{"title": "One"}'), ("other", "{}"), ("text", "not json")):
        (tmp_path / f"{name}.json").write_text(text)
    monkeypatch.setattr("sys.argv", ["plots", record, picture])
    with pytest.raises(SystemExit) as ended:
        frame.draw_a_record(page_of)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and named in said and said.count("\n") == 1


def test_a_command_draws_the_record_it_is_given(tmp_path, monkeypatch, capsys):
    (tmp_path / "one.json").write_text('{"title": "One"}')
    monkeypatch.setattr("sys.argv", ["plots", str(tmp_path / "one.json"), str(tmp_path / "one.png")])
    frame.draw_a_record(page_of)
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr("sys.argv", ["plots"])
    with pytest.raises(SystemExit):
        frame.draw_a_record(page_of)
    assert "RECORD.json" in capsys.readouterr().err
