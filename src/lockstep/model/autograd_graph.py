"""What a backward pass will go through."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor


def nodes_of(loss: Tensor) -> Iterator[Any]:
    """Yield the nodes of the autograd graph that gradients of `loss` flow through, each once."""
    seen: set[Any] = set()
    open_nodes: list[Any] = [loss.grad_fn]
    while open_nodes:
        node = open_nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        open_nodes += [parent for parent, _ in node.next_functions]


def leaves_of(loss: Tensor) -> set[Tensor]:
    """Return the leaf tensors that gradients of `loss` flow into."""
    return {leaf for node in nodes_of(loss) if (leaf := getattr(node, "variable", None)) is not None}
