"""Mixed precision: a model computes in one dtype, and its optimizer keeps values in another.

Source: arXiv 1910.02054, section 3.1; mixed-precision training, arXiv 1710.03740.

The units do the work: `master` is what the optimizer updates (fp32), `full` the cast that the model
computes with (bf16 or fp16). Gradients of one micro-batch are reduced in the model's dtype. Sums of several are kept in
the master's dtype, and stages 0 and 1 reduce them in it. In fp16 the loss is scaled as well: update/loss_scale.py.

This file casts inputs of the model from the master's dtype to the model's, and outputs back, so that a loss outside
the model is computed in fp32 (a model that computes its own loss must cast it, as trainer/gpt.py does). Buffers are not
cast.

Left out: a list of operations that are safe in 16 bits, as in autocast; the model itself must cast for others.
"""

import copy
import dataclasses
from collections.abc import MutableMapping

import torch


def cast(tree, source: torch.dtype, target: torch.dtype):
    """The same tree with each tensor of dtype `source` as `target`; others, such as token ids, do not change.

    A tree is nested tuples, lists, dicts (any MutableMapping) and dataclasses.

    >>> cast({"x": [torch.zeros(1)], "tokens": torch.tensor(3)}, torch.float32, torch.bfloat16)
    {'x': [tensor([0.], dtype=torch.bfloat16)], 'tokens': tensor(3)}
    """
    if isinstance(tree, torch.Tensor):
        return tree.to(target) if tree.dtype == source else tree
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):  # a namedtuple
        return type(tree)(*(cast(value, source, target) for value in tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(cast(value, source, target) for value in tree)
    if isinstance(tree, MutableMapping):
        result = copy.copy(tree)  # a defaultdict, for example, cannot be made from its items
        for key, value in tree.items():
            result[key] = cast(value, source, target)
        return result
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        parts = {part.name: getattr(tree, part.name) for part in dataclasses.fields(tree) if part.init}
        return dataclasses.replace(tree, **cast(parts, source, target))
    return tree
