"""Ranks that go different ways through a sharded model are stopped, or give the numbers of one process."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, sleep
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import linear

from lockstep.dist import all_gather_object, check_collectives, get_rank, init_dist
from lockstep.errors import CollectiveMismatchError, ConfigError, PeerError
from lockstep.groups import resolve
from lockstep.model import MMFullyShardedDataParallel, call_order, checkpoint_activations
from lockstep.model.shards import gather_full
from lockstep.optim import OptimWrapper
from lockstep.testing import RankFailure, ranks, run_ranks

from .branches import INPUTS, WIDTH, Expert, Experts, Twins, own_inputs, seeded

pytestmark = pytest.mark.layouts

STEPS, UNUSED = 3, {"auto_wrap_policy": "Mixture", "find_unused_parameters": True}


def wrapper_of(model: nn.Module, counts: int = 1) -> OptimWrapper:
    return OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), accumulative_counts=counts)


def trained(model: MMFullyShardedDataParallel, data: Any, counts: int = 1) -> dict[str, Tensor]:
    optim_wrapper = wrapper_of(model, counts)
    for _ in range(STEPS):
        for part in data.chunk(counts):
            model.train_step(part, optim_wrapper)
            with torch.no_grad():
                model(part)
    return {name: gather_full(parameter.detach()) for name, parameter in model.module.named_parameters()}


def trained_alone(kind: type[nn.Module] = Experts) -> dict[str, Tensor]:
    model = seeded(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(INPUTS).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def refused(step: Callable[[], Any], says: str, error: type[Exception] = CollectiveMismatchError) -> None:
    with pytest.raises(error, match=says):
        step()


@ranks(2)
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"auto_wrap_policy": "Linear"}, "calls `left` on rank 0 and calls `right` on rank 1"),
        ({}, r"depend on `left.weight` on rank 0 alone, .*`right.bias` on rank 1 alone. Pass find_unused_parameters"),
    ],
    ids=["units", "parameters"],
)
def test_ranks_that_use_different_layers_of_one_shape_are_refused(options: dict, says: str):
    model = MMFullyShardedDataParallel(seeded(Twins), **options)
    data = {"x": own_inputs(), "left": get_rank() == 0}
    refused(lambda: model.train_step(data, wrapper_of(model)), says)


@ranks(2)
def test_experts_that_are_units_are_refused_with_what_to_do():
    model = MMFullyShardedDataParallel(seeded(Experts), auto_wrap_policy="Expert", find_unused_parameters=True)
    says = r"experts\.\d. on rank 0 and calls .*experts\.\d. on rank 1.*by its class in `auto_wrap_policy`"
    refused(lambda: model.train_step(own_inputs(), wrapper_of(model)), says)


@ranks(2)
@pytest.mark.parametrize(
    "options",
    [{}, {"forward_prefetch": True}, {"reshard_after_forward": False}, {"cpu_offload": True, "auto_wrap_policy": None}],
    ids=str,
)
@pytest.mark.parametrize("counts", [1, 2])
def test_ranks_that_hit_different_experts_train_as_one_process(options: dict, counts: int):
    model = MMFullyShardedDataParallel(seeded(Experts), **{**UNUSED, **options})
    alone = trained_alone()
    for name, value in trained(model, own_inputs(), counts).items():
        assert torch.allclose(value, alone[name], atol=1e-6), name


@ranks(4)
@pytest.mark.parametrize("recomputed", [False, True])
def test_replicas_hit_different_experts_too(recomputed: bool):
    net = seeded(Experts)
    if recomputed:
        checkpoint_activations(net, ["Mixture"])
    alone = trained_alone()
    for name, value in trained(MMFullyShardedDataParallel(net, **UNUSED, device_mesh=(2, 2)), own_inputs()).items():
        assert torch.allclose(value, alone[name], atol=1e-6), name


@ranks(4)
def test_ranks_that_compute_together_hit_different_experts_from_others():
    tensor = {"degree": 2, "plan": {"first": "colwise_rep"}}
    model = MMFullyShardedDataParallel(seeded(Experts), **UNUSED, tensor_parallel=tensor)
    rank, shares = model.data_shard
    alone = trained_alone()
    for name, value in trained(model, INPUTS[rank::shares]).items():
        assert torch.allclose(value, alone[name], atol=1e-6), name


class Spare(nn.Module):
    """Two blocks, of which only the first is called, and whose inner layer is called on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = Expert(), Expert()
        self.head, self.other = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        head = self.head if get_rank() else self.other
        return head(self.used(x)).mean()


