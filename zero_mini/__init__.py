"""zero_mini: ZeRO (arXiv 1910.02054) in PyTorch, small enough to read in an evening.

The book, in reading order:

    by_hand.py                                all of ZeRO on one page, without hooks or overlap
    comm.py  flat.py                          four collectives; parameters as one flat buffer
    script.py                                 when: the moments of a training step
    ddp.py  zero1.py  zero2.py  zero3.py      what: plain data parallelism, then one idea a file
    zeroify.py  train_gpt.py                  the one-line entry; a trainer that uses it

What serves it, each folder with a list of its files in `__init__.py`:

    wire          counts collectives, and names a rank that is missing
    binding       ties a step to a model and an optimizer that know nothing of it
    update        updates the parameters, and scales their gradients
    memory        counts bytes, by formula and by looking
    activations   makes the rest of the memory small
    checkpoint    writes states to the disk, for any stage and number of ranks
    trainer       the model, the data, the flags and the reports of train_gpt.py
    simulate      one process as rank r of N, the other ranks absent
    comparison    the benchmark
    course        what the lessons share: ranks in a notebook, figures
    laboratory    what ZeRO is not: other systems, beside the real thing
    measured      records of what was measured, as JSON
"""

from zero_mini.zeroify import zeroify

__all__ = ["zeroify"]
__version__ = "0.1.0"
