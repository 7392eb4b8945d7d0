"""The rest of the memory: activations and logits (arXiv 1910.02054, sections 3.2 and 6).

checkpointing.py  computed again in backward
on_host.py        kept in host memory
chunked_loss.py   logits of a part of the tokens at a time
"""