@ranks(2)
def test_a_parameter_without_gradient_on_every_rank_has_none_and_others_get_zeros():
    model = MMFullyShardedDataParallel(seeded(Spare), auto_wrap_policy="Expert", find_unused_parameters=True)
    loss = model(own_inputs())
    with model.backward_context(loss, syncs=True):
        loss.backward()
    without = {name for name, parameter in model.module.named_parameters() if parameter.grad is None}
    assert without == {name for name, _ in Spare().named_parameters() if name.startswith("spare")}
    assert torch.equal(model.module.head.bias.grad.full_tensor(), torch.tensor([0.5]))


@ranks(2)
def test_a_backward_pass_that_nobody_prepares_is_refused():
    model = MMFullyShardedDataParallel(seeded(Experts), **UNUSED)
    refused(lambda: model(own_inputs()).backward(), "must be prepared, .*update_params", RuntimeError)


class Late(nn.Module):
    """Calls its blocks in another order on rank 1, or fails there, from its ninth call on."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Expert() for _ in range(2))
        self.calls = 0

    def forward(self, x: Tensor, fails: bool) -> Tensor:
        self.calls += 1
        is_late = self.calls > 8 and get_rank() == 1
        if is_late and fails:
            raise ValueError("no good sample")
        for block in reversed(self.blocks) if is_late else self.blocks:
            x = block(x)
        return x.mean()


@ranks(2)
def test_every_pass_is_compared_if_asked_for():
    model = MMFullyShardedDataParallel(seeded(Late), auto_wrap_policy="Expert")
    optim_wrapper = wrapper_of(model)
    check_collectives("always")
    try:
        for _ in range(8):
            model.train_step({"x": own_inputs(), "fails": False}, optim_wrapper)
        says = "calls `blocks.0` on rank 0 and calls `blocks.1` on rank 1"
        refused(lambda: model.train_step({"x": own_inputs(), "fails": False}, optim_wrapper), says)
    finally:
        check_collectives("off")


@ranks(2)
def test_a_later_pass_is_compared_at_its_end_by_one_exchange():
    model = MMFullyShardedDataParallel(seeded(Late), auto_wrap_policy="Expert")
    with torch.no_grad(), patch.object(call_order, "from_all", wraps=call_order.from_all) as exchange:
        for number in range(101):
            model.module.calls = 100 if number == 100 else 0
            exchange.reset_mock()
            if number == 100:
                says = "calls `blocks.0` on rank 0 and calls `blocks.1` on rank 1. Use"
                refused(lambda: model(own_inputs(), fails=False), says)
            else:
                model(own_inputs(), fails=False)
            if number in (0, 49, 50):
                assert exchange.call_count == {0: 4, 49: 0, 50: 1}[number]  # the whole, its two blocks, and the end


@ranks(2, fresh=True)
def test_gradients_of_different_layers_are_found_soon_between_the_passes_that_are_compared():
    init_dist("pytorch", timeout=60)
    model = MMFullyShardedDataParallel(seeded(Twins), auto_wrap_policy=None)
    optim_wrapper = wrapper_of(model)
    for _ in range(7):
        model.train_step({"x": own_inputs(), "left": True}, optim_wrapper)

    data = {"x": own_inputs(), "left": get_rank() == 0}
    model.train_step(data, optim_wrapper)
    deadline = monotonic() + 30
    while resolve(model.process_group).calls.failure is None and monotonic() < deadline:
        sleep(0.1)
    says = r"rank 0: backward_pass\(no gradient of right.weight, right.bias; see find_unused_parameters\) at .*"
    refused(lambda: model.train_step(data, optim_wrapper), f"(?s)same call, .*{says}rank 1: .*no gradient of left.w")


@ranks(2)
def test_a_rank_that_fails_in_a_forward_pass_is_named_by_the_others():
    model = MMFullyShardedDataParallel(seeded(Late), auto_wrap_policy="Expert")
    model.module.calls = 8
    error, says = (
        (PeerError, "rank 1 failed in the forward pass") if get_rank() == 0 else (ValueError, "no good sample")
    )
    refused(lambda: model(own_inputs(), fails=True), says, error)


def fail_in_pass(number: int) -> None:
    model = MMFullyShardedDataParallel(seeded(Late), auto_wrap_policy="Expert")
    model.module.calls = 8 - (number - 1)
    for _ in range(number):
        model(own_inputs(), fails=True)


@pytest.mark.parametrize("number", [call_order.EVERY, call_order.EVERY + 1])
def test_a_rank_that_fails_in_a_later_forward_pass_is_at_fault_also_where_passes_are_compared(number):
    """The others are gathering a unit then, over the same group: an exchange would end them by SIGABRT."""
    with pytest.raises(RankFailure, match="rank 1 raised: ValueError: no good sample"):
        run_ranks(2, fail_in_pass, number)


@ranks(2, fresh=True)
def test_a_forward_pass_of_ones_own_names_the_rank_that_is_gone():
    """As in a Session, where no step of lockstep's is around it: the watch has ended what torch gathers."""
    init_dist("pytorch")
    model = MMFullyShardedDataParallel(seeded(Twins), auto_wrap_policy="Linear")
    aborted = torch.distributed.DistBackendError("NCCL communicator was aborted on rank 0")
    with patch.object(model.module, "forward", side_effect=aborted):
        resolve().calls.failure = PeerError("rank 1 is gone", rank=1)
        refused(lambda: model(own_inputs()), "rank 1 is gone", PeerError)


