"""`MMFullyShardedDataParallel`: each rank keeps a shard of the parameters, which are gathered while needed."""

from __future__ import annotations

import inspect
import logging
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FSDPModule,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from lockstep.dist import get_rank
from lockstep.dist.consistency import check_call
from lockstep.errors import ConfigError, did_you_mean, listed, message_of, wrong_type
from lockstep.groups import Comm, resolve
from lockstep.model import steps
from lockstep.model.autograd_graph import never_compiled, refuse_second_backward
from lockstep.model.fsdp import arguments
from lockstep.model.fsdp.arguments import GroupsLike, MeshLike, Offload, Precision, make_meshes
from lockstep.model.fsdp.consistency import Consistency
from lockstep.model.fsdp.parameters import (
    InitFunction,
    Materializer,
    Originals,
    ReplicatedParameters,
)
from lockstep.model.fsdp.units import choose_units, cut_by_dtype, directly_callable_parts
from lockstep.model.hidden_outputs import show_hidden
from lockstep.model.norm import BATCH_NORMS
from lockstep.model.parts import (
    broadcast_from_first,
    refuse_added,
    refuse_sparse_gradients,
    require_same_parameters,
    trains_others,
)
from lockstep.model.shards import UPDATES_SHARDS, reshard
from lockstep.model.tensor_parallel import TensorParallel
from lockstep.model.tensor_parallel_peers import PeerCheck
from lockstep.model.tensor_parallel_plan import read_request
from lockstep.model.wrapper import ModelWrapper
from lockstep.model.written import refuse_max_norm
from lockstep.registry import MODEL_WRAPPERS
from lockstep.transport.handles import note_running
from lockstep.watch.failures import backend_errors_translated

_logger = logging.getLogger("lockstep.model.fsdp")
_MIXED = "mixed torch.Tensor and DTensor"  # torch's words (2.13)
_USED_OUTSIDE = (
    "weights must be used inside the forward pass of their unit under FSDP, but some are used outside of it, where "
    "they are sharded. Call the module that holds them as a whole, by a `__call__` that leads to nn.Module's, or leave "
    "it out of `auto_wrap_policy`, so that its weights are gathered with those around it; a penalty can use "
    "weight.full_tensor()"
)
_DTENSOR = str(Path(torch.distributed.tensor.__file__).parent)


