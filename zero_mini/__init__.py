"""zero_mini: ZeRO (arXiv 1910.02054) in PyTorch, small enough to read in an evening.

In reading order:

    comm.py  flat.py  units.py                the four collectives; parameters as one flat buffer
    ddp.py  zero1.py  zero2.py  zero3.py      plain data parallelism, then one idea a file
    hooks.py  held.py                         how the script meets a model
    precision.py  loss_scale.py  clip.py      what it computes in, and how gradients are tamed
    zeroify.py  checks.py  whole.py           the one-line entry; every refusal; whole values from shards
    activations.py  host_activations.py       what is left: activations computed again, or in host memory
    chunked_loss.py  fragmentation.py         logits in parts; memory in one piece
    memory.py  recorder.py  ranks.py          what it costs, by formula and by looking; a function run on N ranks
    checkpoint.py  checkpoint_files.py        shards on the disk
    resharding.py                             for any stage and number of ranks
    gpt.py  text.py  gpt2_file.py             the model and the data of every lesson; weights as others have them
    train_gpt.py  options.py  launch.py  resume.py  report.py      a training run, start to end
"""

from zero_mini.zeroify import zeroify

__all__ = ["zeroify"]
__version__ = "0.1.0"