@ranks(2)
def test_a_part_that_one_rank_alone_differentiates_is_refused():
    class Auxiliary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.main, self.extra = Expert(), Expert()

        def forward(self, x: Tensor) -> Tensor:
            x = x.requires_grad_()
            main, extra = self.main(x).mean(), self.extra(x).mean()
            return main + extra if get_rank() else main + extra.detach()

    for unused in (True, False):
        model = MMFullyShardedDataParallel(Auxiliary(), auto_wrap_policy=Expert, find_unused_parameters=unused)
        refused(lambda model=model: model.train_step(own_inputs(), wrapper_of(model)), "unit `extra` on rank 1 alone")


@ranks(2)
def test_other_passes_are_let_through():
    """Units that nobody calls, several forward passes in a step, parts that are called without the whole."""

    class Pair(Spare):
        def forward(self, x: Tensor) -> Tensor:
            return self.used(self.used(x)).mean()

    model = MMFullyShardedDataParallel(Pair(), auto_wrap_policy="Expert")
    model(own_inputs())
    loss = model(own_inputs()) + model(own_inputs())
    with model.backward_context(loss, syncs=True):
        loss.backward()
    with torch.no_grad():
        model.module.used(own_inputs())
        model.eval()
        model(own_inputs())
    assert model.module.used.up.weight.grad is not None
    assert model.module.spare.up.weight.grad is None


