"""Wrappers, which distribute a model over ranks: their base class, and functions that recognise and unwrap them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, partial
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.dist.consistency import check_call
from lockstep.groups import Comm, this_rank
from lockstep.model import steps
from lockstep.model.outside_loss import losses_of, predictions_of
from lockstep.model.parts import INSIDE_WRAPPERS
from lockstep.model.steps import ParseLosses, UpdatesParams
from lockstep.registry import MODEL_WRAPPERS
from lockstep.watch.failures import backend_errors_translated


class ModelWrapper(nn.Module):
    r"""A module that distributes another one over ranks; the base class of lockstep's wrappers.

    A subclass sets `module`, and overrides what differs. A wrapper that is registered in `MODEL_WRAPPERS` need not
    inherit from this class; lockstep then assumes these defaults.

    Attributes:
        module: the user's own module.
        forward_is_collective: whether ranks must call `forward` equally often, also in validation; a loop over uneven
            data must ensure this.
        prepares_backward: whether `backward_context` must be entered for each backward pass.
        partitioned: text that says what holds the parameters in pieces that only an engine can join, and what to use
            instead; None if each rank has them whole or as DTensors.
        data_shard: the data shard that this rank needs, as `(index, count)`; None if each rank has its own.
        process_group: the group of ranks in which the model communicates, which errors name; None for all, or several.
    """

    module: nn.Module
    forward_is_collective: bool = False
    prepares_backward: bool = False
    partitioned: str | None = None
    data_shard: tuple[int, int] | None = None
    process_group: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.module(*args, **kwargs)

    def train_step(self, data: Any, optim_wrapper: UpdatesParams) -> dict[str, Tensor]:
        """Train on this rank's part of the batch, and return this rank's values to log.

        **Collective**: every rank.
        """
        with self.step_context(optim_wrapper):
            return train_step(self, data, optim_wrapper)

    def step_context(self, optim_wrapper: Any) -> AbstractContextManager[Any]:
        """Return the context of one training step, whatever code computes its losses."""
        return nullcontext()

    def val_step(self, data: Any) -> Any:
        """Return what the module predicts for this rank's batch."""
        with self.evaluation_context():
            return step_of(self.module, "val_step", predict_step)(data)

    def test_step(self, data: Any) -> Any:
        """Return what the module predicts for this rank's batch."""
        with self.evaluation_context():
            return step_of(self.module, "test_step", predict_step)(data)

    def note_failure(self, error: Exception) -> None:
        """Add to an error that ends a training what this way of training has to do with it."""

    def begin_epoch(self) -> None:
        """Be told that an epoch begins, on every rank; code of the user's own may have run since the last one."""

    def begin_save(self) -> None:
        """Be told that a checkpoint is to be saved, on every rank, before anything of it is written."""

    def evaluation_context(self) -> AbstractContextManager[Any]:
        """Return the context in which `val_step` and `test_step` run."""
        return nullcontext()

    def no_sync(self) -> AbstractContextManager[Any]:
        """Return the context in which each rank accumulates its gradients, and they are not averaged."""
        return nullcontext()

    def backward_context(self, loss: Tensor, *, syncs: bool) -> AbstractContextManager[Tensor]:
        """Return the context of the backward pass of a loss, whichever modules were called to compute it.

        Args:
            loss: the loss, scaled.
            syncs: whether the pass averages gradients.

        Returns:
            The context, which gives the loss to run the backward pass on.
        """
        return nullcontext(loss)

    def full_numel(self, parameter: nn.Parameter) -> int:
        """Return the number of elements of a parameter of the module, counting a sharded one in full."""
        return parameter.numel()


def note_no_backward(comm: Comm) -> None:
    """Record that this rank has made no backward pass in a training step, as a call that all ranks must make.

    Nothing is sent. If other ranks have made one, which waits for this rank, the watch finds within seconds that the
    calls differ, and names them on every rank; if none has, the calls are the same.

    Raises:
        CollectiveMismatchError: the calls of this rank are known to differ from those of others.
    """
    check_call("step_without_backward_pass", comm, "to leave out a batch, multiply its loss by 0", compares=False)


