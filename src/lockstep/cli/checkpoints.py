"""`lockstep checkpoints`: list those in a folder, verify them, show one, remove old ones."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.filesize import decimal
from typer.core import TyperGroup

from lockstep.checkpoint import find_checkpoints, remove, remove_dead_drafts, verify
from lockstep.checkpoint.drafts import drafts_in, folder_of, is_owned
from lockstep.checkpoint.files import MANIFEST_FILE, is_there, sizes_in
from lockstep.checkpoint.manifest import OWN_FILES, Manifest
from lockstep.checkpoint.search import read_pointer, readable_manifest, written_at
from lockstep.checkpoint.values import check_resumable_form, decode, leaves, tagged
from lockstep.checkpoint.verifying import check, fault_found_by
from lockstep.errors import ConfigError, counted
from lockstep.location import Location, locate
from lockstep.masking import printable

_AT_URL = "Also a URL, as s3://BUCKET/NAME."
Checkpoint = Annotated[
    str, typer.Argument(metavar="CHECKPOINT", help=f"A checkpoint, as work_dirs/NAME/TIME/epoch_1. {_AT_URL}")
]
Folder = Annotated[
    str, typer.Argument(metavar="DIR", help=f"A work dir, the folder of a run, or a checkpoint. {_AT_URL}")
]


_WIDTH = 160  # columns of output that does not go to a terminal
_WIDE = 120  # columns of a terminal from which on all is shown
_COLUMNS = ("checkpoint", "written", "strategy", "whole", "epoch", "iter", "ranks", "model", "optimizer", "all")
_NEEDED = ("checkpoint", "whole", "epoch", "iter", "ranks", "all")
_TEXTS = ("checkpoint", "written", "strategy", "whole")


class _ListByDefault(TyperGroup):
    """A group of commands, of which `list` runs if the first argument names no command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the name of the command `list` before a folder."""
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            args = ["list", *args]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run a command. An OSError, as of an unreadable folder, is shown as a message, without a traceback."""
        try:
            return super().invoke(ctx)
        except OSError as error:
            raise ConfigError(str(error)) from error


checkpoints_app = typer.Typer(
    cls=_ListByDefault,
    no_args_is_help=True,
    help="Look at checkpoints: `lockstep checkpoints DIR` lists them; show one, remove old ones.",
)


@checkpoints_app.command("list")
def list_checkpoints(
    directory: Folder,
    verify_all: Annotated[
        bool, typer.Option("--verify", help="Read all bytes, and compare them with their checksums.")
    ] = False,
) -> None:
    """List the checkpoints in a folder, the newest one first.

    Shown are position, strategy, ranks, sizes, and whether each is whole: its manifest, and that its files are there.
    The exit code is 1 if one of them is not.
    """
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    root = _folder(directory)
    found = _find_or_refuse(root)
    last, faults = _read_last(root, found)
    table = Table(title=_cell(f"{counted(len(found), 'checkpoint')} in {directory}"), title_justify="left", box=SIMPLE)
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    shown = [name for name in _COLUMNS if console.width >= _WIDE or name in _NEEDED]
    for name in shown:
        table.add_column(name, justify="left" if name in _TEXTS else "right", no_wrap=name == "checkpoint")
    for one, time in found.items():
        fault = fault_found_by(verify if verify_all else check, one)
        if fault is not None and not is_there(one):
            continue  # a run has removed it meanwhile
        if fault is not None:
            faults.append(fault)
        name = _relative(one, root) + (" (last)" if one == last else "")
        whole = "no" if fault else "yes" if verify_all else "not verified"
        strategy, *numbers = _columns_of(one, readable_manifest(one))
        written = f"{datetime.fromtimestamp(time):%Y-%m-%d %H:%M}"
        row = dict(zip(_COLUMNS, [name, written, strategy, whole, *numbers], strict=True))
        table.add_row(*[_cell(row[column]) for column in shown])
    console.print(table)
    for draft in drafts_in(root):
        state = "is being written" if is_owned(draft) else "was left by an interrupted save; `prune` removes it"
        print(printable(f"{_relative(draft, root)} {state}", lines=False))
    for fault in faults:
        console.print(f"[bold red]fault:[/] {_cell(fault)}", soft_wrap=True)
    if faults:
        raise typer.Exit(1)


