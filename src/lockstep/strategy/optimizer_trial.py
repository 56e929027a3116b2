"""Trying an optimizer on small tensors: whole ones, and the same ones in shards."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from copy import deepcopy
from math import isclose, isnan, prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer

from lockstep.dataset.random_state import random_state, set_random_state
from lockstep.dist.agreement import from_all
from lockstep.errors import ConfigError, error_in_words
from lockstep.model.shards import gather_full, shard_like

_KNOWN = (Adam, AdamW, SGD)
_STEPS = 3
# An update may differ by this fraction of the largest one: optimizers round to bfloat16 inside. What is computed from
# a part of a tensor instead of the whole differs by more.
_TOLERANCE = 0.03
_NOISE = 2.0**-7  # of gradients, relative: bfloat16 rounds by up to half of it
# An update may also differ by so many times what such noise makes of it: Muon makes a matrix orthogonal in bfloat16,
# where the order of the sums differs with the shards (up to 5 %, torch 2.13).
_TIMES_NOISE = 4


def check_by_trial(optimizer: Optimizer) -> None:
    """Refuse an optimizer that fails on shards, or updates them otherwise than whole tensors.

    Copies of the optimizer make three updates of small random tensors with the options of its groups: of whole ones,
    and of the same ones, sharded like its parameters. An optimizer that does not work on such tensors at all is let
    through, and so is one that draws random numbers, unless it fails on shards. Adam, AdamW and SGD are known to be
    right on real numbers, and not tried.

    Args:
        optimizer: new, and over the sharded parameters. It is not changed.

    **Collective**: every rank. **Cost**: for each group, three updates of one tensor of a few elements for each number
    of dimensions, dtype and sharding; two exchanges between the hosts.

    Raises:
        ConfigError: on every rank.
    """
    sharded = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    tried = [parameter for parameter in sharded if isinstance(parameter, DTensor) and parameter.requires_grad]
    if type(optimizer) in _KNOWN:
        tried = [parameter for parameter in tried if parameter.is_complex()]
    if not tried:
        return
    if isinstance(optimizer, LBFGS):
        raise ConfigError(
            "`optimizer` must be one that can update shards under FSDP, but is LBFGS, which works on all parameters in "
            "one vector. Use AdamW or SGD, or strategy 'ddp', which keeps every parameter whole"
        )
    state = random_state()
    try:
        _check(optimizer)
    finally:
        set_random_state(state)


def _check(optimizer: Optimizer) -> None:
    kind = " and ".join(type(part).__name__ for part in getattr(optimizer, "parts", [optimizer]))
    whole, options, runs, repeats = list[Tensor](), dict[tuple[int, str], float](), False, False
    noisy = list[list[Tensor]]()
    with suppress(Exception):  # whatever it needs, it is not known here
        (whole, options), (others, _) = (_updates(optimizer, seed, sharded=False) for seed in (0, 1))
        runs, repeats = True, all(map(torch.equal, whole, others))  # else it draws random numbers
        noisy = [_updates(optimizer, 0, sharded=False, noise=draw)[0] for draw in (1, 2)] if repeats else []
    trials = from_all((runs, repeats))
    if not all(runs for runs, _ in trials):
        return
    repeats = all(repeats for _, repeats in trials)
    in_shards: list[Tensor] = []
    raised: str | None = None
    apart: str | None = None
    try:
        in_shards, own_options = _updates(optimizer, 0, sharded=True)
        for place, number in options.items() if repeats else ():
            of_shards = own_options[place]
            if not isclose(of_shards, number, rel_tol=_TOLERANCE) and not isnan(of_shards + number):
                apart = f"computes {of_shards:.3g} for {number:.3g} as its option `{place[1]}`"
    except Exception as error:
        raised = error_in_words(error).partition("\n")[0]
    found = from_all((raised, apart))
    # One rank's shard alone may be refused, such as an empty one.
    if (first := next(filter(None, (raised for raised, _ in found)), None)) is not None:
        can_loop = "foreach" in first and "foreach" in optimizer.defaults
        remedy = "Try it with foreach=False, or use" if can_loop else "Use"
        params = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        short = [tuple(one.shape) for one in params if isinstance(one, DTensor) and _has_empty_shards(one)]
        if short:
            remedy = (
                f"Where that is for a parameter that has no rows for some ranks, as one of shape {short[0]}, give such "
                "parameters to an optimizer of their own, as AdamW, and both in a list. Or use"
            )
        raise ConfigError(
            f"`optimizer` must be one that can update shards under FSDP, but {kind} can't: its first steps raise "
            f"{first.rstrip('.')}. {remedy} AdamW or SGD, or strategy 'ddp', which keeps every parameter whole"
        )
    if not repeats:
        return
    does_not = (
        f"`optimizer` must update shards as it updates whole parameters under FSDP, but {kind} does not: in a trial on "
        "small tensors,"
    )
    why = (
        "It may compute with this rank's shard, or with a sum of this rank's elements, as float(tensor.sum()) reads "
        "it; tensor.sum().full_tensor() is the sum over all ranks. Use AdamW or SGD, or strategy 'ddp', which keeps "
        "every parameter whole"
    )
    for rank, (_, apart) in enumerate(found):
        if apart is not None:
            raise ConfigError(f"{does_not} rank {rank} {apart}. {why}")
    for own, expected, *others in zip(map(gather_full, in_shards), whole, *noisy, strict=True):
        if not expected.numel():
            continue
        largest = float(expected.abs().max())
        difference = float((own - expected).abs().max())
        by_noise = max(float((other - expected).abs().max()) for other in others)
        if not difference <= max(_TOLERANCE * largest, _TIMES_NOISE * by_noise):
            raise ConfigError(f"{does_not} its updates differ by {difference / (largest or 1):.0%}. {why}")


def _updates(
    optimizer: Optimizer, seed: int, *, sharded: bool, noise: int = 0
) -> tuple[list[Tensor], dict[tuple[int, str], float]]:
    """Return the changes of the tensors that a copy of the optimizer has updated, and the numbers in its groups.

    Args:
        optimizer: what is copied.
        seed: of the random numbers that the optimizer draws.
        sharded: whether the tensors are shards.
        noise: above 0, the gradients have noise, of this seed.
    """
    generator, of_noise = (torch.Generator().manual_seed(one) for one in (0, noise))
    twins: dict[int, Any] = {}
    tried: list[nn.Parameter] = []
    kept: list[list[nn.Parameter]] = []
    for group in optimizer.param_groups:
        kinds: dict[Any, nn.Parameter] = {}
        for parameter in group["params"]:
            twin = twins[id(parameter)] = _twin(parameter, generator, sharded)
            if isinstance(parameter, DTensor) and parameter.requires_grad:
                layout = parameter.device_mesh, parameter.placements
                shape = twin.shape if twin.is_complex() else None
                kinds.setdefault((twin.dim(), twin.dtype, layout, _has_empty_shards(parameter), shape), twin)
        kept.append([*kinds.values()])
        tried += kinds.values()
    copy = _copy(optimizer, twins)
    copy.param_groups[:] = [
        {**group, "params": own, **({"lr": group["lr"] or 0.01} if isinstance(group.get("lr"), float) else {})}
        for group, own in zip(copy.param_groups, kept, strict=True)
        if own
    ]
    if callable(train := getattr(copy, "train", None)):  # as schedule-free optimizers need
        train()
    before = [twin.detach().clone() for twin in tried]
    torch.manual_seed(seed)
    for _ in range(_STEPS):
        for twin in tried:
            grad = _drawn(twin.shape, twin, generator)
            if noise:
                grad = grad * (
                    1 + _NOISE * (2 * torch.rand(grad.shape, generator=of_noise, device="cpu") - 1).to(grad.dtype)
                )
            twin.grad = shard_like(grad.to(twin.device), twin)
        copy.step()
    entries = ((index, *entry) for index, group in enumerate(copy.param_groups) for entry in group.items())
    options = {(index, name): value for index, name, value in entries if isinstance(value, float)}
    return [twin.detach() - start for twin, start in zip(tried, before, strict=True)], options


def _twin(parameter: nn.Parameter, generator: torch.Generator, sharded: bool) -> nn.Parameter:
    """Return a small random parameter of as many dimensions, and sharded likewise if asked to."""
    shape = [min(size, 4) for size in parameter.shape]
    if isinstance(parameter, DTensor):
        for dim, (size, count) in enumerate(_sharded(parameter)):
            if count > 1:
                shape[dim] = min(size, 3 * count - (size % count > 0))
    value = _drawn(shape, parameter, generator)
    value = shard_like(value, parameter) if sharded else value.to(parameter.device)
    return nn.Parameter(value, requires_grad=parameter.requires_grad)


def _sharded(parameter: DTensor) -> list[tuple[int, int]]:
    """Return each dimension's size, and over how many ranks it is sharded."""
    axes = list(zip(parameter.device_mesh.shape, parameter.placements, strict=True))
    counts = (prod(ranks for ranks, placement in axes if placement.is_shard(dim)) for dim in range(parameter.dim()))
    return list(zip(parameter.shape, counts, strict=True))


def _has_empty_shards(parameter: DTensor) -> bool:
    return any(size < count for size, count in _sharded(parameter))


def _drawn(shape: Sequence[int], parameter: Tensor, generator: torch.Generator) -> Tensor:
    dtype = torch.complex64 if parameter.is_complex() else torch.float32
    return torch.randn(shape, generator=generator, dtype=dtype, device="cpu").to(parameter.dtype)


def _copy(optimizer: Optimizer, twins: dict[int, Any]) -> Optimizer:
    """Return a copy with other parameters, of an optimizer and of those inside it.

    `deepcopy` would leave out the attributes of its class (torch 2.13).
    """
    copy: Optimizer = object.__new__(type(optimizer))
    twins[id(optimizer)] = copy
    for name, value in vars(optimizer).items():
        if name == "step":  # a scheduler has wrapped it
            continue
        if isinstance(value, Optimizer):
            value = twins.get(id(value)) or _copy(value, twins)
        elif name.endswith("_hooks"):
            value = OrderedDict()
        elif name == "state":
            value = defaultdict(dict)
        else:
            value = deepcopy(value, twins)
        vars(copy)[name] = value
    return copy
