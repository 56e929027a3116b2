"""A config as a table of options, as experiment trackers compare them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lockstep.config import Config
from lockstep.config.source_form import plain_data


def flat_options(config: Config) -> dict[str, Any]:
    """Return the values of a config by dotted keys; classes by the names they are imported under.

    Example:
        >>> flat_options(Config(dict(model=dict(depths=[2, 4]), seed=None)))
        {'model.depths.0': 2, 'model.depths.1': 4, 'seed': None}
    """
    return dict(_leaves("", plain_data(config)))


def _leaves(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        items = value.items()
    elif isinstance(value, list) and value:
        items = {str(index): item for index, item in enumerate(value)}.items()
    else:
        yield prefix, value
        return
    for key, item in items:
        yield from _leaves(f"{prefix}.{key}" if prefix else key, item)
