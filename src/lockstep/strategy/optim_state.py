"""Reads the canonical state of torch's optimizers, and writes one that another run or strategy has saved.

Reading changes nothing: an optimizer that has not stepped has no state, nor has a parameter that never had a gradient.
Writing gives a state to the parameters that were saved with one, and removes it from the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Adagrad, Optimizer, SparseAdam

from lockstep.errors import CheckpointError, ConfigError, listed
from lockstep.model.shards import reshard_like
from lockstep.optim.constructor import param_sites
from lockstep.strategy.base import OptimState
from lockstep.tree import tree_map

# Keys of every state of the optimizers for which `first_state` does not work.
_ALWAYS: Mapping[type, set[str]] = {LBFGS: {"func_evals", "n_iter"}, SparseAdam: {"step", "exp_avg", "exp_avg_sq"}}
# Options that tell one kind of optimizer from another.
_TELLING = frozenset(
    ("alpha", "betas", "etas", "lambd", "lr_decay", "max_iter", "momentum", "rho", "beta2_decay", "ns_steps")
)
# Options that say how an update is computed, not which update.
_IMPLEMENTATION = ("fused", "foreach", "capturable", "differentiable")
_REMEDY = "Resume with the optimizer that was saved, or load the weights alone, by `load_from` with resume=False"


def read_optim_state(core: nn.Module, optimizers: Iterable[Optimizer]) -> OptimState:
    """Return `{"state": {parameter name: ...}, "param_groups": [...]}`; the tensors are the optimizers' own.

    A tied parameter has its first name. A parameter without a state has no entry.

    Raises:
        ConfigError: an optimizer updates parameters that have no name in `core`, or keeps state outside of parameters.
    """
    names = {parameter: name for name, parameter in named_parameters(core).items()}
    entries: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for optimizer in optimizers:
        own = names_by_group(optimizer, names)
        by_index = list(chain(*own))
        packed = optimizer.state_dict()
        # What else it holds, and keys of its state that are no parameter's index.
        for name in [*sorted(packed.keys() - {"state", "param_groups"}), *packed.get("state", ())]:
            if not isinstance(name, int):
                raise ConfigError(
                    f"`optimizer` must keep its state by parameter, but {type(optimizer).__name__} also keeps "
                    f"{name!r}, which has no name in a checkpoint. Keep it in a parameter's state, or in a group; or "
                    "save without the optimizer's state, by CheckpointHook(save_optimizer=False)"
                )
        for index, entry in packed["state"].items():
            if entry:
                entries[by_index[index]] = dict(entry)
        groups += named_groups(packed["param_groups"], own)
    return {"state": entries, "param_groups": groups}


def write_optim_state(core: nn.Module, optimizers: Iterable[Optimizer], state: OptimState) -> None:
    """Load a state into optimizers; their parameters without an entry in it have none afterwards.

    A tensor may be sharded in any way, or be whole on every rank; the optimizers get copies.

    **Collective**: every rank, if the sharding of a tensor differs from its parameter's.

    Raises:
        ConfigError: on every rank, before anything is changed, if the state belongs to another optimizer or another
            model.
    """
    optimizers = list(optimizers)
    entries: Mapping[str, Any] = state["state"]
    parameters = named_parameters(core)
    names = {parameter: name for name, parameter in parameters.items()}
    groups = [(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups]
    own = [group for optimizer in optimizers for group in names_by_group(optimizer, names)]
    options = options_to_load(groups, own, parameters, state)
    of_groups = iter(options)
    for optimizer in optimizers:
        updated = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
        present = {index: name for index, name in enumerate(updated) if entries.get(name)}
        written = {index: _like(entries[name], parameters[name]) for index, name in present.items()}
        write_entries(optimizer, written, list(islice(of_groups, len(optimizer.param_groups))))


def write_entries(
    optimizer: Optimizer, entries: Mapping[int, Mapping[str, Any]], options: Sequence[Mapping[str, Any]]
) -> None:
    """Load into an optimizer a state by parameter index, and the options of its groups.

    Parameters without an entry are as in a new optimizer.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    packed = optimizer.state_dict()
    groups = [{**own, "params": group["params"]} for group, own in zip(packed["param_groups"], options, strict=True)]
    optimizer.load_state_dict({**packed, "state": dict(entries), "param_groups": groups})
    # The entries themselves, wherever the optimizer keeps them: one that wraps another one has none in its `state`.
    loaded = optimizer.state_dict()["state"]
    for index, entry in entries.items():
        # torch rounds all numbers to the parameter's dtype; NAdam's product of momenta loses most of its digits in
        # bfloat16. Source: `Optimizer._process_value_according_to_param_policy` (2.13).
        held = loaded[index]
        for key, value in entry.items():
            if isinstance(value, Tensor) and value.shape != parameters[index].shape and held[key].dtype != value.dtype:
                held[key] = value.to(held[key].device)
    if isinstance(optimizer, Adagrad):  # its state exists from the beginning
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            if new := [parameters[index] for index in saved["params"] if index not in entries]:
                optimizer.state.update(Adagrad([{**options_of(group), "params": new}]).state)


