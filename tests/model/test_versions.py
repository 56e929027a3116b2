"""Which tensors have been written."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from lockstep.dist import get_world_size
from lockstep.model.fsdp_writes import TensorVersions
from lockstep.testing import ranks


def clamp(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.clamp_(-0.01, 0.01)


def through_detach(weight: nn.Parameter) -> None:
    weight.detach().mul_(2)


def replace_data(weight: nn.Parameter) -> None:
    weight.data = weight.data * 2


def renormalise_in_forward(weight: nn.Parameter) -> None:
    nn.functional.embedding(torch.tensor([0, 1]), weight, max_norm=0.1)


@pytest.mark.parametrize("write", [clamp, through_detach, replace_data, renormalise_in_forward])
def test_a_tensor_that_was_written_is_named(write):
    model = nn.Linear(3, 3)
    versions = TensorVersions(model.named_parameters())
    assert versions.written() == []
    write(model.weight)
    assert versions.written() == ["weight"]
    versions.record()
    assert versions.written() == []


def test_reading_is_no_write():
    model = nn.Linear(3, 3)
    versions = TensorVersions(model.named_parameters())
    model(torch.ones(2, 3)).sum().backward()
    model.state_dict()
    assert versions.written() == []


def test_a_tensor_of_inference_mode_has_no_version_but_an_address():
    with torch.inference_mode():
        made = torch.ones(3)
    versions = TensorVersions([("made", made)])
    assert versions.written() == []


@ranks(2)
def test_a_write_to_a_dtensor_is_one_to_its_shard():
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (get_world_size(),))
    sharded = nn.Parameter(DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)]))
    versions = TensorVersions([("sharded", sharded)])
    assert versions.written() == []
    with torch.no_grad():
        sharded.mul_(2)
    assert versions.written() == ["sharded"]
    versions.record()
    with torch.no_grad():
        sharded.to_local().mul_(2)
    assert versions.written() == ["sharded"]
