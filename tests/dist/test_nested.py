"""Many values at once: the same as one at a time, or an error on every rank with nothing changed."""

from __future__ import annotations

import random
import re
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as torch_dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from lockstep.dist import (
    CollectiveMismatchError,
    PeerError,
    all_gather_tree,
    all_reduce,
    all_reduce_dict,
    all_reduce_params,
    all_reduce_tree,
    broadcast_tree,
    get_default_group,
    get_rank,
    get_world_size,
    sync_random_seed,
)
from lockstep.groups import resolve
from lockstep.testing import ranks, run_ranks

from .backends import COUNTS
from .drawn_objects import assert_same
from .reference import assert_group_works

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int16,
    torch.uint8,
    torch.bool,
    torch.complex64,
)
SHAPES = ((), (0,), (3,), (2, 3))

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64)


class Plan(NamedTuple):
    """How to make a value, another one on each rank."""

    kind: str
    dtype: torch.dtype
    shape: tuple[int, ...]


KINDS = ("tensor", "strided", "parameter", "array", "numpy scalar", "int", "float", "bool", "complex")
PLANS = st.builds(Plan, st.sampled_from(KINDS), st.sampled_from(DTYPES), st.sampled_from(SHAPES))


def value_of(plan: Plan, seed: int) -> Any:
    """Return a value of small whole numbers, so that no order of adding them rounds."""
    generator = torch.Generator().manual_seed(seed)
    number = int(torch.randint(0, 4, (), generator=generator))
    if plan.kind in ("int", "float", "bool", "complex"):
        return {"int": int, "float": float, "bool": bool, "complex": complex}[plan.kind](number)
    if plan.kind == "numpy scalar":
        return np.float32(number)
    data = torch.randint(0, 4, plan.shape, generator=generator)
    if plan.kind == "array":
        return data.numpy().astype("f8" if plan.dtype.is_floating_point else "i4")
    data = data.to(plan.dtype)
    if plan.kind == "parameter":
        return Parameter(data, requires_grad=plan.dtype.is_floating_point)
    return torch.stack([data, data], dim=-1)[..., 0] if plan.kind == "strided" else data


def copied(value: Any) -> Any:
    """Return a value that a reduction in place of the other leaves as it is."""
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def reduced_alone(value: Any, op: str) -> Any:
    """Return what `all_reduce` makes of one value."""
    if isinstance(value, Tensor):
        result = copied(value)
        all_reduce(result, op)
        return Parameter(result, result.requires_grad) if isinstance(value, Parameter) else result
    data = torch.from_numpy(np.array(value))
    all_reduce(data, op)
    if isinstance(value, np.ndarray | np.generic):
        result = data.numpy()
        return result if isinstance(value, np.ndarray) else result[()]
    return data.item()


# --- dicts


def reduce_dict_and_compare(plans: list[tuple[Any, Plan]], op: str) -> None:
    rank = get_rank()
    values = {key: value_of(plan, 7 * rank + number) for number, (key, plan) in enumerate(plans)}
    before = {key: copied(value) for key, value in values.items()}
    keys = list(values)
    random.Random(rank).shuffle(keys)
    data = {key: values[key] for key in keys}
    try:
        expected = {key: reduced_alone(value, op) for key, value in values.items()}
    except ValueError:  # the mean of integers; other ranks raise as well, at the same place
        with pytest.raises(ValueError, match="must be a whole number"):
            all_reduce_dict(data, op)
        expected = {key: before[key] for key in keys}
        assert_same({key: copied(data[key]) for key in keys}, expected)
        return
    assert all_reduce_dict(data, op) is data
    assert list(data) == keys
    for key in keys:
        assert_same(data[key], expected[key])
        assert (data[key] is values[key]) or not isinstance(values[key], Tensor)


