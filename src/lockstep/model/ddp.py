"""torch's DDP with the training and validation steps of a model."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from time import perf_counter
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from lockstep.device import Moment, moment
from lockstep.dist import all_gather_object, all_reduce
from lockstep.dist.consistency import check_call
from lockstep.errors import ConfigError, listed, message_of
from lockstep.groups import resolve
from lockstep.model import steps
from lockstep.model.autograd_graph import (
    after_backward,
    backward_pass,
    hides_leaves,
    leaves_of,
    nodes_of,
    reaches_none,
)
from lockstep.model.hidden_outputs import hidden_tensors
from lockstep.model.parts import refuse_added, require_same_parameters, trains_others
from lockstep.model.wrapper import ModelWrapper, note_no_backward
from lockstep.model.written import AVERAGED, OWN_STEP, DriftCheck, awaits_update, refuse_max_norm
from lockstep.registry import MODEL_WRAPPERS
from lockstep.transport.handles import note_running, waiting
from lockstep.watch.failures import backend_errors_translated

Hook: TypeAlias = Callable[[Any, GradBucket], Future[Tensor]]

_logger = logging.getLogger(__name__)

# torch 2.13 warns about the old name; torch 2.11 knows only that one.
_BUFFERS_ARGUMENT = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)
# In the first synchronised backward passes, ranks compare what the loss depends on.
_FIRST_CHECKED = 3
# After this many changes of the trainable parameters, searching for unused parameters is cheaper than rebuilding DDP.
_MOST_CHANGES = 4


@MODEL_WRAPPERS.register_module()
class MMDistributedDataParallel(DistributedDataParallel, ModelWrapper):
    """Train replicas of a module on all ranks, and average their gradients.

    If the module defines its own `train_step`, that is called. It may call the module or parts of it: gradients are
    averaged in the backward passes that the optim wrapper runs. `find_unused_parameters` is then on by default, so that
    each of several losses may depend on only some of the parameters.

    Parameters may be frozen and unfrozen between steps by `requires_grad_`, in the same way on all ranks.

    Args:
        module: the module, on the device on which it will be trained. It need not be a `BaseModel`.
        detect_anomalous_params: before each backward pass, look for trainable parameters that the loss does not depend
            on, and warn about those not yet named. Each rank warns about its own loss. Costs one walk over the autograd
            graph per step.
        comm_hook: how gradients travel: a function for torch's `register_comm_hook`, such as `fp16_compress_hook` of
            `torch.distributed.algorithms.ddp_comm_hooks.default_hooks`, which gets the process group as its state.
        **kwargs: those of `torch.nn.parallel.DistributedDataParallel`. `device_ids` can be left out, and is ignored on
            the CPU. `broadcast_buffers` says whether each forward pass sends rank 0's buffers to the others; initially
            they are equal in any case. `gradient_as_bucket_view` is True by default, unlike in torch: gradients are
            views of the buckets in which they are sent, so they are held once, not twice, and are not copied back. To
            keep a gradient from one step to the next, copy it or pass False.

    Attributes:
        clock: when this rank has waited for the gradients of others.

    **Collective**: every rank of the group; the parameters of rank 0 are sent to the others.

    **Raises**: `CollectiveMismatchError`, on every rank, if the models of the ranks have other parameters or buffers;
    `ConfigError` if trainable parameters get no gradient on some rank and `find_unused_parameters` is off, on every
    rank before each of the first three backward passes, later on that rank after the pass; or, on every rank, if an
    embedding has `max_norm` and there are several ranks;
    `DivergenceError`, on every rank after a step, if replicas are no longer equal, as after a layer has written its
    weights in the forward pass.

    **Cost**: besides the gradients, one exchange of 256 bytes between the hosts in each of the first three backward
    passes, unless `find_unused_parameters` is on; and what `lockstep.model.written.DriftCheck` says after the first
    three updates, every 500th, in a Session the first of each epoch, and before each checkpoint.
    """

    prepares_backward = True

    def __init__(
        self,
        module: nn.Module,
        detect_anomalous_params: bool = False,
        *,
        comm_hook: Hook | None = None,
        **kwargs: Any,
    ) -> None:
        if all(parameter.device.type == "cpu" for parameter in module.parameters()):
            kwargs.pop("device_ids", None)
            kwargs.pop("output_device", None)
        if _BUFFERS_ARGUMENT != "broadcast_buffers" and "broadcast_buffers" in kwargs:
            kwargs[_BUFFERS_ARGUMENT] = kwargs.pop("broadcast_buffers")
        kwargs.setdefault("gradient_as_bucket_view", True)  # docs/decisions/0010
        self.clock = ExchangeClock()
        comm = resolve(kwargs.get("process_group") or kwargs.get("device_mesh"))
        if comm.size > 1:
            refuse_max_norm(module, "where each rank has its own batch, so that replicas would differ")
            # As DDP's `_set_params_and_buffers_to_ignore_for_model` has set, which torch tells in no other way (2.13).
            left_out = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
            syncs = bool(kwargs.get("init_sync", True))
            require_same_parameters(module, comm.ranks, comm.pg, left_out=left_out, buffers=syncs)
        if steps.calls_parts(module) and not kwargs.get("static_graph") and "find_unused_parameters" not in kwargs:
            kwargs["find_unused_parameters"] = True
        self._replicate(module, kwargs, comm_hook)
        self.detect_anomalous_params = detect_anomalous_params
        self._named_anomalous: set[str] = set()
        self._trains_itself = steps.defines_step(module, "train_step")
        self._expects_gradients = False
        self._synced_backwards = self._changes = 0
        self._has_averaged = self._hides_outputs = False
        self._begin_drift_check()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what knows the group, as torch does; a copy joins the default group."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return {name: value for name, value in state.items() if name not in ("_comm", "_drift", "clock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._comm = resolve(self.process_group)
        self.clock = ExchangeClock()
        self._begin_drift_check()

    def begin_epoch(self) -> None:
        """Compare replicas after the first update of the epoch, too: one rank alone may have written weights."""
        self._drift.look_again()

    def begin_save(self) -> None:
        """Compare replicas, of which a checkpoint has one."""
        self._drift.before_save()

    def _begin_drift_check(self) -> None:
        self._drift = DriftCheck(self.replicated, self.process_group, OWN_STEP if self._trains_itself else AVERAGED)

    def _replicate(self, module: nn.Module, options: Mapping[str, Any], comm_hook: Hook | None) -> None:
        super().__init__(module, **options)
        self._options, self._comm_hook = options, comm_hook
        self._comm = resolve(self.process_group)
        if self._comm.is_alone and self._comm.size > 1:
            super().register_comm_hook(None, _keep_gradients)
        elif comm_hook is not None:
            self.register_comm_hook(self.process_group, comm_hook)
        self._parameters_seen = list(module.parameters())
        self._has_met, self._will_meet = bool(options.get("find_unused_parameters")), False
        self._ids = set(map(id, self._parameters_seen))
        self._exchanged = [parameter.requires_grad for parameter in self._parameters_seen]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, and prepare the exchange of gradients in the next backward pass."""
        # Torch's wrapper can't look at the tensors of such transforms (2.13); a static graph needs it all the same.
        if torch._C._are_functorch_transforms_active() and not self.static_graph:
            self._hides_outputs = True  # the backward pass prepares itself
            return self.module(*args, **kwargs)
        if torch.is_grad_enabled():
            self._follow_trainability()
            self._expects_gradients = self.require_backward_grad_sync
        try:
            with self._meeting() if self._will_meet and torch.is_grad_enabled() else nullcontext():
                output = super().forward(*args, **kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            with backend_errors_translated(self.process_group):
                self._explain(error)
        searches = (self.find_unused_parameters or self.static_graph) and torch.is_grad_enabled()
        if searches and hidden_tensors(output):
            if self.static_graph:
                raise ConfigError(
                    "`static_graph` must be False for a model whose outputs torch does not find, because it would not "
                    f"average the gradients of the first step, but {type(self.module).__name__} returns a "
                    f"{type(output).__name__} ({self._comm.this_rank}). Return a tensor, dict, list, tuple or dataclass"
                )
            self._hides_outputs = True
        return output

    @contextmanager
    def _meeting(self) -> Iterator[None]:
        """Record the forward pass after the first exchange, in which torch broadcasts its buckets, as a call."""
        self._will_meet = False
        check_call("forward_pass", self._comm, compares=False)
        with waiting(self._comm) if self.device_type == "cpu" else nullcontext():
            yield

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        """Let `hook` exchange the gradients, and time it; see torch's `DistributedDataParallel`."""
        super().register_comm_hook(state, self.clock.timed(hook))

    @contextmanager
    def step_context(self, optim_wrapper: Any) -> Iterator[None]:
        """Follow changes of `requires_grad`; after the step, check now and then that replicas are equal.

        **Collective**: every rank of the group.

        Raises:
            ConfigError: the optimizer trains parameters that were added to the model after it was wrapped.
            DivergenceError: on every rank, if replicas differ.
        """
        self._follow_trainability()
        if self._comm.size > 1 and trains_others(optim_wrapper, self._ids):
            self.replicated()
        before = getattr(optim_wrapper, "inner_count", None)
        self._has_averaged = False
        yield
        if before is not None and optim_wrapper.inner_count == before:
            note_no_backward(self._comm)
        # A step of the user's own may also update without a backward pass that averages gradients, or average without
        # an update.
        may_update = self._has_averaged or self._trains_itself
        if not awaits_update(optim_wrapper):
            (self._drift.after_update if may_update else self._drift.after_local_update)()

    @contextmanager
    def backward_context(self, loss: Tensor, *, syncs: bool) -> Iterator[Tensor]:
        """Prepare the backward pass of a loss, whichever modules were called to compute it.

        Args:
            loss: the loss on which the backward pass runs.
            syncs: whether the pass averages gradients.
        """
        if self.detect_anomalous_params:
            self._report_anomalous(loss)
        if self._trains_itself:
            # Forward passes of this step, if any, have prepared backward passes from their own outputs only.
            syncs, self._expects_gradients = syncs or self._expects_gradients, False
        self._has_averaged |= syncs
        if syncs and self._synced_backwards < _FIRST_CHECKED:
            self._synced_backwards += 1
            self._check_all_reached(loss)
        if syncs:
            # Recorded, so that a rank that makes no such pass, or one more, is found; see `note_no_backward`.
            check_call("backward_pass", self._comm, compares=False)
            self._will_meet, self._has_met = not self._has_met, True
        if syncs and reaches_none(loss, self._ids):
            self._contribute_nothing()
        elif syncs and (self._trains_itself or self._hides_outputs):
            self.reducer.prepare_for_backward([loss] if self.find_unused_parameters else [])
            self._hides_outputs = False
        if loss.requires_grad:
            loss.register_hook(self.clock.follow)  # type: ignore[no-untyped-call]
        with waiting(self._comm) if syncs and self.device_type == "cpu" else nullcontext():
            yield loss
        if syncs:
            self._require_all_reduced()
        if syncs and self.device_type != "cpu":
            note_running(self._comm, loss.device)

    def _require_all_reduced(self) -> None:
        """Raise an error if the backward pass that has just ended left out parameters for whose gradients others wait.

        torch says so in the next forward pass, which a rank may never reach: before it, ranks may exchange the sizes of
        their batches, in which this rank would wait for those that wait for its gradients.
        """
        try:
            self._check_reducer_finalized()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            self._explain(error)

    def _contribute_nothing(self) -> None:
        """Take part in the exchange of gradients with zeros: torch begins it only when some gradient is computed.

        Raises:
            ConfigError: `find_unused_parameters` is off.
        """
        averaged = self._averaged()
        if not self.find_unused_parameters:
            raise ConfigError(_unused([name for name, _ in averaged], self._comm.rank, self._comm.size))
        nothing = averaged[0][1].flatten()[:1].sum() * 0
        self.reducer.prepare_for_backward([nothing])
        nothing.backward()  # type: ignore[no-untyped-call]

    def _follow_trainability(self) -> None:
        """Start exchanging the gradients of unfrozen parameters, and stop exchanging those of frozen ones."""
        trainable = [parameter.requires_grad for parameter in self._parameters_seen]
        if trainable == self._exchanged or not any(trainable):
            return
        seen = zip(self._parameters_seen, self._exchanged, strict=True)
        changed = [parameter for parameter, before in seen if parameter.requires_grad != before]
        unfrozen = [parameter for parameter in changed if parameter.requires_grad]
        frozen = [parameter for parameter in changed if not parameter.requires_grad]
        if self.find_unused_parameters and not unfrozen:
            return  # the search will find that they get no gradient, and average what they have of an open window
        if not self.find_unused_parameters:
            self._average_window(frozen)
        self._changes += 1
        if self._changes > _MOST_CHANGES:  # as in a step that freezes parts in turn
            self._options = {**self._options, "find_unused_parameters": True}
        # The user's settings on this wrapper are kept; its communication hook is registered again.
        kept = {
            name: value
            for name, value in vars(self).items()
            if name == "training" or ("_hooks" in name and name != "_comm_hooks")
        }
        # With that search, temporarily frozen parameters may stay in the exchange.
        staying = frozen if self._options.get("find_unused_parameters") else []
        for parameter in staying:
            parameter.requires_grad_(True)
        try:
            self._replicate(self.module, self._options, self._comm_hook)
        finally:
            for parameter in staying:
                parameter.requires_grad_(False)
        vars(self).update(kept)
        self._synced_backwards = 0

    def _average_window(self, frozen: Sequence[nn.Parameter]) -> None:
        """Average what parameters that are frozen now have of an open window, which its end leaves out."""
        own = {id(parameter) for _, parameter in self.replicated()}
        parameters = [parameter for parameter in frozen if id(parameter) in own]
        have_some = all_gather_object([one.grad is not None for one in parameters], group=self.process_group)
        for parameter, has_some in zip(parameters, map(any, zip(*have_some, strict=True)), strict=True):
            if has_some:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()
                all_reduce(gradient, "mean", group=self.process_group)
                parameter.grad = gradient

    def _check_all_reached(self, loss: Tensor) -> None:
        """Refuse a loss that does not depend on all parameters: DDP would wait for their gradients forever."""
        if self.find_unused_parameters or self.static_graph or self._comm.size == 1:
            return
        by_rank = all_gather_object(self._unreached(loss), group=self.process_group)
        rank = next((rank for rank, names in enumerate(by_rank) if names), None)
        if rank is not None:
            raise ConfigError(_unused(by_rank[rank], rank, len(by_rank)))

    def _unreached(self, loss: Tensor) -> list[str]:
        if any(map(hides_leaves, nodes_of(loss))):
            return []  # not known
        reached = leaves_of(loss)
        return [name for name, parameter in self._averaged() if parameter not in reached]

    def _averaged(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, parameter) for name, parameter in self.replicated() if parameter.requires_grad]

    def _explain(self, error: RuntimeError) -> NoReturn:
        """Raise an error that names the parameters for which torch's error gives only indices; else raise `error`.

        So it is where backward passes go around this wrapper, which would name them itself.
        """
        found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", text := message_of(error))
        if found is None or "finished reduction" not in text:
            raise error
        averaged = self._averaged()
        unused = [averaged[int(index)][0] for index in found.group(1).split()]
        raise ConfigError(_unused(unused, self._comm.rank, self._comm.size)) from error

    def replicated(self) -> list[tuple[str, nn.Parameter]]:
        """Return the module's parameters that are equal on all ranks, with their names.

        Raises:
            ConfigError: on every rank, if a trainable one was added after the module was wrapped.
        """
        ignored = self.parameters_to_ignore
        named = [(name, own) for name, own in self.module.named_parameters() if name not in ignored]
        added = [name for name, own in named if own.requires_grad and id(own) not in self._ids]
        refuse_added(added, "DDP wraps the model")
        return named

    def _report_anomalous(self, loss: Tensor) -> None:
        names = [name for name in self._unreached(loss) if name not in self._named_anomalous]
        if names:
            self._named_anomalous.update(names)
            _logger.warning(
                "the loss does not depend on %d parameters, which get no gradient (rank %d of %d): %s. Freeze them "
                "with requires_grad_(False), or pass find_unused_parameters=True",
                len(names), self._comm.rank, self._comm.size, ", ".join(names),
            )  # fmt: skip


