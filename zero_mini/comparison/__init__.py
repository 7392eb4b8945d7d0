"""The benchmark, in reading order.

benchmark.py  the command, and the record of optimizations that were tried
works.py      the models and batches to train
llama.py      a Llama, beside the trainer's GPT-2
one_pass_loss.py  its loss, with gradients computed along with it
models.py     a work's model, before a system wraps it
systems.py    the systems that train it: this package's stages, and the list of all
peers.py      torch's DDP and FSDP2, DeepSpeed
plain.py      forward and backward on one GPU, with and without the update of 1/N of the parameters
trainee.py    a model in training
absent_peers.py  one GPU as rank 0 of N, which sends nothing
ablations.py  stage 3 with one decision changed
measure.py    the measurements of one rank for one row
scores.py     gate, floor and table
"""
