"""Agreement between ranks: is everybody calling the same thing?"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import count
from typing import Final, Literal, TypeAlias, cast
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.distributed import ProcessGroup

from lockstep.dist.groups import Group
from lockstep.dist.slots import swap_slots
from lockstep.errors import CollectiveMismatchError

CheckMode: TypeAlias = Literal["off", "sample", "always"]

_MODES = ("off", "sample", "always")
_SLOT_BYTES = 256
_SAMPLE_FIRST, _SAMPLE_EVERY = 20, 100
_LENGTH = struct.Struct("<H")
_UNWATCHED: Final = nullcontext()

_mode: CheckMode = "off"
_calls: WeakKeyDictionary[ProcessGroup, count[int]] = WeakKeyDictionary()


def check_collectives(mode: CheckMode | str = "always") -> None:
    """Choose how often ranks compare what they call before they call it.

    Ranks that call different collectives, or the same one with other shapes, abort each other or hang; a check turns
    that into a `CollectiveMismatchError` on every rank that lists what each of them called.

    Args:
        mode: ``"off"`` (as at the start), ``"always"``, or ``"sample"``: the first 20 calls of each group and every
            hundredth after. The environment variable ``LOCKSTEP_CHECK`` sets the mode when `init_dist` is called.

    **Collective**: every rank, at the same place; nothing is sent. **Cost**: of a checked call, one message of 256
    bytes from every rank to every rank.

    **Example (2 ranks)**::

        >>> from lockstep.dist import all_reduce, check_collectives, get_rank
        >>> check_collectives("always")
        >>> try:
        ...     all_reduce(torch.ones(2 + get_rank()))
        ... except CollectiveMismatchError as error:
        ...     "rank 1: all_reduce(float32[3], sum)" in str(error)
        True
        >>> check_collectives("off")
    """
    global _mode
    if mode not in _MODES:
        raise ValueError(f"`mode` must be one of {', '.join(_MODES)}, but is {mode!r}")
    _mode = cast(CheckMode, mode)


def check_mode() -> CheckMode:
    """Return what `check_collectives` has chosen."""
    return _mode


def check_call(name: str, here: Group, *arguments: object) -> None:
    """Compare this call with every rank's, if the mode says so.

    **Raises**: CollectiveMismatchError, on every rank.
    """
    if _mode != "off":
        _compare(f"{name}({', '.join(map(_described, arguments))})", here)


def watch(name: str, here: Group) -> AbstractContextManager[None]:
    """Return a context for the checks of a call's arguments, before `check_call`.

    Where they refuse the call on this rank, the others learn it by their `check_call`, if the mode says so.
    """
    return _UNWATCHED if _mode == "off" else _telling_refusals(name, here)


@contextmanager
def _telling_refusals(name: str, here: Group) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError) as error:
        with suppress(CollectiveMismatchError):  # this rank has an error of its own
            _compare(f"{name}, refused: {type(error).__name__}: {error}", here)
        raise


def _compare(call: str, here: Group) -> None:
    if here.pg is None or not _is_due(here.pg):
        return
    text = call.encode(errors="replace")[: _SLOT_BYTES - _LENGTH.size]
    slot = bytearray(_SLOT_BYTES)
    _LENGTH.pack_into(slot, 0, len(text))
    slot[_LENGTH.size : _LENGTH.size + len(text)] = text
    calls = [_text_of(other) for other in swap_slots(slot, here)]
    if len(set(calls)) > 1:
        table = "\n".join(f"  rank {rank}: {other}" for rank, other in enumerate(calls))
        raise CollectiveMismatchError(
            f"all ranks must call the same collective with arguments that belong together, but call\n{table}"
        )


def _is_due(pg: ProcessGroup) -> bool:
    if _mode == "always":
        return True
    number = next(_calls.setdefault(pg, count()))
    return number < _SAMPLE_FIRST or number % _SAMPLE_EVERY == 0


def _text_of(slot: memoryview) -> str:
    (length,) = _LENGTH.unpack_from(slot)
    return bytes(slot[_LENGTH.size : _LENGTH.size + length]).decode(errors="replace")


def _described(argument: object) -> str:
    if isinstance(argument, Tensor):
        dims = ", ".join(map(str, argument.shape))
        return f"{str(argument.dtype).removeprefix('torch.')}[{dims}]"
    return str(argument)