@given(st.data())
@settings(max_examples=25)
def test_a_dict_is_reduced_in_place_as_its_entries_would_be_alone(data: st.DataObject) -> None:
    op = data.draw(st.sampled_from(["sum", "mean", "max"]))
    keys = st.text(max_size=3) | st.integers(0, 9) | st.tuples(st.integers(0, 3))
    plans = data.draw(st.dictionaries(keys, PLANS, max_size=6))
    if op == "max":
        plans = {k: plan for k, plan in plans.items() if plan.kind != "complex" and not plan.dtype.is_complex}
    size = data.draw(st.integers(0, 4), label="ranks, 0 for no group")
    if size:
        run_ranks(size, reduce_dict_and_compare, list(plans.items()), op)
    else:
        reduce_dict_and_compare(list(plans.items()), op)


@ranks(2)
def test_a_dict_is_reduced_on_the_ranks_of_a_group() -> None:
    group = torch_dist.new_group([1])
    if get_rank() == 1:
        assert all_reduce_dict({"a": 1}, group=group) == {"a": 1}
        assert all_reduce_tree([1], group=group) == [1]
    assert all_reduce_dict({"a": 1}, "sum", get_default_group()) == {"a": 2}


@ranks(1, 2)
def test_what_an_evaluation_under_inference_mode_has_made_is_reduced_in_place_outside_of_it() -> None:
    size = get_world_size()
    with torch.inference_mode():
        losses = {"loss": torch.ones(2), "samples": torch.tensor(8), "ratio": 0.5}
        params, best = [torch.ones(2), torch.ones(2**18)], torch.tensor([1.0, -1.0])
    all_reduce_dict(losses)
    all_reduce_params(params)
    all_reduce(best, "max")
    assert [losses["loss"].tolist(), losses["samples"].item(), losses["ratio"]] == [[size, size], 8 * size, size / 2]
    assert [x.unique().tolist() for x in params] == [[size], [size]]
    assert best.tolist() == [1.0, -1.0]


@ranks(2)
def test_to_float_makes_float32_tensors_of_all_entries() -> None:
    loss = torch.tensor(1.5)
    data = {"loss": loss, "hits": get_rank(), "ratio": 0.5, "flag": True, "half": torch.ones(2, dtype=torch.float16)}
    all_reduce_dict(data, "mean", to_float=True)
    assert {key: value.tolist() for key, value in data.items()} == {
        "loss": 1.5,
        "hits": 0.5,
        "ratio": 0.5,
        "flag": 1.0,
        "half": [1.0, 1.0],
    }
    assert all(value.dtype is torch.float32 for value in data.values())
    assert data["loss"] is loss


@ranks(2)
def test_a_loss_in_a_graph_of_gradients_is_reduced_outside_of_it() -> None:
    weight = torch.ones(1, requires_grad=True)
    loss = (weight * (get_rank() + 1)).sum()
    with pytest.warns(UserWarning, match=r"its gradient stays that of this rank's own value"):
        assert all_reduce_dict({"loss": loss}, "mean")["loss"].detach().item() == 1.5
    loss.backward()
    assert weight.grad.item() == get_rank() + 1


@pytest.mark.parametrize("numel", [6, 200])
@ranks(3)
def test_a_dict_takes_one_all_reduce_for_each_dtype_and_one_exchange(numel: int) -> None:
    data = {f"loss{number}": torch.ones(()) for number in range(20)}
    data |= {"map": torch.ones(numel), "hits": 1}
    group = torch_dist.new_group(backend="silent")
    all_reduce_dict({"first": 1}, group=group)
    COUNTS.clear()
    all_reduce_dict(data, group=group)
    assert (COUNTS, resolve(group).calls.number) == ({"allreduce": 2}, 2)  # the exchange goes over gloo beside it
    assert data["hits"] == 3
    assert torch.equal(data["map"], torch.full((numel,), 3.0))


@ranks(2)
def test_a_value_that_has_no_memory_for_its_elements_is_refused_before_anything_is_changed() -> None:
    data = {"a": torch.ones(2), "b": torch.ones(1).expand(3)}
    with pytest.raises(ValueError, match=r"`'b'` must have memory for each of its elements"):
        all_reduce_dict(data)
    assert data["a"].tolist() == [1.0, 1.0]


