"""A tensor-parallel plan: which layers of a model are split, how, and whether they can be."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from inspect import getattr_static
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from lockstep.errors import ConfigError, did_you_mean, require_known


class PlanRequest(NamedTuple):
    """What `tensor_parallel` asks for.

    Attributes:
        degree: number of ranks that compute together; None takes it from the mesh.
        plan: styles by patterns of names; None takes it from the model.
    """

    degree: int | None = None
    plan: Mapping[str, Any] | None = None


def read_request(tensor_parallel: Any) -> PlanRequest | None:
    """Return the request for a degree, or for a dict of `degree` and `plan`; None for None.

    Raises:
        ConfigError: it is something else, or not a number of ranks.
    """
    if tensor_parallel is None:
        return None
    given = tensor_parallel if isinstance(tensor_parallel, Mapping) else {"degree": tensor_parallel}
    require_known("tensor_parallel", given, PlanRequest._fields)
    degree, plan = request = PlanRequest(**given)
    if degree is not None and (isinstance(degree, bool) or not isinstance(degree, int) or degree < 1):
        raise ConfigError(
            "`tensor_parallel` must be a number of ranks, at least 1, or a dict(degree=..., plan=...), but is "
            f"{degree!r}"
        )
    if plan is not None and not isinstance(plan, Mapping):
        raise ConfigError(
            "`tensor_parallel['plan']` must be a dict of styles by patterns of names, as in {'*.attn.q': 'colwise'}, "
            f"but is {plan!r}"
        )
    return request


def read_plan(model: nn.Module, plan: Mapping[str, Any] | None) -> dict[str, ParallelStyle]:
    """Return the style of each module to split, by the module's name.

    Args:
        model: the model.
        plan: by patterns of names (`*` matches anything, dots too), the name of a style or one of torch's styles. None
            takes the `_tp_plan` of the model itself, as in HuggingFace's models, or of its parts.

    Raises:
        ConfigError: there is no plan; a pattern matches nothing; a style is unknown; or two patterns contradict.
    """
    given = _own_plan(model) if plan is None else plan
    if not given:
        raise ConfigError(
            f"`tensor_parallel` must have a plan, because {type(model).__name__} has none in `_tp_plan`. For example "
            "dict(degree=2, plan={'*.linear1': 'colwise', '*.linear2': 'rowwise'})"
        )
    chosen: dict[str, tuple[str, Any]] = {}
    for pattern, style in given.items():
        matches = _matches(model, pattern)
        if not matches:
            _refuse_parameters(model, pattern, given)
            raise ConfigError(
                f"`tensor_parallel` must name modules of {type(model).__name__}, but {pattern!r} matches none"
                + did_you_mean(pattern, _patterns_for(model))
            )
        for name in matches:
            before = chosen.setdefault(name, (pattern, style))
            if not _are_equal(before[1], style):
                raise ConfigError(
                    f"`tensor_parallel` must split `{name}` in one way, but says {before[1]!r} by {before[0]!r} and "
                    f"{style!r} by {pattern!r}"
                )
    layers = {layer: choice for name, choice in chosen.items() for layer, choice in _layers(model, name, choice)}
    read = {name: _read_style(pattern, style, model.get_submodule(name)) for name, (pattern, style) in layers.items()}
    return {name: style for name, style in read.items() if style is not None}


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, ParallelStyle) and type(one) is type(other):  # torch compares them by identity
        return vars(one) == vars(other)
    return bool(one == other)


def owner_of_layer(model: nn.Module, name: str) -> nn.Module:
    """Return the module around a layer, skipping modules that an adapter has inserted between them."""
    owner = name.rpartition(".")[0]
    while owner and isinstance(getattr(model.get_submodule(owner), "base_layer", None), nn.Module):
        owner = owner.rpartition(".")[0]
    return model.get_submodule(owner)


def _rowwise(module: nn.Module) -> ParallelStyle:
    # The rows of an embedding are its words: every rank gets all indices.
    return RowwiseParallel(input_layouts=Replicate()) if isinstance(module, nn.Embedding) else RowwiseParallel()


_STYLES: Mapping[str, Callable[[nn.Module], ParallelStyle | None]] = {
    "colwise": lambda _: ColwiseParallel(),
    "colwise_rep": lambda _: ColwiseParallel(output_layouts=Replicate()),
    "rowwise": _rowwise,
    "rowwise_rep": lambda _: RowwiseParallel(input_layouts=Replicate()),
    "local_rowwise": lambda _: RowwiseParallel(output_layouts=Partial()),
    "gather": lambda _: PrepareModuleOutput(output_layouts=Partial(), desired_output_layouts=Replicate()),
    "sequence_parallel": lambda _: SequenceParallel(),
    # Every rank's part of the activations counts as separate samples, whose gradients are summed.
    "replicated_with_grad_allreduce": lambda _: SequenceParallel(sequence_dim=0, use_local_output=True),
    "replicate": lambda _: None,
}  # fmt: skip
# Other names for the same styles, used by HuggingFace's models.
_ALIASES = {
    "colwise_gather_output": "colwise_rep", "rowwise_split_input": "rowwise_rep", "embedding_rowwise": "rowwise",
    "all_reduce": "gather", "local_colwise": "colwise",
}  # fmt: skip


def _read_style(pattern: str, style: Any, module: nn.Module) -> ParallelStyle | None:
    if isinstance(style, ParallelStyle):
        return style
    if not isinstance(style, str) or _ALIASES.get(style, style) not in _STYLES:
        raise ConfigError(
            f"`tensor_parallel['plan'][{pattern!r}]` must be the name of a style, or a ParallelStyle of torch's, but "
            f"is {style!r}" + did_you_mean(style, _STYLES)
        )
    return _STYLES[_ALIASES.get(style, style)](module)


def _own_plan(model: nn.Module) -> dict[str, Any]:
    """Return the plans of the outermost modules that have a `_tp_plan`, with names as seen from the model.

    A plan may serve several models: one may have a dense layer where another has experts. So entries for a module are
    left out if it has none of the layers that they split.
    """
    plan: dict[str, Any] = {}
    inside = ""
    for name, module in model.named_modules():
        # Not the plan that a wrapper such as peft's forwards from its inner module, whose names lack a prefix.
        own = getattr_static(module, "_tp_plan", None)
        if isinstance(own, Mapping) and own and not (inside and name.startswith(inside)):
            prefix = inside = f"{name}." if name else ""
            plan.update((f"{prefix}{pattern}", style) for pattern, style in own.items())
            if not name:
                break
    splits = [pattern for pattern, style in plan.items() if _is_split(style)]
    present = {pattern.rpartition(".")[0] for pattern in splits if _matches(model, pattern)}
    return {
        pattern: style
        for pattern, style in plan.items()
        if pattern not in splits or pattern.rpartition(".")[0] in present or _parameters(model, pattern)
    }


def _is_split(style: Any) -> bool:
    return isinstance(style, ParallelStyle) or (isinstance(style, str) and ("colwise" in style or "rowwise" in style))


def _matches(model: nn.Module, pattern: Any) -> list[str]:
    return [name for name, _ in model.named_modules() if name and fnmatchcase(name, str(pattern))]


def _parameters(model: nn.Module, pattern: Any) -> list[str]:
    return [name for name, _ in model.named_parameters() if fnmatchcase(name, str(pattern))]


def _refuse_parameters(model: nn.Module, pattern: str, given: Mapping[str, Any]) -> None:
    """Refuse a pattern that names parameters, as of experts: their module reads one slice per expert."""
    parameters = _parameters(model, pattern)
    if not parameters:
        return
    owners = {name.rpartition(".")[0] for name in parameters}
    rest = {
        other: style
        for other, style in given.items()
        if (matches := _matches(model, other)) and owners.isdisjoint(matches)
    }
    raise ConfigError(
        f"`tensor_parallel` must name modules of {type(model).__name__}, but {pattern!r} ({given[pattern]!r}) names a "
        f"parameter, `{parameters[0]}`, of which a module reads slices. Leave that module whole by plan={rest}, or use "
        "strategy 'fsdp' without tensor_parallel"
    )


def _layers(model: nn.Module, name: str, choice: tuple[str, Any]) -> Iterator[tuple[str, tuple[str, Any]]]:
    """Yield the layer of that name; if a low-rank adapter is around it, also the factors that must be split with it.

    Along columns, the second factor is split like the layer itself, and the first is whole; along rows, the other way
    round. Of a layer that peft keeps beside its trained copies (`modules_to_save`), all are split.
    """
    module = model.get_submodule(name)
    if isinstance(copies := getattr(module, "modules_to_save", None), nn.ModuleDict) and _is_split(choice[1]):
        for part in ("original_module", *(f"modules_to_save.{key}" for key in copies)):
            yield from _layers(model, f"{name}.{part}", choice)
        return
    if not isinstance(getattr(module, "base_layer", None), nn.Module) or not _is_split(choice[1]):
        yield name, choice
        return
    factor = "lora_B" if isinstance(_read_style(*choice, module), ColwiseParallel) else "lora_A"
    known = ("base_layer.", "lora_A.", "lora_B.")
    other = [parameter for parameter, _ in module.named_parameters() if not parameter.startswith(known)]
    factors = [f"{factor}.{key}" for key, _ in getattr(module, factor, nn.Module()).named_children()]
    if other or not factors:
        what = f"`{name}.{other[0]}`" if other else f"no `{factor}`"
        raise ConfigError(
            f"`tensor_parallel` must split layers that are plain, or in an adapter of two factors, but `{name}`, a "
            f"{type(module).__name__}, has {what}. Leave it out by a plan of your own, or use strategy 'fsdp' without "
            "tensor_parallel"
        )
    for part in ("base_layer", *factors):
        yield f"{name}.{part}", choice


def _patterns_for(model: nn.Module) -> list[str]:
    """Return patterns for the modules that own parameters, one for all names that differ only in a number."""
    return [
        re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
        for name, module in model.named_modules()
        if name and any(True for _ in module.parameters(recurse=False))
    ]


def split_layer(module: nn.Module, style: ParallelStyle, mesh: DeviceMesh) -> None:
    """Split a layer that has the same values on all ranks of a mesh, without communication; wait for its outputs."""
    parallelize_module(module, mesh, style, src_data_rank=None)
    module.register_forward_hook(_wait)


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


def check_layer(model: nn.Module, name: str, style: ParallelStyle, degree: int) -> None:
    """Refuse a module that can't be split into `degree` equal parts."""
    module = model.get_submodule(name)
    parent = owner_of_layer(model, name)
    if isinstance(parent, nn.MultiheadAttention):
        raise ConfigError(
            f"`tensor_parallel` must name modules that are called, but `{name}` is in a torch.nn.MultiheadAttention, "
            "which reads its weights itself. Leave it out, or use an attention of Linear layers"
        )
    if not isinstance(style, ColwiseParallel | RowwiseParallel):
        return
    if not isinstance(module, nn.Linear | nn.Embedding):
        raise ConfigError(
            f"`tensor_parallel` must split Linear and Embedding layers, but `{name}` is a {type(module).__name__}. "
            "Leave it out by a plan of your own, or use strategy 'fsdp' without tensor_parallel"
        )
    by_columns, is_linear = isinstance(style, ColwiseParallel), isinstance(module, nn.Linear)
    of_columns, of_rows = ("out_features", "in_features") if is_linear else ("embedding_dim", "num_embeddings")
    attribute = of_columns if by_columns else of_rows
    size = getattr(module, attribute)
    if size % degree:
        split, other = ("colwise", "rowwise") if by_columns else ("rowwise", "colwise")
        raise ConfigError(
            f"`{name}.{attribute}` must be a multiple of {degree}, the degree of tensor_parallel, to be split "
            f"'{split}', but is {size}. Split it '{other}_rep', leave it out, or choose another degree or {attribute}"
        )
    if by_columns and is_linear:
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