@MODEL_WRAPPERS.register_module()
class MMFullyShardedDataParallel(ModelWrapper):
    """Train a module whose parameters are sharded over the ranks.

    The arguments are those of torch's `FullyShardedDataParallel`; its successor `fully_shard` does the work. Arguments
    that have no meaning for `fully_shard` are accepted, with a warning. Parameters become `DTensor`s in place: build
    the optimizer afterwards.

    If the module defines its own `train_step`, that is called. Each child of such a module is a unit, so that the step
    may call it directly. Outside of forward passes, its parameters are `DTensor`s: they can be changed in place, and
    used in a loss as `weight.full_tensor()`.

    The parameters of a unit have one dtype: parts with another dtype become separate units. Parameters of dimension 0
    can't be sharded: every rank keeps them whole, starts with those of the first rank, and averages their gradients. In
    the first passes, and in every fiftieth, the ranks check that they call the same units and get gradients for the
    same parameters; see `lockstep.model.fsdp.consistency`.

    Args:
        module: the module. It is changed in place and can't be copied or pickled any more; its state dict can.
        process_group: the ranks to shard over, by default all; for replicas see `device_mesh`.
        sharding_strategy: a `ShardingStrategy` or its name. `FULL_SHARD` frees gathered parameters after the forward
            pass, `SHARD_GRAD_OP` after the backward pass, `HYBRID_SHARD` and `_HYBRID_SHARD_ZERO2` do the same within
            each node, and `NO_SHARD` keeps them on every rank. By default `FULL_SHARD`, hybrid over a mesh of two axes.
        cpu_offload: keep shards and their gradients in CPU memory, and run the optimizer there.
        auto_wrap_policy: which parts are units, gathered one at a time; see `lockstep.model.fsdp.units`. Without a
            policy the module is gathered as a whole, which saves memory only between steps.
        backward_prefetch: 'pre', 'post' or a `BackwardPrefetch`; torch now always does 'pre'.
        mixed_precision: a `MixedPrecisionPolicy`, the older `MixedPrecision`, a dict of their arguments, or one dtype
            such as `"bf16"`, with which gradients are reduced in float32. The others mean what they mean to torch:
            without `reduce_dtype`, gradients are reduced in `param_dtype`. BatchNorm layers keep their precision.
        ignored_modules: modules inside `module` whose parameters are not sharded, and whose gradients are not averaged.
            They are moved to the device, too.
        param_init_fn: called with each module that owns parameters on the meta device, to materialize them; by default
            its `reset_parameters` is called. Units are materialized and sharded one after the other.
        device_id: the device to train on; by default that of the parameters.
        sync_module_states: start with the parameters and buffers of the first rank.
        forward_prefetch: gather the next unit while the present one computes.
        limit_all_gathers: no longer has a meaning.
        use_orig_params: no longer has a meaning; parameters keep their names and shapes.
        fsdp_auto_wrap_policy: an alias for `auto_wrap_policy`.
        device_mesh: the mesh to shard over, one-axis or (replicas, shards); or its shape.
        reshard_after_forward: as for `fully_shard`, in place of `sharding_strategy`.
        find_unused_parameters: allow the losses of different ranks to depend on different parameters of a unit, as with
            a mixture of experts: a rank contributes zeros for gradients that only other ranks have. See
            `lockstep.model.fsdp.consistency`.
        tensor_parallel: the number of ranks that together compute the modules named in the model's `_tp_plan`, each
            with a part of their weights; or `dict(degree=2, plan={"*.attn.q": "colwise", ...})`, see
            `lockstep.model.tensor_parallel_plan.read_plan`. FSDP then shards parameters across these groups of ranks.

    Attributes:
        mesh: the ranks over which parameters are sharded.
        tensor_mesh: the ranks that compute together and need the same batches; None without tensor parallelism.

    **Collective**: every rank of the mesh, in the constructor and in each forward and backward pass, also in
    validation.

    Raises:
        TypeError: an argument has an unknown type, which the message names.
        ValueError: arguments contradict each other, or do not fit the number of ranks.
        CollectiveMismatchError: on every rank, if the models of the ranks have other parameters.
        ConfigError: `tensor_parallel` does not fit the model or the number of ranks; an embedding has sparse gradients
            or `max_norm`; or a module owns parameters of two dtypes. In a backward pass, on every rank: a parameter
            was written in the forward pass, or by `parameter.data = values`, so that the change would be lost.

    **Source**: `torch.distributed.fsdp.fully_shard` (2.13). Zhao et al., PyTorch FSDP, VLDB 2023.
    """

    forward_is_collective = True
    prepares_backward = True

    def __init__(
        self,
        module: nn.Module,
        process_group: GroupsLike | None = None,
        sharding_strategy: ShardingStrategy | str | None = None,
        cpu_offload: Offload | None = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: BackwardPrefetch | str | None = None,
        mixed_precision: Precision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: InitFunction | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = True,
        *,
        fsdp_auto_wrap_policy: Any = None,
        device_mesh: MeshLike | None = None,
        reshard_after_forward: bool | int | None = None,
        find_unused_parameters: bool = False,
        tensor_parallel: int | Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        _refuse(kwargs, type(self))
        _check_module(module)
        if param_init_fn is not None and not callable(param_init_fn):
            raise wrong_type("param_init_fn", "a function of a module or None", param_init_fn)
        if auto_wrap_policy is not None and fsdp_auto_wrap_policy is not None:
            raise ValueError("`auto_wrap_policy` and `fsdp_auto_wrap_policy` must not be given both: they mean one")
        policy = fsdp_auto_wrap_policy if auto_wrap_policy is None else auto_wrap_policy
        arguments.check_meaningless(backward_prefetch, limit_all_gathers, use_orig_params)
        precision = arguments.read_precision(mixed_precision)
        ignored = arguments.read_ignored(ignored_modules, module)
        device = arguments.read_device(device_id, module)
        offload = arguments.read_offload(cpu_offload, device.type)
        sharding = arguments.read_sharding(sharding_strategy, reshard_after_forward)
        refuse_sparse_gradients(module, "FSDP", ignored)
        refuse_max_norm(module, "under FSDP, which would lose what it writes", ignored)
        units = choose_units(module, policy, ignored)
        self._trains_itself = steps.calls_parts(module)
        if self._trains_itself:
            if isinstance(module, nn.ModuleDict):  # nobody calls it as a whole, which would gather what they share
                _refuse_shared_parts(module)
            units += [part for part in directly_callable_parts(module, ignored) if part not in units]
        units += cut_by_dtype(module, units, ignored)
        for part in [module, *(units if self._trains_itself else ())]:  # whose outputs a loss is computed from
            refuse_second_backward(part, "FSDP reduces gradients, and frees what it has gathered, after the first one")
        request = read_request(tensor_parallel)
        self.mesh, self.tensor_mesh, whole = make_meshes(device.type, sharding, request, process_group, device_mesh)
        _compare(module, whole, ignored)
        _warn_of_layer_drop(module)
        parallel = None
        if request is not None and self.tensor_mesh is not None:
            parallel = TensorParallel(module, request.plan, self.tensor_mesh, ignored)
            ranks = self.mesh.mesh.flatten().tolist()
            self.data_shard = (ranks.index(get_rank()), len(ranks))
        # Ranks that compute together must start with the same values.
        synced = whole if sync_module_states else self.tensor_mesh
        materializer = Materializer(device, param_init_fn, synced, ignored)
        shard = partial(
            fully_shard, mesh=self.mesh, reshard_after_forward=sharding.reshard_after_forward, offload_policy=offload
        )
        precisions = dict.fromkeys([module, *units], precision) | _precisions_of_norms(module, precision, ignored)
        originals = Originals(module)
        scalars = _shard(module, precisions, materializer, parallel, shard)
        originals.hand_over(module)
        if hasattr(module, "prepare_inputs_for_generation"):
            # `generate` of transformers and peft calls parts by themselves, such as an encoder, whose own weights would
            # be shards there: of what is no unit, the outermost one gathers the weights.
            _register_forward(module, "generate")
        for name in ("val_step", "test_step"):
            step = getattr(module, name, None)
            owner = step.__self__ if inspect.ismethod(step) else None
            if isinstance(owner, nn.Module) and owner is not module:  # a part of it, as the model inside of peft's
                _register_forward(module, name)
        broadcast_from_first(scalars, *whole.get_all_groups())
        self.module = module
        self._ids = None if whole.size() == 1 else set(map(id, module.parameters()))
        self.process_group = whole.get_group() if whole.ndim == 1 else None
        self._syncs_gradients = True
        # After a forward pass the outermost unit shows gathered parameters in their places.
        self._shards = [(name, own) for name, own in module.named_parameters() if isinstance(own, DTensor)]
        self._finds_unused = find_unused_parameters
        self._knows_hooks = False
        self._comm: Comm | None = None
        self._replicated = ReplicatedParameters(module, scalars, self.mesh, lambda: self._syncs_gradients)
        frees = sharding.reshard_after_forward is not False
        self._consistency = Consistency(module, whole, scalars, find_unused_parameters, frees)
        self._peers = None if parallel is None else PeerCheck(module, parallel.mesh, self.mesh.ndim)
        axes = [axis for axis in range(whole.ndim) if whole.size(axis) > 1]
        if axes:
            self._comm = resolve(whole.get_group(axes[-1]))  # on failure, this is the group whose waits end
            # The watch reports collectives that hang on a device, but only those that it has been told of.
            if device.type != "cpu":
                module.register_forward_hook(never_compiled(self._note_running))
        if forward_prefetch:
            for unit, following in pairwise(part for part in module.modules() if isinstance(part, FSDPModule)):
                unit.set_modules_to_forward_prefetch([following])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; each unit is gathered while it computes.

        **Collective**: every rank of the mesh.

        Raises:
            PeerError: a rank has ended during the pass.
            CollectiveTimeoutError: a rank did not arrive in time.
        """
        try:
            with _without_inference_mode(), _sharded_weights_explained():
                return self.module(*args, **kwargs)
        except RuntimeError:
            group = None if self._comm is None else self._comm.pg
            with backend_errors_translated(group):  # entered here alone, because every pass would pay for it
                raise

    @contextmanager
    def step_context(self, optim_wrapper: Any) -> Iterator[None]:
        """Prepare the module for a step of the user's own; an error about sharded weights says what to do.

        **Collective**: every rank of the mesh.

        Raises:
            ConfigError: the optimizer trains parameters that were added to the model after it was sharded.
        """
        if self._ids is not None and trains_others(optim_wrapper, self._ids):
            reshard(self.module)
            # One that the user's code has sharded itself is averaged.
            trained = [(name, own) for name, own in self.module.named_parameters() if own.requires_grad]
            added = [name for name, own in trained if id(own) not in self._ids and not isinstance(own, DTensor)]
            refuse_added(added, "FSDP shards the model")
        if self._trains_itself:
            assert isinstance(self.module, FSDPModule)
            # The step may call a part first, which FSDP would then take for the outermost unit (2.13).
            self.module._get_fsdp_state()._lazy_init()
            # The step may also change parameters, such as a teacher's; changes of gathered parameters would be lost.
            self.module.set_reshard_after_forward(True, recurse=False)
        with _sharded_weights_explained():
            yield

    def note_failure(self, error: Exception) -> None:
        """Add what to do to an error of the loop of a Session, if it is about sharded weights."""
        if _MIXED in message_of(error) and UPDATES_SHARDS not in getattr(error, "__notes__", ()):
            error.add_note(_USED_OUTSIDE)

    @contextmanager
    def evaluation_context(self) -> Iterator[None]:
        """Return the context in which units are gathered as in training, also in inference mode."""
        with _without_inference_mode(), _sharded_weights_explained():
            yield

    @contextmanager
    def backward_context(self, loss: Tensor, *, syncs: bool) -> Iterator[Tensor]:
        """Run a backward pass inside; before it, the ranks compare what it will reach.

        Args:
            loss: the scaled loss on which the pass runs.
            syncs: whether the pass ends a window of gradient accumulation; otherwise nothing is reduced, as in
                `no_sync`.

        **Collective**: every rank of the mesh.

        Raises:
            CollectiveMismatchError: on every rank, if the losses depend on different units or parameters.
            ConfigError: ranks that compute together have other losses or gradients; see `PeerCheck`.
        """
        if not syncs:
            self._name_hooks_of_windows()
        synced = nullcontext() if syncs else self.no_sync()
        with (
            synced,
            self._replicated.at_the_end(),
            self._consistency.backward_pass(loss, reduces=self._syncs_gradients),
        ):
            yield loss
        if self._peers is not None and self._syncs_gradients and syncs:
            self._peers.after_backward(loss)
        if self._comm is not None:
            # Ranks with gradients of different parameters mix them up. They are found as ranks whose calls differ are.
            without = () if self._finds_unused or not self._syncs_gradients else self._without_gradient()
            check_call("backward_pass", self._comm, *without, compares=False)
            self._note_running()

    def _without_gradient(self) -> tuple[str, ...]:
        """Return which parameters have got no gradient, as the record of calls shows it; nothing if all have one."""
        names = [name for name, own in self._shards if own.requires_grad and own.grad is None]
        if not names:
            return ()
        # The whole list could be long, and another one in each pass.
        digest = f", {zlib.crc32(repr(names).encode()):x}" if len(names) > 4 else ""
        return (f"no gradient of {listed(names, most=4)}{digest}; see find_unused_parameters",)

    def _name_hooks_of_windows(self) -> None:
        """Say once which hooks see a whole window of accumulation, where one process calls them for each part of it."""
        shards = () if self._knows_hooks else self._shards
        hooked = [name for name, own in shards if own._post_accumulate_grad_hooks]
        self._knows_hooks = True
        if hooked and get_rank() == 0:
            _logger.warning(
                "hooks of `register_post_accumulate_grad_hook` are called once for each window of accumulation under "
                "FSDP, with the averaged gradient of all its batches; in one process and under 'ddp' they are called "
                "after each backward pass, with what has been accumulated until then. One that changes the gradient "
                "trains something else than there: that of %s. Use `register_hook`, or a hook of the optimizer "
                "(`register_step_pre_hook`), if it must be the same",
                listed(hooked, most=4),
            )

    def _note_running(self, *_: object) -> None:
        if self._comm is not None:
            note_running(self._comm, self._comm.comm_device)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate unsharded gradients on each rank in the backward passes inside, and reduce nothing.

        **Cost**: the memory of all unsharded gradients, until the next backward pass outside.
        """
        before = self._syncs_gradients
        self._set_gradient_sync(False)
        try:
            yield
        finally:
            self._set_gradient_sync(before)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield names and parameters as `nn.Module` does; every parameter is sharded.

        After a forward pass the outermost unit holds gathered parameters; if an optimizer updated those, its updates
        would be lost. They are freed here, so a call after a forward pass must be made on every rank.
        """
        reshard(self.module)
        return super().named_parameters(prefix, recurse, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's state dict, with the module's own names and sharded tensors."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict with the module's own names and tensors that are sharded in the same way."""
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)

    def _set_gradient_sync(self, syncs: bool) -> None:
        assert isinstance(self.module, FSDPModule)
        if syncs == self._syncs_gradients:  # torch would go through all modules
            return
        self._syncs_gradients = syncs
        self.module.set_requires_gradient_sync(syncs)