@ranks(2)
def test_of_what_is_reduced_in_float32_too_all_is_refused_before_anything_is_changed() -> None:
    data = {"n": 1, "a": torch.zeros(1).expand(3), "b": torch.ones(1, dtype=torch.float64).expand(3)}
    with pytest.raises(ValueError, match=r"`'a'` must have memory for each of its elements"):
        all_reduce_dict(data, to_float=True)
    assert data["n"] == 1
    del data["a"]
    data["n"] = 1j
    with pytest.raises(
        TypeError, match=r"`'n'` must be real to be reduced in torch\.float32, but is torch\.complex128"
    ):
        all_reduce_dict(data, to_float=True)
    data["n"] = 1
    assert all_reduce_dict(data, to_float=True)["b"].tolist() == [get_world_size()] * 3  # is replaced
    assert_group_works()


MISMATCHES = {
    "a key more": ({"a": 1.0, "b": 2}, {"a": 1.0}, "'b': int64[]"),
    "other keys": ({"a": 1.0, "b": 2}, {"a": 1.0, "c": 2}, "'b': int64[]"),
    "nothing at all": ({"a": 1.0}, {}, "'a': float64[]"),
    "another shape": ({"a": torch.ones(2)}, {"a": torch.ones(3)}, "'a': float32[2]"),
    "another dtype": ({"a": 1}, {"a": 1.0}, "'a': int64[]"),
    "a number for a word": ({1: 1.0}, {"1": 1.0}, "1: float64[]"),
}


@pytest.mark.parametrize("to_float", [False, True])
@pytest.mark.parametrize("kind", list(MISMATCHES))
@ranks(3)
def test_ranks_with_other_keys_shapes_or_dtypes_are_named_on_every_rank(kind: str, to_float: bool) -> None:
    most, other, shown = MISMATCHES[kind]
    data = dict(other if get_rank() == 1 else most)
    before = dict(data)
    if kind == "another dtype" and to_float:
        assert all_reduce_dict(data, to_float=True)["a"].item() == 3
        return
    with pytest.raises(CollectiveMismatchError) as caught:
        all_reduce_dict(data, to_float=to_float)
    if not to_float:
        line = (
            re.escape(f"ranks 0, 2: {shown} at ") + r"\S*test_nested\.py:\d+\n  rank 1: .* at \S*test_nested\.py:\d+$"
        )
        assert re.search(line, str(caught.value))
    assert all(data[key] is before[key] for key in before)
    assert list(data) == list(before)
    assert_group_works()


@ranks(2)
def test_the_mean_of_integers_that_is_no_whole_number_changes_nothing_on_any_rank() -> None:
    hits = torch.tensor([2, get_rank()])
    data = {"a": torch.ones(1), "hits": hits, "z": torch.ones(1, dtype=torch.int16), "number": 1.5}
    with pytest.raises(ValueError, match="must be a whole number"):
        all_reduce_dict(data, "mean")
    assert data == {"a": torch.ones(1), "hits": hits, "z": torch.ones(1), "number": 1.5}
    assert hits.tolist() == [2, get_rank()]
    assert_group_works()


UNREDUCIBLE = {
    "None": (None, TypeError, "loss'?` must be a tensor, an array or a number, but is NoneType"),
    "text": ("1.0", TypeError, "loss'?` must be a tensor, an array or a number, but is str"),
    "huge": (2**63, ValueError, "loss'?` must be an int that fits into 64 bits, but is 9223372036854775808"),
    "words": (np.array(["a"]), TypeError, "or a number, but is an array of <U1, which torch does not know"),
    "sparse": (torch.eye(2).to_sparse(), TypeError, "loss'?` must be dense"),
}


