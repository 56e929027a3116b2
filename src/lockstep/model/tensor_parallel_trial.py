"""Trying a tensor-parallel plan on copies of the modules that it splits: whole ones, and the same ones in parts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
)
from torch.utils._pytree import tree_leaves

from lockstep.dist import all_reduce
from lockstep.errors import ConfigError

# Rounding and TF32 make differences of a thousandth of the norm; numbers of other heads differ by a tenth and more.
_TOLERANCE = 0.01
# A gradient that is 0 but for rounding, as that of the bias of keys, is compared with this part of a usual one.
_NEGLIGIBLE = 0.01


@dataclass
class _Region:
    """The smallest module around some split layers from which nothing comes out in parts.

    Attributes:
        name: in the model.
        styles: by the names of layers in the module; "" is the module itself.
        whole: a copy of the module.
        split: another one, whose layers are split.
        inputs: positional and keyword arguments of the module's first call; None if there was none, or no copy of them.
    """

    name: str
    styles: Mapping[str, ParallelStyle]
    whole: nn.Module
    split: nn.Module
    inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None


class PlanTrial:
    """Refuses a plan under which modules compute something else than without it, in the first training step.

    A module may divide what a split layer returns by a fixed number of heads, cut it into queries and keys by `chunk`,
    or normalise heads by a weight whose gradient each rank then has for its own heads alone. None of these raises an
    error. So one module of each kind is copied twice, with random weights, and one copy is split. Given the inputs of
    the module's own first call, both must agree on what they return and on the gradients of inputs and parameters.

    Let through untried: modules that are compiled, need half precision, draw random numbers or can't be copied, that
    get or return parts, as under plans that split the sequence, and layers around which there is none but the whole
    model.

    Args:
        model: its first forward pass with gradients ends the trial.
        styles: of its layers, by name.
        mesh: one axis, the ranks that compute together.
        split: splits a layer in a style over the mesh.
        remedy: what to do about a parameter with the gradient of a part, given a pattern of the name of its module.

    **Collective**: the first forward pass that trains, among the ranks of the mesh. **Cost**: two copies of a module of
    each kind until then, in float32; three forward and backward passes of these; one all_reduce of a number for each of
    their parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        styles: Mapping[str, ParallelStyle],
        mesh: DeviceMesh,
        split: Callable[[nn.Module, ParallelStyle, DeviceMesh], None],
        remedy: Callable[[str], str],
    ) -> None:
        self._model = model
        self._mesh = mesh
        self._split, self._remedy = split, remedy
        self._regions: dict[object, _Region | None] = {}
        self._waiting = _regions_of(model, styles)
        self._hooks = [model.register_forward_hook(self._end)]

    def copy(self, part: nn.Module) -> None:
        """Copy the modules of kinds not seen yet in a part of the model, which has values and is not split yet."""
        inside = set(part.modules())
        for name in [name for name in self._waiting if self._model.get_submodule(name) in inside]:
            module, styles = self._model.get_submodule(name), self._waiting.pop(name)
            kind = type(module), tuple((layer, type(style)) for layer, style in styles.items())
            if kind in self._regions or any(isinstance(parameter, DTensor) for parameter in module.parameters()):
                continue
            self._regions[kind] = None
            try:
                whole = _with_random_weights(module)
                split = deepcopy(whole)
                for layer, style in styles.items():
                    self._split(split.get_submodule(layer), deepcopy(style), self._mesh)
            except Exception:  # whatever it needs to be copied is not known here
                continue
            self._regions[kind] = region = _Region(name, styles, whole, split)
            self._hooks.append(module.register_forward_pre_hook(_keeping_inputs(region), with_kwargs=True))

    def _end(self, model: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        for hook in self._hooks:
            hook.remove()
        regions = [region for region in self._regions.values() if region is not None and region.inputs is not None]
        self._regions.clear()
        for region in regions:
            self._judge(region)

    def _judge(self, region: _Region) -> None:
        differences = _differences(region)
        all_reduce(differences, "max", self._mesh)
        names = [name for name, _ in region.whole.named_parameters()]
        kind, where = type(region.whole).__name__, f"`{region.name}`"
        layers = ", ".join(f"`{layer}`" for layer in region.styles if layer)
        of_output, of_input, *of_parameters = differences.tolist()
        if of_output > _TOLERANCE:
            raise ConfigError(
                f"`tensor_parallel` must split {where} so that it returns what it returns as a whole, but a copy of it "
                f"with random weights differs by {of_output:.0%}. {kind} may divide what a split layer returns by a "
                f"fixed number of heads, or cut it into several by `chunk` or `split`. Leave {layers} out of the plan"
            )
        for name, difference in zip(names, of_parameters, strict=True):
            if difference > _TOLERANCE:
                owner = f"{region.name}.{name}".rpartition(".")[0]
                pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", owner)
                raise ConfigError(
                    f"`{region.name}.{name}` must get the gradient of all that it is used for under `tensor_parallel`, "
                    f"but in a trial with random weights it differs by {difference:.0%}: each rank uses it for its own "
                    f"part of what {kind} computes. {self._remedy(pattern)}, or leave {layers} whole"
                )
        if of_input > _TOLERANCE:
            raise ConfigError(
                f"`tensor_parallel` must split {where} so that its inputs get their whole gradients, but in a trial "
                f"with random weights they differ by {of_input:.0%}. Leave {layers} out of the plan"
            )


def _regions_of(model: nn.Module, styles: Mapping[str, ParallelStyle]) -> dict[str, dict[str, ParallelStyle]]:
    """Return the styles inside the smallest modules around layers that return parts, by the module's name."""
    regions = {}
    for name, style in styles.items():
        if not _opens(style):
            continue
        around = name.rpartition(".")[0]
        while around and not (_is_called(model, around) and any(map(_closes, _inside(around, styles).values()))):
            around = around.rpartition(".")[0]
        if around:
            regions[around] = _inside(around, styles)
    return regions


def _is_called(model: nn.Module, name: str) -> bool:
    return not isinstance(model.get_submodule(name), nn.ModuleList | nn.ModuleDict)


def _inside(around: str, styles: Mapping[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    return {name[len(around) + 1 :]: style for name, style in styles.items() if f"{name}.".startswith(f"{around}.")}


def _opens(style: ParallelStyle) -> bool:
    return isinstance(style, ColwiseParallel) and not all(map(_is_whole, style.output_layouts))


def _closes(style: ParallelStyle) -> bool:
    if isinstance(style, RowwiseParallel):
        return all(map(_is_whole, style.output_layouts))
    return isinstance(style, PrepareModuleOutput) and all(map(_is_whole, style.desired_output_layouts))


def _is_whole(placement: object) -> bool:
    return isinstance(placement, Replicate)


def _with_random_weights(module: nn.Module) -> nn.Module:
    """Return a copy without hooks, in float32, for evaluation, with weights of a usual size, the same on every rank."""
    hooks = {
        id(value): type(value)()
        for part in module.modules()
        for name, value in vars(part).items()
        if name.endswith("_hooks") and isinstance(value, dict)
    }
    copy = deepcopy(module, hooks).float().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in copy.named_parameters():
            if parameter.is_floating_point():
                drawn = torch.randn(parameter.shape, generator=generator)
                if parameter.dim() < 2:
                    drawn = drawn / 10 + (0 if name.endswith("bias") else 1)
                else:
                    drawn /= parameter[0].numel() ** 0.5
                parameter.copy_(drawn)
    return copy


def _keeping_inputs(region: _Region) -> Callable[..., None]:
    """Return a hook that keeps a copy of what a module is called with for the first time in training."""

    # A closure, which copies of the model share.
    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or region.inputs is not None:
            return
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(isinstance(tensor, DTensor) for tensor in tensors):
            return
        with suppress(Exception):  # of an object that can't be copied, such as a cache that has been filled
            region.inputs = deepcopy((args, kwargs), {id(tensor): _leaf(tensor) for tensor in tensors})

    return keep


def _leaf(tensor: Tensor) -> Tensor:
    leaf = tensor.detach().clone()
    if leaf.is_floating_point():
        leaf = leaf.float().requires_grad_(tensor.requires_grad)
    return leaf


def _differences(region: _Region) -> Tensor:
    """Return how far the split copy is from the whole one: in outputs, in gradients of inputs, of each parameter."""
    count = sum(1 for _ in region.whole.parameters())
    device = next(region.whole.parameters()).device
    nothing = torch.zeros(2 + count, device=device)
    try:
        expected, found = (_outcome(module, region.inputs) for module in (region.whole, region.split))
        others = _outcome(region.whole, region.inputs, seed=1)[0]
    except Exception:  # half precision is needed, or a size does not fit, which the module itself will say
        return nothing
    if [value.shape for part in expected for value in part] != [value.shape for part in found for value in part]:
        return nothing  # parts are returned
    if _relative(list(zip(expected[0], others, strict=True))) > _TOLERANCE:
        return nothing  # it draws random numbers, of which a part would draw others
    outputs, inputs, parameters = ([*zip(*parts, strict=True)] for parts in zip(expected, found, strict=True))
    gradients = [one for one, _ in inputs + parameters]
    usual = _size(gradients) / max(1, sum(one.numel() for one in gradients)) ** 0.5
    least = [_NEGLIGIBLE * usual * one.numel() ** 0.5 for one, _ in parameters]
    return torch.stack(
        [
            _relative(outputs),
            _relative(inputs),
            *(_relative([pair], floor) for pair, floor in zip(parameters, least, strict=True)),
        ]
    )


def _relative(pairs: list[tuple[Tensor, Tensor]], floor: Tensor | float = 0.0) -> Tensor:
    """Return how far the second tensors are from the first, as a part of their norm, or of a larger one."""
    difference, size = _size([other - one for one, other in pairs]), _size([one for one, _ in pairs])
    return difference / torch.clamp(size, min=torch.as_tensor(floor, device=size.device) + 1e-30)


def _size(tensors: list[Tensor]) -> Tensor:
    norms = [torch.linalg.vector_norm(tensor) for tensor in tensors]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())


def _outcome(module: nn.Module, inputs: Any, seed: int = 0) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return what a module returns, and the gradients of its inputs and of its parameters, for one random gradient."""
    module.zero_grad()
    args, kwargs = deepcopy(inputs)
    device = next(module.parameters()).device.type
    devices = [] if device == "cpu" else [torch.accelerator.current_device_index()]
    with (
        torch.random.fork_rng(devices, device_type=device if devices else "cuda"),
        torch.autocast(device, enabled=False),
    ):
        torch.manual_seed(seed)
        returned = module(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(returned) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        graded = [output for output in outputs if output.requires_grad]
        torch.manual_seed(0)
        torch.autograd.backward(graded, [torch.randn_like(output) for output in graded])
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.requires_grad]
    of_inputs, of_parameters = ([_gradient(leaf) for leaf in tensors] for tensors in (leaves, module.parameters()))
    return [_plain(output.detach()) for output in outputs], of_inputs, of_parameters


def _gradient(tensor: Tensor) -> Tensor:
    return _plain((torch.zeros_like(tensor) if tensor.grad is None else tensor.grad).detach())


def _plain(tensor: Tensor) -> Tensor:
    """Return a tensor that is whole, and has arrived."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.wait() if isinstance(whole, AsyncCollectiveTensor) else whole
