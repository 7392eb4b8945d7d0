"""What a row of the table consists of: a claim, an experiment, its number, a verdict that follows from it, and bars.

Bars are the measured values themselves, for course/plots/claims.py: {"quantity", "unit", "values": {thing: value}}.
"""

from statistics import mean
from typing import NamedTuple

ANSWERS = ("yes", "no", "it depends")
BLOCK = 10  # steps whose losses are averaged in the record


class Row(NamedTuple):
    claim: str
    experiment: str
    number: str
    verdict: str
    measured: list[dict]


def merge(results: list) -> object:
    """What the ranks returned -> one result: losses averaged over ranks and `BLOCK` steps, the rest is rank 0's.

    >>> merge([{"losses": [1.0] * 20, "bytes": 3}, {"losses": [2.0] * 20, "bytes": 4}])
    {'losses': [1.5, 1.5], 'bytes': 3}
    """
    first = results[0]
    if isinstance(first, dict):
        return {key: merge([result[key] for result in results]) for key in first}
    if isinstance(first, list):
        steps = [mean(losses) for losses in zip(*results)]
        return [mean(steps[i : i + BLOCK]) for i in range(0, len(steps), BLOCK)]
    return first


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


def bars(quantity: str, unit: str, values: dict[str, float]) -> dict:
    """What was measured: a value for each thing, in one unit ("" if the quantity has none)."""
    return {"quantity": quantity, "unit": unit, "values": values}


def answer(verdict: str) -> str:
    """The verdict in a word; "" if the numbers do not show what they should.

    >>> answer("it depends: on N"), answer("not refuted by these numbers")
    ('it depends', '')
    """
    return verdict.partition(":")[0] if ":" in verdict else ""


def compared(prediction: str, verdict: str) -> str:
    """What to say of a reader's prediction: "yes", "no", "it depends", or "?" for none.

    >>> [compared(prediction, "no: losses are equal") for prediction in ("no", " No", "yes", "?", "maybe")]
    ['right', 'right', 'not what was measured', 'no prediction', 'write yes, no, or it depends']
    """
    word = prediction.strip().lower()
    if word in ("?", ""):
        return "no prediction"
    if word not in ANSWERS:
        return "write yes, no, or it depends"
    return "right" if word == answer(verdict) else "not what was measured"


def mb(nbytes: float) -> str:
    """
    >>> mb(405504)
    '0.406 MB'
    """
    return f"{nbytes / 1e6:.3f} MB"


def first_below(losses: list[float], limit: float, block: int = BLOCK) -> int | None:
    """The number of steps after which the mean loss of a block of steps was below `limit`; None if never.

    >>> first_below([4.0, 3.5, 2.9], 3.0), first_below([4.0], 3.0)
    (30, None)
    """
    return next((block * (i + 1) for i, loss in enumerate(losses) if loss < limit), None)
