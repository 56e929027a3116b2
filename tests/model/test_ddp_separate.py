"""`MMSeparateDistributedDataParallel` on real ranks: a GAN with two optimizers, and other models of several parts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import binary_cross_entropy_with_logits as bce

from lockstep.dist import all_gather, get_rank, get_world_size
from lockstep.errors import DivergenceError
from lockstep.model import BaseModel, MMDistributedDataParallel, MMSeparateDistributedDataParallel, unwrap_model
from lockstep.model.written import DriftCheck
from lockstep.optim import OptimWrapper, OptimWrapperDict, build_optim_wrapper
from lockstep.registry import MODEL_WRAPPERS
from lockstep.strategy import DDPStrategy, SingleDeviceStrategy
from lockstep.testing import ranks, run_ranks

REAL = torch.arange(48.0).reshape(6, 4, 2) / 24
NOISE = torch.linspace(-1, 1, 72).reshape(6, 4, 3)


class Gan(BaseModel):
    def __init__(self, freeze: bool = False) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.freeze = freeze

    def forward(self, real: Tensor, noise: Tensor, mode: str = "tensor"):
        return self.discriminator(self.generator(noise))

    def train_step(self, data, optim_wrapper):
        real, noise = data
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        d_loss = self._update(
            optim_wrapper["discriminator"],
            self.discriminator,
            lambda: (
                bce(self.discriminator(self.frozen(real)), ones)
                + bce(self.discriminator(self.generator(noise).detach()), zeros)
            ),
        )
        if self.freeze:
            self.discriminator.requires_grad_(False)
        g_loss = self._update(
            optim_wrapper["generator"], self.generator, lambda: bce(self.discriminator(self.generator(noise)), ones)
        )
        self.discriminator.requires_grad_(True)
        if not self.freeze:  # what the generator's loss has left; within a window it would go with what is to stay
            optim_wrapper.zero_grad()
        return {"loss": g_loss, "d_loss": d_loss}

    def _update(self, wrapper, part, loss_of):
        with wrapper.optim_context(part):
            loss = loss_of()
        wrapper.update_params(loss)
        return loss.detach()


def optimizers_of(gan: Gan, **kwargs) -> OptimWrapperDict:
    return OptimWrapperDict(
        generator=OptimWrapper(torch.optim.Adam(gan.generator.parameters(), lr=0.01), **kwargs),
        discriminator=OptimWrapper(torch.optim.SGD(gan.discriminator.parameters(), lr=0.1, momentum=0.5), **kwargs),
    )


def trained(gan: Gan, **kwargs) -> tuple[list[float], dict[str, Tensor]]:
    wrapped = MMSeparateDistributedDataParallel(gan) if get_world_size() > 1 else gan
    optim_wrapper = optimizers_of(unwrap_model(wrapped), **kwargs)
    losses = []
    for real, noise in zip(REAL, NOISE, strict=True):
        own = slice(get_rank(), None, get_world_size())
        logged = wrapped.train_step((real[own], noise[own]), optim_wrapper)
        losses.append(torch.stack(all_gather(torch.stack([logged["loss"], logged["d_loss"]]))).mean(0))
    state = {name.replace("module.", ""): value for name, value in gan.state_dict().items()}
    return torch.stack(losses), state


def seeded_gan(**kwargs) -> Gan:
    torch.manual_seed(3)
    return Gan(**kwargs)


def gan_on_ranks(freeze: bool, counts: int) -> tuple[Tensor, dict[str, Tensor]]:
    return trained(seeded_gan(freeze=freeze), accumulative_counts=counts)


@pytest.mark.parametrize(("freeze", "counts"), [(False, 1), (True, 1), (True, 2)])
def test_a_gan_trains_on_two_ranks_as_on_one_without_a_search_for_unused_parameters(freeze, counts):
    losses, weights = gan_on_ranks(freeze, counts)
    results = run_ranks(2, gan_on_ranks, freeze, counts)
    for rank_losses, rank_weights in results:
        assert torch.allclose(rank_losses, losses, rtol=1e-5)
        assert rank_weights.keys() == weights.keys()
        for name, value in rank_weights.items():
            assert torch.allclose(value, weights[name], rtol=1e-4, atol=1e-6), name
            assert torch.equal(value, results[0][1][name]), name


@ranks(2)
def test_children_are_wrapped_where_they_have_something_to_train():
    gan = MMSeparateDistributedDataParallel(Gan(), device_ids=[0], output_device=0).module
    assert isinstance(gan.generator, MMDistributedDataParallel)
    assert isinstance(gan.discriminator, MMDistributedDataParallel)
    assert isinstance(gan.frozen, nn.Linear)
    assert MODEL_WRAPPERS["MMSeparateDistributedDataParallel"] is MMSeparateDistributedDataParallel


class Parts(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(2, 2) for _ in range(number))
        self.still = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for part in (*self.parts, self.still):
            x = part(x)
        return x.square().mean()


@ranks(2)
@pytest.mark.parametrize("number", [0, 1, 3])
def test_no_sync_works_with_any_number_of_parts(number):
    torch.manual_seed(0)
    wrapped = MMSeparateDistributedDataParallel(Parts(number))
    inputs = torch.full((2, 2), 1.0 + get_rank())
    with wrapped.no_sync():
        loss = wrapped(inputs)
        if number:
            loss.backward()
    for part in wrapped.module.parts:
        assert isinstance(part, MMDistributedDataParallel)
        assert not torch.equal(*all_gather(part.module.weight.grad))
    if number:
        wrapped(inputs).backward()
    for part in wrapped.module.parts:
        assert torch.equal(*all_gather(part.module.weight.grad))


@ranks(2)
def test_a_module_without_steps_of_its_own_trains_and_predicts():
    wrapped = MMSeparateDistributedDataParallel(Parts(2))
    optim_wrapper = OptimWrapper(torch.optim.SGD(wrapped.module.parts.parameters(), lr=0.1))
    logged = wrapped.train_step(torch.ones(2, 2), optim_wrapper)
    assert logged["loss"].shape == ()
    assert wrapped.val_step(torch.ones(2, 2)).shape == wrapped.test_step(torch.ones(2, 2)).shape == ()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x).square().mean()


@ranks(2)
def test_validation_sends_nothing_so_that_ranks_may_have_different_numbers_of_batches():
    """Shown by not hanging."""
    wrapped = MMSeparateDistributedDataParallel(Normed(), broadcast_buffers=True)
    optim_wrapper = OptimWrapper(torch.optim.SGD(wrapped.parameters(), lr=0.1))
    wrapped.train_step(torch.rand(4, 2), optim_wrapper)
    wrapped.eval()
    with torch.no_grad():
        for _ in range(3 * get_rank()):
            wrapped.val_step(torch.rand(4, 2))
    wrapped.train()
    wrapped.train_step(torch.rand(4, 2), optim_wrapper)


class Loose(Parts):
    def __init__(self) -> None:
        super().__init__(1)
        self.scale = nn.Parameter(torch.ones(2))


@ranks(2)
def test_parameters_of_nobody_or_of_two_are_refused():
    with pytest.raises(ValueError, match="Loose itself has scale, which would not be averaged"):
        MMSeparateDistributedDataParallel(Loose())
    tied = Parts(2)
    tied.parts[1].weight = tied.parts[0].weight
    with pytest.raises(ValueError, match=r"two would both average parts\.0\.weight=parts\.1\.weight"):
        MMSeparateDistributedDataParallel(tied)


@ranks(2)
def test_states_have_canonical_names_and_load_into_one_process_form():
    gan = seeded_gan()
    strategy = DDPStrategy(model_wrapper={"type": "MMSeparateDistributedDataParallel"})
    wrapped, optim_wrapper = strategy.prepare(gan, optimizers_of(gan))
    wrapped.train_step((REAL[0], NOISE[0]), optim_wrapper)
    model_state, optim_state = strategy.model_state(), strategy.optim_state()
    assert set(model_state) == set(Gan().state_dict())
    assert {name.split(".")[0] for name in optim_state["state"]} == {"generator", "discriminator"}
    assert [group["lr"] for group in optim_state["param_groups"]] == [0.01, 0.1]

    other = seeded_gan()
    twin = DDPStrategy(model_wrapper={"type": "MMSeparateDistributedDataParallel"})
    twin_wrapped, twin_optim = twin.prepare(other, optimizers_of(other))
    twin.load_state(model_state, optim_state)
    steps = [
        each.train_step((REAL[1], NOISE[1]), optim)
        for each, optim in ((wrapped, optim_wrapper), (twin_wrapped, twin_optim))
    ]
    assert torch.equal(steps[0]["loss"], steps[1]["loss"])


def test_a_config_gives_each_part_its_optimizer():
    gan = seeded_gan()
    adam, sgd = {"optimizer": {"type": "Adam", "lr": 0.01}}, {"optimizer": {"type": "SGD", "lr": 0.1}}
    wrapper = build_optim_wrapper(gan, {"generator": adam, "discriminator": sgd})
    assert isinstance(wrapper, OptimWrapperDict)
    assert type(wrapper["generator"].optimizer) is torch.optim.Adam
    assert set(wrapper["discriminator"].param_groups[0]["params"]) == set(gan.discriminator.parameters())
    strategy = SingleDeviceStrategy()
    model, prepared = strategy.prepare(gan, wrapper)
    assert prepared is wrapper
    assert set(model.train_step((REAL[0], NOISE[0]), wrapper)) == {"loss", "d_loss"}


class Distilled(nn.Module):
    """Has a frozen teacher, and a child under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.teacher, self.norm = nn.Linear(1, 1), nn.Linear(1, 1), nn.BatchNorm1d(1, affine=False)
        self.same = self.net
        self.teacher.requires_grad_(False)
        for tensor in (*self.parameters(), self.norm.running_mean):
            nn.init.constant_(tensor, get_rank() + 1.0)

    def train_step(self, data: Tensor, optim_wrapper: OptimWrapper) -> dict[str, Tensor]:
        loss = self.same(self.teacher(data)).sum()
        optim_wrapper.update_params(loss)
        return {"loss": loss.detach()}


