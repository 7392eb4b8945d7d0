"""What a message must say, in whatever words: numbers, names of parameters, units, ranks and flags, what to call.

    with pytest.raises(ValueError, match=naming("--lr", "rank 1", 0.01)):
    assert tells(message, "blocks.0", "zero.full_params()")

A sentence may be put otherwise and no test falls; one that names another rank, or no remedy, fails.
"""

import re


def naming(*things: object) -> str:
    """A pattern that fits a text which has all of these, as words of their own, in any order.

    >>> texts = "4 on rank 1", "on rank 1, but 4", "rank 1 has 4.5", "rank 10 has 4"
    >>> [bool(re.search(naming("rank 1", 4), text)) for text in texts]
    [True, True, False, False]
    """
    return r"(?s)\A" + "".join(rf"(?=.*(?<![\w.]){re.escape(str(thing))}(?!\w|\.\d))" for thing in things)


def tells(message: str, *things: object) -> bool:
    return re.search(naming(*things), message) is not None
