"""Whether ranks agree on a value, in one group and over the axes of a mesh."""

from __future__ import annotations

from torch.distributed.device_mesh import init_device_mesh

from lockstep.dist import get_rank
from lockstep.dist.agreement import Sampled, differing, from_all
from lockstep.testing import ranks


@ranks(4)
def test_values_come_in_the_order_of_the_mesh_and_only_where_they_differ():
    mesh = init_device_mesh("cpu", (2, 2))
    groups = [mesh.get_group(1), mesh.get_group(0)]
    assert from_all(get_rank(), groups) == from_all(get_rank()) == [0, 1, 2, 3]
    assert differing({"lr": 0.1}, groups) is None
    assert differing(get_rank() == 2, groups) == [False, False, True, False]
    assert differing([-1, -2][get_rank() % 2]) == [-1, -2, -1, -2]  # whose hashes are the same


def test_a_check_is_due_at_first_and_then_now_and_then():
    check = Sampled(first=2, every=4)
    assert [check.is_due() for _ in range(9)] == [True, True, False, False, True, False, False, False, True]
    assert check.count == 9
