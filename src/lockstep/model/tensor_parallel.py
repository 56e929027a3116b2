"""Tensor parallelism: several ranks compute a module together, each with a part of its weights; the trial of a plan."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
)
from torch.nn.utils import get_total_norm
from torch.utils.checkpoint import checkpoint

from lockstep.dist import all_reduce
from lockstep.errors import ConfigError, DistError
from lockstep.model.parts import is_callable, owners_of_parameters
from lockstep.model.shards import gather_full
from lockstep.model.tensor_parallel_plan import check_layer, read_plan, split_layer
from lockstep.tree import tree_leaves

_logger = logging.getLogger("lockstep.model")


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
            check_layer(model, name, style, mesh.size())
        self._styles = {model.get_submodule(name): style for name, style in styles.items()}
        self._names = {module: name for name, module in model.named_modules()}
        self._trial = PlanTrial(model, styles, mesh)
        self._ties = [sites for sites in owners_of_parameters(model).values() if len(sites) > 1]

    def apply(self, unit: nn.Module) -> None:
        """Split the modules in a part of the model; every rank of the mesh must hold the same values of it.

        Modules that are split already are skipped. Nothing is sent.

        Raises:
            ConfigError: a parameter that several modules share would be split in different ways.
        """
        modules = list(unit.modules())
        self._trial.copy()
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


# Rounding and TF32 make differences of a thousandth of the norm; numbers of other heads differ by a tenth and more.
_TOLERANCE = 0.01
# A gradient that is 0 but for rounding, as that of the bias of keys, is compared with this part of a usual one.
NEGLIGIBLE = 0.01


@dataclass
class _Region:
    """The smallest module around some split layers from which nothing comes out in parts.

    Attributes:
        name: in the model.
        styles: by the names of layers in the module; "" is the module itself.
        copy: of the module, with its parameters on the meta device.
        inputs: positional and keyword arguments of the module's first call; None if there was none, or no copy of them.
    """

    name: str
    styles: Mapping[str, ParallelStyle]
    copy: nn.Module | None = None
    inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None


class PlanTrial:
    """Refuses a plan under which modules compute something else than without it, in the first training step.

    A module may divide what a split layer returns by a fixed number of heads, cut it into queries and keys by `chunk`,
    or normalise heads by a weight whose gradient each rank then has for its own heads alone. None of these raises an
    error. So one module of each kind is copied twice, with random weights, and one copy is split. Given the inputs of
    the module's own first call, both must agree on what they return and on the gradients of inputs and parameters.

    These are not tried: modules inside compiled ones; modules that have a `forward` of the instance's own, share
    parameters, need half precision, draw random numbers or can't be copied; modules that get or return only parts, as
    under plans that split the sequence; modules with buffers on the meta device in which a layer is a unit of its own;
    layers that only the whole model encloses; and models whose `forward` is never called. `PeerCheck` finds some of
    what is wrong there.

    Args:
        model: its first forward pass with gradients ends the trial.
        styles: of its layers, by name.
        mesh: one axis, the ranks that compute together.

    **Collective**: the first forward pass that trains, among the ranks of the mesh. **Cost**: until then, the inputs of
    one module of each kind. Then, for one kind after the other, a whole and a split copy of it in float32, three
    forward and two backward passes, and two all_reduce, of a number for each parameter.
    """

    def __init__(self, model: nn.Module, styles: Mapping[str, ParallelStyle], mesh: DeviceMesh) -> None:
        self._model = model
        self._mesh = mesh
        self._regions = _regions_of(model, styles)
        self._hooks = [model.register_forward_hook(self._end)]

    def copy(self) -> None:
        """Copy one module of each kind, whose buffers have values, before it or a layer in it is split or sharded."""
        for region in self._regions:
            module = self._model.get_submodule(region.name)
            if region.copy is not None or self._runs_compiled(region.name):
                continue
            if not any(buffer.is_meta for buffer in module.buffers()) and _may_be_copied(module):
                with suppress(Exception):  # whatever it needs to be copied is not known here
                    region.copy = _without_weights(module)
                    self._hooks.append(module.register_forward_pre_hook(_input_recorder(region), with_kwargs=True))

    def _runs_compiled(self, name: str) -> bool:
        """Return whether a module around this one is compiled, in which a hook would only make another graph."""
        parts = name.split(".")
        return any(_forward_of(self._model.get_submodule(".".join(parts[:end])))[1] for end in range(len(parts)))

    def _end(self, model: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        for hook in self._hooks:
            hook.remove()
        while self._regions:
            self._try_region(self._regions.pop(0))

    def _try_region(self, region: _Region) -> None:
        """Run a whole and a split copy of a module, and refuse the plan if they differ. **Collective**: the mesh."""
        device = torch.device(self._mesh.device_type)
        whole, has_run = None, torch.zeros(1, device=device)
        with suppress(Exception):  # half precision is needed, or there is no memory for it
            if region.copy is not None and region.inputs is not None:
                whole = _TrialRun(_with_random_weights(region.copy, device), region.inputs)
                others = _TrialRun(whole.module, region.inputs, seed=1).outputs
                # What draws random numbers draws others for a part.
                has_run += float(_relative(list(zip(whole.outputs, others, strict=True)))) < _TOLERANCE
        all_reduce(has_run, "min", self._mesh)  # the other copy communicates
        if whole is None or not has_run:
            return
        differences = torch.zeros(2 + sum(1 for _ in whole.module.parameters()), device=device)
        failure: Exception | None = None
        try:
            split = deepcopy(whole.module)
            for layer, style in region.styles.items():
                split_layer(split.get_submodule(layer), deepcopy(style), self._mesh)
            differences = _differences(whole, _TrialRun(split, region.inputs))
        except (torch.OutOfMemoryError, MemoryError, DistError):  # of this rank alone
            raise
        except Exception as error:  # a size does not fit, on any rank, which the module itself says
            _logger.debug("the trial of `%s` has failed", region.name, exc_info=True)
            failure = error
        try:
            all_reduce(differences, "max", self._mesh)
        except DistError as error:  # where the trial has failed on this rank alone, the others are still in it
            raise error from failure
        self._refuse_differences(region, whole.module, differences.tolist())

    def _refuse_differences(self, region: _Region, whole: nn.Module, differences: list[float]) -> None:
        names = [name for name, _ in whole.named_parameters()]
        kind, where = type(whole).__name__, f"`{region.name}`"
        layers = ", ".join(f"`{layer}`" for layer in region.styles if layer)
        of_output, of_input, *of_parameters = differences
        if (difference := max(of_output, of_input)) > _TOLERANCE:
            raise ConfigError(
                f"`tensor_parallel` must split {where} so that it returns what it returns as a whole, and its inputs "
                f"get their whole gradients, but a copy of it with random weights differs by {difference:.0%}. {kind} "
                "may divide what a split layer returns by a fixed number of heads, or cut it into several by `chunk` "
                f"or `split`. Leave {layers} out of the plan"
            )
        for name, difference in zip(names, of_parameters, strict=True):
            if difference > _TOLERANCE:
                owner = f"{region.name}.{name}".rpartition(".")[0]
                pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", owner)
                raise ConfigError(
                    f"`{region.name}.{name}` must get the gradient of all that it is used for under `tensor_parallel`, "
                    f"but in a trial with random weights it differs by {difference:.0%}: each rank uses it for its own "
                    f"part of what {kind} computes. Add {{{pattern!r}: 'replicated_with_grad_allreduce'}} to the plan, "
                    f"or leave {layers} whole"
                )


def _regions_of(model: nn.Module, styles: Mapping[str, ParallelStyle]) -> list[_Region]:
    """Return the smallest modules around layers that return parts, the first of each kind."""
    regions: dict[object, _Region] = {}
    for name, style in styles.items():
        if not _returns_parts(style):
            continue
        around = name.rpartition(".")[0]
        while around and not (
            is_callable(model.get_submodule(around))
            and any(map(_returns_whole, _styles_inside(around, styles).values()))
        ):
            around = around.rpartition(".")[0]
        if around:
            inside = _styles_inside(around, styles)
            kind = type(model.get_submodule(around)), tuple((layer, type(style)) for layer, style in inside.items())
            regions.setdefault(kind, _Region(around, inside))
    return list(regions.values())


def _styles_inside(around: str, styles: Mapping[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    """Return the styles of the layers inside a module, by their names in it."""
    return {name[len(around) + 1 :]: style for name, style in styles.items() if f"{name}.".startswith(f"{around}.")}


def _returns_parts(style: ParallelStyle) -> bool:
    """Return whether a layer with this style returns only a part of its output on each rank."""
    return isinstance(style, ColwiseParallel) and set(style.output_layouts) != {Replicate()}


def _returns_whole(style: ParallelStyle) -> bool:
    """Return whether a layer with this style makes a whole output from parts."""
    if isinstance(style, RowwiseParallel):
        return set(style.output_layouts) == {Replicate()}
    return isinstance(style, PrepareModuleOutput) and set(style.desired_output_layouts) == {Replicate()}


def _may_be_copied(module: nn.Module) -> bool:
    has_own_forward = any(
        "forward" in vars(part) and getattr(_forward_of(part)[0], "__func__", None) is not type(part).forward
        for part in module.modules()
    )
    has_ties = any(len(sites) > 1 for sites in owners_of_parameters(module).values())
    return not has_own_forward and not has_ties and not any(isinstance(x, DTensor) for x in module.parameters())


def _forward_of(module: nn.Module) -> tuple[Any, bool]:
    """Return a module's `forward` as it is inside compilation and recomputation, and whether it is compiled."""
    forward: Any = module.forward
    is_compiled = module._compiled_call_impl is not None
    while True:
        if isinstance(forward, partial) and forward.func is checkpoint:
            forward = forward.args[0]
        elif (inner := getattr(forward, "_torchdynamo_orig_callable", None)) is not None:
            forward, is_compiled = inner, True
        else:
            return forward, is_compiled


