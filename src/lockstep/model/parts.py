"""The parts of a model: by class, by what they own, those that can be called; and recomputing their activations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, zip_longest
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import checkpoint, noop_context_fn

from lockstep.calls import unlike_most
from lockstep.dist import broadcast
from lockstep.dist.agreement import differing
from lockstep.errors import CollectiveMismatchError, ConfigError, did_you_mean, listed, ranks_in_words
from lockstep.groups import GroupLike, this_rank

INSIDE_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""The names under which torch's wrappers keep a module, and so in those of its tensors: `torch.compile`, checkpointing.

They give out the module in no other way (2.13).
"""
ClassNames: TypeAlias = str | type[nn.Module] | Iterable[str | type[nn.Module]]

Site: TypeAlias = tuple[nn.Module, str]
"""The module that owns a parameter, and the parameter's name in it."""


def refuse_added(added: Sequence[str], wrapped: str) -> None:
    """Refuse parameters of a model that were not there when it was distributed over the ranks.

    Raises:
        ConfigError: there are some.
    """
    if added:
        raise ConfigError(
            f"trainable parameters must be there when {wrapped}, but {listed(added, most=4)} were added or replaced "
            f"afterwards ({this_rank()}), and their gradients would not be averaged over ranks. Build the whole model "
            "first, and freeze what is to train later"
        )


def trains_others(optim_wrapper: Any, known: Collection[int]) -> bool:
    """Return whether an optimizer trains a parameter whose identity is not `known`.

    Looked at in each step: it is much cheaper than a walk through the model.
    """
    groups = getattr(optim_wrapper, "param_groups", ())
    return any(id(own) not in known and own.requires_grad for group in groups for own in group["params"])


def broadcast_from_first(tensors: Iterable[Tensor], *groups: GroupLike) -> None:
    """Overwrite parameters and buffers with those of rank 0 of each group, in one group after the other.

    **Collective**: every rank of each group. **Cost**: for each group one broadcast of each tensor, all in flight at
    once; no copy of contiguous ones.
    """
    tensors = list(tensors)
    for group in groups:
        for handle in [broadcast(tensor, src=0, group=group, async_op=True) for tensor in tensors]:
            assert handle is not None  # asked for by async_op
            handle.wait()


def require_same_parameters(
    model: nn.Module, ranks: Sequence[int], *groups: GroupLike, left_out: Collection[str] = (), buffers: bool = False
) -> None:
    """Refuse a model whose parameters have other names, shapes, dtypes or another order on other ranks.

    Args:
        model: the model, before it is distributed.
        ranks: the ranks of the job that the groups reach, in the order in which `from_all` returns their values.
        groups: one group; or the groups of a mesh's axes, from the last axis to the first.
        left_out: names of parameters and buffers that need not be the same.
        buffers: whether buffers are compared, too.

    **Collective**: every rank of the groups. **Cost**: one exchange between the hosts for each group.

    Raises:
        CollectiveMismatchError: the same on every rank, which names the first one that differs.
    """
    named = chain(model.named_parameters(), model.named_buffers() if buffers else ())
    own = [f"`{name}` {_described(tensor)}" for name, tensor in named if name not in left_out]
    by_rank = differing(own, groups)
    if by_rank is None:
        return
    found = next(each for each in zip_longest(*by_rank, fillvalue="nothing further") if len(set(each)) > 1)
    ranks_of = {text: [rank for rank, other in zip(ranks, found, strict=True) if other == text] for text in found}
    told = " and ".join(f"{text} on {ranks_in_words(some)}" for text, some in ranks_of.items())
    raise CollectiveMismatchError(
        f"the model must have the same parameters{' and buffers' if buffers else ''} on all ranks, but the first that "
        f"differs is {told}. No argument of the model may depend on the rank, or on the data of one rank, as a number "
        "of classes may; nor what is frozen. Count over all data, or on rank 0, and send it: "
        "lockstep.dist.broadcast_object",
        failed_ranks=[ranks[place] for place in unlike_most(dict(enumerate(found)))],
    )


def _described(tensor: Tensor) -> str:
    shape = "not initialized" if is_lazy(tensor) else list(tensor.shape)
    is_frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    return f"{shape} {str(tensor.dtype).removeprefix('torch.')}{' (frozen)' if is_frozen else ''}"


def classes_in(model: nn.Module, names: ClassNames, *, what: str) -> tuple[type[nn.Module], ...]:
    """Return the module classes given by `names`, which holds classes and names of classes.

    Args:
        model: the model in which classes are looked up by name.
        names: one or several.
        what: the name of the argument that gave them, for errors.

    Raises:
        TypeError: something in `names` is neither a name nor a class of modules.
        ValueError: the model has no module of that class.
    """
    kinds = {type(module) for module in model.modules()}
    items = [names] if isinstance(names, str | type) or not isinstance(names, Iterable) else list(names)
    found: set[type[nn.Module]] = set()
    for item in items:
        if isinstance(item, str):
            named = {kind for kind in kinds if kind.__name__ == item}
            if not named:
                raise ValueError(
                    f"`{what}` must name classes of modules in {type(model).__name__}, but names {item!r}"
                    + did_you_mean(item, {kind.__name__ for kind in kinds})
                )
            found |= named
        elif isinstance(item, type) and issubclass(item, nn.Module):
            found.add(item)
        else:
            raise TypeError(f"`{what}` must hold classes of modules or their names, but holds {item!r}")
    return tuple(found)


