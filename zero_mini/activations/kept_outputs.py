"""Selective checkpointing: the outputs of a few operators are kept, and the second run does not compute them again.

Source: Korthikanti et al., arXiv 2205.05198 (there it is the other way round: attention alone is computed again, since
without a fused kernel its activations are the largest). With a fused kernel attention keeps one tensor as large as a
block's input, and its FLOPs grow with the square of the sequence:

    b s h elements        kept in addition, a block
    2 b s^2 h FLOPs       saved, a block, if attention is causal (its two products)

    first run     q, k, v -> attention -> [kept] -> ...
    second run    q, k, v    computed again: the backward of attention reads them
                  attention  not run: the kept output, and the sums of exponentials beside it, take its place

Left out: operators that a compiler replaced, which no dispatch mode sees. (inductor calls attention as it is.)
"""

import contextlib
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

Operator = torch._ops.OpOverload

# The kernels behind F.scaled_dot_product_attention. Its fallback is missing here: that is several matrix products.
ATTENTION: tuple[Operator, ...] = tuple(
    getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}").default
    for kernel in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
)


def check_operators(operators: Sequence[Operator]) -> tuple[Operator, ...]:
    """ValueError if one is not an operator of torch.ops, or draws random numbers that the second run would miss."""
    if not isinstance(operators, Iterable):
        raise ValueError(f"outputs_of takes a list of operators, as ATTENTION (got {operators!r})")
    for operator in operators:
        if not isinstance(operator, Operator):
            raise ValueError(f"outputs_of takes operators, as torch.ops.aten.mm.default (got {operator!r})")
        if torch.Tag.nondeterministic_seeded in operator.tags and "dropout_p" not in names_of(operator):
            raise ValueError(f"outputs_of: {operator} draws random numbers, which the second run has to draw again")
    return tuple(operators)


def names_of(operator: Operator) -> list[str]:
    return [argument.name for argument in operator._schema.arguments]


def has_dropout(operator: Operator, args: tuple, kwargs: dict) -> bool:
    """Then it runs again: the operators after it must find the random state that they had in the first run."""
    return (dict(zip(names_of(operator), args)) | kwargs).get("dropout_p", 0) > 0


class KeptOutputs:
    """The outputs of the chosen operators in one call of a function."""

    def __init__(self, operators: tuple[Operator, ...]):
        self.operators = operators
        self.kept: list[tuple[Operator, object, list[int]]] = []  # (operator, its outputs, their versions)

    def first(self) -> contextlib.AbstractContextManager:
        """Within, outputs are kept."""
        return Chosen(self.operators, self.keep) if self.operators else contextlib.nullcontext()

    def again(self) -> contextlib.AbstractContextManager:
        """Within, they take the place of the operators."""
        queue = iter(self.kept)
        if not self.operators:
            return contextlib.nullcontext()
        return Chosen(self.operators, partial(self.take, queue))

    def keep(self, operator: Operator, args: tuple, kwargs: dict) -> object:
        outputs = operator(*args, **kwargs)
        kept = tree_map_only(Tensor, alias, outputs)
        self.kept.append((operator, kept, versions_of(kept)))
        return outputs

    def take(self, queue, operator: Operator, args: tuple, kwargs: dict) -> object:
        kept_operator, kept, versions = next(queue, (None, None, None))
        if kept_operator is not operator:
            raise RuntimeError(
                f"checkpoint: the second run calls {operator} where the first called {kept_operator or 'no more'}; "
                "the function must do the same in both"
            )
        if versions_of(kept) != versions:
            raise RuntimeError(
                f"checkpoint: an output of {operator} that was kept was changed in place; clone() it first"
            )
        return tree_map_only(Tensor, alias, kept)

    def warn_if_none(self) -> None:
        """Warn if no operator ran in the first run."""
        if self.operators and not self.kept:
            warnings.warn(
                "checkpoint: outputs_of keeps nothing, because none of its operators ran: attention is perhaps "
                "compiled, has dropout, or has a mask that torch supports by matrix products only",
                stacklevel=3,
            )


def alias(tensor: Tensor) -> Tensor:
    """The same values in another tensor, with the same count of writes.

    What an operator returns gets a graph: kept itself, it would keep that graph, and all activations in it, alive.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):  # for the count
        return tensor.detach()


def versions_of(outputs: object) -> list[int]:
    return [leaf._version for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]


class Chosen(TorchDispatchMode):
    """Within, calls of the chosen operators go through `call(operator, args, kwargs)`."""

    def __init__(self, operators: tuple[Operator, ...], call: Callable):
        super().__init__()
        self.operators, self.call = operators, call

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled functions run compiled; otherwise torch would not compile any while this mode is active."""
        return True

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if operator in self.operators and not has_dropout(operator, args, kwargs):
            return self.call(operator, args, kwargs)
        return operator(*args, **kwargs)
