"""`MMDistributedDataParallel` on real ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint

from lockstep.dist import all_gather, get_rank
from lockstep.errors import ConfigError
from lockstep.model import BaseModel, MMDistributedDataParallel, is_model_wrapper, unwrap_model
from lockstep.optim import OptimWrapper
from lockstep.registry import MODEL_WRAPPERS
from lockstep.testing import ranks


class Toy(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(2, 1)

    def forward(self, x: Tensor, y: Tensor | None = None, mode: str = "tensor"):
        out = self.used(x)
        if mode == "loss":
            return {"loss": (out - y).square().mean()}
        return (out, y) if mode == "predict" else out


class ToyWithSpare(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(1, 1)
        self.frozen = nn.Linear(1, 1).requires_grad_(False)


class PlainLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(2, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.used(x) - y).square().mean()


GLOBAL = torch.arange(16.0).reshape(8, 2) / 16, torch.ones(8, 1)


def own_part() -> tuple[Tensor, Tensor]:
    return GLOBAL[0][get_rank() :: 2], GLOBAL[1][get_rank() :: 2]


@ranks(2)
@pytest.mark.parametrize("kind", [Toy, PlainLoss])
def test_two_ranks_train_as_one_process_on_the_whole_batch(kind):
    torch.manual_seed(get_rank())  # rank 0's parameters are what counts
    wrapped = MMDistributedDataParallel(kind(), device_ids=[0], output_device=0)
    alone = PlainLoss()
    alone.used.load_state_dict(wrapped.module.used.state_dict())
    alone_optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    optim_wrapper = OptimWrapper(torch.optim.SGD(wrapped.parameters(), lr=0.1))
    for _ in range(3):
        logged = wrapped.train_step(own_part(), optim_wrapper=optim_wrapper)
        alone_optimizer.zero_grad()
        loss = alone(*GLOBAL)
        loss.backward()
        alone_optimizer.step()
        assert torch.allclose(torch.stack(all_gather(logged["loss"])).mean(), loss.detach(), rtol=1e-6)
    assert torch.allclose(wrapped.module.used.weight, alone.used.weight, rtol=1e-6)


class Recomputed(PlainLoss):
    """Reaches its parameters through a backward pass of its own, which the graph does not show."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (checkpoint(self.used, x.requires_grad_(), use_reentrant=True) - y).square().mean()


