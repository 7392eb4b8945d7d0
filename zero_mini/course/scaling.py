"""Why the paper's speed-up is more than linear, and where that ends: a model of one step. Lesson 10 derives it.

    N grows  ->  states of a GPU shrink  ->  a larger batch fits  ->  the wire, which does not grow, is a smaller share

Paper (arXiv 1910.02054, section 10): 60 billion parameters on 64 to 400 V100 of 32 GB, P_os+g; 16 GPUs of a node share
8 x 100 Gbit/s; 1.6K sequences in a batch on 400 GPUs; 15 PFLOP/s on 400 GPUs, on average over models of 8B to 100B.

Assumed here: the model is split over all 16 GPUs of a node; sequences of 1024 tokens; 8 GB do not depend on the batch;
nothing hides; a matrix product is as efficient with a small batch as with a large one.

Left out: model parallelism's own traffic, which grows with the batch as computing does.
"""

from zero_mini.memory.formulas import model_state_bytes

NODE = 16  # GPUs, which share one model
PSI = 60e9 / NODE  # parameters of a GPU
SEQUENCE = 1024  # tokens
GPU_GB, OTHER_GB = 32.0, 8.0
BATCH_400, TFLOPS_400 = 64, 37.5  # 1.6K sequences over 25 nodes; 15 PFLOP/s over 400 GPUs
BYTES_PER_S = 100e9 / NODE
TFLOP = 8 * PSI * SEQUENCE / 1e12  # of a sequence, with its activations computed again


def states_GB(gpus: int) -> float:
    """Of one GPU at stage 2.

    >>> [round(states_GB(gpus), 1) for gpus in (64, 400, 4096)]
    [20.6, 9.6, 7.7]
    """
    return sum(model_state_bytes(PSI, gpus // NODE, stage=2).values()) / 1e9


def batch(gpus: int) -> int:
    """Sequences of a node that fit.

    >>> [batch(gpus) for gpus in (64, 400, 4096)]
    [15, 64, 72]
    """
    sequence_GB = (GPU_GB - OTHER_GB - states_GB(400)) / BATCH_400
    return int((GPU_GB - OTHER_GB - states_GB(gpus)) / sequence_GB + 1e-9)


def wire_seconds(gpus: int) -> float:
    """Of a step, whatever its batch."""
    nodes = gpus / NODE
    return 2 * 2 * PSI * (nodes - 1) / nodes / BYTES_PER_S


def tflops(gpus: int, sequences: int) -> float:
    """TFLOP/s of each GPU with so many sequences a node.

    >>> [round(tflops(gpus, batch(gpus)), 1) for gpus in (64, 400, 4096)], round(tflops(4096, 1600 // 256), 1)
    ([34.0, 37.5, 37.6], 26.0)
    """
    rate = 1 / (1 / TFLOPS_400 - wire_seconds(400) / (BATCH_400 * TFLOP))  # while it computes
    work = sequences * TFLOP
    return work / (work / rate + wire_seconds(gpus))
