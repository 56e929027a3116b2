"""`MMSeparateDistributedDataParallel`: a DDP around each part of a model, as a GAN needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from lockstep.errors import listed
from lockstep.groups import resolve, this_rank
from lockstep.model.autograd_graph import on_backward
from lockstep.model.ddp import MMDistributedDataParallel
from lockstep.model.parts import broadcast_from_first, callable_children, require_same_parameters
from lockstep.model.wrapper import ModelWrapper, all_entered
from lockstep.model.written import OWN_STEP, DriftCheck, awaits_update
from lockstep.registry import MODEL_WRAPPERS


@MODEL_WRAPPERS.register_module()
class MMSeparateDistributedDataParallel(ModelWrapper):
    """Wrap each child that has trainable parameters in its own DDP.

    With one DDP around a whole GAN, the generator's step waits for gradients of the discriminator, unless DDP searches
    the graph in every step (`find_unused_parameters`). With a DDP around each of the two, each waits only for its own
    gradients. The module's `train_step` runs unchanged; its children are now DDPs (their own attributes are in
    `.module`).

    Containers without a `forward`, such as `ModuleList`, are not wrapped; their children are.

    Args:
        module: the model, on the device on which it will be trained. Each trainable parameter must belong to exactly
            one child.
        device_ids: as for DDP; ignored on the CPU.
        output_device: as for DDP; ignored on the CPU.
        broadcast_buffers: send rank 0's buffers to the others in each forward pass of training.
        find_unused_parameters: search the graph of each child's outputs for parameters that get no gradient.
        **kwargs: further arguments of `MMDistributedDataParallel`, for every child.

    **Collective**: every rank; the parameters and buffers of rank 0 are sent to the others, also those of children that
    are frozen.

    Raises:
        ValueError: a trainable parameter belongs to no child, or to two of them; or, in a step, one was not there, or
            frozen, when the children were wrapped.
        CollectiveMismatchError: on every rank, if the models of the ranks have other parameters or buffers.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        broadcast_buffers: bool = False,
        find_unused_parameters: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        _check_ownership(module)
        kwargs |= {"device_ids": device_ids, "output_device": output_device}
        kwargs |= {"broadcast_buffers": broadcast_buffers, "find_unused_parameters": find_unused_parameters}
        self.process_group = kwargs.get("process_group") or kwargs.get("device_mesh")
        comm = resolve(self.process_group)
        if comm.size > 1:  # each child is compared, too, but ranks may have other children
            require_same_parameters(module, comm.ranks, comm.pg, buffers=True)
        self._parallel: list[MMDistributedDataParallel] = []
        names: dict[nn.Module, list[str]] = {}  # a child may have several
        for name, part in module.named_modules(remove_duplicate=False):
            names.setdefault(part, []).append(name)
        for _, _, child in callable_children(module):
            if any(parameter.requires_grad for parameter in child.parameters()):
                wrapped = MMDistributedDataParallel(child, **kwargs)
                on_backward(wrapped, wrapped.clock.follow)  # nobody enters its `backward_context`
                for name in names[child]:
                    parent, _, own_name = name.rpartition(".")
                    setattr(module.get_submodule(parent), own_name, wrapped)
                self._parallel.append(wrapped)
        self._inside = {tensor for part in self._parallel for tensor in (*part.parameters(), *part.buffers())}
        tensors = (*module.parameters(), *module.buffers())
        broadcast_from_first([own for own in tensors if own not in self._inside], self.process_group)
        self.module = module
        self._drift = DriftCheck(self._replicated, self.process_group, OWN_STEP)

    @contextmanager
    def step_context(self, optim_wrapper: Any) -> Iterator[None]:
        """Return the context of one step; after it, check now and then that replicas are equal; see `DriftCheck`."""
        if missed := [name for name, own in self._outside() if own.requires_grad]:
            raise ValueError(
                "parameters must be there, and trainable, when MMSeparateDistributedDataParallel wraps the children "
                f"that have them, but {listed(missed, most=4)} were not ({this_rank()}), and their gradients would not "
                "be averaged over ranks. Add parameters before the model is wrapped, and freeze them afterwards"
            )
        yield
        if not awaits_update(optim_wrapper):
            self._drift.after_update()

    def begin_save(self) -> None:
        """Compare replicas, of which a checkpoint has one."""
        self._drift.before_save()

    def _outside(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, own) for name, own in self.module.named_parameters() if own not in self._inside]

    def _replicated(self) -> list[tuple[str, nn.Parameter]]:
        return self._outside() + [
            (f"{name}.{own_name}", own)
            for name, part in self.module.named_modules()
            if isinstance(part, MMDistributedDataParallel)
            for own_name, own in part.replicated()
        ]

    def no_sync(self) -> AbstractContextManager[None]:
        """Let no child exchange gradients in the forward and backward passes inside."""
        return all_entered(wrapped.no_sync() for wrapped in self._parallel)

    @contextmanager
    def evaluation_context(self) -> Iterator[None]:
        """Let no child send its buffers."""
        # The module calls its children's DDPs, which would send buffers even without gradients, while ranks may hold
        # different numbers of validation batches.
        before = [wrapped.require_forward_param_sync for wrapped in self._parallel]
        for wrapped in self._parallel:
            wrapped.require_forward_param_sync = False
        try:
            yield
        finally:
            for wrapped, required in zip(self._parallel, before, strict=True):
                wrapped.require_forward_param_sync = required


def _check_ownership(module: nn.Module) -> None:
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(parameter, []).append(name)
    owners = Counter(parameter for _, _, part in callable_children(module) for parameter in part.parameters())
    if orphans := [known[0] for parameter, known in names.items() if not owners[parameter]]:
        raise ValueError(
            f"`module` must hold its trainable parameters in children that have a forward, but {type(module).__name__} "
            f"itself has {', '.join(orphans)}, which would not be averaged over ranks. Move them into a child, or use "
            "MMDistributedDataParallel"
        )
    if shared := ["=".join(known) for parameter, known in names.items() if owners[parameter] > 1]:
        raise ValueError(
            "`module` must hold each trainable parameter in one child, but two would both average "
            f"{', '.join(shared)}. Use MMDistributedDataParallel"
        )