def _without_weights(module: nn.Module) -> nn.Module:
    """Return a copy without hooks, for evaluation, whose parameters are in float32 and on the meta device."""
    memo: dict[int, Any] = {
        id(value): type(value)()
        for part in module.modules()
        for name, value in vars(part).items()
        if name.endswith("_hooks") and isinstance(value, dict)
    }
    for parameter in module.parameters():
        empty = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
    copy = deepcopy(module, memo).float().eval()
    for part in copy.modules():
        vars(part).pop("forward", None)  # a function is not copied: it would compute with the module itself
    return copy


@torch.no_grad()
def _with_random_weights(copy: nn.Module, device: torch.device) -> nn.Module:
    """Give a copy weights of a usual size, the same on every rank."""
    with _seeded(0, device):
        for parameter, sites in owners_of_parameters(copy).items():
            drawn = torch.randn(parameter.shape, dtype=parameter.dtype, device=device)
            if parameter.dim() < 2:
                drawn = drawn / 10 + (0 if sites[0][1].endswith("bias") else 1)
            else:
                drawn /= parameter[0].numel() ** 0.5
            for owner, name in sites:
                setattr(owner, name, nn.Parameter(drawn, parameter.requires_grad))
    return copy.to(device)


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    devices = [] if device.type == "cpu" else [torch.accelerator.current_device_index()]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        torch.manual_seed(seed)
        yield


