"""A GPT in Hugging Face's format of GPT-2: a folder with model.safetensors and config.json.

    here                             there
    wte.weight, wpe.weight, ln_f.*   the same
    blocks.3.ln_1.*                  h.3.ln_1.*                           ln_2 too
    blocks.3.qkv.*                   h.3.attn.c_attn.*       transposed
    blocks.3.attn_out.*              h.3.attn.c_proj.*       transposed
    blocks.3.fc.*                    h.3.mlp.c_fc.*          transposed
    blocks.3.mlp_out.*               h.3.mlp.c_proj.*        transposed

There a linear layer is a "Conv1D" whose matrix is (inputs, outputs); biases are the same. The head is tied to `wte` in
both, and stored once. `transformers.GPT2LMHeadModel.from_pretrained(FOLDER)` reads the folder.

Needs the package safetensors: pip install -e ".[safetensors]". Left out: the tokenizer.
"""

import json
import os
import re
from pathlib import Path

import torch

from zero_mini.trainer.gpt import GPT, GPTConfig

LAYERS = {
    "ln_1": "ln_1",
    "ln_2": "ln_2",
    "qkv": "attn.c_attn",
    "attn_out": "attn.c_proj",
    "fc": "mlp.c_fc",
    "mlp_out": "mlp.c_proj",
}


def gpt2_name(name: str) -> str:
    """
    >>> gpt2_name("blocks.3.attn_out.weight"), gpt2_name("ln_f.bias")
    ('h.3.attn.c_proj.weight', 'ln_f.bias')
    """
    return re.sub(r"^blocks\.(\d+)\.(\w+)", lambda match: f"h.{match[1]}.{LAYERS[match[2]]}", name)


def is_transposed(name: str) -> bool:
    """Is it a matrix of a linear layer? Embeddings are stored as they are."""
    return re.search(r"\.(qkv|attn_out|fc|mlp_out)\.weight$", name) is not None


def export_gpt2(folder: Path, state_dict: dict[str, torch.Tensor], config: GPTConfig) -> None:
    """Write a folder from `model.state_dict()` of a GPT(config). OSError from the file system."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        gpt2_name(name): (value.T if is_transposed(name) else value).cpu().contiguous().clone()
        for name, value in state_dict.items()
    }
    try:
        save_file(tensors, folder / "model.safetensors.unfinished", {"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from error
    os.replace(folder / "model.safetensors.unfinished", folder / "model.safetensors")
    settings = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": config.L,
        "n_embd": config.d,
        "n_head": config.heads,
        "n_positions": config.T,
        "vocab_size": config.vocab,
        "activation_function": "gelu_new",  # the one by tanh
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), config.dropout),
        **dict.fromkeys(("bos_token_id", "eos_token_id")),  # none: tokens are bytes here
    }
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")


def import_gpt2(path: Path, config: GPTConfig) -> dict[str, torch.Tensor]:
    """A model.safetensors, of a released GPT-2 or of `export_gpt2`, as a state_dict for `GPT(config)`.

    ValueError if it is of another shape. The constant masks in released files are not used.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = {name.removeprefix("transformer."): value for name, value in load_file(path).items()}
    except SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file: {error}") from error
    with torch.device("meta"):
        expected = {name: tuple(value.shape) for name, value in GPT(config).state_dict().items()}
    state = {
        name: tensors[gpt2_name(name)].T.contiguous() if is_transposed(name) else tensors[gpt2_name(name)]
        for name in expected
        if gpt2_name(name) in tensors
    }
    for name, shape in expected.items():
        there = tuple(state[name].shape) if name in state else "missing"
        if there != shape:
            raise ValueError(f"{path} is of another shape: {name} is {there} there and {shape} here; give its shape")
    L = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("h."))
    settings = Path(path).with_name("config.json")  # needed for the number of heads, which no tensor's shape shows
    heads = json.loads(settings.read_text()).get("n_head", config.heads) if settings.is_file() else config.heads
    for what, there, here in (("L", L, config.L), ("heads", heads, config.heads)):
        if there != here:
            raise ValueError(f"{path} is of another shape: it has {what}={there}, here {what}={here}; give its shape")
    return state
