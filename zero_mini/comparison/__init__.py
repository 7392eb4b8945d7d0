"""The benchmark, in reading order.

benchmark.py  the command, and what was tried to be fast
works.py      what is trained
systems.py    by whom: this package's stages, torch's DDP and FSDP2, DeepSpeed
ablations.py  stage 3 with one decision taken otherwise
measure.py    what one rank does for one row, and brings back
scores.py     gate, floor and table
"""
