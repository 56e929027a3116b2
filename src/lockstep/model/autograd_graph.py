"""The autograd graph of a loss: which nodes and leaves a backward pass will reach, and when it begins."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge
from torch.utils.weak import WeakTensorKeyDictionary

from lockstep.errors import ConfigError
from lockstep.groups import this_rank
from lockstep.model.hidden_outputs import hidden_tensors
from lockstep.tree import tree_leaves


def nodes_of(loss: Tensor) -> Iterator[Any]:
    """Yield the nodes of the autograd graph that gradients of `loss`, which may be a leaf, flow through, each once."""
    seen: set[Any] = set()
    open_nodes: list[Any] = [get_gradient_edge(loss).node] if loss.requires_grad else []
    while open_nodes:
        node = open_nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        open_nodes += [parent for parent, _ in node.next_functions]


def leaf_of(node: Any) -> Tensor | None:
    """Return the leaf tensor whose gradient a node accumulates; None if it does something else."""
    # A node of the user's own may have any attributes, also a `variable`.
    leaf: Tensor | None = node.variable if type(node).__name__ == "AccumulateGrad" else None
    return leaf


def leaves_of(loss: Tensor) -> set[Tensor]:
    """Return the leaf tensors that gradients of `loss` flow into."""
    return {leaf for node in nodes_of(loss) if (leaf := leaf_of(node)) is not None}


def reaches_none(loss: Tensor, parameters: Collection[int]) -> bool:
    """Return whether a loss with a graph of at most 32 nodes, as of a zero, depends on none of the parameters, by `id`.

    Larger graphs are not searched, so that this is cheap enough for every step.
    """
    for count, node in enumerate(nodes_of(loss)):
        leaf = leaf_of(node)
        if count >= 32 or hides_leaves(node) or (leaf is not None and id(leaf) in parameters):
            return False
    return True


def hides_leaves(node: Any) -> bool:
    """Return whether a node runs a backward pass of its own, to leaves that the graph does not show.

    **Source**: `torch.utils.checkpoint.checkpoint(use_reentrant=True)` (2.13), and DeepSpeed's of the same name.
    """
    return type(node).__name__ == "CheckpointFunctionBackward"


def on_backward(module: nn.Module, hook: Callable[[Tensor], None]) -> None:
    """Call `hook` with the gradient of each output of `module` when a backward pass reaches that output."""
    hooked = WeakTensorKeyDictionary()  # leaves of the graph, such as a parameter that is returned: they live on

    def watch(_: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            for leaf in (*tree_leaves(output), *hidden_tensors(output)):
                if isinstance(leaf, Tensor) and leaf.requires_grad and not (leaf.is_leaf and leaf in hooked):
                    leaf.register_hook(hook)  # type: ignore[no-untyped-call]
                    if leaf.is_leaf:
                        hooked[leaf] = True

    module.register_forward_hook(never_compiled(watch))


def backward_pass() -> int:
    """Return the number of the backward pass that runs in this thread; -1 outside of one."""
    return int(torch._C._current_graph_task_id())  # torch's own wrappers ask so, and no public function tells (2.13)


def after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` at the end of the backward pass that runs in this thread, when all gradients are there.

    What is queued is called in that order, also what DDP and FSDP queue, which use the same function.
    """
    Variable._execution_engine.queue_callback(callback)  # there is no public one (2.13)


def refuse_second_backward(module: nn.Module, why: str) -> None:
    """Let a backward pass through the outputs of `module` raise an error if it is to be differentiated itself.

    **Source**: autograd (2.13) enables gradients within a backward pass only with `create_graph=True`.
    """

    def refuse(gradient: Tensor) -> None:
        if torch.is_grad_enabled():
            raise ConfigError(
                f"a backward pass through {type(module).__name__} must not be differentiated again (create_graph=True, "
                f"as for a penalty on gradients), because {why} ({this_rank()}). Use strategy 'ddp'"
            )

    on_backward(module, refuse)


def never_compiled(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that is excluded from compilation."""
    disabled: Callable[..., Any] = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    return disabled