def one_rank_has_an_unreducible_value(kind: str, culprit: int) -> None:
    value, error, words = UNREDUCIBLE[kind]
    for reduce_all in (all_reduce_dict, all_reduce_tree):
        is_own_fault = get_rank() == culprit
        data = {"loss": value if is_own_fault else 1.0}
        with pytest.raises(error if is_own_fault else PeerError, match=words) as caught:
            reduce_all(data)
        assert is_own_fault or caught.value.rank == culprit
        assert data["loss"] is (value if is_own_fault else data["loss"])
    assert_group_works()


@pytest.mark.parametrize("kind", UNREDUCIBLE)
def test_a_value_that_one_rank_cannot_reduce_is_an_error_on_every_rank(kind: str) -> None:
    one_rank_has_an_unreducible_value(kind, 0)
    run_ranks(3, one_rank_has_an_unreducible_value, kind, 1)


@ranks(1, 2)
def test_what_has_no_meaning_for_a_dtype_is_refused_on_every_rank() -> None:
    with pytest.raises(TypeError, match="only integers and bool have bits"):
        all_reduce_dict({"a": 1, "b": 1.0}, "bor")
    with pytest.raises(ValueError, match="`op` must be one of"):
        all_reduce_dict({"a": 1}, "median")
    with pytest.raises(TypeError, match="`data` must be a dict, but is list"):
        all_reduce_dict([1])  # type: ignore[type-var]
    assert_group_works()


@ranks(1, 2)
def test_numbers_do_not_go_to_the_default_device() -> None:
    with torch.device("meta"):
        assert all_reduce_dict({"hits": 1, "ratio": 0.5}) == {"hits": get_world_size(), "ratio": 0.5 * get_world_size()}


# --- parameters


def reduce_params_and_compare(plans: list[Plan], options: dict[str, Any], lazily: bool) -> None:
    params = [value_of(plan, 7 * get_rank() + number) for number, plan in enumerate(plans)]
    expected = [reduced_alone(param, options["op"]) for param in params]
    assert all_reduce_params((param for param in params) if lazily else params, **options) is None
    assert_same(params, expected)


LARGE = tuple((2**18 + more,) for more in (-1, 0, 1))  # float32: around the 1 MiB from which they travel alone


@given(st.data())
@settings(max_examples=30)
def test_parameters_are_reduced_in_place_as_each_would_be_alone(data: st.DataObject) -> None:
    op = data.draw(st.sampled_from(["sum", "mean", "max"]))
    dtypes = [d for d in DTYPES if (op != "max" or not d.is_complex) and (op != "mean" or d.is_floating_point)]
    small = st.builds(
        Plan, st.sampled_from(["tensor", "strided", "parameter"]), st.sampled_from(dtypes), st.sampled_from(SHAPES)
    )
    large = st.builds(Plan, st.just("parameter"), st.just(torch.float32), st.sampled_from(LARGE))
    plans = data.draw(st.permutations(data.draw(st.lists(small, max_size=6)) + data.draw(st.lists(large, max_size=2))))
    options = {
        "op": op,
        "coalesce": data.draw(st.booleans()),
        "bucket_size_mb": data.draw(st.sampled_from([-1, 0, 1e-5, 0.5, 1, 4])),
    }
    size = data.draw(st.integers(0, 4), label="ranks, 0 for no group")
    lazily = data.draw(st.booleans())
    if size:
        run_ranks(size, reduce_params_and_compare, plans, options, lazily)
    else:
        reduce_params_and_compare(plans, options, lazily)


@pytest.mark.parametrize(
    ("options", "calls"),
    [({}, 3), ({"coalesce": False}, 7), ({"bucket_size_mb": 3 * 400 / 2**20}, 4)],
    ids=["all small ones together", "each alone", "in buckets"],
)
@ranks(3)
def test_small_parameters_travel_together_by_dtype(options: dict[str, Any], calls: int) -> None:
    params = [torch.ones(100) for _ in range(5)] + [torch.ones(1, dtype=torch.int64), torch.ones(2**18)]
    group = torch_dist.new_group(backend="silent")
    COUNTS.clear()
    all_reduce_params(params, group=group, **options)
    assert (COUNTS, resolve(group).calls.number) == ({"allreduce": calls}, 1)
    assert all(bool((param == 3).all()) for param in params)


