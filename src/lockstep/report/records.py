"""The records in a run's folder."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from lockstep.errors import ConfigError, counted, listed
from lockstep.masking import mask_text, mask_value

Record: TypeAlias = Mapping[str, Any]

_RECORDS = "metrics.jsonl"
MODES = ("val", "test")  # of evaluations
_NOT_FINITE = {"nan", "inf", "-inf"}
_LARGEST = 1e300  # sums of larger numbers, and percentages, may be infinite


@dataclass(frozen=True, slots=True)
class RunRecords:
    """The records of one run, and of the runs that it resumed, in order, as if there had been one.

    Attributes:
        folder: the run's folder.
        resumed: the folder of each run that was resumed, and the iteration that it was resumed after, in order.
        train: means over a few iterations each.
        evaluations: metrics of validations and tests.
        stragglers: ranks that were slow, or no longer are; see `lockstep.diagnostics.slow_ranks`.
        failed: how the run has failed; None if it has not, or by a kill, which leaves no record.
        environment: host, devices and versions of the run.
        config: the config as Python source.
        faults: one line for each file that could not be read completely.
    """

    folder: Path
    resumed: list[tuple[Path, int]]
    train: list[Record]
    evaluations: list[Record]
    stragglers: list[Record]
    failed: Record | None
    environment: Record
    config: str
    faults: list[str]

    def evaluated(self, mode: str) -> list[Record]:
        """Return the evaluations of one mode."""
        return [record for record in self.evaluations if record["mode"] == mode]

    def unit(self, metric: str) -> str:
        """Return the unit of a metric, or an empty string if none is recorded."""
        units = self.environment.get("units")
        return str(units.get(metric, "")) if isinstance(units, dict) else ""

    @property
    def counted_in(self) -> str:
        """What the batches of the training are counted in: samples, or units of a `batch_size_of`."""
        return "units" if self.environment.get("counted_in") == "units" else "samples"


def find_run(path: Path) -> Path:
    """Return the folder of a run: `path` itself, or, for a work_dir, that of the run with the latest record.

    Trainings come before runs that only test or predict.

    Raises:
        ConfigError: `path` is not a folder, or holds no run.
    """
    if not path.exists():
        raise ConfigError(f"there is no folder `{path}`")
    if not path.is_dir():
        raise ConfigError(f"`RUN_DIR` must be the folder of a run, but `{path}` is a file")
    if (path / _RECORDS).is_file():
        return path
    runs = [folder for folder in path.iterdir() if (folder / _RECORDS).is_file()]
    if not runs:
        logs = [one for one in (path / "log.txt", *path.glob("*/log.txt")) if one.is_file()]
        last = max(logs, key=lambda one: one.stat().st_mtime, default=None)
        raise ConfigError(
            f"`{path}` holds no run: there is no {_RECORDS} in it or in a folder of it. "
            + ("The folder of a run is what `lockstep train` names at its end" if last is None else f"See {last}")
        )
    runs = [folder for folder in runs if _has_trained(folder)] or runs
    return max(runs, key=lambda folder: ((folder / _RECORDS).stat().st_mtime, folder.name))


def _has_trained(folder: Path) -> bool:
    return any(record["mode"] == "train" for record in _json_lines(folder / _RECORDS, []))


def read_run(folder: Path) -> RunRecords:
    """Read the records of a run, and those up to where it began of the runs that it resumed.

    Unreadable lines are left out and listed in `faults`.

    Raises:
        ConfigError: there is no record.
    """
    faults: list[str] = []
    records = list(_json_lines(folder / _RECORDS, faults))
    if not records:
        found = f", only what cannot be read ({faults[0]})" if faults else ""
        raise ConfigError(f"`{folder / _RECORDS}` has no record yet{found}; there is nothing to show of this run")
    config = folder / "config.py"
    failed = next((record for record in reversed(records) if record["mode"] == "failed"), None)
    resumed: list[tuple[Path, int]] = []
    before, at = _resumed(folder, records)
    while before is not None and before not in [folder.resolve(), *(run for run, _ in resumed)]:
        unreadable: list[str] = []
        earlier = list(_json_lines(before / _RECORDS, unreadable))
        resumed.insert(0, (before, at))
        # What came after the checkpoint was lost, and done again. A validation at it may have been.
        again = {(record["mode"], record["iter"]) for record in records}
        records[:0] = [one for one in earlier if one["iter"] <= at and (one["mode"], one["iter"]) not in again]
        if not earlier:
            faults.append(f"what came before iteration {at} is missing: `{before}`, which was resumed, has no record")
        faults += [f"{before.name}/{fault}" for fault in unreadable]
        before, at = _resumed(before, earlier)
    return RunRecords(
        folder=folder,
        resumed=resumed,
        train=[record for record in records if record["mode"] == "train"],
        evaluations=[record for record in records if record["mode"] in MODES],
        stragglers=[record for record in records if record["mode"] == "straggler"],
        failed=failed,
        # Masked also here: another library or an earlier version may have written them.
        environment=mask_value(_json_object(folder / "environment.json", faults)),
        config=mask_text(config.read_text(encoding="utf-8", errors="replace")) if config.is_file() else "",
        faults=faults,
    )


def _resumed(folder: Path, records: list[Record]) -> tuple[Path | None, int]:
    """Return the folder of the run whose checkpoint a run resumed, and the iteration of that; None if it began anew."""
    for record in records:
        if record["mode"] == "resumed" and isinstance(record.get("path"), str):
            run = Path(record["path"]).parent
            # Runs of one work_dir may have been moved together; that of another one may have begun in the same second.
            beside = folder.resolve().parent / run.name
            with suppress(OSError, ValueError):  # somebody else's records may have what is no path here
                return (beside if beside.is_dir() and not run.is_dir() else run).resolve(), record["iter"]
    return None, 0


def number(value: object) -> float | None:
    """Return a recorded value as a float, including "nan" and "inf"; None if it is not a number, or is too large.

    Example:
        >>> number(3), number("nan"), number("seven"), number(10**400)
        (3.0, nan, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, str) and value not in _NOT_FINITE:
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return None if _LARGEST < abs(found) < math.inf else found


def _json_lines(path: Path, faults: list[str]) -> Iterator[Record]:
    """Yield the records of a JSON Lines file: objects that have a mode and an iteration."""
    if not path.is_file():
        return
    broken = []
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line_number, line in enumerate(lines, start=1):
            record = _object_in(line) or {}
            mode, iteration = record.get("mode"), record.get("iter")
            if isinstance(mode, str) and isinstance(iteration, int) and number(iteration) is not None:
                yield record
            elif line.strip():
                broken.append(line_number)
    if broken:
        faults.append(f"{path.name}: {counted(len(broken), 'unreadable line')} left out ({listed(broken)})")


def _json_object(path: Path, faults: list[str]) -> Record:
    if not path.is_file():
        return {}
    found = _object_in(path.read_text(encoding="utf-8", errors="replace"))
    if found is None:
        faults.append(f"{path.name}: unreadable, left out")
    return found or {}


def _object_in(text: str) -> Record | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
