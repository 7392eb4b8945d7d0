"""What a model is given is cast, whatever holds it; what the user has stays as it is."""

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass

import pytest
import torch

from zero_mini.binding.precision import cast


@dataclass
class Batch:
    x: torch.Tensor


Pair = namedtuple("Pair", ["x", "tokens"])
X = torch.ones(2)
HOLDERS = {
    "dict": ({"x": X}, lambda tree: tree["x"]),
    "OrderedDict": (OrderedDict(x=X), lambda tree: tree["x"]),
    "defaultdict": (defaultdict(list, x=X), lambda tree: tree["x"]),
    "UserDict": (UserDict(x=X), lambda tree: tree["x"]),
    "list": ([X], lambda tree: tree[0]),
    "tuple": ((X, 1), lambda tree: tree[0]),
    "namedtuple": (Pair(X, 1), lambda tree: tree.x),
    "dataclass": (Batch(X), lambda tree: tree.x),
    "one in another": ([{"x": (X,)}], lambda tree: tree[0]["x"][0]),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_what_holds_tensors_keeps_its_class_and_is_cast(name):
    tree, find = HOLDERS[name]
    found = cast(tree, torch.float32, torch.bfloat16)
    assert type(found) is type(tree) and find(found).dtype == torch.bfloat16
    assert find(tree) is X


def test_token_ids_and_other_dtypes_are_not_cast():
    tokens, exact = torch.tensor([1]), torch.ones(1, dtype=torch.float64)
    assert cast([tokens, exact, "a"], torch.float32, torch.bfloat16) == [tokens, exact, "a"]
