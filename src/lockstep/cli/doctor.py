"""`lockstep doctor`: what this machine has, and whether ranks can meet on it."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import typer

from lockstep.errors import TopologyError
from lockstep.topology import infer_launcher, read_topology
from lockstep.version import __version__

_OPTIONAL = ("scikit-learn", "deepspeed", "colossalai", "tensorboard", "mlflow", "wandb", "pytest")


def doctor() -> None:
    """Show versions, accelerators, backends and launcher, and try the loopback interface."""
    from rich.console import Console
    from rich.table import Table

    meeting, works = _loopback()
    table = Table(show_header=False, title="lockstep doctor", title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("lockstep", __version__)
    table.add_row("python", f"{platform.python_version()} on {platform.platform()}")
    table.add_row("torch", version("torch"))
    table.add_row("cores", str(os.cpu_count()))
    table.add_row("accelerators", _accelerators())
    table.add_row("backends", _backends())
    table.add_row("launcher", _launcher())
    table.add_row("loopback", meeting, style=None if works else "bold red")
    table.add_row("optional", ", ".join(map(_package, _OPTIONAL)))
    Console().print(table)
    if not works:
        raise typer.Exit(1)


def _accelerators() -> str:
    import torch

    if not torch.accelerator.is_available():
        return "none: ranks compute on the CPU"
    kind = torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count()
    module = torch.get_device_module(kind)
    names = [str(getattr(module, "get_device_name", str)(index)) for index in range(count)]
    return f"{count} x {kind} ({', '.join(sorted(set(names)))})"


def _backends() -> str:
    import torch.distributed as dist

    there = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
        "ucc": dist.is_ucc_available(),
        "xccl": dist.is_xccl_available(),
    }
    return ", ".join(name for name, available in there.items() if available) or "none"


def _launcher() -> str:
    try:
        launcher = infer_launcher(os.environ)
        if launcher == "none":
            return "none: lockstep starts its own ranks"
        topology = read_topology(os.environ, launcher)
    except TopologyError as error:
        return f"contradictory: {error}"
    return (
        f"{launcher}: rank {topology.rank} of {topology.world_size}, node {topology.node_rank} of {topology.num_nodes}"
    )


def _loopback() -> tuple[str, bool]:
    """Meet ourselves in a store, as the ranks of a job on this machine would."""
    from torch.distributed import TCPStore

    from lockstep.launch.loopback import LoopbackRendezvous
    from lockstep.launch.network import LOOPBACK, interface_towards

    rendezvous = LoopbackRendezvous("doctor")
    try:
        rendezvous.next_rendezvous()
        TCPStore(LOOPBACK, rendezvous.port, is_master=False, wait_for_workers=False).set("hello", "")
    except (OSError, RuntimeError) as error:
        return f"ranks cannot meet at {LOOPBACK}: {error}", False
    finally:
        rendezvous.shutdown()
    return f"works ({LOOPBACK}, interface {interface_towards(LOOPBACK) or 'not known'})", True


def _package(name: str) -> str:
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return f"{name} -"
