"""Activation checkpointing: keep a function's inputs, and compute its activations again when backward needs them.

Source: Chen et al., arXiv 1604.06174; arXiv 1910.02054, section 3.2 (activations), 6.1 (P_a+cpu: on_host.py).

    activations, L equal blocks   L inputs + one block, in place of L blocks
    FLOPs                         at most a third more: forward is run twice

    forward    x0 [block] x1 [block] x2 [block]     an operation saves a tensor: the graph stores an empty `Saved`
    backward                        x2 [block] <-   the first `Saved` that is used runs the block again,
                         x1 [block] <-              which fills all of them; each is emptied when it is used
               x0 [block] <-

The graph is the one that forward built; only the tensors that its nodes saved are replaced. So the gradients of
parameters, `torch.autograd.grad`, hooks on tensors, retain_graph, create_graph and outputs of any structure work as
without checkpointing. The other design, a backward inside the backward, needs a dummy input where only parameters
require a gradient, does not support `autograd.grad`, and delivers a gradient in two parts if two checkpoints use a
parameter.

The second run starts from the state of the first: random states (CPU, the CUDA devices of the inputs and the current
one), autocast, the inputs. It stops at the last tensor that was saved: in a transformer's block without dropout
that leaves out the last matrix product. A second run whose saved tensors differ in number, shape, dtype or device
raises an error.

Under ZeRO, `checkpoint_blocks` wraps a block's `forward`, inside the hooks of its unit. To a stage the second run is a
part of the unit's backward, so every stage launches the same collectives as without checkpointing, in the same order.
A `checkpoint` around whole modules runs their hooks again: around one unit or two, stage 3 gathers nothing more,
because they fit its two slots; around more it gathers each of them at most once more.

Left out: states of other random generators, tensors inside arguments that are objects, functions whose backward
runs on several GPUs at once. torch.compile around a checkpoint leaves it uncompiled; inside one it compiles.
"""

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten

from zero_mini.activations.kept_outputs import KeptOutputs, Operator, check_operators
from zero_mini.activations.on_host import HostMemory
from zero_mini.binding.units import find_blocks
from zero_mini.memory.fragmentation import Arena


def checkpoint(
    function: Callable,
    *args: Any,
    host: HostMemory | Arena | None = None,
    outputs_of: Sequence[Operator] = (),
    **kwargs: Any,
) -> Any:
    """Call `function(*args, **kwargs)`; its activations are not kept but computed again in backward.

    Values and gradients are those of a plain call, to the bit. Tensors may be nested in tuples, lists and dicts, in
    arguments and results alike. With `host`, inputs that the graph computed wait there (HostMemory, Arena). With
    `outputs_of`, outputs of these operators are kept and not computed again (kept_outputs.ATTENTION, for example). The
    function must do the same when it is run again; without gradients (no_grad) it is simply called. If the function
    itself has an argument of one of these names, bind it by functools.partial.

    RuntimeError if an input is changed in place before its use in backward, by the function or later, or if the
    second run saves other tensors than the first; torch's own error for a second backward without retain_graph.
    """
    if torch.compiler.is_compiling():
        return uncompiled(function, *args, host=host, outputs_of=outputs_of, **kwargs)
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    call = CheckpointedCall(function, Inputs(args, kwargs, host), KeptOutputs(check_operators(outputs_of)))
    with call.kept.first(), saved_tensors_hooks(call.pack, call.unpack):
        outputs = function(*args, **kwargs)
    call.inputs.check_unchanged()
    call.kept.warn_if_none()
    return outputs


@torch._disable_dynamo
def uncompiled(*args: Any, **kwargs: Any) -> Any:
    """`checkpoint` for torch.compile around it: the second run is outside the compiled function, so both are."""
    return checkpoint(*args, **kwargs)