@ranks(2)
def test_one_tensor_counts_as_a_list_of_one() -> None:
    weight = torch.full((3,), float(get_rank()))
    all_reduce_params(weight, op="mean")
    assert weight.tolist() == [0.5] * 3


@ranks(2)
def test_the_gradients_of_a_model_are_averaged() -> None:
    model = torch.nn.Linear(2, 2)
    torch.nn.init.ones_(model.weight)
    model(torch.full((1, 2), float(get_rank()))).sum().backward()
    all_reduce_params((weight.grad for weight in model.parameters()), op="mean")
    assert model.weight.grad.tolist() == [[0.5, 0.5]] * 2
    assert all_reduce_params(model.parameters()) is None
    assert model.weight.tolist() == [[2, 2]] * 2


@ranks(2)
def test_a_mean_that_is_no_whole_number_is_an_error_on_every_rank_when_all_others_are_reduced() -> None:
    counts, weight = torch.tensor([get_rank()]), torch.full((3,), float(get_rank()))
    for coalesce in (True, False):
        weight.fill_(get_rank())
        with pytest.raises(ValueError, match="must be a whole number"):
            all_reduce_params([counts, weight], coalesce, op="mean")
        assert (counts.tolist(), weight.tolist()) == ([get_rank()], [0.5] * 3)
    assert_group_works()


@ranks(2)
def test_after_a_mismatch_nothing_is_in_flight_that_another_rank_waits_for() -> None:
    narrow, wide = [torch.ones(1) for _ in range(3)], [torch.ones(2) for _ in range(3)]

    def reduce(params: list[Tensor]) -> None:
        all_reduce_params(params, coalesce=False)

    with pytest.raises(CollectiveMismatchError):  # the first call of a kind is compared before
        reduce([narrow, wide][get_rank()])
    for _ in range(3):
        reduce(narrow)
    assert_group_works()


def test_what_is_no_tensor_among_parameters_is_named() -> None:
    with pytest.raises(TypeError, match=r"`params\[1\]` must be a tensor, but is int"):
        all_reduce_params([torch.ones(1), 1])  # type: ignore[list-item]


# --- trees


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True)
class Losses:
    total: Any
    parts: Any


class Element:
    """A class that names its children."""

    def __init__(self, **children: Any) -> None:
        self.children = children

    def tree_children(self) -> dict[str, Any]:
        return self.children

    def tree_rebuild(self, children: dict[str, Any]) -> Element:
        return Element(**children)

    def __repr__(self) -> str:
        return f"Element({self.children})"


def tree_of(number: int) -> dict[str, Any]:
    """Return one of each container around one of each leaf."""
    tree = {
        "list": [number, float(number), number > 0, complex(number)],
        "tuple": (torch.full((2,), number), np.full((2, 1), number)),
        "point": Point(np.float32(number), {"deep": [torch.tensor(float(number))]}),
        "losses": Losses(torch.tensor(number), []),
        "element": Element(boxes=torch.full((1, 4), number, dtype=torch.float16)),
        "ordered": OrderedDict(b=number, a=number),
        "default": defaultdict(list, a=number),
    }
    return dict(sorted(tree.items(), reverse=get_rank() % 2 == 1))


@ranks(1, 2, 3)
def test_a_tree_is_reduced_leaf_by_leaf_with_all_types_kept() -> None:
    tree, size = tree_of(get_rank() + 1), get_world_size()
    reduced = all_reduce_tree(tree)
    expected = tree_of(sum(range(1, size + 1)))
    expected["list"][2] = True
    assert repr(reduced) == repr(expected)
    assert reduced["default"].default_factory is list
    assert repr(tree) == repr(tree_of(get_rank() + 1))


