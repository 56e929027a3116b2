"""What torch finds on this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from lockstep.cli.doctor.finding import Finding
from lockstep.errors import counted
from lockstep.launch import JobSpec


def accelerators(env: Mapping[str, str]) -> Finding:
    """Check that torch finds the devices that the variables name."""
    import torch

    wanted = [name for name in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    found = torch.cuda.device_count()
    if wanted and wanted[0].strip() not in ("-1", "NoDevFiles") and found < len(wanted):
        has_gpus = torch.version.cuda is not None or torch.version.hip is not None
        why = f"torch finds {found}" if has_gpus else "this torch is built without CUDA"
        says = (
            f"CUDA_VISIBLE_DEVICES names {counted(len(wanted), 'device')}, {env['CUDA_VISIBLE_DEVICES']!r}, but {why}"
        )
        return Finding("accelerators", says, "fault", "Unset it, or see what nvidia-smi shows.", {"count": found})
    if not torch.accelerator.is_available():
        return Finding("accelerators", "none: ranks compute on the CPU", facts={"count": 0})
    kind = torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count()
    module: Any = torch.get_device_module(kind)
    names = [str(getattr(module, "get_device_name", str)(index)) for index in range(count)]
    text = f"{count} x {kind} ({', '.join(sorted(set(names)))})"
    return Finding("accelerators", text, facts={"count": count, "kind": str(kind), "names": names})


def backends(env: Mapping[str, str]) -> Finding:
    """Check that torch has gloo."""
    import torch.distributed as dist

    remedy = "Install one from pytorch.org."
    if not dist.is_available():
        return Finding("backends", "none: this torch is built without torch.distributed", "fault", remedy)
    names = ("gloo", "nccl", "mpi", "ucc", "xccl")
    found = [name for name in names if getattr(dist, f"is_{name}_available")()]
    facts = {"backends": found}
    if "gloo" in found:
        return Finding("backends", ", ".join(found), facts=facts)
    lacks = "lockstep needs gloo, with which this torch is not built"
    return Finding("backends", f"{', '.join(found) or 'none'}: {lacks}", "fault", remedy, facts)


def loopback(env: Mapping[str, str]) -> Finding:
    """Connect to a store on this machine as the ranks of a job do."""
    from torch.distributed import TCPStore
    from torch.distributed.elastic.rendezvous import RendezvousError

    from lockstep.launch.job import LOOPBACK, interface_towards
    from lockstep.launch.rendezvous import NodesRendezvous

    rendezvous = NodesRendezvous(JobSpec(), timeout_seconds=5.0, say=print)
    try:
        meeting = rendezvous.next_rendezvous().bootstrap_store_info
        assert meeting is not None
        TCPStore(LOOPBACK, meeting.master_port, is_master=False, wait_for_workers=False).set("hello", "")
    except (OSError, RuntimeError, RendezvousError) as error:
        return Finding("loopback", f"ranks cannot meet at {LOOPBACK}: {error}", "fault")
    finally:
        rendezvous.shutdown()
    return Finding("loopback", f"works ({LOOPBACK}, interface {interface_towards(LOOPBACK) or 'not known'})")


def device() -> dict[str, str]:
    """Return the device of this rank: what it is called, and what tells it from others on the same host."""
    import torch

    if not torch.accelerator.is_available():
        return {"device": "cpu", "id": "", "name": ""}
    kind = torch.accelerator.current_accelerator()
    index = torch.accelerator.current_device_index()
    module: Any = torch.get_device_module(kind)
    named = str(getattr(module, "get_device_name", lambda _: kind)(index))
    properties = getattr(module, "get_device_properties", lambda _: None)(index)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return {"device": f"{kind}:{index}", "id": str(getattr(properties, "uuid", f"{visible} {index}")), "name": named}
