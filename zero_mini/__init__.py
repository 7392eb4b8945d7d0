"""zero_mini: ZeRO (arXiv 1910.02054) in PyTorch, small enough to read in an evening.

In reading order:

    comm.py  flat.py  units.py                the four collectives; parameters as one flat buffer
    ddp.py  zero1.py  zero2.py  zero3.py      plain data parallelism, then one idea a file
    hooks.py  held.py  precision.py           how the script meets a model, and what it computes in
    zeroify.py  checks.py  whole.py           the one-line entry; every refusal; whole values from shards
    memory.py  ranks.py                       what the states cost; a function run on N ranks
    gpt.py  text.py                           the model and the data of every lesson
    train_gpt.py  options.py  launch.py  report.py      a training run, start to end
"""

from zero_mini.zeroify import zeroify

__all__ = ["zeroify"]
__version__ = "0.1.0"
