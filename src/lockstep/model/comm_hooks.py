"""Communication hooks of DDP, which send gradients in half precision or as matrices of low rank.

Each entry of `COMM_HOOKS` takes the process group and its own options, and returns the state and the function to pass
to `DistributedDataParallel.register_comm_hook`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import Tensor
from torch.distributed import GradBucket, ProcessGroup
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from lockstep.registry import Registry

Hook: TypeAlias = Callable[[Any, GradBucket], Future[Tensor]]
HookConfig: TypeAlias = str | Mapping[str, Any] | Hook

COMM_HOOKS = Registry("communication hook", scope="lockstep")
"""DDP's communication hooks, by name."""


@COMM_HOOKS.register_module()
def fp16_compress(process_group: ProcessGroup) -> tuple[Any, Hook]:
    """Send gradients in float16: half the bytes; values above 65504 overflow."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return process_group, default_hooks.fp16_compress_hook


@COMM_HOOKS.register_module()
def bf16_compress(process_group: ProcessGroup) -> tuple[Any, Hook]:
    """Send gradients in bfloat16: half the bytes, the range of float32, 8 bits of precision.

    DDP recognises torch's own hook, and refuses it on all backends but NCCL and XCCL (2.13); this one also works on
    gloo.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    def send(group: ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
        return default_hooks.bf16_compress_hook(group, bucket)

    # DDP compares a hook's annotations with type objects; in this module annotations are strings.
    send.__annotations__ = {"bucket": GradBucket, "return": Future[Tensor]}
    return process_group, send


@COMM_HOOKS.register_module(name="powerSGD")
def low_rank(process_group: ProcessGroup, **options: Any) -> tuple[Any, Hook]:
    """Send each gradient as two matrices of low rank; `options` are those of torch's `PowerSGDState`.

    The compression error is added to the next step's gradients. Each rank keeps its own error, which is not part of
    checkpoints.

    **Source**: Vogels et al., PowerSGD, NeurIPS 2019; `torch.distributed.algorithms.ddp_comm_hooks` (2.13).
    """
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd

    return power_sgd.PowerSGDState(process_group, **options), power_sgd.powerSGD_hook


def register_comm_hook(wrapper: DistributedDataParallel, comm_hook: HookConfig) -> None:
    """Make `wrapper` exchange its gradients by `comm_hook`.

    Args:
        wrapper: the DDP module, before its first backward pass.
        comm_hook: a name in `COMM_HOOKS`; a dict with such a `type` and its options; or a function for
            `register_comm_hook`, which gets the process group as its state.
    """
    group = wrapper.process_group
    if isinstance(comm_hook, str | Mapping):
        cfg = {"type": comm_hook} if isinstance(comm_hook, str) else comm_hook
        state, hook = COMM_HOOKS.build(cfg, process_group=group)
    elif callable(comm_hook):
        state, hook = group, comm_hook
    else:
        raise TypeError(
            "`comm_hook` must be the name of a communication hook, a config dict, a function or None, but is "
            f"{comm_hook!r} of type {type(comm_hook).__name__}. Names: {', '.join(COMM_HOOKS)}"
        )
    wrapper.register_comm_hook(state, hook)
