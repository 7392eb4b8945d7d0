"""A call or a result as bytes for another process, which need not be able to import its functions and classes.

Functions and classes of a notebook cell, of a script or of another function are pickled by value (cloudpickle), tensors
as plain bytes, which need no shared memory and arrive on the CPU.

    >>> unpack(pack(lambda x: x + torch.ones(2)))(1).tolist()
    [2.0, 2.0]
"""

import importlib
import io
import operator
import types
from typing import Any

import cloudpickle
import torch


def pack(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_module=_ByValue)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


class _ByValue:
    """The pickle module for torch.save."""

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, types.CodeType):  # cloudpickle drops the name of the file, and tracebacks need it
                return _code, (obj.co_filename, *self.dispatch_table[types.CodeType](obj)[1])
            # A function that contains `model.config` makes cloudpickle pickle torch.distributed.config, if that is
            # imported. Such modules of settings have a class of their own, which pickle does not treat as a module.
            if isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType:
                return importlib.import_module, (obj.__name__,)
            if isinstance(obj, torch._ops.OpOverload):  # checkpoint_blocks(outputs_of=ATTENTION)
                return _operator, (str(obj),)
            return super().reducer_override(obj)


def _operator(name: str) -> torch._ops.OpOverload:
    """The operator of torch.ops of this name, as "aten.mm.default"."""
    return operator.attrgetter(name)(torch.ops)


def _code(filename: str, *parts: Any) -> types.CodeType:
    return types.CodeType(*parts).replace(co_filename=filename)
