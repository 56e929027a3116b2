"""torch's private names that lockstep uses: where, and a check that this torch still has what lockstep needs of each.

The reason for each is beside its use in the code. A name that is used and not in the table fails here, and so does one
that is in the table and no longer used.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as torch_dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.fsdp import FSDPModule, MixedPrecision, ShardingStrategy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

import lockstep

ROOT = Path(lockstep.__file__).parent


class Private(NamedTuple):
    """A private name of torch.

    Attributes:
        check: returns whether it is what lockstep needs.
        files: where it is used, below src/lockstep.
    """

    check: Callable[[], Any]
    files: tuple[str, ...]


def takes(function: Any, *names: str) -> bool:
    """Return whether the parameters of a function are these, in this order."""
    return list(inspect.signature(function).parameters) == list(names)


def agent() -> Any:
    spec: Any = WorkerSpec("rank", 1, None, entrypoint="x")  # type: ignore[arg-type]
    return LocalElasticAgent(spec, DefaultLogsSpecs())


def node() -> Any:
    return (torch.ones(1, requires_grad=True) * 2).grad_fn


def in_backward_pass(look: Callable[[], Any]) -> Any:
    seen: list[Any] = []
    loss = torch.ones(1, requires_grad=True) * 2
    loss.register_hook(lambda _: seen.append(look()))  # type: ignore[no-untyped-call]
    loss.backward()  # type: ignore[no-untyped-call]
    return seen[0]


def callbacks() -> bool:
    from torch.autograd import Variable

    order: list[int] = []

    def queue() -> None:
        for number in (1, 2):
            Variable._execution_engine.queue_callback(lambda number=number: order.append(number))

    in_backward_pass(queue)
    return order == [1, 2]


def foreach() -> bool:
    one, two = [torch.zeros(2)], [torch.ones(2)]
    torch._foreach_lerp_(one, two, 0.25)
    torch._foreach_copy_(two, one)
    return one[0].tolist() == two[0].tolist() == [0.25, 0.25]


def called_first() -> bool:
    module = nn.Identity()
    vars(module)["_compiled_call_impl"] = lambda x: "called"
    return nn.Identity()._compiled_call_impl is None and module(1) == "called"


def compiled() -> Any:
    return torch.compile(nn.Identity(), backend="eager")


def hooks_kept() -> bool:
    parameter = nn.Parameter(torch.ones(1))
    before = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    parameter.register_hook(lambda x: x)  # type: ignore[no-untyped-call]
    parameter.register_post_accumulate_grad_hook(lambda x: None)  # type: ignore[no-untyped-call]
    after = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    return before == (None, None) and all(isinstance(one, dict) and len(one) == 1 for one in after)


def storage_changes() -> bool:
    tensor = torch.ones(1)
    before = tensor.untyped_storage()._cdata
    tensor.data = torch.zeros(1)
    return isinstance(before, int) and tensor.untyped_storage()._cdata != before


def fsdp_state_has(name: str) -> bool:
    state = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_state").FSDPState
    return takes(getattr(state, name), "self")


def ignored_by_ddp() -> Any:
    module: Any = nn.Linear(1, 1)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["bias"])  # type: ignore[no-untyped-call]
    return module._ddp_params_and_buffers_to_ignore == ["bias"]


def checkpoint_wrapped() -> bool:
    wrapper = importlib.import_module("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    inner = nn.Identity()
    return wrapper.checkpoint_wrapper(inner)._checkpoint_wrapped_module is inner


def scheduler_state() -> dict[str, Any]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    return torch.optim.lr_scheduler.StepLR(optimizer, 1).state_dict()


def sequential_state() -> dict[str, Any]:
    optimizer = torch.optim.SGD([torch.ones(1)], lr=0.1)
    parts = [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.ConstantLR(optimizer)]
    return torch.optim.lr_scheduler.SequentialLR(optimizer, parts, milestones=[1]).state_dict()


def chained_state() -> dict[str, Any]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    part = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return torch.optim.lr_scheduler.ChainedScheduler([part], optimizer).state_dict()


def non_persistent() -> bool:
    module = nn.Identity()
    module.register_buffer("b", torch.ones(1), persistent=False)
    return module._non_persistent_buffers_set == {"b"}


def module_holds(name: str) -> bool:
    norm = nn.Sequential(nn.BatchNorm1d(1))
    held = {"_modules": norm, "_parameters": norm[0], "_buffers": norm[0]}[name]
    return isinstance(getattr(held, name), dict) and len(getattr(held, name)) > 0


def c10d() -> Any:
    return importlib.import_module("torch.distributed.distributed_c10d")


def operator(name: str) -> Callable[[], bool]:
    return lambda: hasattr(torch.ops.aten, name)


def memory(name: str, *some: str) -> bool:
    return set(some) <= set(inspect.signature(getattr(torch.cuda.memory, name)).parameters)


FLOPS, AMP = ("diagnostics/mfu.py",), ("optim/amp.py",)
PRIVATE: dict[str, Private] = {
    # Autograd.
    "_C": Private(
        lambda: torch._C.DisableTorchFunctionSubclass,
        ("groups.py", "model/autograd_graph.py", "model/ddp.py", "model/fsdp/parameters.py"),
    ),
    "_are_functorch_transforms_active": Private(
        lambda: (
            torch.func.vmap(lambda x: x + torch._C._are_functorch_transforms_active())(torch.zeros(1)).item() == 1
            and not torch._C._are_functorch_transforms_active()
        ),
        ("model/ddp.py",),
    ),
    "_remaining_restarts": Private(lambda: agent()._remaining_restarts >= 0, ("launch/elastic.py",)),
    "_current_graph_task_id": Private(
        lambda: torch._C._current_graph_task_id() == -1 < in_backward_pass(torch._C._current_graph_task_id),
        ("model/autograd_graph.py",),
    ),
    "_execution_engine": Private(callbacks, ("model/autograd_graph.py",)),
    "_sequence_nr": Private(
        lambda: isinstance(node()._sequence_nr(), int),
        ("strategy/gradient_flow.py",),
    ),
    "_backward_hooks": Private(hooks_kept, ("model/fsdp/parameters.py", "strategy/native.py")),
    "_post_accumulate_grad_hooks": Private(
        hooks_kept, ("model/fsdp/parameters.py", "model/fsdp/wrapper.py", "strategy/native.py")
    ),
    # Tensors.
    "_foreach_copy_": Private(foreach, ("model/averaged.py",)),
    "_foreach_lerp_": Private(foreach, ("model/averaged.py",)),
    "_cdata": Private(storage_changes, ("model/written.py",)),
    "_debug_has_internal_overlap": Private(
        lambda: torch._debug_has_internal_overlap(torch.ones(1).expand(2)) == 1, ("dist/validate.py",)
    ),
    "_op_dispatcher": Private(lambda: hasattr(DTensor, "_op_dispatcher"), ("groups.py",)),
    "_clear_DTensor_sharding_propagator_cache": Private(
        lambda: hasattr(torch._C, "_clear_DTensor_sharding_propagator_cache"), ("groups.py",)
    ),
    "torch.distributed._functional_collectives": Private(
        lambda: takes(
            importlib.import_module("torch.distributed._functional_collectives").AsyncCollectiveTensor.wait, "self"
        ),
        ("model/tensor_parallel_plan.py",),
    ),
    # Modules.
    "_modules": Private(
        lambda: module_holds("_modules"),
        ("model/averaged.py", "model/norm.py", "model/wrapper.py"),
    ),
    "_buffers": Private(
        lambda: module_holds("_buffers"),
        ("runner/uneven_inputs.py",),
    ),
    "_non_persistent_buffers_set": Private(non_persistent, ("model/averaged.py",)),
    "_load_from_state_dict": Private(
        lambda: "_load_from_state_dict" in inspect.getsource(nn.Module.load_state_dict), ("weights/description.py",)
    ),
    "_extra_state": Private(
        lambda: importlib.import_module("torch.nn.modules.module")._EXTRA_STATE_KEY_SUFFIX == "_extra_state",
        ("checkpoint/loading.py", "weights/source.py"),
    ),
    "_call_impl": Private(lambda: nn.Identity()._call_impl(1) == 1, ("model/compiling.py",)),
    "_compiled_call_impl": Private(
        called_first,
        ("model/compiling.py", "model/tensor_parallel.py", "model/wrapper.py"),
    ),
    "_ddp_params_and_buffers_to_ignore": Private(ignored_by_ddp, ("model/ddp.py",)),
    # Compiling.
    "torch._dynamo": Private(
        lambda: isinstance(compiled(), importlib.import_module("torch._dynamo").OptimizedModule),
        ("diagnostics/mfu.py", "model/compiling.py"),
    ),
    "_orig_mod": Private(
        lambda: type(compiled()._orig_mod) is nn.Identity and callable(compiled().dynamo_ctx),
        ("model/compiling.py", "model/parts.py"),
    ),
    "_torchdynamo_orig_callable": Private(
        lambda: torch.compile(callbacks, backend="eager")._torchdynamo_orig_callable is callbacks,  # type: ignore[attr-defined]
        ("model/tensor_parallel.py",),
    ),
    "_checkpoint_wrapped_module": Private(checkpoint_wrapped, ("model/parts.py",)),
    "torch._inductor.config": Private(lambda: find_spec("torch._inductor.config"), ("testing/pool.py",)),
    "torch._inductor.cudagraph_trees": Private(
        lambda: (
            find_spec("torch._inductor.cudagraph_trees")
            and "cudagraph_trees" in inspect.getsource(torch.compiler.cudagraph_mark_step_begin)
        ),
        ("model/compiling.py",),
    ),
    # Wrappers.
    "_check_reducer_finalized": Private(
        lambda: takes(DistributedDataParallel._check_reducer_finalized, "self"), ("model/ddp.py",)
    ),
    "_comm_hooks": Private(
        lambda: "self._comm_hooks" in inspect.getsource(DistributedDataParallel.__init__), ("model/ddp.py",)
    ),
    "_get_fsdp_state": Private(lambda: takes(FSDPModule._get_fsdp_state, "self"), ("model/fsdp/wrapper.py",)),
    "_lazy_init": Private(lambda: fsdp_state_has("_lazy_init"), ("model/fsdp/wrapper.py",)),
    "_HYBRID_SHARD_ZERO2": Private(
        lambda: "_HYBRID_SHARD_ZERO2" in ShardingStrategy.__members__, ("model/fsdp/arguments.py",)
    ),
    "_module_classes_to_ignore": Private(
        lambda: "_module_classes_to_ignore" in vars(MixedPrecision()), ("model/fsdp/arguments.py",)
    ),
    # Optimizers.
    "_growth_tracker": Private(lambda: "_growth_tracker" in GradScaler("cpu").state_dict(), AMP),
    "_schedulers": Private(
        lambda: chained_state()["_schedulers"][0]["last_epoch"] == 0,
        ("optim/build_schedulers.py", "runner/resumed_options.py", "session/schedules.py"),
    ),
    "_milestones": Private(lambda: sequential_state()["_milestones"] == [1], ("session/schedules.py",)),
    "_last_lr": Private(lambda: "_last_lr" in scheduler_state(), ("runner/resumed_options.py",)),
    "_step_count": Private(lambda: "_step_count" in scheduler_state(), ("runner/resumed_options.py",)),
    # Data.
    "_BaseDataLoaderIter": Private(
        lambda: isinstance(
            iter(DataLoader([0])), importlib.import_module("torch.utils.data.dataloader")._BaseDataLoaderIter
        ),
        ("dataset/loader.py",),
    ),
    "_iterator": Private(
        lambda: "_iterator" in vars(DataLoader([0])),
        ("dataset/loader.py", "dataset/stream.py"),
    ),
    "_shutdown_workers": Private(
        lambda: takes(
            importlib.import_module("torch.utils.data.dataloader")._MultiProcessingDataLoaderIter._shutdown_workers,
            "self",
        ),
        ("dataset/position.py", "dataset/stream.py"),
    ),
    # Groups.
    "distributed_c10d": Private(c10d, ("groups.py", "testing/worker.py", "transport/control.py", "watch/interrupt.py")),
    "_process_group_name": Private(
        lambda: takes(c10d()._process_group_name, "ranks", "use_hashed_name"), ("transport/control.py",)
    ),
    "_device_types": Private(lambda: isinstance(c10d().ProcessGroup._device_types, property), ("watch/interrupt.py",)),
    "_get_backend": Private(lambda: callable(c10d().ProcessGroup._get_backend), ("watch/interrupt.py",)),
    "_world": Private(
        lambda: isinstance(c10d()._world.pg_map, dict) and isinstance(c10d()._world.pg_names, dict),
        ("groups.py", "testing/worker.py", "transport/control.py", "watch/interrupt.py"),
    ),
    # Memory and operators.
    "_record_memory_history": Private(
        lambda: memory("_record_memory_history", "enabled", "max_entries"), ("diagnostics/profiling.py",)
    ),
    "_dump_snapshot": Private(lambda: memory("_dump_snapshot", "filename"), ("diagnostics/profiling.py",)),
    "_c10d_functional": Private(lambda: hasattr(torch.ops._c10d_functional, "all_reduce"), FLOPS),
    "_dtensor": Private(lambda: hasattr(torch.ops._dtensor, "shard_dim_alltoall"), FLOPS),
    **{
        name: Private(operator(name), FLOPS)
        for name in (
            *("_cudnn_rnn", "_cudnn_rnn_backward", "_grouped_mm", "_int_mm", "_scaled_grouped_mm", "_trilinear"),
            *("_addmm_activation", "_cudnn_attention_forward", "_cudnn_attention_backward"),
            *("_flash_attention_forward_no_dropout_inplace", "_mixed_dtypes_linear", "_sparse_sparse_matmul"),
            *(
                "_sparse_mm_reduce_impl",
                "_sparse_mm_reduce_impl_backward",
                "_weight_int4pack_mm",
                "_weight_int8pack_mm",
            ),
            *("_scaled_mm_v2", "_scaled_grouped_mm_v2", "_foreach_mm", "_sparse_addmm", "_sparse_semi_structured_mm"),
            *("_sparse_semi_structured_addmm", "_sparse_semi_structured_linear"),
            *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"),
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_flash_attention_for_cpu_backward",
            "_scaled_dot_product_fused_attention_overrideable",
            "_scaled_dot_product_fused_attention_overrideable_backward",
        )
    },
    "_sparse_mm": Private(lambda: hasattr(torch.ops.aten, "_sparse_mm"), FLOPS),
}

# Private methods of torch that a class overrides: its name, and the method's parameters.
OVERRIDDEN: dict[tuple[str, str], tuple[Any, tuple[str, ...]]] = {
    ("BaseAveragedModel", "_apply"): (nn.Module, ("self", "fn", "recurse")),
    ("BaseDataPreprocessor", "_apply"): (nn.Module, ("self", "fn", "recurse")),
    ("ImgDataPreprocessor", "_apply"): (nn.Module, ("self", "fn", "recurse")),
    ("BatchNormXd", "_check_input_dim"): (nn.BatchNorm1d, ("self", "input")),
    ("StepFlops", "_count_flops"): (
        FlopCounterMode,
        ("self", "func_packet", "out", "args", "kwargs"),
    ),
    ("LossScaler", "_unscale_grads_"): (GradScaler, ("self", "optimizer", "inv_scale", "found_inf", "allow_fp16")),
    ("_Agent", "_exit_barrier"): (LocalElasticAgent, ("self",)),
    ("_Agent", "_monitor_workers"): (LocalElasticAgent, ("self", "worker_group")),
    ("_Agent", "_shutdown"): (LocalElasticAgent, ("self", "death_sig", "timeout")),
    ("_Agent", "_start_workers"): (LocalElasticAgent, ("self", "worker_group")),
    ("_Agent", "_stop_workers"): (LocalElasticAgent, ("self", "worker_group")),
}

# Names of others: of Python, of the engines and of HuggingFace, of configs and variables, and lockstep's own, which it
# puts into other objects.
OF_OTHERS = {
    *("_replace", "_asdict", "_fields", "_getframe", "_current_frames", "_exit", "_run_exitfuncs", "_DummyThread"),
    *("_Feature", "_inheriting", "_register_atexit"),
    *("_release_process_group_references", "_hp_mapping", "_reductions"),
    *("_padding_dim", "_origin_length", "_current_length"),
    *(
        "_no_split_modules",
        "_ex_iterable",
        "_tp_plan",
        "_hf_peft_config_loaded",
        "_parent_loader",
        "_report_subprocess_enabled",
    ),
    *("_base_", "_delete_", "_scope_", "_lockstep_outside_loss", "_IFNAME"),
}
_PRIVATE = re.compile(r"_[A-Za-z]\w*$|torch(\.\w+)*\._\w+(\.\w+)*$")
_OF_MODULES = {name for name in vars(nn.Module()) if name.startswith("_")}


def used() -> dict[str, set[str]]:
    """Return private names that are not defined in lockstep, with the files that use them."""
    trees = {str(file.relative_to(ROOT)): ast.parse(file.read_text()) for file in sorted(ROOT.rglob("*.py"))}
    own = {name for tree in trees.values() for name in defined_in(tree)}
    found: dict[str, set[str]] = {}
    for file, tree in trees.items():
        for name in used_in(tree, own):
            found.setdefault(name, set()).add(file)
    return found


def defined_in(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Assign) and "__slots__" in map(ast.unparse, node.targets):
            yield from (part.value for part in ast.walk(node.value) if isinstance(part, ast.Constant))


def used_in(tree: ast.AST, own: set[str]) -> Iterator[str]:
    in_texts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            is_own = node.attr in own and (is_self(node.value) or node.attr not in _OF_MODULES)
            names += [] if is_own else [node.attr]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names += [node.module or "", *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in in_texts:
            names += [] if node.value in own else [node.value]
    yield from (name for name in names if _PRIVATE.match(name) or name == "distributed_c10d")


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def test_the_table_holds_every_private_name_of_torch_and_where_it_is_used() -> None:
    found = {name: tuple(sorted(files)) for name, files in used().items() if name not in OF_OTHERS}
    assert found == {name: private.files for name, private in PRIVATE.items()}


@pytest.mark.parametrize("name", PRIVATE)
def test_a_private_name_is_what_lockstep_needs(name: str) -> None:
    assert PRIVATE[name].check()


def overriding() -> Iterator[tuple[str, str]]:
    for module in pkgutil.walk_packages(lockstep.__path__, "lockstep."):
        if module.name.startswith(("lockstep.strategy.deepspeed", "lockstep.strategy.colossalai", "lockstep.__main__")):
            continue  # the engines are not installed here
        for kind in vars(importlib.import_module(module.name)).values():
            if inspect.isclass(kind) and kind.__module__ == module.name:
                bases = [base for base in kind.__mro__[1:] if base.__module__.startswith("torch")]
                for name, value in vars(kind).items():
                    is_private = name.startswith("_") and not name.startswith("__") and inspect.isfunction(value)
                    if is_private and any(name in vars(base) for base in bases):
                        yield kind.__name__, name


def test_the_private_methods_that_are_overridden_are_called_as_they_were() -> None:
    assert set(overriding()) == OVERRIDDEN.keys()
    for (_, name), (base, parameters) in OVERRIDDEN.items():
        assert takes(getattr(base, name), *parameters), name


# Objects of torch without an underscore in their name, but in no documentation either.
UNDOCUMENTED: dict[str, Callable[[], Any]] = {
    "the leaf of a node": lambda: hasattr(
        (torch.ones(1, requires_grad=True) * 2).grad_fn.next_functions[0][0], "variable"
    ),  # type: ignore[union-attr]
    "the reducer of DDP": lambda: hasattr(torch_dist.Reducer, "prepare_for_backward"),
    "the group of FSDP's node": lambda: (
        "ctx.param_group = "
        in inspect.getsource(
            importlib.import_module(
                "torch.distributed.fsdp._fully_shard._fsdp_param_group"
            ).RegisterPostBackwardFunction
        )
    ),
}


@pytest.mark.parametrize("name", UNDOCUMENTED)
def test_an_undocumented_object_is_what_lockstep_needs(name: str) -> None:
    assert UNDOCUMENTED[name]()
