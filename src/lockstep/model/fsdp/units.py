"""Choosing the units of a model: the parts that FSDP gathers and frees together.

A policy is one of: a class of modules or its name, or several of them; a function of a module that says whether it is a
unit; one of torch's policies (`ModuleWrapPolicy`, and functions of `module, recurse, nonwrapped_numel`); an object with
`choose(model)`, which gets the whole model; a name in `FSDP_WRAP_POLICIES`, or a dict with such a `type` and its
options. FSDP needs units whose parameters have one dtype: parts with another dtype become separate units, see
`cut_by_dtype`.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, wrap

from lockstep.errors import ConfigError, did_you_mean
from lockstep.model.parts import Site, callable_children, classes_in, is_callable, owners_of_parameters
from lockstep.registry import Registry


def is_unit(module: nn.Module) -> bool:
    """Return whether FSDP gathers a module as a unit."""
    return isinstance(module, FSDPModule)


def sites_by_unit(module: nn.Module) -> dict[nn.Module, dict[Site, str]]:
    """Return, for each unit, where to find its sharded parameters, and their names as seen from `module`."""
    sites: dict[nn.Module, dict[Site, str]] = {}
    unit_of: dict[str, nn.Module] = {}
    names: dict[Tensor, str] = {}
    for name, part in module.named_modules():
        unit = part if is_unit(part) else unit_of[name.rpartition(".")[0]]
        unit_of[name] = unit
        own = sites.setdefault(unit, {})
        for key, parameter in part.named_parameters(recurse=False):
            if hasattr(parameter, "device_mesh"):
                full_name = names.setdefault(parameter, f"{name}.{key}" if name else key)
                own[part, key] = full_name
    return sites


FSDP_WRAP_POLICIES = Registry("FSDP wrap policy", scope="lockstep")
"""FSDP's policies for choosing units, by name."""
for _name in (
    "always_wrap_policy", "lambda_auto_wrap_policy", "size_based_auto_wrap_policy", "transformer_auto_wrap_policy",
    "ModuleWrapPolicy",
):  # fmt: skip
    FSDP_WRAP_POLICIES.register_module(module=getattr(wrap, _name))
# torch 1.11's name for size_based_auto_wrap_policy, which MMEngine's registry still uses.
FSDP_WRAP_POLICIES.register_module(name="default_auto_wrap_policy", module=wrap.size_based_auto_wrap_policy)


@FSDP_WRAP_POLICIES.register_module(name="repeated_blocks")
class RepeatedBlocks:
    """Make a unit of each block that a model repeats, such as the layers of a transformer.

    The blocks are the modules whose classes the model names in `_no_split_modules`, as HuggingFace's models do; else
    the items of each `ModuleList`, `ModuleDict` or `Sequential` with at least two items of one class that have children
    with parameters. If a block consists mostly of repeated blocks, such as a stage of a vision transformer, those
    become units instead; not so experts, whose parts have no parts, in layers of one size: each token calls a few of
    them, so that they are gathered with their layer.
    """

    def choose(self, model: nn.Module) -> list[nn.Module]:
        """Return the blocks."""
        named = set(getattr(model, "_no_split_modules", None) or ())
        blocks = [module for module in model.modules() if type(module).__name__ in named]
        return blocks or list(self._blocks_in(model))

    def _blocks_in(self, module: nn.Module) -> Iterator[nn.Module]:
        repeated = _repeated_items(module)
        sizes = Counter(_numel([item]) for item in repeated)
        for child in module.children():
            inner = list(self._blocks_in(child))
            are_experts = sizes[_numel([child])] > 1 and not any(map(_is_deep, inner))
            if child in repeated and (are_experts or 2 * _numel(inner) <= _numel([child])):
                yield child
            else:
                yield from inner


