"""`lockstep doctor`: what a machine has, what the ranks of a job have in common, and what contradicts itself."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from lockstep.cli.doctor import machine
from lockstep.cli.doctor.finding import Finding, as_json, print_table, run_check
from lockstep.cli.jobs import check_ranks_found
from lockstep.cli.options import RankOptions, print_error
from lockstep.errors import ConfigError, LaunchError, LockstepError, counted
from lockstep.launch import JobSpec, launch
from lockstep.topology import Topology, topology_if_known

_TITLE = "lockstep doctor"
_GLOO = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True, kw_only=True)
class Doctor(RankOptions):
    """Show what this machine has for a training, and what contradicts itself or does not work, with a remedy.

    Alone it looks at versions, launcher, variables, host, interfaces, MASTER_PORT, shared memory, limits, cores,
    accelerators and backends. With --nproc, or started by torchrun, mpirun, srun or lockstep launch, the ranks also
    meet and compare what they have. The exit code is 1 after a fault, which is something that contradicts itself or
    cannot work, and 0 after warnings.
    """

    json_: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False
    timeout: Annotated[
        int, typer.Option(min=1, metavar="SECONDS", help="How long ranks, and machines, wait for each other.")
    ] = 60

    def run(self) -> None:
        """Look, and print what was found."""
        spec, at = self.job_spec(), topology_if_known(os.environ)
        if at.world_size > 1:
            check_ranks_found(at.launcher, self)
            self._look_over_ranks(at)
        elif spec.nproc > 1 or spec.nnodes > 1:
            self._start_ranks(replace(spec, rdzv_timeout_seconds=self.timeout))
        else:
            found = [*_own_findings(os.environ), *_torch_findings(os.environ)]
            self._print(found, world_size=1)
            self._end(found)

    def _look_over_ranks(self, at: Topology) -> None:
        """Look as a rank of a job; rank 0 prints."""
        own = _own_findings(os.environ)
        try:
            found = findings_over_ranks(own, self.timeout)
        except (ImportError, LockstepError, OSError, RuntimeError, ValueError) as error:
            met = Finding("meeting", f"the ranks cannot meet: {error}", "fault", ranks=(at.rank,))
            if at.rank == 0 or (at.local_rank == 0 and not self.json_):
                self._print([*(one for one in own if at.rank == 0 or one.status != "ok"), met], at.world_size)
            else:  # the first rank of a node may have met nobody, or not be there at all
                print_error(ConfigError(f"rank {at.rank} of {at.world_size}: {met.text}"))
            raise typer.Exit(1) from None
        if at.rank == 0:
            self._print(found, at.world_size)
        sys.stdout.flush()
        self._end(found, prints=at.rank == 0)

    def _start_ranks(self, spec: JobSpec) -> None:
        """Start ranks that look together, and print what they have found on node 0."""
        with TemporaryDirectory(prefix="lockstep-") as folder:
            file = Path(folder, "found.json")
            payload = json.dumps(
                {"job": "Doctor", "file": str(file), "timeout": self.timeout, "gloo": os.environ.get(_GLOO)}
            )
            try:
                launch(["-m", "lockstep.cli.rank"], spec, payload=payload)
            except LaunchError as error:
                own = {one.name: one for one in _own_findings(os.environ)}
                if spec.nnodes > 1:
                    number = spec.endpoint()[1]
                    own["port"] = Finding("port", f"{number} (--rdzv), where node 0 listens", facts={"port": number})
                met = Finding("meeting", str(error), "fault")
                self._print([*own.values(), met], spec.nproc * spec.nnodes)
                raise
            if self.node_rank != 0:  # rank 0 has written the file on node 0
                return
            known = json.loads(file.read_text(encoding="utf-8"))
        found = [Finding.of(one) for one in known["findings"]]
        self._print(found, known["world_size"])
        self._end(found)

    def _print(self, found: Sequence[Finding], world_size: int) -> None:
        """Print what was found; of what other ranks than 0 have found alone, only what is wrong."""
        if self.json_:
            print(as_json(found, world_size))
            return
        title = _TITLE + (f" over {world_size} ranks" if world_size > 1 else "")
        shown = [one for one in found if one.status != "ok" or not one.ranks or 0 in one.ranks]
        print_table(title, shown, world_size)

    def _end(self, findings: Sequence[Finding], *, prints: bool = True) -> None:
        """Exit with code 1 if there are faults, and name them."""
        names = list(dict.fromkeys(finding.name for finding in findings if finding.status == "fault"))
        if not names:
            return
        if prints and not self.json_:
            print_error(ConfigError(f"{counted(len(names), 'fault')}, see above: {', '.join(names)}"))
        raise typer.Exit(1)


def findings_over_ranks(own: Sequence[Finding], timeout: float) -> list[Finding]:
    """Join the other ranks, and return what all of them have found.

    **Collective**: every rank of the job.

    Args:
        own: what this rank has found without torch.
        timeout: how many seconds to wait for other ranks.
    """
    from lockstep.cli.doctor.over_ranks import examine  # imports torch
    from lockstep.dist import destroy_dist, init_dist

    init_dist(timeout=timeout)
    try:
        return examine([*own, *_torch_findings(os.environ)])
    finally:
        destroy_dist()


def look_as_rank(asked: Mapping[str, Any]) -> None:
    """Look as a rank that `lockstep doctor` has started; rank 0 writes what was found to the file that it was told."""
    # What the launcher has set is not the user's to unset.
    env = {name: value for name, value in os.environ.items() if name != _GLOO or asked["gloo"] is not None}
    found = findings_over_ranks(_own_findings(env), asked["timeout"])
    at = topology_if_known(os.environ)
    if at.rank == 0:
        Path(asked["file"]).write_text(as_json(found, at.world_size), encoding="utf-8")


def _own_findings(env: Mapping[str, str]) -> list[Finding]:
    """Return what this process finds without torch."""
    of_host = (machine.cores, machine.launcher, machine.variables, machine.host)
    checks = (*of_host, machine.interfaces, machine.port, machine.shared_memory, machine.limits)
    return [*machine.versions(), *(run_check(check, env) for check in checks)]


def _torch_findings(env: Mapping[str, str]) -> list[Finding]:
    """Return what this process finds by torch."""
    try:
        return [machine.accelerators(env), machine.backends(env)]
    except ImportError as error:
        return [Finding("torch", f"cannot be imported: {error}", "fault", "Install it from pytorch.org.")]
