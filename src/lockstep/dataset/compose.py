"""`Compose`: a chain of transforms of one sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from lockstep.registry import TRANSFORMS, Registry

Transform = Callable[[Any], Any]


@TRANSFORMS.register_module()
class Compose:
    """A chain of transforms that are applied to a sample in order.

    Args:
        transforms: functions of a sample, or configs of such functions in the registry `TRANSFORMS`. If one returns
            None, the chain ends there: the sample is dropped.

    Attributes:
        registry: from which configs are built; a subclass may have another.

    Example:
        >>> Compose([lambda sample: sample + 1, lambda sample: sample * 2])(3)
        8
    """

    registry: ClassVar[Registry] = TRANSFORMS

    def __init__(self, transforms: Sequence[Transform | Mapping[str, Any]] | None) -> None:
        self.transforms: list[Transform] = []
        for item in transforms or ():
            transform = self.registry.build(item) if isinstance(item, Mapping) else item
            if not callable(transform):
                raise TypeError(f"`transforms` must hold functions and config dicts, but hold {transform!r}")
            self.transforms.append(transform)

    def __call__(self, data: Any) -> Any:
        """Return the transformed sample, or None if a transform returned None."""
        for transform in self.transforms:
            data = transform(data)
            if data is None:
                return None
        return data

    def __repr__(self) -> str:
        return f"Compose({', '.join(map(repr, self.transforms))})"