@contextmanager
def all_entered(contexts: Iterable[AbstractContextManager[Any]]) -> Iterator[None]:
    """Enter several contexts; they are left in reverse order, also if one of them raises."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def train_step(model: nn.Module, data: Any, optim_wrapper: UpdatesParams) -> dict[str, Tensor]:
    """Train `model` on one batch, by the `train_step` of the wrapped module if it defines one.

    In a module's own `train_step`, `self(...)` and `self.forward(...)` go through the wrapper. Backward passes go
    through the optim wrapper: `update_params(loss)`, or `backward(loss)` and `step()`.

    Args:
        model: the module, wrapped or not.
        data: the batch. A dict is unpacked into keyword arguments of `forward`, a list or tuple into positional ones.
        optim_wrapper: runs the backward pass and the update.

    Returns:
        The values to log, detached and on their device; `"loss"` is what was minimised.

    Raises:
        PeerError: a rank has ended during a forward or backward pass that communicates.
        CollectiveTimeoutError: a rank did not arrive in time.
    """
    core = unwrap_model(model)
    if model is core:
        return _default_train_step(model, core, data, optim_wrapper)
    if (bind := getattr(optim_wrapper, "bind", None)) is not None:  # a strategy has done so already
        bind(model)
    try:
        if not steps.defines_step(core, "train_step"):
            return _default_train_step(model, core, data, optim_wrapper)
        own: Callable[..., dict[str, Tensor]] = core.train_step  # type: ignore[assignment]
        with forwarded(core, model):
            return own(data, optim_wrapper)
    except RuntimeError:
        group = getattr(model, "process_group", None)  # torch's DDP has it too
        with backend_errors_translated(group):  # entered here alone, because every step would pay for it
            raise


@contextmanager
def forwarded(core: nn.Module, wrapper: Callable[..., Any]) -> Iterator[None]:
    """Redirect calls of `core`, and of its `forward`, to the wrapper around it; calls by the wrapper reach `core`.

    **Source**: `nn.Module.__call__` (2.13), which looks at `_compiled_call_impl` before it runs any hook, so that each
    hook of `core` runs once.
    """
    names = ("_compiled_call_impl", "forward")
    before = {name: vars(core)[name] for name in names if name in vars(core)}

    def through_wrapper(*args: Any, **kwargs: Any) -> Any:
        restore()
        try:
            return wrapper(*args, **kwargs)
        finally:
            vars(core).update(redirected)

    def restore() -> None:
        for name in names:
            vars(core).pop(name, None)
        vars(core).update(before)

    redirected = dict.fromkeys(names, through_wrapper)
    vars(core).update(redirected)
    try:
        yield
    finally:
        restore()


def _default_train_step(
    model: nn.Module, core: nn.Module, data: Any, optim_wrapper: UpdatesParams
) -> dict[str, Tensor]:
    """Train a module that defines no step of its own."""
    parse: ParseLosses = getattr(core, "parse_losses", None) or steps.parse_losses
    with optim_wrapper.optim_context(model):
        batch = steps.preprocess(core, data, training=True)
        losses = losses_of(model, core, batch)
    try:
        loss, log_vars = parse(losses)
    except TypeError as error:
        if lacking := steps.lacks_labels(core, batch):
            raise TypeError(f"{lacking} ({this_rank()})") from error
        raise
    optim_wrapper.update_params(loss)
    return log_vars


def predict_step(model: nn.Module, data: Any) -> Any:
    """Return what `model` predicts for one batch, in whatever form the model returns it.

    Wrappers are bypassed: a wrapper's own `forward` communicates, and ranks may hold different numbers of validation
    batches.
    """
    core = unwrap_model(model)
    return predictions_of(core, steps.preprocess(core, data, training=False))


def step_of(model: nn.Module, name: str, otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """Return the model's own step of that name, or `otherwise`, the default for any module."""
    own: Callable[..., Any] | None = getattr(model, name, None)
    return partial(otherwise, model) if own is None or steps.is_stub(own) else own


def train_step_of(model: nn.Module) -> Callable[[Any, UpdatesParams], dict[str, Tensor]]:
    """Return the training step of `model`: its own `train_step`, or else `train_step`."""
    if hasattr(model, "train_step") or is_model_wrapper(model):
        return step_of(model, "train_step", train_step)
    return partial(_default_train_step, model, model)


def is_model_wrapper(model: nn.Module) -> bool:
    """Return whether `model` distributes another module over ranks, which is then its `.module`.

    True of every `ModelWrapper`, of torch's `DistributedDataParallel` and `DataParallel`, and of every class in
    `MODEL_WRAPPERS`.
    """
    kind: type = type(model)
    return _wraps(kind, len(MODEL_WRAPPERS))


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the user's own module under any number of wrappers."""
    while is_model_wrapper(model):
        inner = model.module
        assert isinstance(inner, nn.Module)
        model = inner
    return model


def inside_wrappers(module: nn.Module) -> nn.Module:
    """Return the module under any number of wrappers, also torch's for compiling and checkpointing a part of a model.

    Names of tensors in a model's state lack what these add to them.
    """
    name = _name_inside(module)
    return module if name is None else inside_wrappers(module.get_submodule(name))


def parts_in_state(
    model: nn.Module, prefix: str = "", parent: nn.Module | None = None
) -> Iterator[tuple[str, nn.Module, nn.Module | None]]:
    """Yield each part of a model, without wrappers, under each of its names, in the order of `model.modules()`.

    With it come the prefix of its tensors in the model's state, and the part that holds it, which is None at the top.
    """
    model = inside_wrappers(model)
    yield prefix, model, parent
    for name, child in model._modules.items():  # `named_children` leaves out a second name (2.13)
        if child is not None:
            yield from parts_in_state(child, f"{prefix}{name}.", model)


def name_in_state(model: nn.Module, name: str) -> str:
    """Return the name that a tensor has in a model's state, given its name in the model: without parts of wrappers."""
    *path, last = name.split(".")
    kept = list[str]()
    for part in path:
        kept += [] if part == _name_inside(model) else [part]
        model = model.get_submodule(part)
    return ".".join([*kept, last])


def _name_inside(module: nn.Module) -> str | None:
    names = ("module",) if is_model_wrapper(module) else INSIDE_WRAPPERS
    return next((name for name in names if name in module._modules), None)


@cache  # every step calls it; the number of wrappers shows whether another one has been registered
def _wraps(kind: type, _registered: int) -> bool:
    known = tuple(entry for entry in MODEL_WRAPPERS.module_dict.values() if isinstance(entry, type))
    return issubclass(kind, (ModelWrapper, DistributedDataParallel, nn.DataParallel, *known))