def _input_recorder(region: _Region) -> Callable[..., None]:
    """Return a hook that keeps a copy of what a module is called with for the first time in training."""

    # A closure, which copies of the model share.
    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or region.inputs is not None:
            return
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        trains = module.training or torch.is_grad_enabled()  # recomputed modules run without gradients at first
        if trains and not any(isinstance(tensor, DTensor) for tensor in tensors):
            with suppress(Exception):  # of an object that can't be copied, such as a cache that has been filled
                region.inputs = _copy_inputs((args, kwargs))

    return keep


def _copy_inputs(inputs: Any) -> Any:
    """Return a copy of arguments, with tensors in float32, as leaves of a graph of their own."""
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    return deepcopy(inputs, {id(tensor): _as_leaf(tensor) for tensor in tensors})


def _as_leaf(tensor: Tensor) -> Tensor:
    leaf = tensor.detach().clone()
    if leaf.is_floating_point():
        leaf = leaf.float().requires_grad_(tensor.requires_grad)
    return leaf


class _TrialRun:
    """A forward pass of a copy, on copies of its inputs.

    Attributes:
        module: the copy.
        outputs: the floating-point tensors that it returns.
    """

    def __init__(self, module: nn.Module, inputs: Any, seed: int = 0) -> None:
        self.module = module
        args, kwargs = _copy_inputs(inputs)
        self._leaves = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.requires_grad]
        device = next(module.parameters()).device
        with _seeded(seed, device), torch.autocast(device.type, enabled=False):
            leaves = tree_leaves(module(*args, **kwargs))
        self._returned = [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]
        self.outputs: list[Tensor] = [gather_full(x.detach()) for x in self._returned]

    def gradients(self, chosen: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the gradients of the inputs and of the parameters, for random gradients of some outputs."""
        graded = [self._returned[index] for index in chosen if self._returned[index].requires_grad]
        with _seeded(0, self.outputs[0].device):
            # Of the shape alone: `randn_like` draws in the order of the strides, which may differ.
            drawn = [torch.randn(x.shape, dtype=x.dtype, device=x.device) for x in graded]
        torch.autograd.backward(graded, drawn)
        return [*map(_gradient, self._leaves)], [*map(_gradient, self.module.parameters())]


def _differences(whole: _TrialRun, split: _TrialRun) -> Tensor:
    """Return how far the split copy is from the whole one: in outputs, in gradients of inputs, of each parameter."""
    outputs = list(zip(whole.outputs, split.outputs, strict=True))
    chosen = [index for index, (one, other) in enumerate(outputs) if one.shape == other.shape]
    if not chosen:  # nothing but parts is returned
        return torch.zeros(2 + sum(1 for _ in whole.module.parameters()), device=whole.outputs[0].device)
    inputs, parameters = (
        [*zip(*pair, strict=True)] for pair in zip(whole.gradients(chosen), split.gradients(chosen), strict=True)
    )
    gradients = [one for one, _ in inputs + parameters]
    least = NEGLIGIBLE * get_total_norm(gradients) / max(1, sum(one.numel() for one in gradients)) ** 0.5
    found = [
        _relative([outputs[index] for index in chosen]),
        _relative(inputs),
        *(_relative([pair], least * pair[0].numel() ** 0.5) for pair in parameters),
    ]
    return torch.stack([one.to(least.device) for one in found])  # there may be no inputs with gradients


def _relative(pairs: list[tuple[Tensor, Tensor]], floor: Tensor | float = 0.0) -> Tensor:
    """Return how far the second tensors are from the first, as a part of their norm, or of a larger one."""
    difference, size = get_total_norm([other - one for one, other in pairs]), get_total_norm([one for one, _ in pairs])
    return difference / torch.clamp(size, min=torch.as_tensor(floor, device=size.device) + 1e-30)


def _gradient(tensor: Tensor) -> Tensor:
    gradient: Tensor = gather_full(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad)
    return gradient.detach()