@ranks(2)
@pytest.mark.parametrize("frees", ["parameters", "state_dict"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_parameters_that_one_rank_alone_has_freed_are_told_before_ranks_wait_for_each_other(frees, strategy):
    def free() -> None:
        if get_rank() == 1:
            list(getattr(model, frees)())

    model = MMFullyShardedDataParallel(seeded(Experts), sharding_strategy=strategy, auto_wrap_policy="Mixture")
    loss = model(INPUTS)
    free()
    with (
        pytest.raises(CollectiveMismatchError, match="were called on rank 1 alone"),
        model.backward_context(loss, syncs=True),
    ):
        pass
    list(model.parameters())
    with torch.no_grad():
        model(INPUTS)
        free()
        refused(lambda: model(INPUTS), r"`parameters\(\)` and `state_dict\(\)` .* on rank 1 alone. Call them on every")
        list(model.parameters())
        model(INPUTS)


@ranks(2)
@pytest.mark.parametrize("find_unused", [False, True])
def test_a_pass_that_some_ranks_alone_end_a_window_with_is_refused_on_all(find_unused: bool):
    model = MMFullyShardedDataParallel(nn.Linear(WIDTH, 2), find_unused_parameters=find_unused)

    def backward() -> None:
        loss = model(INPUTS).mean()
        with model.backward_context(loss, syncs=get_rank() == 1) as prepared:
            prepared.backward()

    with pytest.raises(CollectiveMismatchError, match=r"the same backward passes under FSDP, but rank 1 alone do in"):
        backward()
    assert all_gather_object(get_rank()) == [0, 1]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Outside(nn.Module):
    """Uses its second block as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor, how: str) -> Tensor:
        x = self.blocks[0](x)
        if how == "weight":
            x = linear(x, self.blocks[1].inner.weight)
        if how == "part":
            x = self.blocks[1].inner(x)
        if how == "after":
            x = linear(self.blocks[2](self.blocks[1](x)), self.blocks[1].inner.weight)
        return self.head(x).mean()

    def val_step(self, data: Tensor) -> Tensor:
        return self(data, "part")


@ranks(2)
@pytest.mark.parametrize("how", ["weight", "part", "after"])
def test_weights_that_are_used_outside_of_their_unit_are_refused_with_what_to_do(how: str):
    model = MMFullyShardedDataParallel(Outside(), auto_wrap_policy="Block")
    with pytest.raises(RuntimeError, match="weights must be used inside the forward pass of their unit"):
        model(torch.ones(2, 6), how)


@ranks(2)
def test_a_prediction_is_told_too_and_without_units_all_is_well():
    model = MMFullyShardedDataParallel(Outside(), auto_wrap_policy="Block")
    with pytest.raises(RuntimeError, match="weights must be used inside the forward pass"), torch.no_grad():
        model.val_step(torch.ones(2, 6))
    whole = MMFullyShardedDataParallel(Outside())
    for how in ("weight", "part", "after"):
        whole(torch.ones(2, 6), how).backward()


class Scaled(nn.Module):
    """Calls its blocks with weights that are not its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Outside()

    def forward(self, x: Tensor) -> Tensor:
        weights = {name: 2 * weight for name, weight in self.inner.named_parameters()}
        return functional_call(self.inner, weights, (x, ""))


@ranks(2)
@pytest.mark.parametrize(("kind", "passes"), [("tensors", 0), ("tensors", 7), ("parameters", 7)])
def test_weights_that_a_call_is_given_in_place_of_those_of_a_unit_are_refused(kind: str, passes: int):
    model = MMFullyShardedDataParallel(Outside(), auto_wrap_policy="Block")
    for _ in range(passes):
        model(torch.ones(2, 6), "")
    given = {name: 2 * weight.detach() for name, weight in model.module.named_parameters()}
    if kind == "parameters":
        given = {name: nn.Parameter(weight) for name, weight in given.items()}
    refused(
        lambda: functional_call(model.module, given, (torch.ones(2, 6), "")), "must be the model's own", ConfigError
    )


@ranks(2)
def test_a_module_may_call_a_part_of_its_one_unit_with_other_weights():
    torch.manual_seed(0)
    alone = Scaled()
    torch.manual_seed(0)
    model = MMFullyShardedDataParallel(Scaled(), auto_wrap_policy=None)
    for _ in range(2):
        torch.testing.assert_close(model(torch.ones(2, 6)), alone(torch.ones(2, 6)))
