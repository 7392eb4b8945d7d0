"""What a stage costs: by formula, by a walk over what is alive, by every allocation.

formulas.py       the paper's section 5
inventory.py      every tensor that a handle keeps alive, by category
recorder.py       every allocation of a step
timeline.py       which kernel ran when, from a profiler's trace
fragmentation.py  free memory in pieces, and an arena against it
"""
