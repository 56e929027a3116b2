"""MMEngine 0.10's published signatures: every keyword is taken, every default is the same or accounted for."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep.dist as dist
from lockstep.dist.validate import NOT_GIVEN
from lockstep.testing import ranks

# As MMEngine 0.10.7 publishes them (read off with inspect.signature), without annotations.
PUBLISHED = {
    "dist": """
        all_gather(data, group=None)
        all_gather_object(data, group=None)
        all_reduce(data, op='sum', group=None)
        all_reduce_dict(data, op='sum', group=None)
        all_reduce_params(params, coalesce=True, bucket_size_mb=-1, op='sum', group=None)
        barrier(group=None)
        broadcast(data, src=0, group=None)
        broadcast_object_list(data, src=0, group=None)
        cast_data_device(data, device, out=None)
        collect_results(results, size, device='cpu', tmpdir=None)
        collect_results_cpu(result_part, size, tmpdir=None)
        collect_results_gpu(result_part, size)
        gather(data, dst=0, group=None)
        gather_object(data, dst=0, group=None)
        get_backend(group=None)
        get_comm_device(group=None)
        get_data_device(data)
        get_default_group()
        get_dist_info(group=None)
        get_local_group()
        get_local_rank()
        get_local_size()
        get_rank(group=None)
        get_world_size(group=None)
        infer_launcher()
        init_dist(launcher, backend='nccl', init_backend='torch', **kwargs)
        init_local_group(node_rank, num_gpus_per_node)
        is_distributed()
        is_main_process(group=None)
        master_only(func)
        sync_random_seed(group=None)
    """,
    "device": """
        get_device()
        get_max_cuda_memory(device=None)
        get_max_musa_memory(device=None)
        is_cuda_available()
        is_dipu_available()
        is_mlu_available()
        is_mps_available()
        is_musa_available()
        is_npu_available()
        is_npu_support_full_precision()
    """,
    "model": """
        MMDistributedDataParallel(module, detect_anomalous_params=False, **kwargs)
        MMSeparateDistributedDataParallel(module, broadcast_buffers=False, find_unused_parameters=False, **kwargs)
        MMFullyShardedDataParallel(module, process_group=None, sharding_strategy=None, cpu_offload=None, \
            auto_wrap_policy=None, backward_prefetch=None, mixed_precision=None, param_init_fn=None, \
            use_orig_params=True, **kwargs)
        BaseModel(data_preprocessor=None, init_cfg=None)
        BaseDataPreprocessor(non_blocking=False)
        ImgDataPreprocessor(mean=None, std=None, pad_size_divisor=1, pad_value=0, bgr_to_rgb=False, \
            rgb_to_bgr=False, non_blocking=False)
        ExponentialMovingAverage(model, momentum=0.0002, interval=1, device=None, update_buffers=False)
        StochasticWeightAverage(model, interval=1, device=None, update_buffers=False)
        MomentumAnnealingEMA(model, momentum=0.0002, gamma=100, interval=1, device=None, update_buffers=False)
        convert_sync_batchnorm(module, implementation='torch')
        revert_sync_batchnorm(module)
    """,
}

Signature = tuple[list[tuple[str, Any]], bool]


def published() -> dict[str, Signature]:
    """Return, for each name, its parameters with their defaults, and whether it takes further keywords."""
    found = {}
    for room, text in PUBLISHED.items():
        for line in text.strip().splitlines():
            call = line.strip()
            function = ast.parse(f"def {call}: ...").body[0]
            assert isinstance(function, ast.FunctionDef)
            names = [argument.arg for argument in function.args.args]
            defaults = [ast.literal_eval(default) for default in function.args.defaults]
            required = [inspect.Parameter.empty] * (len(names) - len(defaults))
            found[f"{room}.{function.name}"] = (
                list(zip(names, [*required, *defaults], strict=True)),
                function.args.kwarg is not None,
            )
    return found


SIGNATURES = published()

# What differs on purpose; docs/mmengine.md tells the users why.
ABSENT = {"device.get_max_musa_memory", "device.is_dipu_available", "device.is_npu_support_full_precision"}
OTHER_DEFAULTS = {
    ("dist.init_dist", "launcher"): None,  # asks the environment
    ("dist.init_dist", "backend"): None,  # what the machine has
    ("dist.init_local_group", "num_gpus_per_node"): None,  # the other form gives the size alone
    ("model.BaseDataPreprocessor", "non_blocking"): True,  # where the host waits, the device has nothing to do
    ("model.ImgDataPreprocessor", "non_blocking"): True,
}
# Places that hold something else; the functions of dist take the published order all the same, as CALLS shows.
OTHER_PLACES = {
    "dist.all_gather": {"group"},  # torch's all_gather(tensor_list, tensor)
    "dist.all_gather_object": {"group"},
    "dist.gather": {"dst", "group"},
    "dist.gather_object": {"dst", "group"},
    "dist.sync_random_seed": {"group"},  # sync_random_seed(seed)
    "dist.collect_results_cpu": {"result_part"},  # called results
    "dist.collect_results_gpu": {"result_part"},
    "model.MMSeparateDistributedDataParallel": {"broadcast_buffers", "find_unused_parameters"},  # DDP's come first
    "model.MMFullyShardedDataParallel": {"param_init_fn", "use_orig_params"},  # torch's order
}


def target(name: str) -> Callable[..., Any]:
    room, _, attribute = name.partition(".")
    found: Callable[..., Any] = getattr(import_module(f"lockstep.{room}"), attribute)
    return found


def default_of(parameter: inspect.Parameter) -> Any:
    return inspect.Parameter.empty if parameter.default is NOT_GIVEN else parameter.default


@pytest.mark.parametrize("name", sorted(SIGNATURES.keys() - ABSENT))
def test_every_published_keyword_is_taken_with_the_published_default(name: str) -> None:
    ours = inspect.signature(target(name)).parameters
    parameters, more = SIGNATURES[name]
    for keyword, default in parameters:
        assert default_of(ours[keyword]) == OTHER_DEFAULTS.get((name, keyword), default), keyword
    assert not more or any(parameter.kind is parameter.VAR_KEYWORD for parameter in ours.values())


@pytest.mark.parametrize("name", sorted(SIGNATURES.keys() - ABSENT))
def test_arguments_stand_in_the_published_order(name: str) -> None:
    ours = list(inspect.signature(target(name)).parameters)
    elsewhere = {
        keyword for place, (keyword, _) in enumerate(SIGNATURES[name][0]) if ours[place : place + 1] != [keyword]
    }
    assert elsewhere == OTHER_PLACES.get(name, set())


def test_the_tables_list_what_differs_and_nothing_else() -> None:
    absent = {
        name
        for name in SIGNATURES
        if not hasattr(import_module(f"lockstep.{name.partition('.')[0]}"), name.partition(".")[2])
    }
    assert absent == ABSENT
    for name, keyword in OTHER_DEFAULTS:
        assert keyword in dict(SIGNATURES[name][0])
    page = (Path(__file__).parents[2] / "docs" / "mmengine.md").read_text()
    for name in {*ABSENT, *(name for name, _ in OTHER_DEFAULTS)}:
        assert f"`{name.partition('.')[2]}" in page, name


# Each published call in each of its forms, by keyword and by place, and what it gives on a group of one.
ONE, TWO = torch.tensor([1.0]), torch.tensor([2.0])


def filled(call: Callable[[Any], object]) -> Any:
    """Return what a call has put into a list or tensor."""
    room = [torch.zeros(1)]
    assert call(room) is None
    return room


def in_place(call: Callable[[Any], object]) -> Any:
    data = torch.tensor([2.0])
    call(data)
    return data


CALLS: dict[str, tuple[Callable[[], Any], Any]] = {
    "all_reduce(tensor=)": (lambda: in_place(lambda x: dist.all_reduce(tensor=x)), TWO),
    "all_reduce(ReduceOp)": (lambda: in_place(lambda x: dist.all_reduce(x, op=dist.ReduceOp.MAX)), TWO),
    "all_reduce(data, op, group)": (lambda: in_place(lambda x: dist.all_reduce(x, "sum", None)), TWO),
    "broadcast(tensor=)": (lambda: in_place(lambda x: dist.broadcast(tensor=x, src=0)), TWO),
    "reduce(tensor=)": (lambda: in_place(lambda x: dist.reduce(tensor=x, dst=0, op=dist.ReduceOp.SUM)), TWO),
    "gather(tensor=)": (lambda: dist.gather(tensor=TWO, dst=0), [TWO]),
    "gather(tensor=, gather_list=)": (lambda: filled(lambda x: dist.gather(tensor=TWO, gather_list=x, dst=0)), [TWO]),
    "gather(data, dst, group)": (lambda: dist.gather(TWO, 0, dist.get_default_group()), [TWO]),
    "all_gather(data=)": (lambda: dist.all_gather(data=TWO, group=None), [TWO]),
    "all_gather(data, group)": (lambda: dist.all_gather(TWO, dist.get_default_group()), [TWO]),
    "all_gather(tensor_list=)": (lambda: filled(lambda x: dist.all_gather(tensor_list=x, tensor=TWO)), [TWO]),
    "all_gather(tensor_list, tensor)": (lambda: filled(lambda x: dist.all_gather(x, TWO)), [TWO]),
    "all_gather_object(data=)": (lambda: dist.all_gather_object(data="a"), ["a"]),
    "all_gather_object(obj=)": (lambda: dist.all_gather_object(obj="a"), ["a"]),
    "all_gather_object(data, group)": (lambda: dist.all_gather_object("a", dist.get_default_group()), ["a"]),
    "all_gather_object(object_list=)": (
        lambda: filled(lambda x: dist.all_gather_object(object_list=x, obj="a")),
        ["a"],
    ),
    "all_gather_object(object_list=, obj=None)": (
        lambda: filled(lambda x: dist.all_gather_object(object_list=x, obj=None)),
        [None],
    ),
    "gather_object(obj=)": (lambda: dist.gather_object(obj="a", dst=0), ["a"]),
    "gather_object(data, dst, group)": (lambda: dist.gather_object("a", 0, dist.get_default_group()), ["a"]),
    "gather_object(obj=, object_gather_list=)": (
        lambda: filled(lambda x: dist.gather_object(obj="a", object_gather_list=x)),
        ["a"],
    ),
    "broadcast_object_list(object_list=, device=)": (
        lambda: dist.broadcast_object_list(object_list=["a"], src=0, device=torch.device("cpu")),
        None,
    ),
    "broadcast_object_list(data, src, group, device)": (
        lambda: dist.broadcast_object_list(["a"], 0, None, "cpu"),
        None,
    ),
    "broadcast_object(obj=)": (lambda: dist.broadcast_object(obj="a", src=0), "a"),
    "all_reduce_dict(py_dict=)": (lambda: dist.all_reduce_dict(py_dict={"a": TWO.clone()}, op="mean"), {"a": TWO}),
    "all_reduce_dict(ReduceOp)": (
        lambda: dist.all_reduce_dict({"a": 2}, dist.ReduceOp.SUM, to_float=True),
        {"a": TWO[0]},
    ),
    "all_reduce_params(...)": (
        lambda: dist.all_reduce_params(params=iter([TWO.clone()]), coalesce=False, bucket_size_mb=1, op="mean"),
        None,
    ),
    "collect_results(results=)": (lambda: dist.collect_results(results=[1, 2], size=1, device="gpu"), [1]),
    "collect_results(tmpdir=)": (lambda: dist.collect_results([1], size=1, tmpdir=None), [1]),
    "collect_results_cpu(result_part=)": (lambda: dist.collect_results_cpu(result_part=[1], size=1), [1]),
    "collect_results_cpu(part, size, tmpdir)": (lambda: dist.collect_results_cpu([1], 1, None), [1]),
    "collect_results_gpu(result_part=)": (lambda: dist.collect_results_gpu(result_part=[1], size=1), [1]),
    "collect_results_gpu(part, size)": (lambda: dist.collect_results_gpu([1], 1), [1]),
    "cast_data_device(data=)": (lambda: dist.cast_data_device(data=[TWO], device="cpu", out=None), [TWO]),
    "sync_random_seed(group)": (lambda: dist.sync_random_seed(dist.get_default_group()) >= 0, True),
    "sync_random_seed(group=)": (lambda: dist.sync_random_seed(group=None) >= 0, True),
    "sync_random_seed(seed=, device=)": (lambda: dist.sync_random_seed(seed=7, device="cuda"), 7),
    "init_local_group(node_rank, num_gpus_per_node)": (lambda: dist.init_local_group(0, 1), None),
    "init_local_group(node_rank=)": (lambda: dist.init_local_group(node_rank=0, num_gpus_per_node=1), None),
    "init_local_group(group_size)": (lambda: dist.init_local_group(1), None),
    "init_local_group(group_size=)": (lambda: dist.init_local_group(group_size=1), None),
    "get_dist_info(group)": (lambda: dist.get_dist_info(dist.get_default_group()), (0, 1)),
    "get_backend(group=)": (lambda: dist.get_backend(group=None) in (None, "gloo"), True),
    "is_main_process(group)": (lambda: dist.is_main_process(dist.get_default_group()), True),
    "barrier(group=)": (lambda: dist.barrier(group=None), None),
    "get_comm_device(group=)": (lambda: dist.get_comm_device(group=None), torch.device("cpu")),
}


def call_each() -> None:
    for form, (call, expected) in CALLS.items():
        assert repr(call()) == repr(expected), form


def test_every_published_form_works_in_one_process() -> None:
    call_each()


@ranks(1, fresh=True)
def test_every_published_form_works_in_a_group_of_one() -> None:
    dist.init_dist("pytorch", "gloo", "torch")
    call_each()


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "both": (lambda: dist.all_reduce(ONE, tensor=ONE), r"all_reduce\(\) got both `data` and `tensor`"),
    "both ": (lambda: dist.broadcast(ONE, tensor=ONE), r"broadcast\(\) got both `data` and `tensor`"),
    "both  ": (lambda: dist.gather(ONE, tensor=ONE), r"gather\(\) got both `data` and `tensor`"),
    "both   ": (lambda: dist.reduce(ONE, tensor=ONE), r"reduce\(\) got both `data` and `tensor`"),
    "lists": (lambda: dist.all_gather([ONE], ONE, tensor_list=[ONE]), "got both `data` and `tensor_list`"),
    "objects": (lambda: dist.broadcast_object_list([1], object_list=[1]), "got both `data` and `object_list`"),
    "objects ": (lambda: dist.all_gather_object([1], 1, object_list=[1]), "got both `data` and `object_list`"),
    "object": (lambda: dist.gather_object(1, obj=1), "got both `data` and `obj`"),
    "dicts": (lambda: dist.all_reduce_dict({}, py_dict={}), "got both `data` and `py_dict`"),
    "results": (lambda: dist.collect_results_cpu([1], 1, result_part=[1]), "got both `results` and `result_part`"),
    "sizes": (lambda: dist.init_local_group(1, group_size=1), "got both `node_rank` and `group_size`"),
    "sizes ": (lambda: dist.init_local_group(0, 1, group_size=1), "`num_gpus_per_node`, or `group_size` alone"),
    "none": (lambda: dist.all_reduce(), r"all_reduce\(\) missing 1 required argument: 'data'"),
    "none ": (lambda: dist.all_gather_object(), r"all_gather_object\(\) missing 1 required argument: 'data'"),
    "none  ": (lambda: dist.init_local_group(), r"init_local_group\(\) missing 1 required argument: 'node_rank'"),
    "none   ": (
        lambda: dist.collect_results([1]),
        r"collect_results\(\) missing 1 required positional argument: 'size'",
    ),
    "misspelt": (lambda: dist.all_reduce(tensr=ONE), r"all_reduce\(\) got an unexpected keyword argument 'tensr'"),
    "misspelt ": (lambda: dist.collect_results(result=[1], size=1), "unexpected keyword argument 'result'"),
}


@pytest.mark.parametrize("case", sorted(WRONG))
def test_contradictions_are_type_errors_that_name_both(case: str) -> None:
    call, words = WRONG[case]
    with pytest.raises(TypeError, match=words):
        call()


def test_init_dist_asks_the_environment_for_a_launcher() -> None:
    for arguments in ((), (None,)):
        dist.init_dist(*arguments)
        assert dist.is_distributed()
        assert dist.get_world_size() == 1
        dist.destroy_dist()


@ranks(2, fresh=True)
def test_init_dist_finds_torchrun_without_being_told() -> None:
    dist.init_dist()
    assert dist.get_world_size() == 2
    assert dist.get_backend() is not None