@ranks(2)
def test_keys_of_one_text_are_not_mixed_up() -> None:
    entries = [(1, 1.0), ("1", 2.0), ("a.b", 3.0), ("a", {"b": 4.0})]
    reduced = all_reduce_tree(dict(entries if get_rank() == 0 else reversed(entries)))
    assert reduced == {1: 2.0, "1": 4.0, "a.b": 6.0, "a": {"b": 8.0}}


def test_one_process_reduces_a_tree_as_a_group_of_one() -> None:
    tree = tree_of(1)
    reduced = all_reduce_tree(tree, "mean")
    assert repr(reduced) == repr(tree)
    reduced["tuple"][0].zero_()
    assert tree["tuple"][0].tolist() == [1, 1]


@ranks(2)
def test_a_bare_leaf_is_a_tree() -> None:
    assert all_reduce_tree(get_rank() + 1, "max") == 2
    assert all_reduce_tree(torch.tensor(1.0)).item() == 2
    assert all_reduce_tree([]) == []


@ranks(2)
def test_trees_that_differ_are_a_mismatch_on_every_rank() -> None:
    with pytest.raises(CollectiveMismatchError, match=r"rank 0: a\[1\]: int64\[\] at .*\n  rank 1: \(nothing else\)"):
        all_reduce_tree({"a": [1, 2] if get_rank() == 0 else [1]})
    assert_group_works()


@ranks(2)
def test_gathered_trees_may_differ_in_everything() -> None:
    mine = tree_of(5) if get_rank() == 0 else Point(torch.ones(3), "text")
    first, second = all_gather_tree(mine)
    assert first["losses"].total.item() == 5
    assert isinstance(second, Point)
    assert second.y == "text"


@ranks(1, 3)
def test_a_tree_is_broadcast_whatever_the_others_hand_in() -> None:
    src = get_world_size() - 1
    received = broadcast_tree({"a": [np.arange(3), Losses(1, torch.ones(2))]} if get_rank() == src else None, src)
    assert repr(received) == repr({"a": [np.arange(3), Losses(1, torch.ones(2))]})


# --- seeds


@ranks(1, 2, 4)
def test_a_seed_is_that_of_rank_0_in_every_way_to_ask_for_it() -> None:
    rank, group = get_rank(), get_default_group()
    assert sync_random_seed(42 + rank) == 42
    assert sync_random_seed(seed=43 + rank, device="cpu", group=group) == 43
    assert sync_random_seed(2**63 - 1, torch.device("cpu"), group) == 2**63 - 1
    assert sync_random_seed(np.int32(44)) == 44
    assert type(sync_random_seed(np.int32(44))) is int
    drawn = [sync_random_seed(), sync_random_seed(group), sync_random_seed(group=group), sync_random_seed(None, "cpu")]
    assert all(0 <= seed < 2**31 for seed in drawn)
    assert len(set(drawn)) == 4
    assert all(other == drawn for other in all_gather_tree(drawn))


@ranks(2)
def test_a_seed_belongs_to_the_group_it_is_asked_for() -> None:
    groups = [torch_dist.new_group([0]), torch_dist.new_group([1])]
    assert sync_random_seed(get_rank(), group=groups[get_rank()]) == get_rank()


def test_seeds_without_a_group_are_random_too() -> None:
    assert sync_random_seed(7) == 7
    assert sync_random_seed() != sync_random_seed()


@pytest.mark.parametrize("seed", [-1, 2**63, 1.5, True, "7"])
@ranks(2)
def test_what_is_no_seed_on_rank_0_is_an_error_on_every_rank(seed: Any) -> None:
    with pytest.raises(ValueError, match=r"`seed` must be an int from 0 to 2\*\*63 - 1, but is .* on rank 0"):
        sync_random_seed(seed if get_rank() == 0 else 7)
    assert_group_works()
