"""Starts a DeepSpeed engine in lockstep's group; defines the model wrapper around it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.device import get_device
from lockstep.dist import (
    all_gather_object,
    get_backend,
    get_local_rank,
    get_rank,
    get_world_size,
    init_dist,
    is_distributed,
)
from lockstep.engines import adopt_group, load_engine, undisturbed
from lockstep.errors import ConfigError, listed, message_of, ranks_in_words
from lockstep.groups import inherit_timeout, this_rank
from lockstep.model.autograd_graph import never_compiled, refuse_second_backward
from lockstep.model.call_order import CallOrder
from lockstep.model.parts import Site, broadcast_from_first
from lockstep.model.wrapper import all_entered
from lockstep.model.written import LostWrites
from lockstep.registry import MODEL_WRAPPERS
from lockstep.strategy.deepspeed.whole_params import WholeParams, called_by_deepspeed
from lockstep.strategy.engine_wrappers import EngineModelWrapper, cast_inputs_and_parts

_RULE = (
    "every rank must call the same layers in the same order at ZeRO stage 3, which gathers their parameters from all"
)
_REMEDY = "Let every rank call all of them, or use stage=1"
_FIRST = 3  # forward passes with gradients, and without, that are checked; of the others, every fiftieth


def join_engine() -> None:
    """Let DeepSpeed use the default group; without one, this process becomes a group of one.

    **Collective**: every rank.
    """
    if not is_distributed():
        init_dist("none")
    adopt_group("deepspeed", get_backend() or "gloo")
    # In every step, DeepSpeed 0.19 calls two collectives by names that torch 2.13 has deprecated: in forward passes,
    # backward passes and updates, so that no context is around all of them. Nor can the filter ask who calls: torch
    # warns in the name of a module of its own. Calls of the user's own are not warned of either, as long as it is here.
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        warnings.filterwarnings("ignore", rf"`torch.distributed.{name}` is deprecated", FutureWarning)


def start_engine(model: nn.Module, optimizer: Optimizer, config: Mapping[str, Any]) -> Any:
    """Return a DeepSpeed engine for `model`; all ranks start with the parameters and buffers of rank 0.

    **Collective**: every rank.

    Raises:
        ConfigError: DeepSpeed refuses the config.
    """
    broadcast_from_first(model.buffers(), None)  # DeepSpeed sends parameters only
    try:
        with undisturbed({}), device_number_known():
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
            if "-" in visible.lstrip("-"):  # UUIDs, where DeepSpeed reads numbers; -1 stands for none
                os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(visible.count(",") + 1)))
            engine, *_ = load_engine("deepspeed").initialize(
                model=model, optimizer=optimizer, config=dict(config), dist_init_required=False
            )
    except (AssertionError, ValueError, NotImplementedError) as error:
        raise ConfigError(f"DeepSpeed refuses what it is given: {error}") from error
    inherit_timeout([engine.data_parallel_group])  # a copy of the default group
    return engine


@MODEL_WRAPPERS.register_module()
class MMDeepSpeedEngineWrapper(EngineModelWrapper):
    """A wrapper around a DeepSpeed engine that provides the steps of a model.

    Args:
        model: the engine.
        inputs_to_half: with `bf16` or `fp16`, the inputs of the model's `forward` that are converted to that precision,
            by position or by name; by default all floating-point tensors.

    Attributes:
        model: the engine.
        module: the user's own module.
    """

    passes_each_loss = True
    model: Any

    def __init__(self, *, model: Any, inputs_to_half: Iterable[int | str] | None = None) -> None:
        module: nn.Module = model.module
        super().__init__(module, model, "DeepSpeed")
        self.__dict__["model"] = model  # not as a submodule; see `EngineModelWrapper`
        refuse_second_backward(module, "DeepSpeed's engine takes it for the pass that exchanges gradients")
        cast_inputs_and_parts(module, model.get_data_types()[0], inputs_to_half)
        # What is checked at stage 3, where forward passes gather parameters.
        self._order: CallOrder | None = None
        self._between: UngatheredWrites | None = None
        self._uses: WholeParams | None = None  # of parameters, by a step of the model's own
        if model.zero_optimization_stage() == 3:
            uses = WholeParams(module, _problem_of_placeholders, user="forward", owner="the module that holds it")
            self._writes = GatheredWrites(module)
            self._forward_checks = self._writes, uses
            self._uses = WholeParams(module, _problem_of_partitions) if self._has_own_step else None
            self._order, self._between = _watch_calls(module), UngatheredWrites(module)
            self.forward_is_collective = True
            self.partitioned = "DeepSpeed's ZeRO stage 3 keeps them in pieces. Use stage=2, or strategy 'fsdp'"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model through the engine, which also runs the backward pass.

        Raises:
            ConfigError: at stage 3, the model uses a parameter outside of the module that holds it, where it is not
                gathered, or writes one, or the ranks call different layers; checked in the first passes with gradients
                and without, and in every fiftieth.
        """
        if self._order is None:
            return super().forward(*args, **kwargs)
        with self._device_number():
            with self._order.compared() as is_checked, all_entered(self._forward_checks if is_checked else ()):
                outputs = super().forward(*args, **kwargs)
            if is_checked and torch.is_grad_enabled():  # the others of a rank that fails hear of it in `compared`
                self._writes.compare()
        return outputs

    @contextmanager
    def step_context(self, optim_wrapper: Any) -> Iterator[None]:
        """Return the context of one training step; see `EngineModelWrapper`.

        **Collective**: every rank.

        Raises:
            ConfigError: at stage 3, the step uses a part of a parameter as the whole, the ranks call different layers,
                or parameters were written outside of it.
        """
        self._check_between()
        try:
            with self._device_number(), super().step_context(optim_wrapper), self._uses or nullcontext():
                yield
        except RuntimeError as error:
            if "Detected a disagreement" not in message_of(error):  # so says DeepSpeed of the order of layers
                raise
            raise ConfigError(
                f"{_RULE}, but rank {get_rank()} of {get_world_size()} calls others than rank 0. {_REMEDY}"
            ) from error

    def engine_context(self) -> AbstractContextManager[Any]:
        """Return the context of the engine's own operations, which may use parts of parameters."""
        return nullcontext() if self._uses is None else self._uses.paused()

    @contextmanager
    def evaluation_context(self) -> Iterator[None]:
        """Compute in the same precision as the engine does in training."""
        self._check_between()
        with self._device_number(), autocast_of(self.model):
            yield

    def full_numel(self, parameter: nn.Parameter) -> int:
        """Return the number of elements of a parameter of the module, counting a sharded one in full."""
        return int(getattr(parameter, "ds_numel", parameter.numel()))

    def _device_number(self) -> AbstractContextManager[None]:
        # Only a pass that gathers parameters reads it.
        return device_number_known() if self.forward_is_collective else nullcontext()

    def _check_between(self) -> None:
        if self._between is not None:
            self._between.check()


