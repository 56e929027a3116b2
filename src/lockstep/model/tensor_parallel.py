"""Tensor parallelism: several ranks compute a module together, each with a part of its weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from lockstep.errors import ConfigError
from lockstep.model.parts import owners_of_parameters
from lockstep.model.tensor_parallel_plan import Split, owner_of_layer, read_plan, split_of
from lockstep.model.tensor_parallel_trial import PlanTrial


class TensorParallel:
    """The modules of one model that the ranks of a mesh compute together.

    Activations between the modules of a plan are whole and equal on all of these ranks, except where the styles leave
    them split, as between a `colwise` and a `rowwise` module. Random numbers must be equal, too: see
    `lockstep.dataset.random_state`.

    Args:
        model: the model, not sharded yet.
        plan: styles by patterns of names; None takes the model's own `_tp_plan`.
        mesh: one axis, the ranks that compute together.
        ignored: all modules that are not sharded, and so can't be split either.

    Raises:
        ConfigError: on every rank, if the plan does not fit the model or the number of ranks.

    **Source**: Shoeybi et al., Megatron-LM, 2019; `torch.distributed.tensor.parallel.parallelize_module` (2.13).
    """

    def __init__(
        self, model: nn.Module, plan: Mapping[str, Any] | None, mesh: DeviceMesh, ignored: Collection[nn.Module] = ()
    ) -> None:
        self.mesh = mesh
        styles = read_plan(model, plan)
        for name, style in styles.items():
            if model.get_submodule(name) in ignored:
                raise ConfigError(f"`ignored_modules` must not hold what tensor_parallel splits, but holds `{name}`")
            _check_module(model, name, split_of(style), mesh.size())
        self._styles = {model.get_submodule(name): style for name, style in styles.items()}
        self._names = {module: name for name, module in model.named_modules()}
        self._trial = PlanTrial(model, styles, mesh, split_layer, _add_to_plan)
        self._ties = [sites for sites in owners_of_parameters(model).values() if len(sites) > 1]

    def apply(self, unit: nn.Module) -> None:
        """Split the modules in a part of the model; every rank of the mesh must hold the same values of it.

        Modules that are split already are skipped. Nothing is sent.

        Raises:
            ConfigError: a parameter that several modules share would be split in different ways.
        """
        modules = list(unit.modules())
        self._trial.copy(unit)
        for module in modules:
            style = self._styles.pop(module, None)
            if style is not None:
                split_layer(module, style, self.mesh)
        inside = set(modules)
        for sites in self._ties:
            if all(owner in inside for owner, _ in sites):
                self._tie(sites)
        for module in modules:
            if isinstance(module, nn.TransformerEncoderLayer):
                # Its fast path for inference passes the weights to a kernel that does not support DTensor (2.13).
                module.activation_relu_or_gelu = 0

    def _tie(self, sites: list[tuple[nn.Module, str]]) -> None:
        """Let modules share a parameter again, after each of them has split it separately."""
        parameters = [getattr(owner, name) for owner, name in sites]
        placements = {parameter.placements if isinstance(parameter, DTensor) else None for parameter in parameters}
        if len(placements) > 1:
            names = " and ".join(f"`{self._names[owner]}.{name}`" for owner, name in sites)
            raise ConfigError(
                f"{names} are one parameter, which `tensor_parallel` must split in one way for all, but splits as "
                f"{' and '.join(map(str, placements))}. An embedding split 'rowwise' goes with a head split 'colwise'"
            )
        for owner, name in sites[1:]:
            setattr(owner, name, parameters[0])


def split_layer(module: nn.Module, style: ParallelStyle, mesh: DeviceMesh) -> None:
    """Split a layer that has the same values on all ranks of a mesh; what it returns has arrived. Nothing is sent."""
    parallelize_module(module, mesh, style, src_data_rank=None)
    module.register_forward_hook(_wait)


def _add_to_plan(pattern: str) -> str:
    return f"Add {{{pattern!r}: 'replicated_with_grad_allreduce'}} to the plan"


class _Waited(torch.autograd.Function):
    """Waits for a tensor whose collective is still in flight, as a differentiable function."""

    @staticmethod
    def forward(ctx: Any, tensor: AsyncCollectiveTensor) -> Tensor:
        return tensor.wait()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _wait(module: nn.Module, args: Any, output: Any) -> Any:
    """Wait for a module's output, because compiled code loses the gradient of a tensor that is in flight (2.13).

    The class of such tensors has no public name.
    """
    if not isinstance(output, AsyncCollectiveTensor):
        return output
    return _Waited.apply(output)  # type: ignore[no-untyped-call]


# Names of the number of heads, in models and their configs, by which the outputs of a module are divided.
_HEADS = (
    "num_heads", "n_heads", "n_head", "nhead", "num_attention_heads",
    "num_key_value_heads", "num_kv_heads", "n_kv_heads",
)  # fmt: skip


def _check_module(model: nn.Module, name: str, split: Split | None, degree: int) -> None:
    """Refuse a module that can't be split into `degree` equal parts."""
    module = model.get_submodule(name)
    parent = owner_of_layer(model, name)
    if isinstance(parent, nn.MultiheadAttention):
        raise ConfigError(
            f"`tensor_parallel` must name modules that are called, but `{name}` is in a torch.nn.MultiheadAttention, "
            "which reads its weights itself. Leave it out, or use an attention of Linear layers"
        )
    if split is None:
        return
    if not isinstance(module, nn.Linear | nn.Embedding):
        raise ConfigError(
            f"`tensor_parallel` must split Linear and Embedding layers, but `{name}` is a {type(module).__name__}"
        )
    attribute = split.attribute(module)
    size = getattr(module, attribute)
    if size % degree:
        raise ConfigError(
            f"`{name}.{attribute}` must be a multiple of {degree}, the degree of tensor_parallel, to be split "
            f"'{split.value}', but is {size}. {split.remedy(module)}"
        )
    if split is Split.COLUMNS and isinstance(module, nn.Linear):
        _check_heads(name, parent, degree)
        if hasattr(parent, "head_dim"):  # an attention module of HuggingFace's models
            _check_heads(name, getattr(model, "config", None), degree)


def _check_heads(name: str, owner: object, degree: int) -> None:
    for attribute in _HEADS:
        heads = getattr(owner, attribute, None)
        if isinstance(heads, int) and heads % degree:
            raise ConfigError(
                f"`{attribute}` of {type(owner).__name__} must be a multiple of {degree}, the degree of "
                f"tensor_parallel, because `{name}` is split by heads, but is {heads}. Choose another degree"
            )