def choose_units(model: nn.Module, policy: Any, ignored: Collection[nn.Module] = ()) -> list[nn.Module]:
    """Return the parts of `model` that become units, each after the parts inside it, without `model` itself.

    Modules without parameters or without a `forward` are left out, as are those in `ignored` and modules that share a
    parameter with a module outside them: FSDP needs such a parameter in a single unit, so it belongs to the next unit
    around both.

    Raises:
        TypeError: `policy` is not a policy.
        ValueError: `policy` is an unknown name.
    """
    if policy is None:
        return []
    left_out = {model, *(inner for module in ignored for inner in module.modules())}
    chosen = set(_ask_policy(model, policy, left_out)) - left_out
    owners = owners_of_parameters(model)
    return [
        module
        for module in reversed(list(model.modules()))
        if module in chosen
        and is_callable(module)
        and next(module.parameters(), None) is not None
        and _keeps_to_itself(module, owners)
    ]


def directly_callable_parts(model: nn.Module, ignored: Collection[nn.Module] = ()) -> list[nn.Module]:
    """Return the children of `model` that its own steps may call, including those in containers without a `forward`."""
    parts = {part for _, _, part in callable_children(model)}
    return choose_units(model, lambda module: module in parts, ignored)


def _ask_by_recursion(
    policy: Callable[..., bool], model: nn.Module, left_out: Collection[nn.Module]
) -> list[nn.Module]:
    """Apply one of torch's older policies: on the way down it says whether to recurse, on the way up what is a unit."""
    units: list[nn.Module] = []
    seen = {model, *left_out}

    def visit(module: nn.Module) -> int:
        """Return how many elements of `module` belong to units: those inside it, or `module` itself."""
        total = _numel([module])
        if not policy(module=module, recurse=True, nonwrapped_numel=total):
            return 0
        taken = 0
        for child in module.children():
            if child not in seen:
                seen.add(child)
                taken += visit(child)
        if not policy(module=module, recurse=False, nonwrapped_numel=total - taken):
            return taken
        units.append(module)
        return total

    visit(model)
    return units


def _ask_policy(model: nn.Module, policy: Any, left_out: Collection[nn.Module]) -> Collection[nn.Module]:
    """Return the modules of `model` that `policy`, of any kind, chooses."""
    if isinstance(policy, str | Mapping):
        policy = _from_registry(model, policy)
    if hasattr(policy, "choose"):
        chosen: list[nn.Module] = policy.choose(model)
        return chosen
    if isinstance(policy, type | list | tuple | set | frozenset):
        kinds = classes_in(model, policy, what="auto_wrap_policy")
        return [module for module in model.modules() if isinstance(module, kinds)]
    if callable(policy):
        if "recurse" in inspect.signature(policy).parameters:
            return _ask_by_recursion(policy, model, left_out)
        return [module for module in model.modules() if policy(module)]
    raise TypeError(
        "`auto_wrap_policy` must be a policy of torch's (of a CustomPolicy its function), a function, classes of "
        "modules or their names, a name in FSDP_WRAP_POLICIES, a config dict or None, but is "
        f"{policy!r} of type {type(policy).__name__}"
    )


def _from_registry(model: nn.Module, policy: str | Mapping[str, Any]) -> Any:
    options = {"type": policy} if isinstance(policy, str) else dict(policy)
    kind = options.pop("type", None)
    entry = FSDP_WRAP_POLICIES.get(kind) if isinstance(kind, str) else kind
    if isinstance(entry, type):
        return FSDP_WRAP_POLICIES.build({"type": entry, **_with_classes(model, options)})
    if callable(entry):
        return partial(entry, **_with_classes(model, options))
    names = {type(module).__name__ for module in model.modules()}
    if isinstance(policy, str) and policy in names:
        return [policy]
    raise ValueError(
        "`auto_wrap_policy` must be a name in FSDP_WRAP_POLICIES or that of a class of modules in "
        f"{type(model).__name__}, but is {policy!r}" + did_you_mean(kind, {*FSDP_WRAP_POLICIES, *names})
    )


def _with_classes(model: nn.Module, options: Mapping[str, Any]) -> dict[str, Any]:
    """Replace names of classes in a config by the classes, which torch's policies need."""
    known = {"transformer_layer_cls", "module_classes"}
    return {key: set(classes_in(model, value, what=key)) if key in known else value for key, value in options.items()}


def _repeated_items(module: nn.Module) -> set[nn.Module]:
    if not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        return set()
    items = [item for item in module.children() if any(_numel([child]) for child in item.children())]
    kinds = [type(item) for item in items]
    return {item for item in items if kinds.count(type(item)) > 1}


