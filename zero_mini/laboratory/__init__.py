"""What ZeRO is not: other systems that articles describe under its name, each small, exact and beside the real thing.

    task.py          the model and the data of every experiment
    server.py        parameter server, gradient server, asynchronous server: rank 0 collects all gradients
    deferred.py      gradients are accumulated, and reduced once
    compression.py   numbers cross the wire in fewer bits; stage 3 that gathers in 8 bits
    sparse.py        only the largest gradients, or the rows that were used, cross the wire
    sampling.py      a random part of the model is updated
    balance.py       ranks with unequal numbers of examples or tokens
    claims.py        what people say that ZeRO does, each with a run
    rows.py          the table: a verdict from each number; rows_of_systems.py and verdict.py have its parts
    __main__.py      runs them all

    make myths       runs __main__.py: writes runs/myths.json, prints claim, experiment, number and verdict

None of this is part of the book: nothing there imports it.
"""
