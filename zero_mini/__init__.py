"""zero_mini: ZeRO (arXiv 1910.02054) in PyTorch, small enough to read in an evening.

In reading order:

    comm.py flat.py                  the four collectives; parameters as one flat buffer
    ddp.py zero1.py zero2.py zero3.py    plain data parallelism, then one idea a file
    whole.py checks.py zeroify.py    whole values from shards; every refusal; the one-line entry
    memory.py ranks.py               what the states cost; a function run on N ranks
    gpt.py text.py                   the model and the data of every lesson
"""

from zero_mini.zeroify import zeroify

__all__ = ["zeroify"]
__version__ = "0.1.0"
