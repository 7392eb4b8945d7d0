"""What a stage costs in memory: by formula, by listing live tensors, by recording every allocation.

formulas.py       the paper's section 5
inventory.py      every tensor that a handle keeps alive, by category
recorder.py       every allocation of a step
timeline.py       which kernel ran when, from a profiler's trace
fragmentation.py  free memory in pieces, and an arena that avoids it
"""
