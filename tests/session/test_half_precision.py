"""A session in half precision, against a plain loop around `fully_shard` under the same rules."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Runner, Session
from lockstep.dist import get_world_size
from lockstep.optim import OptimWrapper
from lockstep.testing import ranks

X = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
Y = (X.sum(1) > 0).long()
WINDOW, MAX_NORM = 2, 0.1  # which all gradients exceed


def network() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Linear(16, 2))


def plain(batches: list[tuple[Tensor, Tensor]], policy: MixedPrecisionPolicy, *, syncs: str) -> list[Tensor]:
    model, mesh = network(), init_device_mesh("cpu", (get_world_size(),))
    for block in list(model.children())[:3]:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for number, (x, y) in enumerate(batches, start=1):
        model.set_requires_gradient_sync(syncs == "every batch" or number % WINDOW == 0)
        (F.cross_entropy(model(x).float(), y) / WINDOW).backward()
        if number % WINDOW == 0:
            assert nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).full_tensor() > MAX_NORM
            optimizer.step()
            optimizer.zero_grad()
    model.reshard()
    return [parameter.full_tensor().detach() for parameter in model.parameters()]


def by_session(folder, policy) -> tuple[list[tuple[Tensor, Tensor]], list[Tensor]]:
    session = Session(
        folder,
        strategy={"type": "fsdp", "mixed_precision": policy},
        accumulative_counts=WINDOW,
        clip_grad={"max_norm": MAX_NORM},
        default_hooks={"checkpoint": None},
        randomness={"seed": 0},
        log_level="ERROR",
    )
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    model, optimizer, loader = session.prepare(model, optimizer, DataLoader(TensorDataset(X, Y), batch_size=4))
    batches = []
    for _ in session.epochs(3):
        for x, y in loader:
            batches.append((x, y))
            session.step(F.cross_entropy(model(x).float(), y))
    return batches, [value.full_tensor().detach() for value in session.run.strategy.model_state().values()]


def greatest_difference(one: list[Tensor], other: list[Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("reduce_dtype", [torch.float32, None])
@ranks(2)
def test_accumulated_and_clipped_gradients_are_those_of_a_plain_loop(tmp_path, reduce_dtype):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    batches, weights = by_session(tmp_path, policy)
    assert greatest_difference(weights, plain(batches, policy, syncs="each window")) < 1e-6


@ranks(2)
def test_bf16_reduces_gradients_in_float32_and_torchs_default_policy_does_not(tmp_path):
    batches, weights = by_session(tmp_path, "bf16")
    same = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert greatest_difference(weights, plain(batches, same, syncs="each window")) < 1e-6
    assert greatest_difference(weights, plain(batches, same, syncs="every batch")) < 1e-6
    coarser = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    assert greatest_difference(weights, plain(batches, coarser, syncs="each window")) > 1e-5
    # With reductions in bfloat16 it also matters when they happen.
    each, every = (plain(batches, coarser, syncs=syncs) for syncs in ("each window", "every batch"))
    assert greatest_difference(each, every) > 1e-5


class Noting(nn.Linear):
    """Notes the dtype in which it computes."""

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        self.dtype = result.dtype
        return result


@pytest.mark.parametrize("how", ["one optimizer", "an optimizer each", "forward_context"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@ranks(1, 2)
def test_each_of_several_models_computes_in_half_precision(tmp_path, strategy, how):
    torch.manual_seed(0)
    models = {"body": Noting(16, 16), "head": Noting(16, 2)}
    session = Session(tmp_path, strategy=strategy, amp="bfloat16", randomness={"seed": 0})
    if how == "an optimizer each":
        optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.1) for name, model in models.items()}
    else:
        optimizers = torch.optim.SGD([p for model in models.values() for p in model.parameters()], lr=0.1)
    model, optim, loader = session.prepare(models, optimizers, DataLoader(TensorDataset(X, Y), batch_size=8))
    for _ in session.epochs(1):
        for x, y in loader:
            if how == "forward_context":
                with session.forward_context():
                    loss = F.cross_entropy(model["head"](model["body"](x)), y)
                session.step(loss)
                continue
            features = model["body"](x)
            assert features.dtype == torch.float32
            if how == "one optimizer":
                session.step(F.cross_entropy(model["head"](features), y))
            else:
                optim["head"].update_params(F.cross_entropy(model["head"](features.detach()), y))
                optim["body"].update_params(features.square().mean())
    assert model["body"].dtype == model["head"].dtype == torch.bfloat16
    if session.is_main:
        assert "mixed precision" not in (session.run_dir / "log.txt").read_text()


class Inner(nn.Module):
    def __init__(self, *, enters: bool) -> None:
        super().__init__()
        self.part, self.enters = Noting(16, 2), enters

    def train_step(self, data: tuple[Tensor, Tensor], optim_wrapper: OptimWrapper) -> dict[str, Tensor]:
        x, y = data
        with optim_wrapper.optim_context(self) if self.enters else nullcontext():
            loss = F.cross_entropy(self.part(x), y)
        optim_wrapper.update_params(loss)
        return {"loss": loss}


@pytest.mark.parametrize("enters", [True, False])
def test_a_step_that_computes_outside_of_the_context_of_half_precision_is_told(tmp_path, enters):
    model = Inner(enters=enters)
    wrapper = {"type": "AmpOptimWrapper", "dtype": "bfloat16", "optimizer": {"type": "SGD", "lr": 0.1}}
    runner = Runner(
        model,
        tmp_path,
        train_dataloader=DataLoader(TensorDataset(X, Y), batch_size=16),
        optim_wrapper=wrapper,
        train_cfg={"max_epochs": 1},
    )
    runner.train()
    assert model.part.dtype == (torch.bfloat16 if enters else torch.float32)
    log = (runner.run_dir / "log.txt").read_text()
    assert (
        log.count("mixed precision: the first loss was computed outside of the optim wrapper's context") == 1 - enters
    )