@contextmanager
def device_number_known() -> Iterator[None]:
    """Set `LOCAL_RANK` in the environment to the number of this rank's device, for which DeepSpeed 0.19 takes it.

    It does so as it starts, and in forward passes at stage 3. Where each rank sees no device but its own, all have
    number 0; Slurm has another name for the local rank, and a single process has none. DeepSpeed refuses to start where
    Open MPI's name for it has another value.
    """
    here = torch.accelerator.current_device_index() if torch.accelerator.is_available() else get_local_rank()
    before = {name: os.environ.pop(name, None) for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")}
    os.environ["LOCAL_RANK"] = str(here)
    try:
        yield
    finally:
        del os.environ["LOCAL_RANK"]
        os.environ.update({name: value for name, value in before.items() if value is not None})


def autocast_of(engine: Any) -> AbstractContextManager[Any]:
    """Return the context in which an engine computes: autocast, if its config enables it."""
    if not engine.torch_autocast_enabled():
        return nullcontext()
    return torch.autocast(get_device(), dtype=engine.torch_autocast_dtype())


def _watch_calls(module: nn.Module) -> CallOrder:
    """Return a `CallOrder` that compares over ranks which layers of a module at stage 3 are called.

    **Source**: `deepspeed.runtime.zero.partitioned_param_coordinator` (0.19), which compares the order afterwards, and
    raises an error on some ranks only.
    """
    layers = {
        name: layer
        for name, layer in module.named_modules()
        if any(hasattr(parameter, "ds_id") for parameter in layer.parameters(recurse=False))
    }
    order = CallOrder(list(layers), rule=_RULE, remedy=_REMEDY, error=ConfigError, first=_FIRST)
    for index, layer in enumerate(layers.values()):
        layer.register_forward_pre_hook(partial(_note_call, order, index), prepend=True)
    return order


def _note_call(order: CallOrder, index: int, *_: Any) -> None:
    order.call(index)  # what a hook returns, the layer would take for its inputs


class UngatheredWrites:
    """Notices what is written into parameters at stage 3 while they are not gathered, and would be lost.

    A write in place through `parameter.data` is not seen.

    Args:
        module: the module, whose parameters the engine has replaced by empty tensors.
    """

    def __init__(self, module: nn.Module) -> None:
        self._names = {parameter: name for name, parameter in module.named_parameters() if hasattr(parameter, "ds_id")}
        self._versions = {parameter: parameter._version for parameter in self._names}
        for parameter in self._names:
            # After each pass, and at the end of `GatheredParameters`, whose writes are kept.
            parameter.partition = self._recording(parameter, parameter.partition)  # type: ignore[attr-defined]

    def check(self) -> None:
        """Check that no parameter has been written since it was last put in pieces.

        Raises:
            ConfigError: one has.
        """
        written = [name for parameter, name in self._names.items() if parameter._version != self._versions[parameter]]
        if written:
            raise ConfigError(
                f"parameters must be written inside `deepspeed.zero.GatheredParameters(parameter, modifier_rank=0)` at "
                f"ZeRO stage 3, where each rank has its share of them between forward passes, but {listed(written)} "
                f"{'was' if len(written) == 1 else 'were'} written outside of it ({this_rank()}), which would be lost. "
                "Write there, or use stage=2 or strategy 'fsdp'"
            )

    def _recording(self, own: nn.Parameter, partition: Callable[..., Any]) -> Callable[..., Any]:
        def partition_and_record(param_list: Any = None, *args: Any, **kwargs: Any) -> Any:
            result = partition(param_list, *args, **kwargs)
            for parameter in [own] if param_list is None else param_list:
                self._versions[parameter] = parameter._version
            return result

        return partition_and_record


class GatheredWrites:
    """Refuses writes to parameters at stage 3 in a forward pass inside this context, which would be lost.

    Args:
        module: the module, whose parameters the engine gathers before a layer's forward pass, and releases after it.

    **Cost**: in a pass with gradients, two readings of all parameters; to compare, one number of each read by the host,
    and the names of those that were written from every rank.
    """

    def __init__(self, module: nn.Module) -> None:
        self._is_on = False
        sites: dict[nn.Module, dict[Site, str]] = {}
        for path, layer in module.named_modules():
            held = [key for key, parameter in layer.named_parameters(recurse=False) if hasattr(parameter, "ds_id")]
            if held:
                sites[layer] = {(layer, key): f"{path}.{key}".lstrip(".") for key in held}
                # After the engine's own hook before the pass, and before its hook after it.
                layer.register_forward_pre_hook(never_compiled(self._before))
                layer.register_forward_hook(never_compiled(self._after), prepend=True)
        self._writes = LostWrites(sites)

    def __enter__(self) -> None:
        self._is_on = torch.is_grad_enabled()

    def __exit__(self, *_: object) -> None:
        self._is_on = False

    def compare(self) -> None:
        """Compare what was found in the pass that has ended.

        **Collective**: every rank.

        Raises:
            ConfigError: on every rank, if a parameter was written on any.
        """
        by_rank = all_gather_object(sorted(self._writes.resolve()))
        if name := next((name for names in by_rank for name in names), None):
            ranks = [rank for rank, names in enumerate(by_rank) if name in names]
            raise ConfigError(
                f"`{name}` must not be written in the forward pass at ZeRO stage 3, where it is a gathered copy that "
                f"is released afterwards, but was written on {ranks_in_words(ranks)}. Write it between steps, inside "
                "`deepspeed.zero.GatheredParameters(parameter, modifier_rank=0)`; or use stage=2, if all ranks write "
                "the same"
            )

    def _before(self, layer: nn.Module, _: Any) -> None:
        if self._is_on:
            self._writes.begin(layer)

    def _after(self, layer: nn.Module, *_: Any) -> None:
        if self._is_on:
            self._writes.end(layer)


def _problem_of_placeholders(parameter: Any, function: str) -> str | None:
    """Return why a torch function called in the forward pass can't use a parameter at stage 3; None if it can."""
    if not hasattr(parameter, "ds_numel") or parameter.numel() == parameter.ds_numel:
        return None
    # DeepSpeed's own `linear` takes the place of torch's.
    if called_by_deepspeed(but="deepspeed.runtime.zero.linear"):
        return None
    return (
        "at ZeRO stage 3 a parameter is whole only while its own module runs. Look it up as an attribute of that "
        "module whenever it is used, not in a list or by `named_parameters()`; or use stage=2"
    )


def _problem_of_partitions(parameter: Any, function: str) -> str | None:
    """Return why a torch function called by the model's own step cannot use a parameter at stage 3; None if it can."""
    if not hasattr(parameter, "ds_numel") or called_by_deepspeed():
        return None
    changes = function == "data" or (function.endswith("_") and not function.endswith("__"))
    if parameter.numel() != parameter.ds_numel or (changes and parameter.ds_persist):
        return (
            "at ZeRO stage 3 each rank has its share of it between forward passes, and gathers it anew for each. "
            "Use stage=2, or strategy 'fsdp'"
        )
    return None
