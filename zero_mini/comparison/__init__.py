"""The benchmark, in reading order.

benchmark.py  the command, and the record of optimizations that were tried
works.py      the models and batches to train
systems.py    the systems that train them: this package's stages, torch's DDP and FSDP2, DeepSpeed
ablations.py  stage 3 with one decision changed
measure.py    the measurements of one rank for one row
scores.py     gate, floor and table
"""
