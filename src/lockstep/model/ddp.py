"""`MMDistributedDataParallel`: torch's DDP with the training and validation steps of a model."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.dist import get_rank, get_world_size
from lockstep.model import steps
from lockstep.model.comm_hooks import HookConfig, register_comm_hook
from lockstep.registry import MODEL_WRAPPERS

_logger = logging.getLogger(__name__)

# torch 2.13 warns of the old name, which torch 2.11 knows alone.
_BUFFERS_ARGUMENT = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


@MODEL_WRAPPERS.register_module()
class MMDistributedDataParallel(DistributedDataParallel):
    """Train replicas of a module on all ranks, with their gradients averaged.

    Args:
        module: the module, which lies on the device it is to be trained on. It need not be a `BaseModel`.
        detect_anomalous_params: before each backward pass, look for trainable parameters that the loss does not depend
            on, and warn of those that were not named before. Each rank speaks for itself: where the ranks' losses
            depend on different parameters, so do their warnings. Costs one walk over the autograd graph per step.
        comm_hook: how gradients travel: `"fp16_compress"`, `"bf16_compress"`, `"powerSGD"` or another name in
            `COMM_HOOKS`; a dict with such a `type` and its options; or a function for torch's `register_comm_hook`.
        **kwargs: those of `torch.nn.parallel.DistributedDataParallel`. `device_ids` can be left out, and on the CPU
            is ignored. `broadcast_buffers` says whether each forward pass sends rank 0's buffers to the others; they
            begin equal in any case. `gradient_as_bucket_view` is True by default, other than torch's: gradients lie
            in the buffers that they travel in, so that they are held once, not twice, and are not copied back. Whoever
            keeps a gradient from one step to the next keeps a copy, or passes False.

    **Collective**: every rank of the group; the parameters of rank 0 are sent to the others.
    """

    def __init__(
        self,
        module: nn.Module,
        detect_anomalous_params: bool = False,
        *,
        comm_hook: HookConfig | None = None,
        **kwargs: Any,
    ) -> None:
        if all(parameter.device.type == "cpu" for parameter in module.parameters()):
            kwargs.pop("device_ids", None)
            kwargs.pop("output_device", None)
        if _BUFFERS_ARGUMENT != "broadcast_buffers" and "broadcast_buffers" in kwargs:
            kwargs[_BUFFERS_ARGUMENT] = kwargs.pop("broadcast_buffers")
        kwargs.setdefault("gradient_as_bucket_view", True)  # docs/decisions/0010
        super().__init__(module, **kwargs)
        if comm_hook is not None:
            register_comm_hook(self, comm_hook)
        self.detect_anomalous_params = detect_anomalous_params
        self._named_anomalous: set[str] = set()

    def train_step(self, data: Any, optim_wrapper: steps.UpdatesParams) -> dict[str, Tensor]:
        """Train on this rank's part of the batch, and return this rank's values to log.

        **Collective**: every rank of the group, unless inside `no_sync`.
        """
        if not self.detect_anomalous_params:
            return steps.train_step(self, data, optim_wrapper)
        return steps.train_step(self, data, _Inspecting(optim_wrapper, self._report_anomalous))

    def val_step(self, data: Any) -> Any:
        """Return what the module predicts for this rank's batch. Nothing is sent."""
        return steps.own_step(self.module, "val_step", data)

    def test_step(self, data: Any) -> Any:
        """Return what the module predicts for this rank's batch. Nothing is sent."""
        return steps.own_step(self.module, "test_step", data)

    def _report_anomalous(self, loss: Tensor) -> None:
        reached = leaves_of(loss)
        names = [
            name
            for name, parameter in self.module.named_parameters()
            if parameter.requires_grad and parameter not in reached and name not in self._named_anomalous
        ]
        if names:
            self._named_anomalous.update(names)
            _logger.warning(
                "the loss does not depend on %d parameters, which get no gradient (rank %d of %d): %s. Freeze them "
                "with requires_grad_(False), or pass find_unused_parameters=True",
                len(names), get_rank(self.process_group), get_world_size(self.process_group), ", ".join(names),
            )  # fmt: skip


class _Inspecting:
    """An optim wrapper that shows each loss to somebody before it is used."""

    def __init__(self, optim_wrapper: steps.UpdatesParams, look: Callable[[Tensor], None]) -> None:
        self._optim_wrapper = optim_wrapper
        self._look = look
        self.optim_context = optim_wrapper.optim_context

    def update_params(self, loss: Tensor) -> None:
        self._look(loss)
        self._optim_wrapper.update_params(loss)


def leaves_of(loss: Tensor) -> set[Tensor]:
    """Return the leaf tensors that gradients of `loss` flow into."""
    leaves: set[Tensor] = set()
    seen: set[Any] = set()
    open_nodes = [loss.grad_fn]
    while open_nodes:
        node = open_nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves.add(leaf)
        open_nodes += [parent for parent, _ in node.next_functions]
    return leaves
