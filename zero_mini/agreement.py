"""What ranks tell each other once a step: a few numbers between hosts, before the optimizer changes anything.

    digest   of all collectives so far: did every rank launch the same ones, in the same order?            (comm.py)
    late     a bit a unit: gradients came that no flat buffer has taken, as the model's modules were called without the
             model's own forward. All ranks reduce such a unit now
    used     a bit a parameter: has this rank brought a gradient to it since zero_grad()? What no rank used is left
             alone by the optimizer, as torch leaves a gradient that is None

The numbers are integers on the host; on GPUs nothing waits for the device.
"""

from zero_mini import pieces, watch
from zero_mini.flat import Unit

BITS = 63  # of an int64, without its sign


def agree(zero) -> None:
    """Compare the digests, reduce what came late, and know what was used. RuntimeError. Collective."""
    late = []
    for unit in zero.trainable:
        watch.check_reduced(unit)
        if unit.grads_arrived():
            zero.check_late(unit)
            unit.note_used()
            late.append(unit)
    mine = pack([(unit in late, 1) for unit in zero.units] + [(unit.used, len(unit.params)) for unit in zero.units])
    bits = unpack(zero.comm.agree(mine))
    is_late = {}
    for unit in zero.units:
        is_late[unit], bits = bits & 1, bits >> 1
    for unit in zero.units:
        unit.used_anywhere, bits = bits & (1 << len(unit.params)) - 1, bits >> len(unit.params)
    for unit in reversed(zero.trainable):
        if is_late[unit]:
            unit.take_grads(zero.master_dtype)
            zero.send(unit)
            zero.means_due = True
    for unit in zero.trainable:
        if unit.holds_gradient:
            leave_unused_alone(zero, unit)


def leave_unused_alone(zero, unit: Unit) -> None:
    """No gradient for a unit that no rank used; pieces of their own for parameters that no rank used in it."""
    if unit.used_anywhere == 0:
        zero.at_hand(unit)
        unit.own_grad = None
        return
    unused = {index for index in range(len(unit.params)) if not unit.used_anywhere >> index & 1}
    mixed = set()
    for run in unit.runs[unit.P] if unused else ():
        members = set(range(run.first, run.after))
        if not members <= unused:
            mixed |= members & unused
    if mixed:
        pieces.set_apart(zero, unit, mixed)


def pack(numbers: list[tuple[int, int]]) -> list[int]:
    """[(number, its width in bits)] -> words of BITS bits, the first number lowest.

    >>> pack([(1, 1), (0b10, 2)])
    [5]
    """
    bits = width = 0
    for number, its_width in numbers:
        bits |= number << width
        width += its_width
    return [bits >> start & (1 << BITS) - 1 for start in range(0, width, BITS)]


def unpack(rows: list[list[int]]) -> int:
    """The words of each rank -> all their bits, or-ed.

    >>> unpack([[5, 1], [2, 0]]) == 7 + (1 << BITS)
    True
    """
    merged = 0
    for row in rows:
        merged |= sum(word << index * BITS for index, word in enumerate(row))
    return merged
