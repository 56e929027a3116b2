"""FLOPs of a step, against those counted by hand; those of training in records: the same under any strategy."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.runs import Losses
from torch import Tensor, nn
from torch.nn.functional import ScalingType, grouped_mm, scaled_dot_product_attention, scaled_mm
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import flop_registry, register_flop_formula

from lockstep import Session
from lockstep.diagnostics import mfu
from lockstep.diagnostics.mfu import StepFlops, from_data_sheet
from lockstep.dist import all_gather_object, get_rank, get_world_size
from lockstep.errors import ConfigError
from lockstep.hooks import Hook, MFUHook
from lockstep.runner import Runner
from lockstep.strategy import FSDPStrategy
from lockstep.testing import ranks

from ..hooks.runs import X, Y, make_runner
from ..strategy.heads import Heads
from ..strategy.transformer import BATCH, INPUTS, TARGETS, WIDTH, WORDS, Transformer, optim_config, seeded

HIDDEN = 16
# Outputs and weights' gradients of both layers, inputs' gradients of the second.
PER_SAMPLE = 2 * (2 * 3 * HIDDEN + 3 * HIDDEN)
AFTER_FREEZING = 2 * (3 * HIDDEN + 2 * HIDDEN)
STEPS = 8


class Mlp(nn.Module):
    """Takes [..., 3] and returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.layers(x) - y).square().mean()