@ranks(2)
def test_all_ranks_begin_alike_and_a_child_trains_under_each_of_its_names():
    net = Distilled()
    wrapped = MMSeparateDistributedDataParallel(net)
    assert float(net.teacher.weight) == float(net.norm.running_mean) == 1.0
    assert net.same is net.net
    optim_wrapper = OptimWrapper(torch.optim.SGD(net.parameters(), lr=0.1))
    for _ in range(3):
        wrapped.train_step(torch.full((1, 1), get_rank() + 1.0), optim_wrapper)
    weights = all_gather(net.net.module.weight.detach())
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], torch.ones(1, 1))


@ranks(2)
def test_a_child_that_is_unfrozen_after_it_was_to_be_wrapped_is_refused():
    net = Distilled()
    wrapped = MMSeparateDistributedDataParallel(net)
    net.teacher.requires_grad_(True)
    optim_wrapper = OptimWrapper(torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"but teacher\.weight, teacher\.bias were not \(rank \d of 2\)"):
        wrapped.train_step(torch.ones(1, 1), optim_wrapper)


@ranks(2)
@pytest.mark.parametrize("place", ["", "net.module"])
def test_a_parameter_that_is_added_after_the_children_were_wrapped_is_refused(place: str):
    net = Distilled()
    wrapped = MMSeparateDistributedDataParallel(net)
    net.get_submodule(place).added = nn.Parameter(torch.ones(1))
    optim_wrapper = OptimWrapper(torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=rf"must be there, .* but {f'{place}.added'.lstrip('.')} were not"):
        wrapped.train_step(torch.ones(1, 1), optim_wrapper)


