"""`lockstep doctor` and `lockstep strategies`: what this machine has, whether its ranks can connect, what works."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

import typer

from lockstep.errors import TopologyError
from lockstep.launch import JobSpec
from lockstep.topology import infer_launcher, read_topology
from lockstep.version import __version__

_OPTIONAL = ("scikit-learn", "deepspeed", "colossalai", "tensorboard", "mlflow", "wandb", "pytest")


def doctor() -> None:
    """Show versions, launcher, accelerators and backends, and test the loopback interface."""
    _print_table(
        "lockstep doctor",
        {
            "lockstep": __version__,
            "python": f"{platform.python_version()} on {platform.platform()}",
            "torch": _version("torch"),
            "cores": str(os.cpu_count()),
            "launcher": _launcher(),
            "optional": ", ".join(f"{name} {_version(name)}" for name in _OPTIONAL),
        },
    )
    try:
        loopback, works = _loopback()
        _print_table(
            "as torch finds it",
            {"accelerators": _accelerators(), "backends": _backends(), "loopback": loopback},
            wrong="" if works else "loopback",
        )
    except ImportError as error:
        works = False
        _print_table("as torch finds it", {"torch": f"cannot be imported: {error}"}, wrong="torch")
    if not works:
        raise typer.Exit(1)


def strategies() -> None:
    """Show the strategies: their names, the packages they need, what works here, and what does not and why."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from lockstep.strategy.survey import survey_strategies  # imports torch, and the engines that are installed

    table = Table(title="strategy=..., or --strategy ...", title_justify="left", show_lines=True)
    table.add_column("name", style="bold")
    table.add_column("package")
    table.add_column("works here")
    table.add_column("refused here, and what to do instead", overflow="fold", ratio=1)
    for standing in survey_strategies():
        reasons = [f"{variant}: {reason}" if variant else reason for variant, reason in standing.refused.items()]
        table.add_row(
            standing.name,
            f"{standing.package} {standing.version or '-'}",
            "\n".join(standing.works) or "[bold red]no[/]",
            escape("\n".join(reasons)),
        )
    Console().print(table)


def _print_table(title: str, rows: Mapping[str, str], wrong: str = "") -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_header=False, title=title, title_justify="left")
    table.add_column(style="bold", min_width=len("accelerators"))
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, escape(value), style="bold red" if name == wrong else None)
    Console().print(table)


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

    names = ("gloo", "nccl", "mpi", "ucc", "xccl")
    return ", ".join(name for name in names if getattr(dist, f"is_{name}_available")()) or "none"


def _launcher() -> str:
    try:
        launcher = infer_launcher(os.environ)
        if launcher == "none":
            return "none: lockstep starts its own ranks"
        at = read_topology(os.environ, launcher)
    except TopologyError as error:
        return f"contradictory: {error}"
    return f"{launcher}: rank {at.rank} of {at.world_size}, node {at.node_rank} of {at.num_nodes}"


def _loopback() -> tuple[str, bool]:
    """Connect to a store on this machine as the ranks of a job do; return the result in words, and whether it works."""
    from torch.distributed import TCPStore
    from torch.distributed.elastic.rendezvous import RendezvousError

    from lockstep.launch.network import LOOPBACK, interface_towards
    from lockstep.launch.rendezvous import NodesRendezvous

    rendezvous = NodesRendezvous(JobSpec(), timeout_seconds=5.0, say=print)
    try:
        meeting = rendezvous.next_rendezvous().bootstrap_store_info
        assert meeting is not None
        TCPStore(LOOPBACK, meeting.master_port, is_master=False, wait_for_workers=False).set("hello", "")
    except (OSError, RuntimeError, RendezvousError) as error:
        return f"ranks cannot meet at {LOOPBACK}: {error}", False
    finally:
        rendezvous.shutdown()
    return f"works ({LOOPBACK}, interface {interface_towards(LOOPBACK) or 'not known'})", True


def _version(package: str) -> str:
    with suppress(PackageNotFoundError):
        return version(package)
    return "-"
