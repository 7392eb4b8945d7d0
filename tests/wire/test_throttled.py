"""A throttled link takes what its formula says, to the digit: every test has a clock of its own, and nobody waits."""

import math
from functools import partial

import pytest
import torch
from says import naming, tells
from test_seams import example, momentum, train
from torch import nn

from zero_mini import zeroify
from zero_mini.comm import Comm
from zero_mini.course.ranks import Ranks
from zero_mini.simulate.absent import OwnSlice
from zero_mini.wire.fit import SIZES, Fit, fit, main, measure, table
from zero_mini.wire.throttled import SlowLink, ThrottledComm

STAGES = (0, 1, 2, 3)
L, D = 8, 64
BLOCK = D * D  # elements; no padding on 2 or 4 ranks
LATENCY_S, BYTES_PER_S = 2**-10, 2.0**20  # sums of these are exact


class Clock:
    """Time that passes when somebody sleeps or computes, and not otherwise."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


class Computes(nn.Module):
    """A block that takes so long in forward."""

    def __init__(self, clock: Clock, seconds: float):
        super().__init__()
        self.layer, self.clock, self.seconds = nn.Linear(D, D, bias=False), clock, seconds

    def forward(self, x):
        self.clock.now += self.seconds
        return self.layer(x)


class ThrottledAlone(ThrottledComm, OwnSlice):
    """A throttled link to ranks that are not there."""


def link(clock: Clock, latency_s: float = LATENCY_S, bytes_per_s: float = BYTES_PER_S) -> dict:
    return dict(latency_s=latency_s, bytes_per_s=bytes_per_s, clock=clock, sleep=clock.sleep)


def blocks(clock: Clock, seconds: float = 0.0) -> nn.Sequential:
    """No root: each parameter is in a block."""
    torch.manual_seed(0)
    return nn.Sequential(*(Computes(clock, seconds) for _ in range(L)))


def seconds_of_a_step(stage: int, latency_s: float, bytes_per_s: float, make=ThrottledComm, **options) -> float:
    clock = Clock()
    model = blocks(clock)
    zero = zeroify(model, momentum(model), stage, comm=make(**link(clock, latency_s, bytes_per_s), **options))
    for _ in range(3):
        begun = clock.now
        model(torch.ones(2, D)).sum().backward()
        zero.optimizer.step()
        zero.optimizer.zero_grad()
    return clock.now - begun


@pytest.mark.parametrize("N", [2, 4])
def test_a_step_takes_2_psi_or_3_psi_over_the_link(ranks, N):
    psi = L * BLOCK
    for stage in STAGES:
        halves = 3 * L - 2 if stage == 3 else 2 * L  # the last two blocks of forward are still there in backward
        steps, numel = halves * (N - 1), halves * BLOCK * (N - 1) / N
        for latency_s, bytes_per_s in ((0.0, BYTES_PER_S), (LATENCY_S, math.inf), (LATENCY_S, BYTES_PER_S)):
            expected = steps * latency_s + 4 * numel / bytes_per_s
            found = ranks(N).run(seconds_of_a_step, stage, latency_s, bytes_per_s)
            assert found == pytest.approx([expected] * N, rel=1e-12), (stage, latency_s, bytes_per_s)
        if latency_s == 0:
            assert expected == (3 * psi - 2 * BLOCK if stage == 3 else 2 * psi) * (N - 1) / N * 4 / bytes_per_s


@pytest.mark.parametrize("number, ratio", [(4, 10 / 8), (16, 46 / 32), (64, 190 / 128)])
def test_stage_3_takes_nearly_1_5_times_as_long_as_data_parallelism(number, ratio):
    seconds = []
    for stage in (0, 3):
        clock = Clock()
        torch.manual_seed(0)
        model = nn.Sequential(*(Computes(clock, 0.0) for _ in range(number)))
        zero = zeroify(model, momentum(model), stage, comm=ThrottledAlone(0, 1024, **link(clock, 0.0)))
        for _ in range(2):
            begun = clock.now
            model(torch.ones(2, D)).sum().backward()
            zero.optimizer.step()
            zero.optimizer.zero_grad()
        seconds.append(clock.now - begun)
    assert seconds[1] / seconds[0] == pytest.approx(ratio, rel=1e-12) and ratio < 1.5


@pytest.mark.parametrize("compute_s", [0.25, 1.0, 4.0])
def test_what_a_block_computes_hides_the_gather_of_the_next_one(ranks, compute_s):
    def seconds_of_a_forward() -> float:
        clock = Clock()
        model = blocks(clock, compute_s)
        rate = 4 * BLOCK / 2  # a gather takes one second on two ranks
        zero = zeroify(model, momentum(model), 3, comm=ThrottledComm(**link(clock, 0.0, rate)))
        for _ in range(2):  # the first forward shows the order
            model(torch.ones(2, D)).sum().backward()
            zero.optimizer.step()
        begun = clock.now
        model(torch.ones(2, D))
        return clock.now - begun

    # The first gather has nothing to hide behind, and the last block no gather to hide.
    expected = 1.0 + (L - 1) * max(1.0, compute_s) + compute_s
    assert ranks(2).run(seconds_of_a_forward) == pytest.approx([expected] * 2, rel=1e-12)


def test_a_collective_begins_when_the_one_before_has_ended():
    clock, buffer = Clock(), torch.zeros(8)
    comm = ThrottledAlone(0, 2, **link(clock, 1.0, 16.0))  # 2 + 32 / 16 = 4 seconds
    first, second = comm.all_reduce(buffer, "a"), comm.all_reduce(buffer, "b")
    clock.now = 3.0
    second.wait()
    assert clock.now == 8.0
    first.wait()
    assert clock.now == 8.0
    clock.now = 20.0  # the link was free for a while
    comm.all_gather(buffer, buffer[:4], "c").wait()
    assert clock.now == 20.0 + 1.0 + 1.0


def test_a_ring_of_1024_ranks_has_2046_steps():
    clock = Clock()
    comm = ThrottledAlone(0, 1024, **link(clock, 5e-6, math.inf))
    comm.all_reduce(torch.zeros(1024), "small").wait()
    assert clock.now == pytest.approx(2046 * 5e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_numbers_are_those_of_a_fast_link(ranks, stage):
    def both():
        results = []
        for throttled in (False, True):
            clock = Clock()
            model = nn.Sequential(*(nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(4)))
            torch.manual_seed(0)
            [nn.init.normal_(param, std=0.2) for param in model.parameters()]
            comm = ThrottledComm(**link(clock)) if throttled else Comm()
            results.append(train(zeroify(model, momentum(model), stage, comm=comm))[0])
        return all(torch.equal(value, results[1][name]) for name, value in results[0].items()), clock.now

    for is_equal, now in ranks(2).run(both):
        assert is_equal and now > 0


def hybrid_and_plain(stage: int) -> tuple[float, float, float]:
    """Seconds of a step over a slow link: plain; hybrid, slow across nodes; hybrid, slow inside them."""
    HybridComm = example("hybrid_shard").HybridComm

    def across(latency_s, bytes_per_s, clock, sleep):
        slow = dict(latency_s=latency_s, bytes_per_s=bytes_per_s, clock=clock, sleep=sleep)
        return HybridComm(2, across=partial(ThrottledComm, **slow))

    class SlowInside(ThrottledComm, HybridComm):
        """Throttled inside a node alone."""

    plain = seconds_of_a_step(stage, LATENCY_S, BYTES_PER_S)
    inside = seconds_of_a_step(stage, LATENCY_S, BYTES_PER_S, SlowInside, ranks_per_node=2)
    return plain, seconds_of_a_step(stage, LATENCY_S, BYTES_PER_S, across), inside


def test_shards_inside_a_node_send_less_over_the_slow_link_across_nodes():
    def seconds(halves: int, numel: float, N: int) -> float:
        return halves * ((N - 1) * LATENCY_S + 4 * numel * (N - 1) / N / BYTES_PER_S)

    with Ranks(4) as own:  # and one call: torch gives a group that replaces a destroyed one the same name
        everyone = own.run(lambda: [(stage, *hybrid_and_plain(stage)) for stage in (1, 3)])
    for stage, plain, across, inside in (row for rows in everyone for row in rows):
        halves = 3 * L - 2 if stage == 3 else 2 * L
        assert plain == pytest.approx(seconds(halves, BLOCK, N=4))
        assert across == pytest.approx(seconds(2 * L, BLOCK / 2, N=2))  # all-reduces of a shard, at every stage
        assert inside == pytest.approx(seconds(halves, BLOCK, N=2))


@pytest.mark.parametrize(
    "latency_s, bytes_per_s", [(-1.0, 1.0), (0.0, 0.0), (0.0, -5.0), (0.0, math.nan), (math.inf, 1.0)]
)
def test_a_link_that_cannot_be_is_refused(latency_s, bytes_per_s):
    with pytest.raises(ValueError, match=naming(latency_s, bytes_per_s)):
        SlowLink(latency_s, bytes_per_s)


# --- the fit ----------------------------------------------------------------------------------


def test_the_fit_finds_the_latency_and_bandwidth_that_were_put_in(ranks):
    def found(N=2):
        clock = Clock()
        points = measure(ThrottledComm(**link(clock)), clock=clock, repeats=1)
        return {kind: fit(of_kind) for kind, of_kind in points.items()}, {kind: list(p) for kind, p in points.items()}

    for fits, sizes in ranks(2).run(found):
        steps = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}
        assert {kind: (line.alpha_s, line.bytes_per_s) for kind, line in fits.items()} == {
            kind: (pytest.approx(count * LATENCY_S), pytest.approx(BYTES_PER_S)) for kind, count in steps.items()
        }
        assert sizes["all_reduce"] == list(SIZES) and sizes["all_gather"] == [nbytes / 2 for nbytes in SIZES]


def test_small_sizes_count_as_much_as_large_ones():
    line = fit({1e3: 1.1e-3, 2e3: 1.1e-3, 1e9: 1.0})
    assert line.alpha_s == pytest.approx(1.1e-3, rel=0.01)  # plain least squares would give it any value
    assert line.misses({1e9: 2.0})[1e9] == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize("points", [{}, {8: 1.0}, {8: 1.0, 16: 0.0}, {8: 1.0, 16: math.nan}])
def test_points_without_a_line_are_refused(points):
    with pytest.raises(ValueError, match="a line needs"):
        fit(points)


def test_neither_number_is_negative_whatever_a_busy_machine_measured():
    assert fit({8: 2.0, 16: 2.0, 32: 1.0}).bytes_per_s == math.inf
    through_zero = fit({10: 1.0, 20: 3.0})
    assert through_zero.alpha_s == 0.0 and 20 / 3 < through_zero.bytes_per_s < 10


@pytest.mark.parametrize("argv", ["--ranks 1", "--latency-us -2", "--MB-per-s nan"])
def test_the_command_refuses_a_wire_that_cannot_be(monkeypatch, capsys, argv):
    monkeypatch.setattr("sys.argv", ["fit", *argv.split()])
    with pytest.raises(SystemExit):
        main()
    err = capsys.readouterr().err.splitlines()[-1]
    assert tells(err, {"1": 1, "-2": "latency_s is -2e-06"}.get(argv.split()[1], "nan")) and argv.split()[0] in err


def test_the_command_prints_a_line_for_each_collective(ranks):
    first, *lines = ranks(2).run(table)[0].splitlines()
    assert "2" in first and [line.split()[0] for line in lines] == ["all_reduce", "reduce_scatter", "all_gather"]
    assert Fit(1.0, 2.0).seconds(4) == 3.0