@ranks(2)
def test_children_that_are_frozen_must_stay_alike_too():
    net = Distilled()
    wrapped = MMSeparateDistributedDataParallel(net)
    optim_wrapper = OptimWrapper(torch.optim.SGD(net.parameters(), lr=0.1))
    nn.init.constant_(net.teacher.bias, get_rank())
    with pytest.raises(DivergenceError, match=r"`teacher\.bias` must be the same on all ranks"):
        wrapped.train_step(torch.ones(1, 1), optim_wrapper)


@ranks(2)
def test_a_mesh_says_which_ranks_are_replicas_also_of_frozen_children():
    net = Distilled()
    before = net.teacher.weight.clone()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("others", "replicas"))["replicas"]
    wrapped = MMSeparateDistributedDataParallel(net, device_mesh=mesh)
    nn.init.constant_(net.teacher.bias, get_rank())
    wrapped.train_step(torch.ones(1, 1), OptimWrapper(torch.optim.SGD(net.parameters(), lr=0.1)))
    assert torch.equal(net.teacher.weight, before)


@ranks(2)
def test_gradients_are_exchanged_once_in_a_window_where_a_step_gives_the_context_the_model_itself():
    net = Distilled()
    optim_wrapper = OptimWrapper(torch.optim.SGD(net.parameters(), lr=0.1), accumulative_counts=2)
    optim_wrapper.bind(MMSeparateDistributedDataParallel(net))
    exchanges = []
    for _ in range(2):
        with optim_wrapper.optim_context(net):
            exchanges.append(net.net.require_backward_grad_sync)
            loss = net.same(net.teacher(torch.ones(1, 1))).sum()
        optim_wrapper.update_params(loss)
    assert exchanges == [False, True]


@pytest.mark.parametrize(("counts", "compared"), [(1, 6), (2, 3)])
@ranks(2)
def test_replicas_are_compared_after_updates_alone(counts: int, compared: int):
    calls: list[DriftCheck] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DriftCheck, "after_update", lambda check: calls.append(check))
        trained(Gan(freeze=True), accumulative_counts=counts)
    assert len(calls) == compared
