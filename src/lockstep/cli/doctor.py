"""`lockstep doctor` and `lockstep strategies`: what this machine has, whether its ranks can connect, what works."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import typer

from lockstep.cli.errors import print_error
from lockstep.errors import ConfigError, TopologyError, counted
from lockstep.launch import JobSpec
from lockstep.topology import infer_launcher, read_topology
from lockstep.version import __version__

_OPTIONAL = (
    *("scikit-learn", "deepspeed", "colossalai", "pytest", "tensorboard", "mlflow", "wandb"),
    *("comet-ml", "aim", "clearml", "neptune", "dvclive"),
)


def doctor() -> None:
    """Show versions, launcher, accelerators and backends, and test the loopback interface.

    The exit code is 1 if something contradicts itself or does not work.
    """
    launcher, variables = _launcher(), _variables(os.environ)
    _print_table(
        "lockstep doctor",
        {
            "lockstep": _Finding(__version__),
            "python": _Finding(f"{platform.python_version()} on {platform.platform()}"),
            "torch": _Finding(_version("torch")),
            "cores": _Finding(str(os.cpu_count())),
            "launcher": launcher,
            "variables": variables,
            "optional": _Finding(", ".join(f"{name} {_version(name)}" for name in _OPTIONAL)),
        },
    )
    findings = {"launcher": launcher, "variables": variables}
    try:
        by_torch = {"accelerators": _accelerators(os.environ), "backends": _backends(), "loopback": _loopback()}
    except ImportError as error:
        by_torch = {"torch": _Finding(f"cannot be imported: {error}", works=False)}
    _print_table("as torch finds it", by_torch)
    wrong = [name for name, finding in (findings | by_torch).items() if not finding.works]
    if wrong:
        print_error(ConfigError(f"{counted(len(wrong), 'fault')}, see above: {', '.join(wrong)}"))
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


class _Finding(NamedTuple):
    """What was found, in words, and whether it is as it should be."""

    text: str
    works: bool = True


def _print_table(title: str, rows: Mapping[str, _Finding]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_header=False, title=title, title_justify="left")
    table.add_column(style="bold", min_width=len("accelerators"))
    table.add_column(overflow="fold")
    for name, finding in rows.items():
        table.add_row(name, escape(finding.text), style=None if finding.works else "bold red")
    Console().print(table)


def _launcher() -> _Finding:
    try:
        launcher = infer_launcher(os.environ)
        if launcher == "none":
            return _Finding("none: lockstep starts its own ranks")
        at = read_topology(os.environ, launcher)
    except TopologyError as error:
        return _Finding(f"contradictory: {error}", works=False)
    return _Finding(f"{launcher}: rank {at.rank} of {at.world_size}, node {at.node_rank} of {at.num_nodes}")


def _variables(env: Mapping[str, str]) -> _Finding:
    """Check variables that torch, OpenMP and gloo read without telling what is wrong with them."""
    faults = []
    port = env.get("MASTER_PORT", "1")  # if a launcher is found, it is read with the launcher's variables
    if infer_launcher(env) == "none" and not (port.isascii() and port.isdecimal() and 0 < int(port) < 2**16):
        faults.append(f"MASTER_PORT must be a port from 1 to 65535, but is {port!r}. Unset it, or choose a free one")
    threads = env.get("OMP_NUM_THREADS", "1")
    if not all(number.strip().isdecimal() and int(number) > 0 for number in threads.split(",")):
        faults.append(f"OMP_NUM_THREADS must be a number of threads, at least 1, but is {threads!r}. Unset it")
    known = [name for _, name in socket.if_nameindex()]
    faults += [
        f"GLOO_SOCKET_IFNAME must be one of {', '.join(known)}, but is {name!r}. Unset it"
        for name in env.get("GLOO_SOCKET_IFNAME", "").split(",")
        if name not in ("", *known)
    ]
    return _Finding("\n".join(faults), works=False) if faults else _Finding("no contradictions")


def _accelerators(env: Mapping[str, str]) -> _Finding:
    import torch

    wanted = [name for name in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    found = torch.cuda.device_count()
    if wanted and wanted[0].strip() not in ("-1", "NoDevFiles") and found < len(wanted):
        has_gpus = torch.version.cuda is not None or torch.version.hip is not None
        why = f"torch finds {found}" if has_gpus else "this torch is built without CUDA"
        return _Finding(
            f"CUDA_VISIBLE_DEVICES names {counted(len(wanted), 'device')}, {env['CUDA_VISIBLE_DEVICES']!r}, but "
            f"{why}. Unset it, or see what nvidia-smi shows",
            works=False,
        )
    if not torch.accelerator.is_available():
        return _Finding("none: ranks compute on the CPU")
    kind = torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count()
    module = torch.get_device_module(kind)
    names = [str(getattr(module, "get_device_name", str)(index)) for index in range(count)]
    return _Finding(f"{count} x {kind} ({', '.join(sorted(set(names)))})")


def _backends() -> _Finding:
    import torch.distributed as dist

    if not dist.is_available():
        return _Finding(
            "none: this torch is built without torch.distributed. Install one from pytorch.org", works=False
        )
    names = ("gloo", "nccl", "mpi", "ucc", "xccl")
    found = [name for name in names if getattr(dist, f"is_{name}_available")()]
    if "gloo" not in found:
        with_gloo = "lockstep needs gloo, with which this torch is not built. Install one from pytorch.org"
        return _Finding(f"{', '.join(found) or 'none'}: {with_gloo}", works=False)
    return _Finding(", ".join(found))


def _loopback() -> _Finding:
    """Connect to a store on this machine as the ranks of a job do."""
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
        return _Finding(f"ranks cannot meet at {LOOPBACK}: {error}", works=False)
    finally:
        rendezvous.shutdown()
    return _Finding(f"works ({LOOPBACK}, interface {interface_towards(LOOPBACK) or 'not known'})")


def _version(package: str) -> str:
    with suppress(PackageNotFoundError):
        return version(package)
    return "-"