def complete_states(optimizer: Optimizer) -> None:
    """Give each parameter's state the values that the options of its group need now, and no others.

    Values that an option which was switched on needs, such as `amsgrad`, begin as after a gradient of zero. A parameter
    without a state, and an optimizer whose state cannot be found in advance (see `first_state`), are left alone.
    """
    for group in optimizer.param_groups:
        first = cache(partial(first_state, optimizer, options_of(group)))
        for parameter in group["params"]:
            held = optimizer.state.get(parameter)
            # One without dims is taken as one with a dim: only so have values of its shape dims, which counts lack.
            wanted = first(max(parameter.dim(), 1)) if held else None
            if not held or wanted is None:
                continue
            for key in held.keys() - wanted.keys():
                del held[key]
            for key in wanted.keys() - held.keys():
                value = wanted[key]
                is_whole = isinstance(value, Tensor) and value.dim() > 0
                held[key] = torch.full_like(parameter, value.item()) if is_whole else value


def named_parameters(core: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by canonical name; a tied parameter by its first name."""
    first: dict[nn.Parameter, str] = {}
    for site in param_sites(core):
        first.setdefault(site.parameter, site.name)
    return {name: parameter for parameter, name in first.items()}


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group: all that it holds except its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def named_groups(groups: Iterable[Mapping[str, Any]], names: Iterable[Iterable[str]]) -> list[dict[str, Any]]:
    """Return an optimizer's groups with the names of their parameters."""
    return [{**options_of(group), "params": list(own)} for group, own in zip(groups, names, strict=True)]


def merge_options(group: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group after loading: the saved ones, but its own for how updates are computed.

    Where its own option is a number, so is the merged one, and where it is a tensor, a tensor: a compiled or captured
    step needs one, and torch refuses one with `foreach` alone.
    """
    own = options_of(group)
    merged = {**own, **saved, **{key: own[key] for key in _IMPLEMENTATION if key in own}}
    for key, value in own.items():
        if isinstance(value, Tensor) and isinstance(merged[key], Tensor | float | int):
            merged[key] = torch.as_tensor(merged[key], dtype=value.dtype, device=value.device)
        elif isinstance(value, float | int) and isinstance(merged[key], Tensor):
            merged[key] = merged[key].item()
    return merged


def match_groups(
    groups: Sequence[Mapping[str, Any]], own: Sequence[Sequence[str]], saved: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the options of each parameter group after loading: the saved ones merged into its own.

    Parameters may have been added or removed since, for instance by freezing or unfreezing; a group with only new
    parameters keeps its options.

    Args:
        groups: the groups of the optimizer.
        own: the names of their parameters.
        saved: the groups as they were saved.

    Raises:
        ConfigError: two saved groups have become one, or one has become two, so the options of a group are ambiguous.
    """
    owner = {name: index for index, group in enumerate(saved) for name in group["params"]}
    taken: dict[int, str] = {}
    matched: list[dict[str, Any]] = []
    for position, (group, names) in enumerate(zip(groups, own, strict=True)):
        by_saved = {owner[name]: name for name in reversed(names) if name in owner}
        if not names and position < len(saved) and not saved[position]["params"]:
            by_saved[position] = ""
        clash = list(by_saved.values()) if len(by_saved) > 1 else [taken[i] for i in by_saved if i in taken]
        if clash:
            others = [*clash, *by_saved.values()][:2]
            became = "one group" if len(by_saved) > 1 else "two groups"
            raise ConfigError(
                f"the optimizer must have the parameter groups of the state that is loaded, which has {len(saved)}, "
                f"but {listed(map(repr, sorted(others)))} are in {became} here and are not there. Resume with the "
                "groups that were saved"
            )
        taken |= by_saved
        matched.append(merge_options(group, options_of(saved[next(iter(by_saved))]) if by_saved else {}))
    return matched


def _check_kind(groups: Iterable[Mapping[str, Any]], saved: Iterable[Mapping[str, Any]]) -> None:
    """Refuse the options of an optimizer of another kind, whose learning rates would be taken."""
    here, there = ({name for group in each for name in _TELLING & group.keys()} for each in (groups, saved))
    if here and there and here != there:
        raise ConfigError(
            f"the optimizer must be of the kind whose state is loaded, but its groups have {_quoted(here)}, and those "
            f"that were saved {_quoted(there)}. {_REMEDY}"
        )


def _quoted(names: Iterable[str]) -> str:
    return listed(map(repr, sorted(names)))


def options_to_load(
    groups: Sequence[tuple[Optimizer, Mapping[str, Any]]],
    names: Sequence[Sequence[str]],
    parameters: Mapping[str, Tensor],
    state: OptimState,
) -> list[dict[str, Any]]:
    """Return the options of each parameter group after loading a state; see `match_groups`.

    Args:
        groups: the groups, each with its optimizer.
        names: the names of their parameters.
        parameters: tensors with the shapes of the model's parameters on this rank, by name.
        state: the state to load.

    Raises:
        ConfigError: the state belongs to another model, another optimizer, or other groups.
    """
    _check_names(parameters, names, state)
    if not state["state"]:  # else its entries tell which kind has saved them
        _check_kind((group for _, group in groups), state["param_groups"])
    options = match_groups([group for _, group in groups], names, state["param_groups"])
    for (optimizer, _), own, merged in zip(groups, names, options, strict=True):
        entries = {name: state["state"].get(name) for name in own if name in parameters}
        _check_entries(optimizer, merged, parameters, entries)
    return options


def _check_names(parameters: Mapping[str, Tensor], own: Iterable[Iterable[str]], state: OptimState) -> None:
    """Refuse a state that has entries for parameters that the optimizer does not update, unless they are frozen now."""
    held = {name for names in own for name in names}
    others = [name for name in state["state"] if name not in held]
    unknown = [name for name in others if name not in parameters]
    if unknown:
        raise ConfigError(
            f"the optimizer's state must be that of this model, but has entries for {listed(map(repr, unknown))}, "
            "which the model does not have. Resume with the model that was saved, or load its weights alone, by "
            "`load_from` with resume=False"
        )
    trained = [name for name in others if name in parameters and parameters[name].requires_grad]
    if trained:
        raise ConfigError(
            f"the optimizer must update the parameters that the state which is loaded was saved with, but does not "
            f"update {listed(map(repr, trained))}. Give them to the optimizer, or freeze them (requires_grad=False)"
        )


def _check_entries(
    optimizer: Optimizer,
    options: Mapping[str, Any],
    parameters: Mapping[str, Tensor],
    entries: Mapping[str, Mapping[str, Any] | None],
) -> None:
    """Refuse entries of a group, with these options, that another kind of optimizer has saved.

    Raises:
        CheckpointError: an entry has the right names, but values of another kind, as no optimizer saves them.
        ConfigError: an entry has other names, or the options are of another kind.
    """
    kind = type(optimizer)
    # If `first_state` does not work, compare with the state of another parameter.
    present = next((held for held in optimizer.state.values() if held), None)
    first = cache(partial(first_state, optimizer, options))
    for name, entry in entries.items():
        if not entry:
            continue
        try:
            wanted = first(parameters[name].dim())
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"the optimizer must be of the kind whose state is loaded, but {kind.__name__} can't have the options "
                f"that were saved: {error}. {_REMEDY}"
            ) from error
        if wanted is not None:
            fits = wanted.keys() == entry.keys()
            if fits and (other := [key for key in entry if _dims(entry[key]) != _dims(wanted[key])]):
                raise CheckpointError(
                    f"the optimizer's state of {name!r} must have `{other[0]}` with {_dims(wanted[other[0]])} dims, as "
                    f"{kind.__name__} keeps it, but has another value there. Resume from another checkpoint"
                )
        else:
            wanted = dict.fromkeys(_ALWAYS[kind]) if kind in _ALWAYS else present
            fits = wanted is None or bool(wanted.keys() & entry.keys())
        if not fits:
            raise ConfigError(
                f"the optimizer's state of {name!r} must have {sorted(wanted or ())}, as {kind.__name__} keeps it, but "
                f"has {sorted(entry)}. {_REMEDY}"
            )


def _dims(value: Any) -> int:
    """Return the number of dims of a state's value: 0 for a number, as some keep their count of steps; else -1."""
    return value.dim() if isinstance(value, Tensor) else 0 if isinstance(value, int | float) else -1


def first_state(optimizer: Optimizer, options: Mapping[str, Any], dim: int) -> dict[str, Any] | None:
    """Return the state that one of torch's optimizers keeps for a parameter with `dim` dims, after a gradient of zero.

    A new optimizer of the same class takes a step for a new parameter with a single element. None for an optimizer
    whose state cannot be found in this way.
    """
    kind = type(optimizer)
    if not f"{kind.__module__}.".startswith("torch.optim.") or kind in _ALWAYS:  # of Muon it is `torch.optim` itself
        return None
    parameter = nn.Parameter(torch.zeros([1] * dim, device="cpu"))
    parameter.grad = torch.zeros_like(parameter)
    what = {key: value for key, value in options.items() if key not in _IMPLEMENTATION}
    twin = kind([{**what, "lr": float(what["lr"]), "params": [parameter]}])  # type: ignore[call-arg]
    twin.step()
    return dict(twin.state[parameter])


def names_by_group(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> list[list[str]]:
    """Return the names of the parameters in each group of an optimizer.

    Raises:
        ConfigError: it updates parameters that have no name.
    """
    for group in optimizer.param_groups:
        shapes = [tuple(parameter.shape) for parameter in group["params"] if parameter not in names]
        if shapes:
            raise ConfigError(
                f"`optimizer` must update parameters of the model, but {type(optimizer).__name__} updates {len(shapes)}"
                f" others, one of shape {shapes[0]}, whose state has no name in a checkpoint. Put them into the model"
            )
    return [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]


def _like(entry: Mapping[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
    """Return a copy of a parameter's state; tensors of the parameter's shape are sharded like the parameter."""

    def convert(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.shape == parameter.shape and value.dim() > 0:
            return reshard_like(value, parameter).to(parameter.device).clone()
        return reshard_like(value, None).clone()

    return {key: tree_map(convert, value) for key, value in entry.items()}