def _refuse(kwargs: Mapping[str, Any], wrapper: type) -> None:
    if kwargs:
        key = next(iter(kwargs))
        known = set(inspect.signature(wrapper).parameters) - {"kwargs"}
        raise TypeError(f"{wrapper.__name__} got an unexpected keyword argument '{key}'{did_you_mean(key, known)}")


def _check_module(module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise wrong_type("module", "a torch.nn.Module", module)
    if any(isinstance(part, FSDPModule) for part in module.modules()):
        raise ValueError(f"`module` must not be sharded yet, but {type(module).__name__} is, or a part of it")


def _refuse_shared_parts(module: nn.Module) -> None:
    """Refuse parts that are called by themselves and that share a parameter, which only one of them can gather."""
    owners: dict[nn.Parameter, tuple[str, str]] = {}
    for name, part in module.named_children():
        for inside, parameter in part.named_parameters():
            owner, inside_owner = owners.setdefault(parameter, (name, inside))
            if owner != name:
                raise ConfigError(
                    f"parts of a model must share no parameters under FSDP, but `{owner}.{inside_owner}` is "
                    f"`{name}.{inside}`. Hand in what they share as a part of its own, and give the others its output; "
                    "or use strategy 'ddp'"
                )


def _register_forward(module: nn.Module, name: str) -> None:
    """Let a method gather the unit's weights as its `forward` does, and keep its parameters for who asks for them."""
    signature = inspect.signature(getattr(module, name))
    register_fsdp_forward_method(module, name)
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    # torch wraps a bound method in a function that is bound again, so that one parameter too many is left out (2.13).
    getattr(module, name).__func__.__signature__ = signature.replace(parameters=[own, *signature.parameters.values()])


def _compare(module: nn.Module, mesh: DeviceMesh, ignored: Iterable[nn.Module]) -> None:
    """Refuse a module that has other parameters on other ranks of a mesh. **Collective**: every rank of the mesh."""
    inside = {own for part in ignored for own in part.parameters()}
    left_out = {name: own for name, own in module.named_parameters() if own in inside}
    axes = [axis for axis in reversed(range(mesh.ndim)) if mesh.size(axis) > 1]
    if axes:
        trained = [name for name, own in left_out.items() if own.requires_grad]
        if trained and get_rank() == 0:
            _logger.warning(
                "gradients of `ignored_modules` are not averaged, so each rank trains %s on its own batches alone, "
                "and clips by a norm of its own. Freeze them by requires_grad_(False), or do not ignore their modules",
                listed(trained, most=4),
            )
        groups = map(mesh.get_group, axes)
        require_same_parameters(module, mesh.mesh.flatten().tolist(), *groups, left_out=left_out)


def _warn_of_layer_drop(module: nn.Module) -> None:
    chances = [getattr(getattr(part, "config", None), "layerdrop", 0.0) for part in module.modules()]
    chance = max((one for one in chances if isinstance(one, float)), default=0.0)
    if chance > 0.0 and get_rank() == 0:
        _logger.warning(
            "the config of %s has layerdrop=%g. Under FSDP, wav2vec2 and its kin in transformers (5.24) call each "
            "layer all the same, and so drop none; other models must drop the same layers on every rank: "
            "randomness=dict(diff_rank_seed=False). Use 'ddp' with find_unused_parameters=True, which drops them, or "
            "set it to 0",
            type(module).__name__, chance,
        )  # fmt: skip


def _shard(
    module: nn.Module,
    precisions: Mapping[nn.Module, MixedPrecisionPolicy],
    materializer: Materializer,
    parallel: TensorParallel | None,
    shard: partial[Any],
) -> list[nn.Parameter]:
    """Shard the units and then the rest; each is whole only while it is materialized and sharded.

    Returns:
        The parameters of dimension 0, which can't be sharded, and stay whole.
    """
    # A preprocessor learns its device by `to`. Sharding moves parameters and buffers only, and it may have neither.
    if isinstance(preprocessor := getattr(module, "data_preprocessor", None), nn.Module):
        materializer.materialize(preprocessor)
        preprocessor.to(materializer.device)
    scalars: list[nn.Parameter] = []
    for unit in reversed(list(module.modules())):
        if unit in precisions:
            materializer.materialize(unit)
            if parallel is not None:
                parallel.apply(unit)
            left_out = {*materializer.ignored_tensors(), *scalars}
            for name, parameter in unit.named_parameters():
                if parameter.dim() == 0 and parameter not in left_out:
                    if isinstance(parameter, DTensor):
                        raise ConfigError(
                            "`tensor_parallel` must leave out parameters of dimension 0, but splits the module of "
                            f"`{name}`. Give that parameter a dimension, or leave the module out of the plan"
                        )
                    scalars.append(parameter)
            unit.register_forward_hook(never_compiled(show_hidden))  # to FSDP's own hook; `Consistency` takes it back
            shard(unit, mp_policy=precisions[unit], ignored_params={*left_out, *scalars} or None)
    return scalars


def _precisions_of_norms(
    module: nn.Module, precision: MixedPrecisionPolicy, ignored: Collection[nn.Module]
) -> dict[nn.Module, MixedPrecisionPolicy]:
    """Return the layers that need their own precision, with that precision.

    BatchNorm does not accept half-precision parameters with running statistics in full precision.
    """
    norms = [part for part in module.modules() if isinstance(part, BATCH_NORMS)]
    own = MixedPrecisionPolicy(cast_forward_inputs=False)
    is_half = precision.param_dtype is not None
    return {norm: own for norm in norms if is_half and norm.affine and norm not in ignored}


@contextmanager
def _sharded_weights_explained() -> Iterator[None]:
    """Raise an error that says what to do where torch's functions use weights inside that are sharded.

    Raises:
        RuntimeError: chained to torch's error, `got mixed torch.Tensor and DTensor`.
    """
    try:
        yield
    except (RuntimeError, AssertionError) as error:
        files = [frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)]
        # An optimizer that is stepped by hand, whose trial before the training could not tell.
        if inspect.getfile(torch.optim.Optimizer) in files and (
            "DTensor" in message_of(error) or _DTENSOR in files[-1]
        ):
            if UPDATES_SHARDS not in getattr(error, "__notes__", ()):
                error.add_note(UPDATES_SHARDS)
            raise
        if _MIXED not in message_of(error):
            raise
        raise RuntimeError(_USED_OUTSIDE) from error


@contextmanager
def _without_inference_mode() -> Iterator[None]:
    """Replace inference mode by no_grad.

    The buffers into which units are gathered are reused; if they were made in inference mode, training could not use
    them.
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield
