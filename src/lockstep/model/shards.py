"""Models that FSDP has sharded: telling them, and keeping a copy of one."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def is_sharded(model: nn.Module) -> bool:
    """Return whether this rank holds only a part of some parameter."""
    return any(hasattr(parameter, "to_local") for parameter in model.parameters())


def own_shard(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, in the same memory; of one that is not sharded the tensor itself."""
    # Asked without importing DTensor, which takes longer than all of lockstep.
    to_local = getattr(tensor, "to_local", None)
    if to_local is None:
        return tensor
    shard: Tensor = to_local()
    return shard


def full_numel(parameter: Tensor) -> int:
    """Return the number of elements that a parameter has in full, also while an engine holds it in pieces."""
    layout = getattr(parameter, "dist_layout", None)
    count: int = getattr(parameter, "ds_numel", parameter.numel()) if layout is None else layout.global_shape.numel()
    return count


def is_in_pieces(model: nn.Module) -> bool:
    """Return whether an engine holds parameters in pieces that only it can put together.

    DeepSpeed does at ZeRO stage 3, ColossalAI in tensor parallelism and in pipelines.
    """
    marks = ("ds_numel", "dist_layout", "pipeline_stage")
    return any(hasattr(parameter, mark) for parameter in model.parameters() for mark in marks)


class ShardedCopy(nn.Module):
    """The parameters and buffers of a sharded model, copied, under the same names, but without its code.

    FSDP ties a module's code to its communication, so that it refuses to copy it; the tensors can be copied.

    Args:
        model: whose parameters are sharded now, as they are between a backward and the next forward pass.
    """

    def __init__(self, model: nn.Module, _copies: dict[int, Any] | None = None) -> None:
        super().__init__()
        copies = {} if _copies is None else _copies  # what is shared in the model is shared in the copy
        for name, parameter in model.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in copies:
                copies[id(parameter)] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            self.register_parameter(name, copies[id(parameter)])
        for name, buffer in model.named_buffers(recurse=False, remove_duplicate=False):
            if id(buffer) not in copies:
                copies[id(buffer)] = buffer.clone()
            self.register_buffer(name, copies[id(buffer)], name not in model._non_persistent_buffers_set)
        for name, child in model._modules.items():
            if child is not None:
                if id(child) not in copies:
                    copies[id(child)] = ShardedCopy(child, copies)
                self.add_module(name, copies[id(child)])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: there is no code to call.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "the copy of a sharded model can't be called. Copy its parameters into the model, as EMAHook does for "
            "validation, or load them from a checkpoint"
        )
