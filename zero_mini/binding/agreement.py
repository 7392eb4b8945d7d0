"""Once a step, before the optimizer changes anything, ranks exchange a few numbers between hosts.

    digest   of all collectives so far: did every rank launch the same ones, in the same order? (wire/ledger.py)
    checksum of what all ranks must have in common: the options of all param groups but tensors, as the learning rate;
             which parameters are frozen; how many backwards have been added up since zero_grad()
    written  a bit a unit: the user has written to its parameters, so ranks compare their values
    late     a bit a unit: it has gradients that are not in a flat buffer, because modules were called without the
             model's own forward. All ranks reduce such a unit now
    used     a bit a parameter: did it get a gradient on this rank since zero_grad()? The optimizer skips a parameter
             that no rank used, as torch skips a gradient that is None

The numbers are integers on the host; on GPUs no rank waits for its device.
"""

import zlib

import torch
from torch.utils._pytree import tree_iter

from zero_mini.binding import pieces, watch
from zero_mini.flat import Unit, count_none

BITS = 63  # of an int64, without its sign
requires_grad_of = torch.Tensor.requires_grad.__get__  # without the property of HeldParameter


def agree(zero) -> None:
    """Compare digests and checksums, reduce late gradients, exchange `used`. RuntimeError. Collective."""
    late = []
    for unit in zero.trainable:
        watch.check_reduced(unit)
        grads = unit.grads()
        if count_none(grads) < len(grads):
            zero.check_late(unit)
            unit.note_used(grads)
            late.append(unit)
    fields = []
    for unit in zero.units:
        fields += [(unit in late, 1), (watch.check_untouched(unit), 1), (unit.used, len(unit.params))]
    common = (
        options_of(zero.optimizer),
        zero.backwards,
        [requires_grad_of(param) for unit in zero.units for param in unit.params],
    )
    checksum = zlib.crc32(repr(common).encode())
    rows = zero.comm.host.agree([checksum, *pack(fields)])
    if any(row[0] != checksum for row in rows):
        refuse_differences(zero, *common)
    bits = unpack([row[1:] for row in rows])
    is_late, is_written = {}, {}
    for unit in zero.units:
        is_late[unit], is_written[unit], bits = bits & 1, bits >> 1 & 1, bits >> 2
        unit.used_anywhere, bits = bits & (1 << len(unit.params)) - 1, bits >> len(unit.params)
    compare_values(zero, [unit for unit in zero.units if is_written[unit]])
    for unit in reversed(zero.trainable):
        if is_late[unit]:
            unit.take_grads(zero.master_dtype)
            zero.send(unit)
            zero.means_due = True
    for unit in zero.trainable:
        if unit.holds_gradient:
            leave_unused_alone(zero, unit)


def leave_unused_alone(zero, unit: Unit) -> None:
    """Drop the mean of a unit that no rank used. In other units unused parameters get pieces of their own."""
    if unit.used_anywhere == 0:
        zero.update.wait_for_mean(unit)
        unit.mean_grad = None
        return
    unused_indices = {index for index in range(len(unit.params)) if not unit.used_anywhere >> index & 1}
    indices = set()
    for run in unit.runs[unit.P] if unused_indices else ():
        members = set(range(run.first, run.after))
        if not members <= unused_indices:
            indices |= members & unused_indices
    if indices:
        pieces.set_apart(zero, unit, indices)


def options_of(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """All options of the param groups, except tensors: to read them, the host would wait for the device."""
    return {
        f"{key} of param group {index}": repr(value)
        for index, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if key != "params" and not any(isinstance(leaf, torch.Tensor) for leaf in tree_iter(value))
    }


def refuse_differences(zero, options: dict[str, str], backwards: int, requires_grad: list[bool]) -> None:
    """RuntimeError, on every rank, that names what differs, the ranks, the values and the remedy."""
    names = [name for unit in zero.units for name in unit.names]
    frozen = {f"requires_grad of {name}": repr(value) for name, value in zip(names, requires_grad)}
    sums = {"the number of backwards since zero_grad()": repr(backwards)}
    for mine, remedy in (
        (options, "set it alike on every rank; a scheduler that looks at the loss needs the mean over ranks"),
        (frozen, "freeze the same parameters on every rank"),
        (sums, "call zero_grad() at the same place on every rank"),
    ):
        first, *others = zero.comm.host.gather(mine)
        for rank, other in enumerate(others, start=1):
            for name in first | other:
                one, value = first.get(name, "missing"), other.get(name, "missing")
                if one != value:
                    raise RuntimeError(f"{name} is {one} on rank 0 but {value} on rank {rank}: {remedy}")


def compare_values(zero, units: list[Unit]) -> None:
    """RuntimeError, on every rank, if the values of these units differ between ranks, after the user wrote to them."""
    if not units:
        return
    checksums = [zlib.crc32(unit.full.detach().cpu().view(torch.uint8).numpy()) for unit in units]
    first, *others = zero.comm.host.gather(checksums)
    for rank, theirs in enumerate(others, start=1):
        for unit, one, other in zip(units, first, theirs):
            if one != other:
                raise RuntimeError(
                    f"parameters of {unit.name} were written to after zeroify(), and rank 0 and rank {rank} have other "
                    "values now: write under zero.full_params(), where rank 0's values count, or alike on every rank"
                )
    for unit in units:
        watch.note_versions(unit)


def pack(numbers: list[tuple[int, int]]) -> list[int]:
    """[(number, its width in bits)] -> words of BITS bits, the first number lowest.

    >>> pack([(1, 1), (0b10, 2)])
    [5]
    """
    bits = width = 0
    for number, number_width in numbers:
        bits |= number << width
        width += number_width
    return [bits >> start & (1 << BITS) - 1 for start in range(0, width, BITS)]


def unpack(rows: list[list[int]]) -> int:
    """The words of each rank -> all their bits, or-ed.

    >>> unpack([[5, 1], [2, 0]]) == 7 + (1 << BITS)
    True
    """
    bits = 0
    for row in rows:
        bits |= sum(word << index * BITS for index, word in enumerate(row))
    return bits