def _unused(names: Sequence[str], rank: int, world_size: int) -> str:
    return (
        f"the loss must depend on every trainable parameter, but not on {len(names)} of them on rank {rank} of "
        f"{world_size}: {listed(names, most=8)}. Freeze them with requires_grad_(False), or let DDP search for them in "
        "every step: strategy=dict(type='ddp', find_unused_parameters=True)"
    )


def _keep_gradients(state: object, bucket: GradBucket) -> Future[Tensor]:
    """Take the average of equal gradients: the other ranks of a fake group are not there to exchange any."""
    # Without a hook of its own, DDP fails there: the future of the fake backend holds no tensor (torch 2.13).
    average: Future[Tensor] = Future()
    average.set_result(bucket.buffer())
    return average


# DDP compares a hook's annotations with type objects; in this module annotations are strings.
_keep_gradients.__annotations__ = {"bucket": GradBucket, "return": Future[Tensor]}


class ExchangeClock:
    """When a rank had computed its gradients in each backward pass, and when those of all ranks were averaged.

    Nothing is measured before `start`, because somebody must take the moments.

    Attributes:
        hooked: seconds of the host in the code of a communication hook, before it returns.

    **Cost**: some 5 us for each backward pass; on an accelerator, two events on its current stream.
    """

    def __init__(self) -> None:
        self.hooked = 0.0
        self._is_on = False
        self._pass = -1
        self._waits: list[tuple[Moment, Moment]] = []

    def start(self) -> None:
        """Begin to measure."""
        self._is_on = True

    def stop(self) -> None:
        """Cease to measure."""
        self._is_on = False
        self._waits = []

    def take(self) -> list[tuple[Moment, Moment]]:
        """Return the beginning and the end of each wait for other ranks since the last call."""
        waits, self._waits = self._waits, []
        return waits

    def follow(self, gradient: Tensor) -> None:
        """Measure the backward pass that has computed this gradient first; autograd calls it as a tensor's hook."""
        if self._is_on and self._pass != backward_pass():
            self._pass = backward_pass()
            # Autograd calls what is queued at the end of the pass in that order: this before DDP's own wait.
            after_backward(partial(self._begin_wait, gradient.device))

    def timed(self, comm_hook: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """Return a communication hook that is timed."""

        @wraps(comm_hook)
        def hook(state: Any, bucket: Any) -> Any:
            before = perf_counter()
            try:
                return comm_hook(state, bucket)
            finally:
                self.hooked += perf_counter() - before

        return hook

    def _begin_wait(self, device: torch.device) -> None:
        after_backward(partial(self._end_wait, moment(device)))

    def _end_wait(self, began: Moment) -> None:
        ended = perf_counter() if isinstance(began, float) else moment(began.device)
        self._waits.append((began, ended))