def _is_deep(module: nn.Module) -> bool:
    return any(_numel(list(child.children())) for child in module.children())


def _numel(modules: list[nn.Module]) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def _keeps_to_itself(module: nn.Module, owners: Mapping[nn.Parameter, list[Site]]) -> bool:
    """Return whether no parameter of `module` is shared with a module outside it."""
    inside = set(module.modules())
    return all(owner in inside for parameter in module.parameters() for owner, _ in owners[parameter])


def cut_by_dtype(model: nn.Module, units: Collection[nn.Module], ignored: Collection[nn.Module]) -> list[nn.Module]:
    """Return the parts of `model` that must become units, in addition to `units`, so that each unit has one dtype.

    The dtype of a unit is that of the parameters that its module owns directly, else that of most elements. The largest
    parts with another dtype become separate units. Parameters that don't require grad may have any dtype.

    Args:
        model: the model, which is a unit itself.
        units: the parts that are units already.
        ignored: all modules that are not sharded.

    Raises:
        ConfigError: a module directly owns parameters of two dtypes, or a part with another dtype can't be a unit.
    """
    names = {module: name for name, module in model.named_modules()}
    owners = owners_of_parameters(model)
    apart = {*units, *ignored}
    parts: list[nn.Module] = []

    def visit(module: nn.Module, dtype: torch.dtype | None) -> None:
        """Look for parts in a module inside a unit of this dtype."""
        own = _own_dtype(module, names[module], ignored)
        if module is model or module in apart:
            dtype = own or _main_dtype(module, apart)
        elif own not in (None, dtype):
            if not is_callable(module) or not _keeps_to_itself(module, owners):
                raise _misplaced(module, names[module])
            parts.append(module)
            dtype = own
        for child in module.children():
            if child not in ignored:
                visit(child, dtype)

    visit(model, None)
    return list(dict.fromkeys(parts))


def _own_dtype(module: nn.Module, path: str, ignored: Collection[nn.Module]) -> torch.dtype | None:
    """Return the dtype of the parameters that a module owns, or else the one of all inside it; None if there is none.

    Those of ignored modules do not count.

    Raises:
        ConfigError: it owns parameters of two dtypes.
    """
    by_dtype = {own.dtype: name for name, own in module.named_parameters(recurse=False) if _is_trained(own)}
    if len(by_dtype) > 1:
        named = [f"`{path}.{name}`" if path else f"`{name}`" for name in by_dtype.values()]
        raise ConfigError(
            f"{named[0]} and {named[1]} of one {type(module).__name__} must have one dtype under FSDP, but are "
            f"{' and '.join(map(_dtype_name, by_dtype))}. Move one of them to a module of its own, or use "
            "strategy 'ddp'"
        )
    if not by_dtype and is_callable(module):
        parts = (part for part in module.modules() if part not in ignored)
        inside = {own.dtype for part in parts for own in part.parameters(recurse=False) if _is_trained(own)}
        return inside.pop() if len(inside) == 1 else None
    return next(iter(by_dtype), None)


def _main_dtype(unit: nn.Module, apart: Collection[nn.Module]) -> torch.dtype | None:
    """Return the dtype of most elements of a unit, without the parameters of those inside it."""
    others = {
        parameter for part in unit.modules() if part in apart and part is not unit for parameter in part.parameters()
    }
    sizes = Counter[torch.dtype]()
    for parameter in filter(_is_trained, unit.parameters()):
        sizes[parameter.dtype] += 0 if parameter in others else parameter.numel()
    return max(sizes, key=lambda dtype: sizes[dtype], default=None)


def _misplaced(module: nn.Module, path: str) -> ConfigError:
    name, parameter = next(module.named_parameters())
    why = "shares a parameter with another part" if is_callable(module) else "is not called"
    return ConfigError(
        f"`{path}.{name}` must have the dtype of the parameters around it under FSDP, but is "
        f"{_dtype_name(parameter.dtype)} in a {type(module).__name__} that {why}, so that it can't be a unit of its "
        "own. Give all parameters one dtype, or use strategy 'ddp'"
    )


def _is_trained(parameter: nn.Parameter) -> bool:
    return parameter.requires_grad and parameter.dim() > 0


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