class ConvolvingMlp(Mlp):
    """Convolves more than it multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.insert(0, nn.Sequential(nn.Unflatten(-1, (1, 3)), nn.Conv1d(1, 64, 1), nn.Conv1d(64, 1, 1)))
        self.layers.insert(1, nn.Flatten(-2))


class Amounts(Hook):
    """Notes the FLOPs of every iteration, of all ranks together."""

    def __init__(self) -> None:
        self.flops: list[float] = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        own = runner.message_hub.get_scalar("amounts/flops").current()
        self.flops.append(sum(all_gather_object(own)) * runner.data_shard.size / runner.world_size)


def train(work_dir: Path, hook: MFUHook | None = None, **changes: Any) -> tuple[Runner, list[float]]:
    amounts = Amounts()
    hooks = [hook or MFUHook(peak_flops=1e9), amounts]
    runner = make_runner(
        work_dir, hooks, **{"kind": Mlp, "default_hooks": {"checkpoint": None, "logger": {"interval": 2}}, **changes}
    )
    runner.train()
    return runner, amounts.flops


def records(runner: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (runner.run_dir / "metrics.jsonl").read_text().splitlines()]


@ranks(2)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"strategy": "fsdp"},
        {"strategy": {"type": "fsdp", "mixed_precision": "bf16"}},
        {"optim_wrapper": {"optimizer": {"type": "SGD", "lr": 0.1}, "accumulative_counts": 2}},
        {"optim_wrapper": {"optimizer": {"type": "Adam", "lr": 0.1}, "type": "AmpOptimWrapper", "dtype": "bfloat16"}},
        {"compile": {"backend": "aot_eager"}, "strategy": "fsdp"},
        {"train_cfg": {"max_iters": STEPS}},
    ],
    ids=["default", "fsdp", "fsdp bf16", "accumulating", "autocast", "compiled fsdp", "iterations"],
)
def test_flops_of_each_iteration(tmp_path: Path, changes):
    runner, flops = train(tmp_path, **changes)
    assert flops == [6 * PER_SAMPLE] * STEPS
    if get_rank() == 0:
        written = records(runner)
        assert {record["mode"] for record in written} == {"train", "epoch"}
        for record in written:
            assert record["flops_per_second"] / record["samples_per_second"] == pytest.approx(PER_SAMPLE)
            assert record["mfu"] == pytest.approx(record["flops_per_second"] / (1e9 * get_world_size()))
            assert "peak_flops" not in record


@ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_flops_of_a_transformer(tmp_path: Path, strategy):
    amounts = Amounts()
    runner = Runner(
        seeded(Transformer),
        tmp_path,
        train_dataloader={"dataset": TensorDataset(INPUTS, TARGETS), "batch_size": BATCH // get_world_size()},
        train_cfg={"max_iters": 3},
        optim_wrapper=optim_config(1, True),
        custom_hooks=[MFUHook(peak_flops=1e9), amounts],
        strategy=strategy,
    )
    model = seeded(Transformer)
    in_products = sum(layer.weight.numel() for layer in model.modules() if isinstance(layer, nn.Linear))
    in_products += sum(layer.self_attn.in_proj_weight.numel() for layer in model.layers)
    width, length = model.head.in_features, INPUTS.shape[1]
    runner.train()
    assert amounts.flops == [BATCH * length * (6 * in_products + 12 * len(model.layers) * width * length)] * 3


@ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_batches_that_repeat_the_last_one_count_for_nothing(tmp_path: Path, strategy):
    sampler = {"type": "DefaultSampler", "round_up": False}
    data = {"dataset": TensorDataset(X[:19], Y[:19]), "batch_size": 3, "sampler": sampler}
    runner, flops = train(tmp_path, train_dataloader=data, strategy=strategy)
    assert flops == [samples * PER_SAMPLE for samples in (6, 6, 6, 1)] * 2
    if get_rank() == 0:
        for record in records(runner):
            assert record["flops_per_second"] / record["samples_per_second"] == pytest.approx(PER_SAMPLE)


@pytest.mark.parametrize("compile_", [False, {"backend": "aot_eager"}])
def test_counting_does_not_change_training(tmp_path: Path, compile_):
    seen = []
    for hooks in ([MFUHook()], []):
        losses = Losses()
        make_runner(tmp_path, [*hooks, losses], kind=Mlp, compile=compile_).train()
        seen.append(losses.by_iter)
    assert seen[0] == seen[1]


@pytest.mark.parametrize("most", [1, 2, 16])
def test_shapes_beyond_the_most_follow_in_proportion(tmp_path: Path, monkeypatch, most):
    monkeypatch.setattr(mfu, "_MOST_SHAPES", most)
    lengths = [2, 5, 3, 9, 2, 7]
    batches = [(torch.ones(4, length, 3), torch.ones(4, length, 1)) for length in lengths]
    loader = DataLoader(batches, batch_size=None)
    runner, flops = train(tmp_path, MFUHook(1e9), train_dataloader=loader, train_cfg={"max_epochs": 2})
    assert flops == pytest.approx([4 * length * PER_SAMPLE for length in lengths] * 2)
    log = (runner.run_dir / "log.txt").read_text()
    assert log.count(f"batches have more than {most} shapes") == (most < 5)


@dataclass
class Pair:
    first: Tensor
    second: Any


@pytest.mark.parametrize(
    ("batch", "shapes"),
    [
        (torch.ones(2, 3), [(2, 3)]),
        (
            {"a": torch.ones(2), "b": ["name", torch.ones(3), {"c": torch.ones(())}], "d": 4, "e": None},
            [(2,), (3,), ()],
        ),
        (Pair(torch.ones(5), (torch.ones(1), "x")), [(5,), (1,)]),
        ([Pair(torch.ones(5), 1)] * 2, [(5,), (5,)]),
        (object(), []),
        (torch.nested.nested_tensor([torch.ones(3, 8), torch.ones(5, 8)], layout=torch.jagged), [(64,)]),
    ],
)
def test_the_shapes_of_a_batch(batch, shapes):
    found = mfu._shapes_of(batch)
    assert found == tuple(map(torch.Size, shapes))
    assert mfu._elements(found) == sum(map(math.prod, shapes))


class Freeze(Hook):
    def after_train_epoch(self, runner) -> None:
        runner.model.layers[0].requires_grad_(False)


def test_flops_are_counted_anew_after_parameters_are_frozen(tmp_path: Path):
    hooks = [MFUHook(1e9), amounts := Amounts(), Freeze()]
    make_runner(tmp_path, hooks, kind=Mlp).train()
    assert amounts.flops == [6 * PER_SAMPLE] * 4 + [6 * AFTER_FREEZING] * 4


@ranks(2)
def test_where_the_peak_is_not_known_there_is_no_mfu_and_one_warning(tmp_path: Path):
    data = [(torch.ones(length, 3), torch.ones(length, 1)) for length in (2, 5, 3)]
    runner, flops = train(tmp_path, MFUHook(), train_dataloader=DataLoader(data, batch_size=None))
    assert min(flops) > 0
    if get_rank() == 0:
        assert all("flops_per_second" in record and "mfu" not in record for record in records(runner))
        says = "the peak FLOP/s of cpu in float32 is not known, so records have flops_per_second, but no mfu. Give it"
        assert (runner.run_dir / "log.txt").read_text().count(says) == 1


class Split(Heads):
    """Sees 2 * 12 tokens per sample on both ranks of a tensor-parallel group."""


@ranks(2)
def test_ranks_that_split_products_need_the_flops(tmp_path: Path):
    def make(hook: MFUHook) -> Runner:
        return Runner(
            seeded(Split),
            tmp_path,
            train_dataloader={"dataset": TensorDataset(INPUTS, TARGETS), "batch_size": BATCH},
            train_cfg={"max_iters": 2},
            optim_wrapper=optim_config(1, True),
            custom_hooks=[hook],
            strategy=FSDPStrategy(tensor_parallel=2),
        )

    with pytest.raises(ConfigError, match=r"`flops_of` of MFUHook must be given .* 2 ranks and 1 data shards"):
        make(MFUHook(peak_flops=1e9)).train()
    runner = make(MFUHook(peak_flops=1e9, flops_of=lambda batch: 100 * batch[0].numel()))
    runner.train()
    if get_rank() == 0:
        (record,) = [record for record in records(runner) if record["mode"] == "epoch"]
        assert record["flops_per_second"] / record["samples_per_second"] == pytest.approx(100 * INPUTS.shape[1])
        assert record["mfu"] == pytest.approx(record["flops_per_second"] / 2e9)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.lstm(x)[0] - y).square().mean()


def test_operators_that_are_not_counted_are_named_once(tmp_path: Path):
    runner, flops = train(tmp_path, MFUHook(), kind=Recurrent)
    assert flops == [0] * STEPS
    assert (runner.run_dir / "log.txt").read_text().count("no FLOPs are counted for aten::mkldnn_rnn_layer, ") == 1
    assert not any("mfu" in record for record in records(runner))


class FailingMlp(Mlp):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        super().forward(x, y)
        raise RuntimeError("no")


def test_a_failure_ends_the_count(tmp_path: Path):
    with pytest.raises(RuntimeError, match="no") as caught:
        train(tmp_path, kind=FailingMlp)
    assert any("while MFUHook counted the FLOPs of this step" in note for note in caught.value.__notes__)
    assert torch._C._len_torch_dispatch_stack() == 0


@ranks(1, 2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_loop_by_hand(tmp_path: Path, strategy):
    amounts = Amounts()
    session = Session(tmp_path, strategy=strategy, custom_hooks=[MFUHook(1e9), amounts], log_level="ERROR")
    model = Mlp().layers
    data = DataLoader(TensorDataset(X, Y), batch_size=6 // get_world_size())
    model, _, loader = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
    for epoch in session.epochs(3):
        assert torch._C._len_torch_dispatch_stack() == 0
        for x, y in loader:
            if epoch == 0:
                break  # within the step that is counted
            session.step((model(x) - y).square().mean())
    assert amounts.flops == [6 * PER_SAMPLE] * STEPS
    if get_rank() == 0:
        assert all("mfu" in record for record in records(session))


def test_an_evaluation_within_a_step_is_not_counted(tmp_path: Path):
    amounts = Amounts()
    session = Session(tmp_path, custom_hooks=[MFUHook(1e9), amounts], log_level="ERROR")
    model = Mlp().layers
    data = DataLoader(TensorDataset(X, Y), batch_size=6)
    model, _, _ = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
    held_out = session.prepare_evaluation(data)
    for x, y in session.iterations(2):
        for held_out_x, _ in held_out:
            model(held_out_x)
        session.step((model(x) - y).square().mean())
    assert amounts.flops == [6 * PER_SAMPLE] * 2


def test_a_penalty_on_gradients_can_be_counted(tmp_path: Path):
    amounts = Amounts()
    session = Session(tmp_path, custom_hooks=[MFUHook(1e9), amounts], log_level="ERROR")
    model = Mlp().layers
    data = DataLoader(TensorDataset(X, Y), batch_size=6)
    model, _, loader = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
    for _ in session.epochs(1):
        for x, _ in loader:
            x.requires_grad_(True)
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            session.step(slope.square().sum())
    assert len(set(amounts.flops)) == 1
    assert amounts.flops[0] > 6 * PER_SAMPLE


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"peak_flops": 0}, "`peak_flops` must be a finite number above 0, but is 0"),
        ({"peak_flops": float("nan")}, "`peak_flops` must be a finite number above 0"),
        ({"peak_flops": "measure"}, "but is 'measure'"),
        ({"peak_flops": True}, "but is True"),
        ({"flops_of": 6e9, "peak_flops": 1e9}, "`flops_of` must be a function of a batch or None, but is 6000000000"),
        ({"flops_of": len}, "`peak_flops` must be a number of FLOP/s where `flops_of` is given, but is None"),
    ],
)
def test_wrong_options_are_refused(options, says):
    with pytest.raises(ConfigError, match=says):
        MFUHook(**options)


B, IN, HID, OUT = 5, 8, 32, 4
# Each layer: its outputs and the gradient of its weight; the second also the gradient of its input.
MLP = 2 * B * (2 * IN * HID + 3 * HID * OUT)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(IN, HID), nn.ReLU(), nn.Linear(HID, OUT))


def counted(step: Callable[[], object]) -> float:
    with StepFlops() as flops:
        step()
    return flops.total


def test_an_mlp():
    net, x = mlp(), torch.ones(B, IN)
    assert counted(lambda: net(x).sum().backward()) == MLP
    net[0].requires_grad_(False)
    assert counted(lambda: net(x).sum().backward()) == 2 * B * (IN * HID + 2 * HID * OUT)
    with torch.no_grad():
        assert counted(lambda: net(x)) == 2 * B * (IN * HID + HID * OUT)


def test_a_transformer_by_hand_and_by_the_rule_of_six():
    model, size, length = Transformer(), 4, INPUTS.shape[1]
    tokens = size * length
    in_products = sum(p.numel() for p in model.parameters() if p.dim() == 2) - WORDS * WIDTH - length * WIDTH
    # All inputs of products need a gradient, because the embedding is trained. Scores and their sums: 12 per layer.
    by_hand = 6 * in_products * tokens + 12 * len(model.layers) * WIDTH * length * tokens
    flops = counted(lambda: model(INPUTS[:size], TARGETS[:size]).backward())
    assert flops == by_hand
    assert flops == pytest.approx(6 * in_products * tokens, rel=0.2)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_attention_counts_no_recomputed_scores(heads):
    size, own, length, width = 2, heads[0], 16, 8
    query, key = (torch.ones(size, count, length, width, requires_grad=True) for count in heads)
    attend = lambda: scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=heads[0] != heads[1])  # noqa: E731
    assert counted(lambda: attend().sum().backward()) == 6 * (2 * size * own * length**2 * width)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations_do_not_count(reentrant):
    net, x = mlp(), torch.ones(B, IN, requires_grad=True)
    whole = counted(lambda: net(x).sum().backward())
    assert whole == MLP + 2 * B * IN * HID
    assert counted(lambda: checkpoint(net, x, use_reentrant=reentrant).sum().backward()) == whole
    half = lambda: net[2](checkpoint(net[:2], x, use_reentrant=reentrant)).sum().backward()  # noqa: E731
    assert counted(half) == whole


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_a_convolution_in_groups(groups):
    conv, x = nn.Conv2d(8, 8, 3, groups=groups), torch.ones(2, 8, 6, 6, requires_grad=True)
    assert counted(lambda: conv(x).sum().backward()) == 3 * (2 * 2 * 8 * (8 // groups) * 4 * 4 * 9)


def test_gradients_of_gradients_count():
    net, x = mlp(), torch.ones(B, IN, requires_grad=True)

    def step() -> None:
        (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        slope.square().sum().backward()

    outputs, slopes = 2 * B * (IN * HID + HID * OUT), 2 * B * (IN * HID + HID * OUT)
    assert counted(step) > outputs + 2 * slopes


@pytest.mark.parametrize("in_place", [True, False])
def test_compiled_code_runs_uncompiled_while_it_counts(in_place):
    net, x = mlp(), torch.ones(B, IN)
    compiled = net if in_place else torch.compile(net, backend="aot_eager")
    if in_place:
        net.compile(backend="aot_eager")
    for _ in range(2):
        assert counted(lambda: compiled(x).sum().backward()) == MLP
        compiled(x).sum().backward()


def test_an_update_does_not_count_but_a_loss_that_an_optimizer_evaluates():
    net, x = mlp(), torch.ones(B, IN)
    muon = torch.optim.Muon(p for p in net.parameters() if p.dim() == 2)

    def step() -> None:
        net(x).sum().backward()
        muon.step()

    assert counted(step) == MLP
    lbfgs = torch.optim.LBFGS(net.parameters(), max_iter=1)

    def evaluate() -> Tensor:
        loss = net(x).square().sum()
        loss.backward()
        return loss

    assert counted(lambda: lbfgs.step(evaluate)) == MLP


class MuonForMatrices(torch.optim.Optimizer):
    """Updates the other parameters by an optimizer within, and then the matrices by products."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.inner = torch.optim.SGD([p for p in self.param_groups[0]["params"] if p.dim() < 2])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.inner.step()
        for parameter in self.param_groups[0]["params"]:
            if parameter.dim() == 2:
                parameter -= parameter.grad @ parameter.grad.T @ parameter.grad


