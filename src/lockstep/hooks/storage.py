"""A check that hooks write through the file system only."""

from __future__ import annotations

from lockstep.errors import ConfigError


def check_local(what: str, **given: object) -> None:
    """Refuse MMEngine's arguments for storage backends, unless they are None or name the local backend.

    Raises:
        ConfigError: an argument names another backend.
    """
    for name, value in given.items():
        if value is not None and value != {"backend": "local"}:
            raise ConfigError(
                f"`{name}` must be None, but is {value!r}: {what} are written through the file system. Mount the "
                "storage, and give its folder as the Runner's `work_dir`. Checkpoints may go to a URL, by `out_dir` of "
                "CheckpointHook"
            )
