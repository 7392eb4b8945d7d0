"""A ring collective step by step: a grid of ranks by chunks; each cell names the ranks whose data is in its sum.

    start        step 1            step 2             reduce-scatter on 3 ranks:
    0  0  0      0    0+2  .       all  .    .        ranks down, chunks across;
    1  1  1      .    1    0+1     .    all  .        each sends a chunk to the rank below,
    2  2  2      1+2  .    2       .    .    all      the last to the first, and does not keep it

A ring of N ranks cuts a buffer of P elements into N chunks, so that every wire works in every step. Rank r ends
with chunk r, as in comm.py. Sums stand for means here: dividing by N costs nothing on the wire.

Left out: trees, which have fewer steps and which NCCL prefers for small buffers; the copy engines' gathers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zero_mini.course.plots.frame import page, panel
from zero_mini.course.plots.palette import COMMUNICATION, FAINT, GRADIENTS, INK, NEUTRAL, PARAMETERS, text_on, tint

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = {  # the colour of what each collective moves in ZeRO
    "all_reduce": GRADIENTS,
    "reduce_scatter": GRADIENTS,
    "all_gather": PARAMETERS,
    "broadcast": COMMUNICATION,
}
State = list[list[frozenset]]  # [rank][chunk]: the ranks whose data is in the sum; empty: nothing of worth
PAGE_IN, LEFT_IN, GAP_IN, TITLE_IN = 6.35, 0.58, 0.18, 0.3  # all grids of a row; left of them; between; above


def ring_sends(kind: str, N: int) -> list[list[tuple[int, int]]]:
    """For each step the (rank, chunk) pairs that are sent, each to the next rank.

    >>> ring_sends("reduce_scatter", 3)
    [[(0, 2), (1, 0), (2, 1)], [(0, 1), (1, 2), (2, 0)]]
    """
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is none of {', '.join(KINDS)}")
    if N < 1:
        raise ValueError(f"N must be at least 1, not {N}")
    if kind == "all_reduce":
        return ring_sends("reduce_scatter", N) + ring_sends("all_gather", N)
    if kind == "broadcast":  # chunks follow one another down the ring, which is open at its end
        return [[(r, t - r) for r in range(N - 1) if 0 <= t - r < N] for t in range(2 * N - 2)]
    first = {"reduce_scatter": 1, "all_gather": 0}[kind]
    return [[(r, (r - t) % N) for r in range(N)] for t in range(first, first + N - 1)]


def ring_steps(kind: str, N: int) -> list[State]:
    """[step][rank][chunk] -> the ranks whose data is in that sum, from before the first step to after the last.

    >>> [[sorted(chunk) for chunk in rank] for rank in ring_steps("reduce_scatter", 2)[-1]]
    [[[0, 1], []], [[], [0, 1]]]
    """
    sends = ring_sends(kind, N)
    if kind == "broadcast":
        start = [[frozenset([0] if r == 0 else []) for _ in range(N)] for r in range(N)]
    elif kind == "all_gather":
        start = [[frozenset([r] if r == c else []) for c in range(N)] for r in range(N)]
    else:
        start = [[frozenset([r]) for _ in range(N)] for r in range(N)]
    steps = [start]
    for number, sent in enumerate(sends):
        before, after = steps[-1], [list(row) for row in steps[-1]]
        adds = kind in ("all_reduce", "reduce_scatter") and number < N - 1
        for r, c in sent:
            after[(r + 1) % N][c] = before[r][c] | before[(r + 1) % N][c] if adds else before[r][c]
        for r, c in sent if adds else ():
            after[r][c] = frozenset()  # a part of a sum that lives on elsewhere
        steps.append(after)
    return steps


def written(cell: frozenset, N: int) -> str:
    """A sum as it stands in its cell, two ranks a line; "all" where that is more than three.

    >>> written(frozenset([0, 1]), 2), written(frozenset([2, 1, 0]), 4), written(frozenset(range(4)), 4)
    ('0+1', '0+1\\n+2', 'all')
    """
    if len(cell) == N > 3:
        return "all"
    ranks = [str(rank) for rank in sorted(cell)]
    return "\n+".join("+".join(ranks[at : at + 2]) for at in range(0, len(ranks), 2))


def phase(kind: str, N: int, step: int) -> str:
    """What a step is called.

    >>> phase("all_reduce", 3, 0), phase("all_reduce", 3, 2), phase("all_reduce", 3, 3), phase("broadcast", 3, 1)
    ('start', 'reduce-scatter, 2', 'all-gather, 1', 'step 1')
    """
    if step == 0:
        return "start"
    if kind != "all_reduce":
        return f"step {step}"
    return f"reduce-scatter, {step}" if step < N else f"all-gather, {step - N + 1}"


def draw_steps(kind: str, N: int, step: int | None = None) -> Figure:
    """All steps in rows of four, of three if N > 4; or one step alone. Cells have room for N up to 5."""
    states, sends = ring_steps(kind, N), [[], *ring_sends(kind, N)]
    shown = range(len(states)) if step is None else [step]
    each = sum(map(len, sends)) / N  # chunks that a rank sends, on average
    senders = "a rank sends on average" if kind == "broadcast" else "every rank sends"
    note = (
        "Ranks down, chunks across; a cell says whose data is in it. A dark frame: this chunk has just arrived\n"
        f"from the rank above, at rank 0 from the last. In {len(sends) - 1} steps {senders} {each:g} chunks of P/{N} "
        f"elements, "
        f"{'2 ' if kind == 'all_reduce' else ''}P (N-1)/N."
    )
    many = 4 if N < 5 else 3
    side = PAGE_IN / many - GAP_IN
    row_in = side + TITLE_IN + 0.18
    figure = page(0.78 + row_in * -(-len(shown) // many), f"{kind} on {N} ranks, as a ring", note)
    for place, number in enumerate(shown):
        left, top = LEFT_IN + place % many * (side + GAP_IN), 0.8 + TITLE_IN + place // many * row_in
        axes = panel(figure, left, top, side, side)
        axes.set_title(phase(kind, N, number), loc="left", fontsize=8.5, color=INK, pad=7)
        draw_state(axes, states[number], sends[number], KINDS[kind])
        if place % many == 0:
            for r in range(N):
                axes.text(-0.14, r + 0.41, f"rank {r}", ha="right", va="center", fontsize=8, color=FAINT)
    return figure


def draw_state(axes: Axes, state: State, sent: list[tuple[int, int]], colour: str) -> None:
    """One grid; arrows say what came from the rank above, the first rank's from the last."""
    N, side = len(state), 0.8
    axes.set(xlim=(-0.05, N - 0.1), ylim=(N - 0.02, -0.22))
    arrived = {((r + 1) % N, c) for r, c in sent}
    adds = colour == GRADIENTS  # the colour grows with the sum; what is only passed on is whole from the start
    for r, row in enumerate(state):
        for c, cell in enumerate(row):
            full = len(cell) == N or (cell and not adds)
            fill = tint(colour, 1.0 if full else 0.65 * len(cell) / N)
            new = (r, c) in arrived
            style = dict(facecolor=fill, edgecolor=INK if new else NEUTRAL, linewidth=1.4 if new else 0.6)
            axes.add_patch(_square(c, r, side, style))
            ink = text_on(fill)
            size = 8.5 if len(cell) in (1, N) else 7.5 if len(cell) < 4 else 6.8
            axes.text(c + side / 2, r + side / 2, written(cell, N), ha="center", va="center", fontsize=size, color=ink)
            if new:
                head = dict(arrowstyle="-|>", color=INK, linewidth=0.9, mutation_scale=6, shrinkA=0, shrinkB=0)
                axes.annotate("", (c + side / 2, r + 0.02), (c + side / 2, r - 0.21), arrowprops=head)


def _square(left: float, top: float, side: float, style: dict):
    from matplotlib.patches import Rectangle

    return Rectangle((left, top), side, side, **style)