def test_an_update_does_not_count_after_one_of_an_optimizer_within():
    net, x = mlp(), torch.ones(B, IN)
    optimizer = MuonForMatrices(net.parameters())

    def step() -> None:
        net(x).sum().backward()
        optimizer.step()

    assert counted(step) == MLP
    assert counted(step) == MLP


@pytest.mark.parametrize("product", [torch.matmul, torch.sparse.mm])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_products_of_sparse_matrices_are_named_and_not_counted_as_dense(product):
    neighbours, layer, x = torch.eye(B).to_sparse(), nn.Linear(IN, OUT), torch.ones(B, IN)
    with StepFlops() as flops:
        product(neighbours, layer(x)).sum().backward()
    assert flops.total == 2 * (2 * B * IN * OUT)
    assert "aten::mm of sparse tensors" in flops.unseen


@pytest.mark.parametrize("matmuls", ["ieee", "tf32"])
@pytest.mark.parametrize("convolutions", ["ieee", "tf32"])
def test_what_torch_may_round_to_tf32(monkeypatch, matmuls, convolutions):
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision=matmuls))
    monkeypatch.setattr(torch.backends.cudnn, "conv", SimpleNamespace(fp32_precision=convolutions))
    net = nn.Sequential(nn.Conv1d(2, 3, 1, bias=False), nn.Linear(4, 5))
    with StepFlops() as flops, torch.no_grad():
        net(torch.ones(1, 2, 4))
    assert flops.by_dtype == {torch.float32: 2 * 4 * 2 * 3 + 2 * 3 * 4 * 5}
    assert flops.rounded == 48 * (convolutions == "tf32") + 120 * (matmuls == "tf32")
    with StepFlops() as flops, torch.no_grad():
        net.double()(torch.ones(1, 2, 4, dtype=torch.float64))
    assert flops.rounded == 0