@ranks(2)
def test_a_reentrant_checkpoint_trains_as_in_one_process():
    torch.manual_seed(0)
    wrapped, alone = MMDistributedDataParallel(Recomputed(), detect_anomalous_params=True), PlainLoss()
    alone.load_state_dict(wrapped.module.state_dict())
    optim_wrapper = OptimWrapper(torch.optim.SGD(wrapped.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(3):
        wrapped.train_step(own_part(), optim_wrapper=optim_wrapper)
        optimizer.zero_grad()
        alone(*GLOBAL).backward()
        optimizer.step()
    assert torch.allclose(wrapped.module.used.weight, alone.used.weight, rtol=1e-6)


class Transformed(PlainLoss):
    """Takes a gradient step for each sample before its loss, by transforms of torch.func around calls of itself."""

    def train_step(self, data: tuple[Tensor, Tensor], optim_wrapper: OptimWrapper) -> dict[str, Tensor]:
        loss = adapted(self, *data)
        optim_wrapper.update_params(loss)
        return {"loss": loss.detach()}

    train_step.calls_parts = False


def adapted(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    own = dict(model.named_parameters())

    def loss_after_a_step(x: Tensor, y: Tensor) -> Tensor:
        gradients = grad(lambda weights: functional_call(model, weights, (x, y)))(own)
        return functional_call(model, {name: own[name] - 0.1 * gradients[name] for name in own}, (x, y))

    return vmap(loss_after_a_step)(inputs, targets).mean()


@ranks(2)
@pytest.mark.parametrize("searches", [False, True])
def test_calls_within_transforms_of_torch_func_train_as_in_one_process(searches: bool):
    torch.manual_seed(0)
    alone = PlainLoss()
    wrapped = MMDistributedDataParallel(Transformed(), find_unused_parameters=searches)
    wrapped.module.load_state_dict(alone.state_dict())
    alone_optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    optim_wrapper = OptimWrapper(torch.optim.SGD(wrapped.parameters(), lr=0.1))
    for _ in range(3):
        wrapped.train_step(own_part(), optim_wrapper=optim_wrapper)
        alone_optimizer.zero_grad()
        adapted(alone, *GLOBAL).backward()
        alone_optimizer.step()
    torch.testing.assert_close(wrapped.module.state_dict(), alone.state_dict())


@ranks(2)
def test_gradients_lie_in_the_buffer_that_they_travel_in_with_the_values_that_they_have_elsewhere():
    def train(**options: bool) -> tuple[list[Tensor], int]:
        torch.manual_seed(0)
        wrapped = MMDistributedDataParallel(PlainLoss(), **options)
        optimizer, gradients = torch.optim.SGD(wrapped.parameters(), lr=0.1), []
        for _ in range(3):
            optimizer.zero_grad()
            wrapped(*own_part()).backward()
            gradients += [parameter.grad.clone() for parameter in wrapped.parameters()]
            optimizer.step()
        return gradients, len({parameter.grad.untyped_storage().data_ptr() for parameter in wrapped.parameters()})

    (gradients, buffers), (wanted, tensors) = train(), train(gradient_as_bucket_view=False)
    assert (buffers, tensors) == (1, 2)
    for gradient, value in zip(gradients, wanted, strict=True):
        assert torch.equal(gradient, value)


@ranks(2)
def test_accumulation_sends_gradients_once_per_window():
    torch.manual_seed(0)
    wrapped = MMDistributedDataParallel(Toy())
    optim_wrapper = OptimWrapper(torch.optim.SGD(wrapped.parameters(), lr=0.1), accumulative_counts=2)
    start = wrapped.module.used.weight.detach().clone()
    wrapped.train_step(own_part(), optim_wrapper)
    local = all_gather(wrapped.module.used.weight.grad)
    assert not torch.equal(*local)  # not averaged yet
    assert torch.equal(wrapped.module.used.weight, start)
    wrapped.train_step(own_part(), optim_wrapper)
    assert torch.equal(*all_gather(wrapped.module.used.weight.detach()))
    assert not torch.equal(wrapped.module.used.weight, start)


@ranks(2)
def test_validation_sends_nothing_so_that_ranks_may_have_different_numbers_of_batches():
    torch.manual_seed(0)
    wrapped = MMDistributedDataParallel(nn.BatchNorm1d(2), broadcast_buffers=True)
    toy = MMDistributedDataParallel(Toy())
    for _ in range(1 + get_rank()):
        assert wrapped.val_step(GLOBAL[0]).shape == (8, 2)
        assert wrapped.test_step(GLOBAL[0]).shape == (8, 2)
        scores, labels = toy.val_step(GLOBAL)
        assert scores.shape == labels.shape == (8, 1)


@contextmanager
def heard(logger_name: str) -> Iterator[list[str]]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger(logger_name)
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


class ToyWithSparesPerRank(ToyWithSpare):
    """Rank 0 leaves out `spare` in every step, rank 1 in the second step only."""

    def forward(self, x: Tensor, y: Tensor | None = None, mode: str = "tensor"):
        out = super().forward(x, y, mode)
        if mode == "loss" and get_rank() == 1 and not self.leave_out:
            out["loss"] = out["loss"] + 0 * sum(p.sum() for p in self.spare.parameters())
        return out


@ranks(2)
def test_parameters_without_gradient_are_named_with_the_rank():
    with heard("lockstep.model.ddp") as messages:
        wrapped = MMDistributedDataParallel(ToyWithSpare(), detect_anomalous_params=True, find_unused_parameters=True)
        optim_wrapper = OptimWrapper(torch.optim.SGD(wrapped.module.used.parameters(), lr=0.1))
        for _ in range(2):
            wrapped.train_step(own_part(), optim_wrapper)
    (message,) = messages  # said once, not at every step
    assert "spare.weight, spare.bias" in message
    assert "frozen" not in message
    assert f"rank {get_rank()} of 2" in message


@ranks(1)
def test_a_pass_that_leaves_parameters_out_ends_in_an_error_before_anything_else_is_exchanged():
    wrapped = MMDistributedDataParallel(ToyWithSpare())
    optim_wrapper = OptimWrapper(torch.optim.SGD(wrapped.module.used.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match=r"not on 2 of them on rank 0 of 1: spare\.weight, spare\.bias"):
        wrapped.train_step(own_part(), optim_wrapper)


@ranks(2)
@pytest.mark.parametrize("searches", [False, True])
def test_a_parameter_that_is_added_after_the_model_was_wrapped_is_refused(searches: bool):
    net = PlainLoss()
    wrapped = MMDistributedDataParallel(net, find_unused_parameters=searches)
    net.used.bias = nn.Parameter(torch.ones(1))
    optim_wrapper = OptimWrapper(torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match=r"used\.bias were added or replaced afterwards \(rank \d of 2\)"):
        wrapped.train_step(own_part(), optim_wrapper)


@ranks(2)
def test_a_parameter_that_is_added_when_the_training_has_run_for_long_is_refused():
    net = Toy()
    wrapped = MMDistributedDataParallel(net)
    optim_wrapper = OptimWrapper(torch.optim.SGD(net.parameters(), lr=0.1))
    for _ in range(5):
        wrapped.train_step(own_part(), optim_wrapper)
    net.used = nn.Sequential(net.used, late := nn.Linear(1, 1))
    optim_wrapper.optimizer.add_param_group({"params": list(late.parameters())})
    with pytest.raises(ConfigError, match=r"used\.1\.weight, used\.1\.bias were added or replaced afterwards"):
        wrapped.train_step(own_part(), optim_wrapper)


@ranks(2)
def test_each_rank_speaks_for_itself_and_names_a_parameter_once():
    with heard("lockstep.model.ddp") as messages:
        wrapped = MMDistributedDataParallel(
            ToyWithSparesPerRank(), detect_anomalous_params=True, find_unused_parameters=True
        )
        optim_wrapper = OptimWrapper(torch.optim.SGD(wrapped.module.used.parameters(), lr=0.1))
        counts = []
        for leave_out in (False, True, False, True):
            wrapped.module.leave_out = leave_out
            wrapped.train_step(own_part(), optim_wrapper)
            counts.append(len(messages))
    assert counts == ([1, 1, 1, 1] if get_rank() == 0 else [0, 1, 1, 1])
    assert "2 parameters" in messages[0]


def gradient_with(comm_hook, steps: int = 1) -> Tensor:
    torch.manual_seed(0)
    wrapped = MMDistributedDataParallel(nn.Linear(32, 32), comm_hook=comm_hook)
    inputs = torch.randn(2, 8, 32)[get_rank()]
    for _ in range(steps):
        wrapped.zero_grad()
        wrapped(inputs).square().mean().backward()
    return wrapped.module.weight.grad


@ranks(2)
def test_gradients_travel_in_half_precision():
    plain, compressed = gradient_with(None), gradient_with(fp16_compress_hook)
    assert torch.equal(compressed, compressed.half().float())  # nothing finer has travelled
    assert not torch.equal(compressed, plain)
    # Rounded on each rank and in their sum; where the ranks nearly cancel, relative to what they had.
    assert torch.allclose(compressed, plain, rtol=0, atol=2 * torch.finfo(torch.half).eps * plain.abs().max().item())
    assert torch.equal(*all_gather(compressed))


@ranks(2)
def test_a_communication_hook_may_be_a_function_of_ones_own():
    def doubled(group, bucket):
        future = torch.futures.Future()
        future.set_result(bucket.buffer() * 2)
        return future

    torch.manual_seed(0)
    alone = nn.Linear(32, 32)
    alone(torch.randn(2, 8, 32)[get_rank()]).square().mean().backward()
    assert torch.equal(gradient_with(doubled), 2 * alone.weight.grad)


@ranks(2)
def test_wrappers_are_told_from_models():
    wrapped = MMDistributedDataParallel(Toy())
    assert is_model_wrapper(wrapped)
    assert is_model_wrapper(nn.parallel.DistributedDataParallel(Toy()))
    assert not is_model_wrapper(Toy())
    assert unwrap_model(wrapped) is wrapped.module
    assert MODEL_WRAPPERS["MMDistributedDataParallel"] is MMDistributedDataParallel


class WithExtra(nn.Module):
    """An embedding, of which a rank may have its own, and a layer that some ranks leave out."""

    def __init__(self, words: nn.Module) -> None:
        super().__init__()
        self.words, self.layer, self.extra = words, nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)

    def forward(self, words: Tensor, uses_extra: bool) -> Tensor:
        hidden = self.layer(self.words(words))
        return (hidden + self.extra(hidden) if uses_extra else hidden).sum()


@pytest.mark.parametrize("kind", ["plain", "sparse", "own", "uneven"])
@ranks(2)
def test_what_is_frozen_within_a_window_is_averaged_where_all_ranks_hold_it(kind: str):
    torch.manual_seed(0)
    rank = get_rank()
    module = WithExtra(nn.Embedding(4 + (rank if kind == "own" else 0), 2, sparse=kind == "sparse"))
    if kind == "own":
        MMDistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["words.weight"])
    model = MMDistributedDataParallel(module)
    optim = OptimWrapper(torch.optim.SGD(module.parameters(), lr=0.1), accumulative_counts=2)
    optim.initialize_count_status(model, 0, 4)
    frozen = module.extra if kind == "uneven" else module.words
    for iteration in range(2):
        if iteration == 1:
            frozen.weight.requires_grad_(False)
        with model.step_context(optim), optim.optim_context(model):
            uses_extra = kind != "uneven" or (iteration == 0 and rank == 0)
            optim.update_params(model(torch.tensor([rank, 1]), uses_extra))
    if kind != "own":
        assert torch.equal(*all_gather(frozen.weight.detach()))