def checkpoint_blocks(
    model: nn.Module | Sequence[nn.Module],
    every: int = 1,
    keep: str | HostMemory | Arena = "device",
    outputs_of: Sequence[Operator] = (),
) -> list[nn.Module]:
    """Checkpoint blocks 0, `every`, 2 `every`, ... of the model from now on; returns these blocks.

    model       a model, whose repeated blocks are found (units.find_blocks), or the blocks in order.
    keep        where their inputs wait for backward: "device", "host" (on_host.py), or an Arena
                (memory/fragmentation.py).
    outputs_of  operators whose outputs are kept and not computed again: ATTENTION, or others (kept_outputs.py).

    It replaces `block.forward`, before or after zeroify() alike; `del block.forward` undoes it. ValueError if there is
    no such block, or one is checkpointed already.
    """
    blocks = [block for _, block in find_blocks(model)] if isinstance(model, nn.Module) else list(model)
    if not blocks:
        raise ValueError("found no repeated blocks (children of ModuleLists and Sequentials); pass them as a list")
    if every < 1 or (isinstance(keep, str) and keep not in ("device", "host")):
        raise ValueError(f"need every >= 1 and keep 'device', 'host' or an Arena (got {every} and {keep!r})")
    chosen = blocks[::every]
    for block in chosen:
        if getattr(vars(block).get("forward"), "func", None) is checkpoint:
            raise ValueError(f"a {type(block).__name__} is checkpointed already; `del block.forward` undoes that")
    operators = check_operators(outputs_of)
    host = {"device": None, "host": HostMemory()}[keep] if isinstance(keep, str) else keep
    for block in chosen:
        block.forward = partial(checkpoint, block.forward, host=host, outputs_of=operators)
    return chosen