@pytest.mark.parametrize(("kind", "peak"), [("convolution", 156e12), ("product", 19.5e12)])
def test_convolutions_have_the_peak_of_tf32_by_default(tmp_path: Path, monkeypatch, kind, peak):
    monkeypatch.setattr(mfu, "_device_name", lambda: "NVIDIA A100-SXM4-80GB")
    changes = {"kind": ConvolvingMlp} if kind == "convolution" else {}
    runner, _ = train(tmp_path, MFUHook(), **changes)
    assert runner.message_hub.get_info("peak_flops") == peak


def test_operators_without_a_formula_are_named():
    lstm = nn.LSTM(8, 8)
    with StepFlops() as flops:
        lstm(torch.ones(3, 2, 8))[0].sum().backward()
    assert (flops.total, flops.unseen) == (0, {"aten::mkldnn_rnn_layer", "aten::mkldnn_rnn_layer_backward"})
    with StepFlops() as flops:
        torch.conv_tbc(torch.ones(3, 2, 4), torch.ones(1, 4, 5), torch.ones(5))
    assert (flops.total, flops.unseen) == (0, {"aten::conv_tbc"})

    @torch.library.custom_op("lockstep_tests::product", mutates_args=())
    def product(x: Tensor) -> Tensor:
        return x @ x

    with StepFlops() as flops:
        product(torch.ones(2, 2))
    assert (flops.total, flops.unseen) == (0, {"lockstep_tests::product"})
    packet = torch.ops.lockstep_tests.product
    try:
        register_flop_formula(packet)(lambda shape, *, out_shape=None: 2 * shape[0] * shape[1] * shape[0])
        with StepFlops() as flops:
            product(torch.ones(2, 2))
    finally:
        flop_registry.pop(packet, None)
    assert (flops.total, flops.unseen) == (16, set())
    with StepFlops() as flops:
        mlp()(torch.ones(B, IN)).softmax(1).sum().backward()
    assert not flops.unseen


