"""Layers that write their own weights in the forward pass, and weights that are written in ways that shards ignore."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from lockstep.dist import all_gather, get_rank, get_world_size
from lockstep.errors import ConfigError, DivergenceError
from lockstep.model import MMDistributedDataParallel, MMFullyShardedDataParallel
from lockstep.model.written import DriftCheck, awaits_update
from lockstep.optim import OptimWrapper, OptimWrapperDict
from lockstep.strategy import build_strategy
from lockstep.testing import ranks

INPUTS = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
WORDS = torch.arange(8)


class Net(nn.Module):
    """Writes some of its weights in the forward pass, in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer, self.words = nn.Linear(6, 6), nn.Linear(6, 1), nn.Embedding(8, 6)
        self.scale = nn.Parameter(torch.ones(6))
        self.how, self.is_first = how, True

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        weight = self.inner.weight
        if self.how == "renormalised":
            weight.data = torch.renorm(weight.data, 2, 0, 0.3)
        if self.how == "clamped by data":
            weight.data.clamp_(-0.1, 0.1)
        if self.how == "clamped":
            with torch.no_grad():
                weight.clamp_(-0.1, 0.1)
        if self.how == "initialised" and self.is_first:  # as ActNorm does
            self.scale.data.copy_(1 / self.inner(x).std(0))
            self.is_first = False
        found = embedding(words, self.words.weight, max_norm=0.5 if self.how == "max_norm" else None)
        return self.outer(torch.tanh(self.inner(x) * self.scale + found)).square().mean()


def own_part() -> tuple[Tensor, Tensor]:
    return INPUTS[get_rank() :: get_world_size()].clone(), WORDS[get_rank() :: get_world_size()].clone()


def trained(strategy: str, how: str, counts: int = 1, **options: object) -> list[Tensor]:
    prepared = build_strategy({"type": strategy, **options})
    optim = {"optimizer": {"type": "SGD", "lr": 0.1}, "accumulative_counts": counts}
    model, optim_wrapper = prepared.prepare(Net(how), optim)
    for _ in range(4):
        model.train_step(own_part(), optim_wrapper)
    return list(prepared.model_state().values())


@ranks(2)
@pytest.mark.parametrize("counts", [1, 4])
@pytest.mark.parametrize(("how", "name"), [("max_norm", "words.weight"), ("initialised", "scale")])
def test_replicas_that_a_forward_pass_drives_apart_are_refused_after_the_first_update(how: str, name: str, counts: int):
    with pytest.raises(
        DivergenceError, match=rf"`{name}` .*rank 1 of 2 differs .* after 1 update\. Its gradients .* written in"
    ):
        trained("ddp", how, counts)


@ranks(2)
@pytest.mark.parametrize("how", ["renormalised", "clamped by data", "clamped"])
def test_what_all_ranks_write_alike_is_right_under_ddp(how: str):
    net = Net(how)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        net(INPUTS, WORDS).backward()
        optimizer.step()
    for own, expected in zip(trained("ddp", how), net.state_dict().values(), strict=True):
        assert torch.allclose(own, expected, atol=1e-6)


@ranks(1, 2)
@pytest.mark.parametrize("counts", [1, 4])
@pytest.mark.parametrize(
    ("how", "name"),
    [
        ("max_norm", "words.weight"),
        ("initialised", "scale"),
        ("renormalised", "inner.weight"),
        ("clamped by data", "inner.weight"),
        ("clamped", "inner.weight"),
    ],
)
def test_what_a_forward_pass_writes_is_refused_under_fsdp_before_an_update(how: str, name: str, counts: int):
    on = "rank 0" if get_world_size() == 1 else "ranks 0, 1"
    with pytest.raises(
        ConfigError, match=rf"`{name}` must not be written .* but on {on} it was written in the forward"
    ):
        trained("fsdp", how, counts)


@ranks(2)
def test_what_one_rank_alone_writes_is_refused_on_all():
    with pytest.raises(ConfigError, match=r"`inner\.weight` must not be written .* but on rank 1 it was"):
        trained("fsdp", "clamped" if get_rank() == 1 else "not")


@ranks(1, 2)
def test_the_same_in_a_unit_inside_and_with_recomputation():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)
            self.writes = False

        def forward(self, x: Tensor) -> Tensor:
            if self.writes:
                self.linear.weight.data.mul_(0.5)
            return torch.tanh(self.linear(x))

    torch.manual_seed(0)
    net = nn.Sequential(Block(), Block(), nn.Linear(6, 1))
    strategy = build_strategy({"type": "fsdp", "auto_wrap_policy": ["Block"], "activation_checkpointing": ["Block"]})
    model, optim_wrapper = strategy.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    loss = lambda: model.train_step({"input": INPUTS}, optim_wrapper)  # noqa: E731
    net.forward = lambda input: nn.Sequential.forward(net, input).square().mean()  # noqa: A006
    loss()
    net[1].writes = True
    with pytest.raises(ConfigError, match=r"`1\.linear\.weight` must not be written"):
        loss()


