"""Memory besides the model states: activations and logits (arXiv 1910.02054, sections 3.2 and 6).

checkpointing.py  activations are computed again in backward
kept_outputs.py   but for outputs that are dear to compute and small, as attention's
on_host.py        inputs of checkpointed blocks wait in host memory
chunked_loss.py   logits of a part of the tokens at a time
"""
