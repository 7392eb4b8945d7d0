"""How a collective travels round a ring: which rank holds whose data, chunk by chunk and step by step.

A row is a rank, a column a chunk of its buffer. A cell names the ranks whose data is in it, and is the darker the
more of them there are; an empty cell holds nothing of use yet. In each step every rank sends one chunk to the next
rank, and the last to the first.

    reduce_scatter  N - 1 steps: a chunk grows by one rank's data each time it moves
    all_gather      N - 1 steps: a finished chunk moves on as it is
    all_reduce      the one, then the other

Left out: what NCCL does besides: trees, pipelining within a chunk, several rings at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zero_mini.plots.palette import COMMUNICATION, FAINT, INK, NEUTRAL

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = ("reduce_scatter", "all_gather", "all_reduce")


def ring_steps(kind: str, N: int) -> list[list[list[frozenset[int]]]]:
    """[step][rank][chunk] -> the ranks whose data is in it: at the start, and after each step.

    >>> [[sorted(chunk) for chunk in rank] for rank in ring_steps("reduce_scatter", 2)[-1]]
    [[[0, 1], [0]], [[1], [0, 1]]]
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)} (got {kind!r})")
    if N < 2:
        raise ValueError(f"a ring needs two ranks or more (got {N})")
    if kind == "all_reduce":
        first = ring_steps("reduce_scatter", N)
        done = [[first[-1][r][c] if r == c else frozenset() for c in range(N)] for r in range(N)]
        return first[:-1] + passed_on(done, N)
    if kind == "all_gather":
        return passed_on([[frozenset({r} if r == c else ()) for c in range(N)] for r in range(N)], N)
    states = [[[frozenset({r}) for _ in range(N)] for r in range(N)]]
    for step in range(N - 1):
        before, after = states[-1], [list(chunks) for chunks in states[-1]]
        for r in range(N):
            chunk, following = (r - step - 1) % N, (r + 1) % N
            after[following][chunk] = before[following][chunk] | before[r][chunk]
        states.append(after)
    return states


def passed_on(start: list[list[frozenset[int]]], N: int) -> list[list[list[frozenset[int]]]]:
    """Rank r begins with chunk r, and sends on what it received last."""
    states = [start]
    for step in range(N - 1):
        before, after = states[-1], [list(chunks) for chunks in states[-1]]
        for r in range(N):
            chunk = (r - step) % N
            after[(r + 1) % N][chunk] = before[r][chunk]
        states.append(after)
    return states


def draw_ring(kind: str, N: int) -> Figure:
    """All steps, from left to right, in rows of at most five."""
    from matplotlib.figure import Figure

    states = ring_steps(kind, N)
    columns = min(len(states), 5)
    rows = -(-len(states) // columns)
    figure = Figure(figsize=(1.9 * columns, 0.45 + rows * (0.55 + 0.36 * N)), layout="constrained")
    figure.suptitle(f"{kind} among {N} ranks", fontsize=11, fontweight="bold", color=INK, x=0.01, ha="left")
    grid = figure.subplots(rows, columns, squeeze=False)
    for step, axes in enumerate(grid.flat):
        if step < len(states):
            panel(axes, states, step, named=step % columns == 0)
        else:
            axes.set_axis_off()
    return figure


def draw_ring_step(kind: str = "all_reduce", N: int = 4, step: int = 0) -> Figure:
    """One step alone, for a slider; a step past the last shows the last."""
    from matplotlib.figure import Figure

    states = ring_steps(kind, N)
    figure = Figure(figsize=(0.9 + 0.75 * N, 0.7 + 0.45 * N), layout="constrained")
    panel(figure.subplots(), states, min(step, len(states) - 1), named=True)
    return figure


def panel(axes: Axes, states: list, step: int, named: bool) -> None:
    """The grid of one moment; what has just arrived is framed."""
    N = len(states[0])
    for rank, chunks in enumerate(states[step]):
        for chunk, members in enumerate(chunks):
            new = step > 0 and members != states[step - 1][rank][chunk] and bool(members)
            shade = 0.15 + 0.75 * len(members) / N if members else 0
            axes.fill(*square(chunk, rank), color=COMMUNICATION, alpha=shade, linewidth=0, zorder=1)
            axes.fill(
                *square(chunk, rank), facecolor="none", edgecolor=INK if new else NEUTRAL, linewidth=1.6 if new else 0.6
            )
            text = "+".join(map(str, sorted(members))) if len(members) < N or N == 1 else "all"
            axes.text(
                chunk,
                rank,
                text,
                ha="center",
                va="center",
                fontsize=7 if len(text) < 5 else 5.8,
                color="white" if shade > 0.8 else INK,
            )
    axes.set(xlim=(-0.55, N - 0.45), ylim=(N - 0.45, -0.55), aspect="auto")
    axes.set_xticks(range(N), [f"chunk {c}" if N < 4 else str(c) for c in range(N)], fontsize=7, color=FAINT)
    axes.set_yticks(range(N), [f"rank {r}" for r in range(N)] if named else [""] * N, fontsize=8, color=INK)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title("at the start" if step == 0 else f"after step {step}", fontsize=8.5, loc="left", color=FAINT)


def square(column: float, row: float, half: float = 0.44) -> tuple[list[float], list[float]]:
    """Corners of a cell.

    >>> square(0, 0, half=1)
    ([-1, 1, 1, -1], [-1, -1, 1, 1])
    """
    left, right, low, high = column - half, column + half, row - half, row + half
    return [left, right, right, left], [low, low, high, high]


def draw_sent(measured: dict[str, dict[int, float]]) -> Figure:
    """Elements that a rank sent, in buffers of P, against N: measured dots on the lines of the formulas.

    measured: kind -> N -> elements sent / P.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 2.9), layout="constrained")
    axes = figure.subplots()
    most = max(N for points in measured.values() for N in points)
    for index, (kind, points) in enumerate(measured.items()):
        passes = 2 if kind == "all_reduce" else 1
        every = [N / 10 for N in range(20, 10 * most + 6)]
        style = dict(color=INK, linewidth=1, linestyle="-" if passes == 2 else ":")
        axes.plot(every, [passes * (N - 1) / N for N in every], zorder=1, **style)
        marker = dict(zorder=2, s=34, color=COMMUNICATION, marker="os^"[index % 3], edgecolors="white", linewidths=0.6)
        axes.scatter([N + 0.05 * (index - 1) for N in points], points.values(), **marker)
    axes.text(most + 0.65, 2 * (most - 1) / most, "all_reduce\n2 (N-1)/N", fontsize=8, va="center", color=INK)
    axes.text(most + 0.65, (most - 1) / most, "all_gather, reduce_scatter\n(N-1)/N", fontsize=8, va="center", color=INK)
    axes.set(xlim=(1.8, most + 2.6), ylim=(0, 2.05), xlabel="ranks, N")
    axes.set_xticks(range(2, most + 1))
    axes.set_title("sent by one rank, in buffers", loc="left", fontsize=10, fontweight="bold", color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8, labelcolor=FAINT, color=NEUTRAL)
    return figure