def owners_of_parameters(model: nn.Module) -> dict[nn.Parameter, list[Site]]:
    """Return, for each parameter, the modules that own it, and its name in each of them."""
    owners: dict[nn.Parameter, list[Site]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(parameter, []).append((module, name))
    return owners


def parameter_at(site: Site) -> nn.Parameter:
    """Return what is there now: the shard, or the gathered parameter."""
    owner, name = site
    return owner.get_parameter(name)


def is_callable(module: nn.Module) -> bool:
    """Return whether a module has a `forward`; containers such as `ModuleList` do not."""
    return type(module).forward is not nn.Module.forward


def callable_children(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Yield the callable children, including those in containers: each one's parent, its name there, and the child."""
    for name, child in list(module.named_children()):
        if is_callable(child):
            yield module, name, child
        else:
            yield from callable_children(child)


Check: TypeAlias = Callable[[nn.Module], bool] | Iterable[str | type[nn.Module]]


def refuse_sparse_gradients(model: nn.Module, where: str, ignored: Collection[nn.Module] = ()) -> None:
    """Refuse embeddings with sparse gradients.

    Args:
        model: the model.
        where: under what, for the message.
        ignored: modules whose gradients are not sent.

    Raises:
        ConfigError: on every rank, naming the embedding.
    """
    for name, part in model.named_modules():
        is_sparse = isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse and part.weight.requires_grad
        if is_sparse and part not in ignored:
            raise ConfigError(
                f"`{f'{name}.sparse'.lstrip('.')}` must be False under {where}, which sends dense gradients, "
                "but is True. Set it to False, or use strategy 'ddp'"
            )


def checkpoint_activations(
    model: nn.Module, check: Check, context_fn: Callable[[], Any] = noop_context_fn
) -> list[str]:
    """Make parts of a model store only their inputs for the backward pass, and recompute their activations.

    Each part's `forward` is replaced in place; names of parameters and classes do not change. Models of transformers
    keep no cache of keys and values where they train, as with their own checkpointing; their configs stay as they are.

    Args:
        model: the model, before it is sharded.
        check: a function that says whether a module is such a part; or the classes of the parts, or their names. A part
            inside another one is recomputed with that one.
        context_fn: as for `torch.utils.checkpoint.checkpoint`: `partial(create_selective_checkpoint_contexts, ops)`
            also stores the outputs of the operators `ops`, such as `[torch.ops.aten.mm.default]`.

    Returns:
        The names of the parts.

    Raises:
        ValueError: no module is such a part.

    **Cost**: one more forward pass of the parts in each step.

    **Source**: Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016; `torch.utils.checkpoint` (2.13), the
    non-reentrant variant.
    """
    names = list(_outermost(model, "", _accepting(model, check)))
    if not names:
        raise ValueError(
            "`check` must accept at least one module, but accepts none of those in "
            f"{type(model).__name__}: {', '.join(sorted({type(m).__name__ for m in model.modules()}))}"
        )
    for name in names:
        part = model.get_submodule(name)
        part.forward = partial(checkpoint, part.forward, use_reentrant=False, context_fn=context_fn)
    for module, _ in _with_cache(model):
        module.register_forward_pre_hook(_without_cache, with_kwargs=True)
    return names


def _without_cache(module: nn.Module, arguments: Any, options: dict[str, Any]) -> Any:
    """Have a model keep no keys and values where gradients follow, whose recomputation would add them once more."""
    return arguments, {**options, "use_cache": False} if torch.is_grad_enabled() else options


def leave_out_cache(model: nn.Module, *, of_packed: bool) -> None:
    """Have models of transformers keep no keys and values, unless a call says `use_cache`.

    With those of packed rows, transformers (5.24) takes the texts of a row for one, which `position_ids` without an
    `attention_mask` tell apart otherwise. Its Trainer leaves them out for the whole training. Blocks that are compiled
    one by one are compiled anew for each number of layers that have some, up to torch's limit of eight.

    Args:
        model: the model, with whatever is around it.
        of_packed: only in calls with rows that may be packed.
    """
    for module, place in _with_cache(model):
        module.register_forward_pre_hook(partial(_without_unasked_cache, place, of_packed), with_kwargs=True)


def _without_unasked_cache(place: int, of_packed: bool, module: nn.Module, arguments: Any, options: Any) -> Any:
    """Say `use_cache=False`, the argument at `place`, in a call that says nothing."""
    says = len(arguments) > place or options.get("use_cache") is not None
    is_packed = options.get("position_ids") is not None and options.get("attention_mask") is None
    return arguments, options if says or (of_packed and not is_packed) else {**options, "use_cache": False}


def _with_cache(model: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """Yield models of transformers that keep keys and values, with the place of `use_cache` among their arguments."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False) is True:  # or an attention in one
            names = list(inspect.signature(module.forward).parameters)
            if "use_cache" in names:
                yield module, names.index("use_cache")


def _outermost(module: nn.Module, name: str, accept: Callable[[nn.Module], bool]) -> Iterator[str]:
    if accept(module):
        yield name
        return
    for child_name, child in module.named_children():
        yield from _outermost(child, f"{name}.{child_name}" if name else child_name, accept)


def _accepting(model: nn.Module, check: Check) -> Callable[[nn.Module], bool]:
    if isinstance(check, type) or not callable(check):
        kinds = classes_in(model, check, what="check")
        return lambda module: isinstance(module, kinds)
    return check