class Saved:
    """What the graph holds in place of one tensor that an operation saved for backward."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.storage, self.version = weakref.ref(tensor.untyped_storage()), tensor._version
        self.tensor: Tensor | None = None  # set by the second run, removed by its use

    def fill(self, tensor: Tensor, number: int, total: int, inputs: "Inputs") -> Tensor:
        """Take the tensor of the second run; returns it without its graph."""
        if (self.shape, self.dtype, self.device) != (tensor.shape, tensor.dtype, tensor.device):
            raise RuntimeError(
                f"checkpoint: of {total} tensors that the function saved for backward, number {number} was "
                f"{in_words(self)} in forward and is {in_words(tensor)} in the second run; {inputs.remedy()}"
            )
        if self.version != tensor._version and self.storage() is tensor.untyped_storage():  # a parameter, say
            raise RuntimeError(
                f"checkpoint: of {total} tensors that the function saved for backward, number {number}, "
                f"{in_words(tensor)}, was changed in place: it had version {self.version} in forward and has "
                f"{tensor._version} in backward; change it after backward"
            )
        self.tensor, self.version = tensor.detach(), tensor._version
        return self.tensor

    def take(self) -> Tensor:
        """Return the tensor and drop this reference to it."""
        tensor, self.tensor = self.tensor, None
        if tensor._version != self.version:
            raise RuntimeError(
                f"checkpoint: a tensor saved for backward, {in_words(tensor)}, was changed in place: "
                f"it had version {self.version} when it was saved and has {tensor._version} now; clone() it first"
            )
        return tensor


class LastOneSaved(BaseException):
    """Ends the second run after the last tensor that backward needs. The function must not catch it."""


class CheckpointedCall:
    """One call of a checkpointed function, alive for as long as the graph holds a tensor that it saved."""

    def __init__(self, function: Callable, inputs: "Inputs", kept: KeptOutputs) -> None:
        self.function, self.inputs, self.conditions = function, inputs, Conditions(inputs.devices)
        self.kept = kept
        self.saved: list[weakref.ref[Saved]] = []  # in order; the graph frees each one after its use

    def pack(self, tensor: Tensor) -> tuple["CheckpointedCall", Saved]:
        saved = Saved(tensor)
        self.saved.append(weakref.ref(saved))
        return self, saved

    @staticmethod
    def unpack(packed: tuple["CheckpointedCall", Saved]) -> Tensor:
        call, saved = packed
        if saved.tensor is None:
            call.run_again()
        return saved.take()

    def run_again(self) -> None:
        """Fill every `Saved` that the graph still holds."""
        numbers, total = itertools.count(1), len(self.saved)

        def fill(tensor: Tensor) -> Tensor:
            number = next(numbers)
            saved = self.saved[number - 1]() or Saved(tensor)  # a new one if the graph has freed it
            tensor = saved.fill(tensor, number, total, self.inputs)
            if number == total:
                raise LastOneSaved
            return tensor

        self.inputs.check_unchanged()
        args, kwargs = self.inputs.again()
        try:
            with self.conditions.again(), self.kept.again(), torch.enable_grad(), saved_tensors_hooks(fill, unchanged):
                self.function(*args, **kwargs)
        except LastOneSaved:
            return
        raise RuntimeError(
            f"checkpoint: the function saved {total} tensors for backward in forward and {next(numbers) - 1} in the "
            f"second run; {self.inputs.remedy()}"
        )


def unchanged(tensor: Tensor) -> Tensor:
    """What the second run saved is used as it is."""
    return tensor


class Inputs:
    """The arguments of a call. Their tensors wait where autograd saves tensors, or in host memory."""

    def __init__(self, args: tuple, kwargs: dict, host: HostMemory | Arena | None) -> None:
        self.leaves, self.tree = tree_flatten((args, kwargs))
        # Tensors of inference mode can be neither saved nor tracked: they stay in `leaves`, as numbers and strings do.
        is_kept = [isinstance(leaf, Tensor) and not leaf.is_inference() for leaf in self.leaves]
        tensors = {index: leaf for index, leaf in enumerate(self.leaves) if is_kept[index]}
        self.devices = {tensor.device for tensor in tensors.values()}
        self.versions = [(weakref.ref(tensor), tensor._version) for tensor in tensors.values()]
        # Tensors that the graph did not compute (weights, token ids, masks) stay: their owner keeps them alive anyway.
        leaving = {index: tensor for index, tensor in tensors.items() if host and tensor.grad_fn is not None}
        staying = {index: tensor for index, tensor in tensors.items() if index not in leaving}
        for index in tensors:
            self.leaves[index] = None
        self.order = [*staying, *leaving]
        self.keeper = Keep.apply(torch.empty(0, requires_grad=True), *staying.values())
        self.host, self.parcel = host, host.put(list(leaving.values())) if leaving else None

    def check_unchanged(self) -> None:
        """RuntimeError if one of the tensors has been written to. A freed one cannot have been."""
        for number, (reference, version) in enumerate(self.versions):
            tensor = reference()
            if tensor is not None and tensor._version != version:
                raise RuntimeError(
                    f"checkpoint: tensor {number} of the arguments, {in_words(tensor)}, was changed in place: "
                    f"it had version {version} when the function was called and has {tensor._version} "
                    "now, so the second run would meet other values; clone() it before it is changed"
                )

    def remedy(self) -> str:
        """What to do if the second run differed. An argument that is an object may remember the first run."""
        remedy = "it must do the same in both, and depend on nothing that changes in between"
        kinds = {type(leaf) for leaf in self.leaves}
        objects = sorted(k.__name__ for k in kinds if k.__module__.split(".")[0] not in ("builtins", "torch"))
        if objects:
            remedy += (
                f": among its arguments {' and '.join(objects)} may have kept something of the first run; with a model "
                "of transformers, pass use_cache=False"
            )
        return remedy

    def again(self) -> tuple[tuple, dict]:
        """The same args and kwargs."""
        moved = [] if self.parcel is None else [tensor.requires_grad_() for tensor in self.host.take(self.parcel)]
        leaves = list(self.leaves)
        for index, tensor in zip(self.order, [*self.keeper.grad_fn.saved_tensors, *moved]):
            leaves[index] = tensor
        return tree_unflatten(leaves, self.tree)


class Keep(torch.autograd.Function):
    """A node beside the graph that saves tensors, so that an enclosing checkpoint replaces these as well."""

    @staticmethod
    def forward(ctx, empty: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return empty.clone()

    @staticmethod
    def backward(ctx, grad):
        """Never called: the result is not used."""


class Conditions:
    """What a run depends on besides its arguments: random states and autocast."""

    def __init__(self, devices: set[torch.device]) -> None:
        gpus = {device.index for device in devices if device.type == "cuda"}
        if torch.cuda.is_initialized():
            gpus.add(torch.cuda.current_device())
        self.cpu, self.gpus = torch.get_rng_state(), {gpu: torch.cuda.get_rng_state(gpu) for gpu in gpus}
        self.autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), torch.is_autocast_cache_enabled())
            for kind in ("cpu", *(["cuda"] if gpus else []))
        ]

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Within, the saved conditions apply; afterwards, those from before."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(list(self.gpus)))
            for state in self.autocast:
                stack.enter_context(torch.autocast(*state))
            torch.set_rng_state(self.cpu)
            for gpu, state in self.gpus.items():
                torch.cuda.set_rng_state(state, gpu)
            yield


def in_words(tensor: Tensor | Saved) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
