"""Units whose parameters have one dtype each, as FSDP needs them: what has another is cut out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

import torch
from torch import nn

from lockstep.errors import ConfigError
from lockstep.model.fsdp_policies import keeps_to_itself, owners_of_parameters


def cut_by_dtype(model: nn.Module, units: Collection[nn.Module], ignored: Collection[nn.Module]) -> list[nn.Module]:
    """Return the parts of `model` that must be units beside `units`, so that each has parameters of one dtype.

    A unit keeps the dtype of the parameters that its module owns itself, else the one with most numbers; the largest
    parts with another become units of their own. Parameters without gradients may have any dtype.

    Args:
        model: the model, which is a unit itself.
        units: the parts that are units already.
        ignored: parts that are not sharded.

    Raises:
        ConfigError: a module itself owns parameters of two dtypes, or what would be cut out can't be a unit.
    """
    return _Cut(model, units, ignored).parts


class _Cut:
    def __init__(self, model: nn.Module, units: Collection[nn.Module], ignored: Collection[nn.Module]) -> None:
        self.parts: list[nn.Module] = []
        self._names = {module: name for name, module in model.named_modules()}
        self._units = {model, *units}
        self._ignored = {part for module in ignored for part in module.modules()}
        self._owners = owners_of_parameters(model)
        for unit in list(self._units):
            self._cut_unit(unit)

    def _cut_unit(self, unit: nn.Module) -> None:
        sizes = Counter[torch.dtype]()
        for part in self._parts_of(unit):
            for parameter in self._own(part).values():
                sizes[parameter.dtype] += parameter.numel()
        if len(sizes) > 1:
            self._cut_children(unit, self._own_dtype(unit) or max(sizes, key=lambda dtype: sizes[dtype]))

    def _cut_children(self, module: nn.Module, dtype: torch.dtype) -> None:
        for child in module.children():
            if child in self._units or child in self._ignored:
                continue
            dtypes = {p.dtype for part in self._parts_of(child) for p in self._own(part).values()}
            if dtypes <= {dtype}:
                continue
            own = self._own_dtype(child)
            is_called = type(child).forward is not nn.Module.forward
            if (len(dtypes) == 1 and is_called) or own not in (None, dtype):
                self._make_unit(child, is_called)
            else:
                self._cut_children(child, dtype)

    def _make_unit(self, module: nn.Module, is_called: bool) -> None:
        if not is_called or not keeps_to_itself(module, self._owners):
            name, parameter = next(module.named_parameters())
            why = "shares a parameter with another part" if is_called else "is not called"
            raise ConfigError(
                f"`{self._names[module]}.{name}` must have the dtype of the parameters around it under FSDP, but is "
                f"{_name(parameter.dtype)} in a {type(module).__name__} that {why}, so that it can't be a unit of its "
                "own. Give all parameters one dtype, or use strategy 'ddp'"
            )
        self.parts.append(module)
        self._units.add(module)
        self._cut_unit(module)

    def _parts_of(self, module: nn.Module) -> Iterator[nn.Module]:
        """Yield the modules that belong to one unit with `module`."""
        yield module
        for child in module.children():
            if child not in self._units and child not in self._ignored:
                yield from self._parts_of(child)

    def _own(self, module: nn.Module) -> dict[str, nn.Parameter]:
        own = module.named_parameters(recurse=False)
        return {name: parameter for name, parameter in own if parameter.requires_grad and parameter.dim()}

    def _own_dtype(self, module: nn.Module) -> torch.dtype | None:
        """Return the dtype of the parameters that a module owns itself; None where it owns none."""
        by_dtype = {parameter.dtype: name for name, parameter in self._own(module).items()}
        if len(by_dtype) > 1:
            path = self._names[module]
            named = [f"`{path}.{name}`" if path else f"`{name}`" for name in by_dtype.values()]
            raise ConfigError(
                f"{named[0]} and {named[1]} of one {type(module).__name__} must have one dtype under FSDP, but are "
                f"{' and '.join(map(_name, by_dtype))}. Move one of them to a module of its own, or use strategy 'ddp'"
            )
        return next(iter(by_dtype), None)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
