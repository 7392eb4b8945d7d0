"""Memory besides the model states: activations and logits (arXiv 1910.02054, sections 3.2 and 6).

checkpointing.py  activations are computed again in backward
kept_outputs.py   outputs of chosen operators, such as attention, are kept instead
on_host.py        inputs of checkpointed blocks wait in host memory
chunked_loss.py   logits of a part of the tokens at a time
"""
