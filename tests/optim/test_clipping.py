"""Norms and clipping of gradients, whole and in shards."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from lockstep.dist import get_rank, get_world_size
from lockstep.optim.clipping import clip_by_norm, clip_by_value, gradient_norm
from lockstep.testing import ranks

INPUTS = torch.linspace(-1, 1, 8 * 6).reshape(8, 6)


def net_with_gradients(mesh=None, share: bool = False) -> nn.Module:
    """The last layer has one row, of which most ranks hold nothing."""
    torch.manual_seed(4)
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
    if share:
        fully_shard(net[2], mesh=mesh)
        fully_shard(net, mesh=mesh)
    inputs = INPUTS[get_rank() :: get_world_size()] if share else INPUTS
    (10 * net(inputs).square().mean()).backward()
    return net


def gradients(net: nn.Module) -> list[Tensor]:
    return [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in net.parameters()]


def mesh_of(shape: tuple[int, ...]):
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


@ranks(2, 4)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf, "inf"])
@pytest.mark.parametrize("hybrid", [False, True])
def test_the_norm_of_shards_is_that_of_one_process(norm_type, hybrid):
    size = get_world_size()
    mesh = mesh_of((2, size // 2) if hybrid else (size,))
    alone, sharded = net_with_gradients(), net_with_gradients(mesh, share=True)
    expected = nn.utils.clip_grad_norm_(alone.parameters(), 0.5, norm_type)
    norm = clip_by_norm(sharded.parameters(), 0.5, norm_type)
    assert type(norm) is Tensor
    assert torch.allclose(norm, expected, rtol=1e-6)
    assert norm > 0.5
    for own, theirs in zip(gradients(sharded), gradients(alone), strict=True):
        assert torch.allclose(own, theirs, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("norm_type", [2, math.inf])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_of_whole_gradients_it_is_bit_by_bit_torchs(norm_type, max_norm):
    ours, theirs = net_with_gradients(), net_with_gradients()
    norm = clip_by_norm(ours.parameters(), max_norm, norm_type)
    assert torch.equal(norm, nn.utils.clip_grad_norm_(theirs.parameters(), max_norm, norm_type))
    for own, other in zip(gradients(ours), gradients(theirs), strict=True):
        assert torch.equal(own, other)


@ranks(2)
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_shards_of_complex_gradients_have_a_real_norm(norm_type):
    values = [torch.full((rows, 2), 3 + 4j) for rows in (3, 1)]  # of the last, one rank has nothing
    whole, sharded = ([nn.Parameter(torch.zeros_like(value)) for value in values] for _ in range(2))
    for one, part, value in zip(whole, sharded, values, strict=True):
        one.grad, part.grad = value.clone(), distribute_tensor(value, mesh_of((2,)), [Shard(0)])
    expected = nn.utils.clip_grad_norm_(whole, 0.5, norm_type)
    assert torch.allclose(clip_by_norm(sharded, 0.5, norm_type), expected)
    for one, part in zip(whole, sharded, strict=True):
        assert torch.allclose(part.grad.full_tensor(), one.grad)


@ranks(4)
def test_gradients_of_several_layouts_have_one_norm():
    wide, row = mesh_of((4,)), mesh_of((2, 2))
    generator = torch.Generator().manual_seed(3)
    values = [torch.randn(6, 5, generator=generator) for _ in range(4)]
    laid_out = [
        distribute_tensor(values[0], wide, [Shard(0)]),
        distribute_tensor(values[1], row, [Replicate(), Shard(1)]),
        distribute_tensor(values[2], row, [Shard(0), Shard(1)]),
        DTensor.from_local(values[3] / 4, wide, [Partial()]),
        values[0],
    ]
    expected = torch.cat([*values, values[0]]).norm()
    assert torch.allclose(gradient_norm(laid_out), expected, rtol=1e-6)
    params = [nn.Parameter(torch.zeros_like(gradient)) for gradient in laid_out if gradient is not laid_out[3]]
    for param, gradient in zip(params, [*laid_out[:3], laid_out[4]], strict=True):
        param.grad = gradient.clone()
    before = clip_by_norm(params, 0.25)
    after = gradient_norm([param.grad for param in params])
    assert before > 1
    assert after.item() == pytest.approx(0.25, rel=1e-4)


@ranks(2)
def test_values_are_bounded_in_shards_and_whole():
    sharded, alone = net_with_gradients(mesh_of((2,)), share=True), net_with_gradients()
    clip_by_value([*sharded.parameters(), *alone.parameters()], 0.01)
    assert max(gradient.abs().max() for gradient in gradients(sharded)) == pytest.approx(0.01)
    assert max(gradient.abs().max() for gradient in gradients(alone)) == pytest.approx(0.01)


@ranks(2)
def test_half_precision_shards_have_a_norm_whose_square_would_overflow():
    param = nn.Parameter(distribute_tensor(torch.zeros(4, dtype=torch.float16), mesh_of((2,)), [Shard(0)]))
    param.grad = distribute_tensor(torch.full((4,), 1000.0, dtype=torch.float16), mesh_of((2,)), [Shard(0)])
    assert clip_by_norm([param], 1e9).item() == pytest.approx(2000, rel=1e-3)


@ranks(2)
@pytest.mark.parametrize(("short", "norm_type"), [(torch.float32, math.inf), (torch.float64, 2.0)])
def test_ranks_without_an_element_of_the_widest_dtype_have_the_same_norm(short, norm_type):
    mesh = mesh_of((2,))
    rows = distribute_tensor(torch.full((4,), 2.0, dtype=torch.bfloat16), mesh, [Shard(0)])
    row = distribute_tensor(torch.full((1,), 3.0, dtype=short), mesh, [Shard(0)])  # rank 1 holds nothing of it
    norm = gradient_norm([rows, row], norm_type)
    assert norm.dtype == short
    assert norm.item() == pytest.approx(3 if math.isinf(norm_type) else 5, rel=1e-2)


@ranks(2)
@pytest.mark.parametrize("norm_type", [2, math.inf])
def test_a_norm_that_is_not_finite_is_refused_on_every_rank(norm_type):
    sharded = net_with_gradients(mesh_of((2,)), share=True)
    if get_rank() == 1:
        next(sharded.parameters()).grad.to_local()[0, 0] = math.nan
    with pytest.raises(RuntimeError, match="the norm of the gradients must be finite, but is nan"):
        clip_by_norm(sharded.parameters(), 1.0, norm_type, error_if_nonfinite=True)


def test_without_gradients_there_is_nothing():
    assert clip_by_norm(nn.Linear(1, 1).parameters(), 1.0) == 0
    with pytest.raises(ValueError, match="`norm_type` must be above 0, but is 0"):
        clip_by_norm([], 1.0, 0)


@ranks(2)
def test_values_of_a_gradient_of_which_ranks_hold_parts_of_a_sum_are_those_of_the_sum():
    mesh = init_device_mesh("cpu", (2,))
    weight = nn.Parameter(DTensor.from_local(torch.zeros(3), mesh, [Replicate()]))
    weight.grad = DTensor.from_local(torch.tensor([1.0, 0.2, -3.0]), mesh, [Partial()])
    clip_by_value([weight], 1.0)
    assert weight.grad.full_tensor().tolist() == pytest.approx([1.0, 0.4, -1.0])