@checkpoints_app.command()
def show(checkpoint: Checkpoint) -> None:
    """Show what is in a checkpoint: its metadata, and its tensors by part."""
    from rich.console import Console
    from rich.table import Table

    place = locate(checkpoint)
    manifest = check(place)
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    written = {**manifest.written, "time": f"{datetime.fromtimestamp(manifest.written['time']):%Y-%m-%d %H:%M:%S}"}
    facts = Table(show_header=False, title=_cell(place), title_justify="left")
    for key, value in {**written, **_decode_meta(manifest.meta)}.items():
        facts.add_row(_cell(key), _cell(value))
    console.print(facts)
    parts = Table(title="parts", title_justify="left")
    for name in ("part", "tensors", "elements", "bytes", "dtypes", "other values"):
        parts.add_column(name, justify="left" if name in ("part", "dtypes") else "right")
    for part in manifest.state:
        tensors = [tensor for name, tensor in manifest.tensors.items() if name.partition(".")[0] == part]
        values = sum(tagged(node)[0] not in ("$tensor", "$array") for _, node in leaves(manifest.state[part]))
        elements = sum(math.prod(tensor.shape) for tensor in tensors)
        dtypes = Counter(tensor.dtype for tensor in tensors)
        parts.add_row(
            _cell(part), f"{len(tensors):,}", f"{elements:,}", decimal(sum(tensor.size for tensor in tensors)),
            ", ".join(f"{dtype} ({number})" for dtype, number in dtypes.most_common()), f"{values:,}",
        )  # fmt: skip
    console.print(parts)