LEFT, RIGHT, VECTOR = torch.ones(32, 16), torch.ones(16, 48), torch.ones(16)
GROUPED, ENDS = torch.ones(2, 16, 48, dtype=torch.bfloat16), torch.tensor([20, 32], dtype=torch.int32)
FP8, ONE = torch.float8_e4m3fn, torch.ones(())


def stack(matrix: Tensor) -> Tensor:
    return torch.stack([matrix, matrix])


PRODUCTS: dict[str, tuple[Callable[[], object], int]] = {
    "vector": (lambda: LEFT @ VECTOR, 32 * 16),
    "vector added": (lambda: torch.addmv(torch.ones(32), LEFT, VECTOR), 32 * 16),
    "vector in place": (lambda: torch.ones(32).addmv_(LEFT, VECTOR), 32 * 16),
    "matrix in place": (lambda: torch.ones(32, 48).addmm_(LEFT, RIGHT), 32 * 16 * 48),
    "matrix and activation": (lambda: torch._addmm_activation(torch.ones(48), LEFT, RIGHT), 32 * 16 * 48),
    "batch in place": (lambda: torch.ones(2, 32, 48).baddbmm_(stack(LEFT), stack(RIGHT)), 2 * 32 * 16 * 48),
    "batch summed": (lambda: torch.addbmm(torch.ones(32, 48), stack(LEFT), stack(RIGHT)), 2 * 32 * 16 * 48),
    "int8": (lambda: torch._int_mm(LEFT.to(torch.int8), RIGHT.to(torch.int8)), 32 * 16 * 48),
    "float8": (
        lambda: scaled_mm(
            *(LEFT.to(FP8), RIGHT.t().contiguous().to(FP8).t()),
            *(ONE, ScalingType.TensorWise, ONE, ScalingType.TensorWise),
            output_dtype=torch.bfloat16,
        ),
        32 * 16 * 48,
    ),
    "groups of rows": (lambda: grouped_mm(LEFT.bfloat16(), GROUPED, offs=ENDS), 32 * 16 * 48),
    "as many groups": (lambda: grouped_mm(stack(LEFT.bfloat16()), GROUPED), 2 * 32 * 16 * 48),
    "groups of a sum": (lambda: grouped_mm(LEFT.t().bfloat16(), torch.ones(32, 8).bfloat16(), offs=ENDS), 16 * 32 * 8),
    "groups of columns": (
        lambda: grouped_mm(GROUPED.mT.contiguous(), torch.ones(16, 32).bfloat16(), offs=ENDS),
        48 * 16 * 32,
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_that_torch_does_not_count(name):
    product, multiplications = PRODUCTS[name]
    with StepFlops() as flops:
        product()
    assert (flops.total, flops.unseen) == (2 * multiplications, set())


def test_a_step_that_fails_leaves_nothing_behind():
    net = mlp()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), StepFlops():
        net(torch.ones(2, 3))
    assert counted(lambda: net(torch.ones(B, IN)).sum().backward()) == MLP


@ranks(2)
def test_products_that_ranks_split_are_refused():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    net = parallelize_module(mlp(), init_device_mesh("cpu", (2,)), {"0": ColwiseParallel()})
    with pytest.raises(ConfigError, match=r"FLOPs can't be counted where ranks split a product, but `aten\.addmm`"):
        counted(lambda: net(torch.ones(B, IN)))


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312),
        ("A100-SXM4-40GB", torch.float16, 312),  # older drivers
        ("NVIDIA A100 80GB PCIe", torch.float32, 19.5),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", torch.bfloat16, None),
        ("NVIDIA A10", torch.bfloat16, 125),
        ("NVIDIA A10G", torch.bfloat16, None),
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989.5),
        ("NVIDIA H100 80GB HBM3", torch.float8_e4m3fn, 1979),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756.5),
        ("AMD Instinct MI300X", torch.float8_e4m3fnuz, 2614.9),
        ("NVIDIA H100 80GB HBM3", torch.float64, None),
        ("Tesla T4", torch.float16, 65),
        ("Tesla V100-SXM2-32GB", torch.bfloat16, None),
        ("", torch.float32, None),
    ],
)
def test_peaks_of_known_devices(name, dtype, tflops):
    found = from_data_sheet(name, dtype)
    assert (None if found is None else found / 1e12) == tflops


def test_tf32_is_another_peak():
    assert from_data_sheet("NVIDIA A100-SXM4-80GB", torch.float32, may_round=True) == 156e12
    assert from_data_sheet("Tesla V100-SXM2-32GB", torch.float32, may_round=True) == 15.7e12
