"""Why the paper's speed-up is more than linear, and why that ends: a model of one step, as lesson 10 derives it.

    memory of a GPU   = states, which shrink with N   + 8 GB, assumed   + batch x a sequence's share
    seconds of a step = batch x FLOP / rate           + bytes of the wire / B

60 billion parameters over 16 GPUs of a node, which is one data-parallel rank; P_os+g; 32 GB a GPU; a node's network has
8 x 100 Gbit/s. Set to go through the paper's 400 GPUs: 64 sequences a node, 37.5 TFLOP/s a GPU (section 10.3).

Left out: overlap, and products that are more efficient in a larger batch.
"""

from zero_mini.memory.formulas import model_state_bytes

PSI = 60e9 / 16  # of a GPU
GPU_GB, OTHER_GB, B = 32, 8, 100e9 / 16  # OTHER_GB is assumed; B: bytes a second of a GPU
PAPER = 400, 64, 37.5  # GPUs, sequences a node, TFLOP/s a GPU
MOST = 1600  # sequences in all
TFLOP = 8 * PSI * 1024 / 1e12  # of a sequence of 1024 tokens, computed again in backward


def states_GB(gpus: int) -> float:
    return sum(model_state_bytes(PSI, gpus // 16, stage=2).values()) / 1e9


def batch(gpus: int) -> int:
    """Sequences of a node for which there is memory."""
    sequence_GB = (GPU_GB - OTHER_GB - states_GB(PAPER[0])) / PAPER[1]
    return int((GPU_GB - OTHER_GB - states_GB(gpus)) / sequence_GB + 1e-9)


def wire_seconds(gpus: int) -> float:
    ranks = gpus / 16
    return 2 * 2 * PSI * (ranks - 1) / ranks / B


def tflops(gpus: int, sequences: int) -> float:
    """Of each GPU."""
    rate = 1 / (1 / PAPER[2] - wire_seconds(PAPER[0]) / (PAPER[1] * TFLOP))
    work = sequences * TFLOP
    return work / (work / rate + wire_seconds(gpus))