@checkpoints_app.command()
def prune(
    directory: Folder,
    keep: Annotated[int, typer.Option(min=1, metavar="N", help="The number of checkpoints to keep, the newest ones.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove all checkpoints but the N newest whole ones of all runs in DIR, and what interrupted saves have left.

    A folder in which another file lies is not removed. All bytes of those that are kept are compared with their
    checksums first. The best ones by a metric (best_...) and the last one of the work dir are kept in addition, but for
    a best one of a run that a kept checkpoint goes on from, with a better one since; if the last one is damaged, it is
    named, and the exit code is 1.
    """
    root = _folder(directory)
    found = _find_or_refuse(root)
    last, faults = _read_last(root, found)
    if faults:
        raise ConfigError(f"nothing is removed, because it is not known which checkpoint is the last one: {faults[0]}")
    regular = [one for one in found if not one.name.startswith("best_")]
    whole: list[Location] = []
    damaged: list[Location] = []  # of those that are newer than the oldest one to be kept
    for path in regular:
        if len(whole) == keep:
            break
        (whole if fault_found_by(verify, path) is None else damaged).append(path)
    if not whole:
        best = "one" if len(found) - len(regular) == 1 else "ones"
        besides = f" besides the best {best}, which resuming falls back to," if len(found) > len(regular) else ""
        raise ConfigError(f"{directory} must hold a whole checkpoint{besides} to be pruned, but holds none")
    gone = {path for path in found if not is_there(path)}  # a run has removed them meanwhile
    kept = {*whole, last, *gone}
    if last is not None and last not in {*whole, *gone} and (fault := fault_found_by(verify, last)) is not None:
        faults.append(f"{fault}. It is the last one, and is not removed")
    for fault in faults:
        print(printable(f"fault: {fault}", lines=False))
    to_remove = [path for path in [*regular, *_outdone(found, whole)] if path not in kept]
    for path, other in [(path, other) for path in to_remove if (other := _foreign_file(path)) is not None]:
        to_remove.remove(path)
        print(printable(f"{_relative(path, root)} is not removed: no save has written {other} in it", lines=False))
    drafts = [draft for draft in drafts_in(root) if not is_owned(draft)]
    sizes = {path: sum(sizes_in(folder_of(path) if path in drafts else path).values()) for path in to_remove + drafts}
    for path, size in sizes.items():
        note = "  damaged" if path in damaged else "  of an interrupted save" if path in drafts else ""
        print(printable(f"{_relative(path, root)}  {decimal(size)}{note}", lines=False))
    left = ", ".join(_relative(path, root) for path in found if path not in {*sizes, *gone})
    print(printable(f"kept: {left}", lines=False))
    if not (to_remove or drafts):
        print("there is nothing to remove")
        raise typer.Exit(1 if faults else 0)
    if not yes and not typer.confirm(f"Remove {'these' if len(to_remove) + len(drafts) > 1 else 'this'}?"):
        raise typer.Exit(1)
    for path in to_remove:
        remove(path)
    remove_dead_drafts([root])
    print(f"removed {counted(len(sizes), 'folder')}, {decimal(sum(sizes.values()))}")
    if faults:
        raise typer.Exit(1)


def _outdone(found: Iterable[Location], kept: Iterable[Location]) -> list[Location]:
    """Return the best checkpoints of runs that kept ones go on from, which none of these calls the best any more."""
    best: set[tuple[str, ...]] = set()  # run and name, since a work dir may have been moved
    former: set[str] = set()
    for path in kept:
        manifest = readable_manifest(path)
        if manifest is None:
            continue
        with suppress(ValueError):  # not one of a run
            check_resumable_form(manifest.meta, manifest.state)
            state = _decode_meta(manifest.meta).get("checkpoint_hook", {"best": {}})
            best |= {tuple(one["path"].split("/")[-2:]) for one in state["best"].values()}
            former |= {one["run"] for one in state.get("former_runs", ())}
    return [
        path for path in found
        if path.name.startswith("best_") and path.parent.name in former and (path.parent.name, path.name) not in best
    ]  # fmt: skip


def _cell(value: object) -> str:
    """Return text for a table; markup and control characters in it have no effect."""
    from rich.markup import escape

    return escape(printable(str(value), lines=False))


def _find_or_refuse(directory: Location) -> dict[Location, float]:
    """Return the checkpoints in a folder, and when each was written, as it says itself, the newest one first.

    Raises:
        ConfigError: there are none, and no drafts either.
    """
    if not directory.is_dir():
        raise ConfigError(
            f"`DIR` must be a folder, but {directory} {'is a file' if directory.exists() else 'does not exist'}"
        )
    times = [(written_at(one), one) for one in find_checkpoints([directory])]
    found = {one: time for time, one in sorted(times, key=itemgetter(0), reverse=True) if _is_of_lockstep(one)}
    if not found and not any(drafts_in(directory)):
        hint = ""
        if times:
            hint = f". {times[0][1] / MANIFEST_FILE} is not of a checkpoint of lockstep, or can't be read"
        elif (below := next(filter(_holds_checkpoints, directory.iterdir()), None)) is not None:
            hint = f". {below} is the work_dir of a run that has some"
        raise ConfigError(f"`DIR` must hold checkpoints, or folders of runs that do, but {directory} has none{hint}")
    return found


def _folder(directory: str) -> Location:
    """Return the folder that a user means, in the form in which pointers lead into it."""
    found = locate(directory)
    return found.resolve() if isinstance(found, Path) else found  # `..` behind a link leads elsewhere than its text


def _is_of_lockstep(path: Location) -> bool:
    """Return whether a folder with a manifest.json is a checkpoint; others write files of that name, too."""
    return readable_manifest(path) is not None or bool(_own_files(path) - {MANIFEST_FILE})


def _holds_checkpoints(folder: Location) -> bool:
    return folder.is_dir() and any(map(_is_of_lockstep, find_checkpoints([folder])))


def _foreign_file(path: Location) -> str | None:
    """Return the name of a file in a checkpoint that no save has written."""
    return min(sizes_in(path).keys() - _own_files(path), default=None)


def _own_files(path: Location) -> set[str]:
    return {name for name in sizes_in(path) if OWN_FILES.fullmatch(name)}


def _read_last(directory: Location, found: Iterable[Location]) -> tuple[Location | None, list[str]]:
    """Return the checkpoint that a work dir, or that of a run, names as its last one, or None; and errors of that.

    Where the folder of a run was renamed, it is the newest one of that name.

    Args:
        directory: the work dir, or the folder of a run.
        found: the checkpoints in it, the newest one first.
    """
    try:
        last = read_pointer(directory) or read_pointer(directory.parent)
    except ConfigError as error:
        return None, [str(error)]
    if last is None or is_there(last):
        return last, []
    return next((one for one in found if one.name == last.name), last), []


def _columns_of(directory: Location, manifest: Manifest | None) -> list[str]:
    """Return strategy, epoch, iteration, ranks, and the bytes of the model, of the optimizer and of all."""
    if manifest is None:
        return [*[""] * 6, decimal(sum(sizes_in(directory).values()))]
    meta = _decode_meta(manifest.meta)
    sizes: Counter[str] = Counter()
    for name, tensor in manifest.tensors.items():
        sizes[name.partition(".")[0]] += tensor.size
    return [
        str(meta.get("strategy", "")).removesuffix("Strategy"),
        *(str(meta.get(key, "")) for key in ("epoch", "iter")),
        str(manifest.written.get("ranks", "")),
        *(decimal(sizes[part]) for part in ("model", "optimizer")),
        decimal(sum(file.size for file in manifest.files.values())),
    ]


def _decode_meta(meta: Any) -> dict[str, Any]:
    """Return metadata as values to show, without dtypes, which need torch; empty if they cannot be decoded."""
    with suppress(ConfigError):  # a nested dtype
        return dict(decode({key: value for key, value in meta.items() if tagged(value)[0] != "$dtype"}))
    return {}


def _relative(path: Location, directory: Location) -> str:
    if path == directory:
        return path.name
    # Both are on a disk, or both in one bucket.
    return str(path.relative_to(directory))  # type: ignore[arg-type]