@ranks(1, 2)
@pytest.mark.parametrize("before", [True, False], ids=["before the first pass", "between passes"])
def test_data_that_are_set_are_refused_under_fsdp(before: bool):
    model = MMFullyShardedDataParallel(Net("not"))
    optim_wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    if not before:
        model.train_step(own_part(), optim_wrapper)
    for parameter in model.module.inner.parameters():
        parameter.data.clamp_(-0.1, 0.1)
        parameter.data.copy_(parameter.data / 2)
    model.train_step(own_part(), optim_wrapper)
    assert model.module.inner.weight.full_tensor().abs().max() < 0.1
    for parameter in model.module.inner.parameters():
        parameter.data = parameter.data.clamp(-0.1, 0.1)
    with pytest.raises(ConfigError, match=r"`inner\.weight` .* it was given values by `parameter\.data = values`"):
        model.train_step(own_part(), optim_wrapper)


@ranks(2)
@pytest.mark.parametrize("wrapper", [MMDistributedDataParallel, MMFullyShardedDataParallel])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_with_a_maximum_norm_is_refused_at_once(wrapper: type, kind: type):
    net = nn.Sequential(kind(5, 4, max_norm=1.0))
    with pytest.raises(
        ConfigError, match=rf"`0\.max_norm` must be None .*, but is 1\.0: {kind.__name__} would shorten"
    ):
        wrapper(net)
    with pytest.raises(ConfigError, match=r"^`max_norm` must be None"):
        wrapper(net[0])


@ranks(1)
def test_one_process_may_shorten_its_rows():
    net = nn.Sequential(nn.Embedding(5, 4, max_norm=1.0))
    wrapped = MMDistributedDataParallel(net)
    wrapped(WORDS[:5])
    assert net[0].weight.norm(dim=1).max() < 1.001


class Noisy(torch.optim.SGD):
    """Adds noise that each rank draws for itself."""

    def step(self) -> None:
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(0.01 * torch.randn(parameter.shape))


@ranks(2)
def test_an_update_that_differs_between_ranks_is_found():
    net = Net("not")
    model = MMDistributedDataParallel(net)
    torch.manual_seed(get_rank())
    with pytest.raises(DivergenceError, match=r"`scale` .* or an option of the optimizer, a hook, or random"):
        model.train_step(own_part(), OptimWrapper(Noisy(net.parameters(), lr=0.1)))
    assert len({float(scale.sum()) for scale in all_gather(net.scale.detach())}) == 2


class OwnStep(Net):
    def train_step(self, data: tuple[Tensor, Tensor], optim_wrapper: OptimWrapper) -> dict[str, Tensor]:
        optim_wrapper.update_params(loss := self(*data))
        return {"loss": loss}


@ranks(2)
def test_the_replicas_of_an_own_step_are_compared_after_updates_not_within_windows():
    net = OwnStep("not")
    model = MMDistributedDataParallel(net)
    optim_wrapper = OptimWrapper(Noisy(net.parameters(), lr=0.1), accumulative_counts=4)
    torch.manual_seed(get_rank())
    for _ in range(3):
        model.train_step(own_part(), optim_wrapper)
    with pytest.raises(DivergenceError, match="differs from the others after 1 update"):
        model.train_step(own_part(), optim_wrapper)


@ranks(2)
def test_replicas_are_compared_before_a_save_unless_they_have_updated_by_their_own_gradients():
    """As local SGD by the user's own hand, between two averages."""
    net = Net("not")
    model = MMDistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model.begin_save()
    for _ in range(3):
        model.train_step(own_part(), OptimWrapper(optimizer))
    model.begin_save()
    with model.no_sync(), model.step_context(None):
        net(*own_part()).backward()
        optimizer.step()
    model.begin_save()
    model.train_step(own_part(), OptimWrapper(optimizer))
    with pytest.raises(DivergenceError, match=r"after 4 updates, where a checkpoint was to be saved\."):
        model.begin_save()


@pytest.mark.parametrize(
    ("values", "differ"),
    [
        (([-1.0], [-2.0]), True),
        (([1.0, 2.0], [2.0, 1.0]), True),  # whose sums are the same
        (([1e8, 1.0, -1e8], [1e8, -1.0, -1e8]), True),
        (([float("nan")], [float("nan")]), False),
    ],
)
@ranks(2)
def test_replicas_are_compared_bit_by_bit(values: tuple[list[float], list[float]], differ: bool) -> None:
    parameter = nn.Parameter(torch.tensor(values[get_rank()]))
    check = DriftCheck(lambda: [("weight", parameter)], None, "Look.")
    context = (
        pytest.raises(DivergenceError, match="`weight` must be the same on all ranks") if differ else nullcontext()
    )
    with context:
        check.after_update()


def test_an_update_is_awaited_while_the_windows_of_all_optimizers_are_open():
    wrappers = {name: OptimWrapper(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1), 2) for name in ("g", "d")}
    both = OptimWrapperDict(**wrappers)
    both.initialize_count_status(nn.Linear(1, 1), 0, 4)
    assert not awaits_update(both)
    assert not awaits_update(None)
    for name, is_awaited in (("g", False), ("d", True), ("g", False)):  # after the third, that of "g" is complete
        wrapper = wrappers[name]
        wrapper.update_params(wrapper.optimizer.param_groups[0]["params"][0].sum())
        assert awaits_update(both) == is_awaited
