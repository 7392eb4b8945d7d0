"""What a row of the table consists of: a claim, an experiment, its number, and a verdict that follows from it."""

from typing import NamedTuple


class Row(NamedTuple):
    claim: str
    experiment: str
    number: str
    verdict: str


def judged(refuted: bool, reason: str) -> str:
    """The verdict on a claim.

    >>> judged(True, "losses are equal"), judged(False, "losses are equal")
    ('no: losses are equal', 'not refuted by these numbers')
    """
    return f"no: {reason}" if refuted else "not refuted by these numbers"


def holds(shown: bool, reason: str) -> str:
    """The verdict on a claim that is true.

    >>> holds(True, "to the bit")
    'yes: to the bit'
    """
    return f"yes: {reason}" if shown else "not shown by these numbers"


def depends(shown: bool, reason: str) -> str:
    """The verdict on a claim that is true in one place and false in another."""
    return f"it depends: {reason}" if shown else "not shown by these numbers"


def mb(nbytes: float) -> str:
    """
    >>> mb(405504)
    '0.406 MB'
    """
    return f"{nbytes / 1e6:.3f} MB"


def first_below(losses: list[float], limit: float, block: int = 10) -> int | None:
    """The number of steps after which the mean loss of a block of steps was below `limit`; None if never.

    >>> first_below([4.0, 3.5, 2.9], 3.0), first_below([4.0], 3.0)
    (30, None)
    """
    return next((block * (i + 1) for i, loss in enumerate(losses) if loss < limit), None)
