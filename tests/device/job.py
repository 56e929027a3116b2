"""A rank on the simulated accelerator. Writes what it has found, as JSON; `test_device.py` says what is right.

Usage: job.py HOW FOLDER, where HOW says how the group is made: `alone`, by torch with the device's backend alone;
`default`, by init_dist; `named`, by init_dist with the name of that backend, and then no more is tried; `chosen`, the
same where each rank names the other's device; `own`, `shared` and `hosts`, the same where each rank sees one device
alone, its own or one for all; with `hosts`, each is a host of its own to NCCL. `again`: by init_dist for a second time,
for a mesh of four ranks.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist

sys.path.insert(0, str(Path(__file__).parent))

from sim import cost, counts, simulator
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from lockstep import dist
from lockstep.dist.consistency import FIRST_CALLS
from lockstep.errors import DistError
from lockstep.logging import read_scalars

if sys.argv[1] in ("own", "shared", "hosts"):
    os.environ |= {"SIM_DEVICES": "1", "SIM_UUID": os.environ["RANK"] if sys.argv[1] == "own" else "one"}
if sys.argv[1] == "hosts":
    os.environ["NCCL_HOSTID"] = os.environ["RANK"]
simulator()


def plain(value: Any) -> Any:
    """Return a value with lists in place of its tensors."""
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value.detach().cpu().tolist() if isinstance(value, Tensor) else value


def measured(run: Callable[[int], Any], rank: int) -> list[Any]:
    """Return what a call costs, and gives."""
    run(rank)
    before = counts()
    result = run(rank)  # again: the first call makes buffers
    return [*cost(before), plain(result)]


def main(how: str, folder: Path) -> None:
    if how == "alone":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch_dist.init_process_group("simccl", timeout=timedelta(seconds=120))
    else:
        chosen = {"device_id": torch.device("sim", 1 - int(os.environ["RANK"]))} if how == "chosen" else {}
        dist.init_dist("pytorch", backend=None if how == "default" else "simccl", timeout=120, **chosen)
    if how == "again":
        dist.destroy_dist()
        dist.init_dist("pytorch", timeout=120)
    results = folder / f"rank_{dist.get_rank()}.json"
    config = torch_dist.get_backend_config(dist.get_default_group())
    found: dict[str, Any] = {"device": str(dist.get_comm_device()), "backends": [dist.get_backend(), str(config)]}
    if how == "again":
        mesh = init_device_mesh("sim", (2, 2), mesh_dim_names=("replicate", "shard"))
        torch_dist.all_reduce(ones := torch.ones(1, device="sim"), group=mesh.get_group("shard"))
        found["sum"] = read_scalars([ones, DTensor.from_local(ones, mesh, [Replicate(), Replicate()], run_check=False)])
    mixed = torch.tensor(4099, device="sim"), torch.tensor(2.5, dtype=torch.bfloat16, device="sim")
    found["read"] = read_scalars(mixed)
    results.write_text(json.dumps(found))
    if how in ("named", "chosen", "own", "hosts", "again"):
        return
    from calls import CALLS  # with tensors on this rank's device

    rank = dist.get_rank()
    for _ in range(FIRST_CALLS):  # which are compared
        dist.sync_random_seed(0)
    dist.check_collectives("off")
    for name, call in CALLS.items():
        try:
            found[name] = [measured(call.run, rank), call.bare and measured(call.bare, rank)]
        except DistError:
            raise  # the ranks are apart
        except Exception as error:
            found[name] = repr(error)
    time.sleep(1.0)  # in which the watch asks for the last call
    found["queries without a device"] = counts()["queries without a device"]
    results.write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
