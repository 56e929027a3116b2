"""FLOPs of a step, against those counted by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry, register_flop_formula

from lockstep.errors import ConfigError
from lockstep.hooks.flops import StepFlops
from lockstep.hooks.peak_flops import from_data_sheet, peak_flops
from lockstep.testing import ranks

from ..strategy.transformer import INPUTS, TARGETS, WIDTH, WORDS, Transformer

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


def test_operators_without_a_formula_are_named():
    lstm = nn.LSTM(8, 8)
    with StepFlops() as flops:
        lstm(torch.ones(3, 2, 8))[0].sum().backward()
    assert (flops.total, flops.unseen) == (0, {"aten::mkldnn_rnn_layer", "aten::mkldnn_rnn_layer_backward"})

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_an_unknown_device_is_measured(dtype):
    before = torch.get_rng_state()
    peak = peak_flops(dtype)
    assert peak.source == f"measured on cpu, {str(dtype).removeprefix('torch.')}"
    assert 1e8 < peak.value < 1e14
    assert torch.equal(torch.get_rng_state(), before)


def test_a_dtype_that_cannot_be_measured_is_refused():
    with pytest.raises(ConfigError, match="`peak_flops` must be given, in FLOP/s, because cpu can't be measured"):
        peak_flops(torch.bool)
