"""zero_mini: ZeRO (arXiv 1910.02054) in PyTorch, small enough to read in an evening.

In reading order:

    by_hand.py                                all of ZeRO on one page, without hooks or overlap
    comm.py  flat.py                          four collectives; parameters as one flat buffer
    ddp.py  zero1.py  zero2.py  zero3.py      plain data parallelism, then one idea a file
    zeroify.py  units.py                      the one-line entry; which parameters travel together
    hooks.py  held.py  out_of_turn.py         how the script meets a model; what a parameter becomes; a read at any time
    pieces.py  agreement.py                   what the optimizer sees; what ranks tell each other at a step
    precision.py  loss_scale.py  clip.py      what it computes in, and how gradients are tamed
    whole.py  inventory.py                    whole values from shards; what is kept alive, listed
    ledger.py  whereabouts.py                 every collective, counted; who is missing when one fails
    checks.py  watch.py                       what is refused at the start; what only shows while training
    activations.py  host_activations.py       what is left: activations computed again, or in host memory
    chunked_loss.py  fragmentation.py         logits in parts; memory in one piece
    offload.py  disk.py                       optimizer states in host memory, or in files
    one_pass.py  copy_engine.py               two reasons why it is fast
    memory.py  recorder.py                    what it costs, by formula and by looking
    checkpoint.py  checkpoint_files.py        shards on the disk
    resharding.py                             for any stage and number of ranks
    gpt.py  text.py  gpt2_file.py             the model and the data of every lesson; weights as others have them
    train_gpt.py  options.py  launch.py  resume.py  report.py      a training run, start to end
    screen.py  fits.py                        what it prints, on any terminal; whether the model fits
    benchmark.py  comparison  timeline.py     how fast it is, beside its peers
    ranks.py  rank_process.py  pickling.py    a function run on N ranks: what starts them, what runs in them
    course.py  plots  measured                what lessons share; pictures; records
"""

from zero_mini.zeroify import zeroify

__all__ = ["zeroify"]
__version__ = "0.1.0"
