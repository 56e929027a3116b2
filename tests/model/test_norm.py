"""BatchNorm over all ranks, and back."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lockstep.dist import get_rank
from lockstep.model import MMDistributedDataParallel, convert_sync_batchnorm, revert_sync_batchnorm
from lockstep.model.norm import BatchNormXd, CpuSyncBatchNorm
from lockstep.testing import ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, eps=0.1, momentum=0.3), nn.ReLU())
        self.head = nn.ModuleDict(
            {
                "plain": nn.BatchNorm1d(4, affine=False),
                "momentary": nn.BatchNorm1d(4, momentum=None, track_running_stats=False),
            }
        )
        self.other = nn.GroupNorm(1, 4)


def kinds(model: nn.Module) -> list[str]:
    return [type(module).__name__ for module in model.modules() if "Norm" in type(module).__name__]


def test_all_settings_and_the_very_tensors_are_kept():
    model = Net()
    model.body.eval()
    norms = [model.body[1], model.head["plain"], model.head["momentary"]]
    settings = [(n.eps, n.momentum, n.affine, n.track_running_stats, n.training) for n in norms]
    tensors = {name: id(value) for name, value in model.state_dict(keep_vars=True).items()}
    for convert, kind in ((convert_sync_batchnorm, "CpuSyncBatchNorm"), (revert_sync_batchnorm, "BatchNormXd")):
        assert convert(model) is model
        assert kinds(model) == [kind, kind, kind, "GroupNorm"]
        norms = [model.body[1], model.head["plain"], model.head["momentary"]]
        assert [(n.eps, n.momentum, n.affine, n.track_running_stats, n.training) for n in norms] == settings
        assert {name: id(value) for name, value in model.state_dict(keep_vars=True).items()} == tensors


def test_what_comes_back_trains_as_before():
    torch.manual_seed(0)
    x = torch.randn(4, 3, 6, 6)
    plain = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.BatchNorm1d(108))
    back = revert_sync_batchnorm(convert_sync_batchnorm(copy.deepcopy(plain)))
    results = []
    for model in (plain, back):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(x).square().mul(x.flatten(1)).mean().backward()
            optimizer.step()
        results.append(model.state_dict())
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name


def test_evaluation_is_the_same_before_between_and_after():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Flatten(), nn.BatchNorm1d(16))
    x = torch.randn(5, 3, 2, 2)
    model(x)
    results = [model.eval()(x)]
    for convert in (convert_sync_batchnorm, revert_sync_batchnorm):
        model = convert(model)
        results.append(model(x))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_a_bare_norm_is_replaced_itself_and_a_shared_one_stays_shared():
    assert type(convert_sync_batchnorm(nn.BatchNorm3d(2))) is CpuSyncBatchNorm
    assert type(revert_sync_batchnorm(nn.SyncBatchNorm(2))) is BatchNormXd
    norm = nn.SyncBatchNorm(2)
    model = revert_sync_batchnorm(nn.ModuleList([norm, nn.Sequential(norm), nn.Linear(1, 1)]))
    assert model[0] is model[1][0]
    assert type(model[0]) is BatchNormXd


@pytest.mark.parametrize("shape", [(4, 2), (4, 2, 3), (4, 2, 3, 3), (4, 2, 3, 3, 3)])
def test_what_comes_back_takes_any_number_of_dims(shape):
    torch.manual_seed(0)
    x = torch.randn(shape)
    dims = [dim for dim in range(len(shape)) if dim != 1]
    out = BatchNormXd(2, affine=False)(x)
    assert torch.allclose(out.mean(dims), torch.zeros(2), atol=1e-5)
    with pytest.raises(ValueError, match=r"\[samples, features, ...\], but has \(3,\)"):
        BatchNormXd(2)(torch.ones(3))


def test_another_implementation_is_refused():
    with pytest.raises(ValueError, match="`implementation` must be 'torch', but is 'mmcv'"):
        convert_sync_batchnorm(nn.BatchNorm1d(1), "mmcv")


@ranks(2)
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("first", [4, 5])  # ranks may have different numbers of samples
def test_two_ranks_normalise_over_all_samples_on_the_cpu(momentum, first):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=momentum), nn.ReLU(), nn.Conv2d(4, 2, 3))
    wrapped = MMDistributedDataParallel(convert_sync_batchnorm(copy.deepcopy(plain)), broadcast_buffers=False)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain, wrapped)]
    for _ in range(3):
        x = torch.randn(8, 3, 6, 6)
        own = x[:first] if get_rank() == 0 else x[first:]
        (plain(x).square().sum() / 100).backward()
        (wrapped(own).square().sum() / 50).backward()  # DDP halves the sum over ranks
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, mine), theirs in zip(wrapped.module.state_dict().items(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5, msg=name)
    x = torch.randn(2, 3, 6, 6)
    torch.testing.assert_close(wrapped.module.eval()(x), plain.eval()(x), rtol=1e-4, atol=1e-5)
