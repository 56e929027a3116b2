"""`InstanceData`: fields with one entry per instance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lockstep.structures
from lockstep.structures.instances import Index as IndexType
from mmengine.structures.base_data_element import BaseDataElement, also_assertion

__all__ = ["IndexType", "InstanceData"]


class InstanceData(lockstep.structures.InstanceData, BaseDataElement):
    """Fields with one entry per instance; see `lockstep.structures.InstanceData`."""

    @also_assertion
    def __getitem__(self, item: Any) -> Any:
        """Return a field by its name, or the instances that an index selects."""
        return super().__getitem__(item)

    @staticmethod
    @also_assertion
    def cat(instances_list: Sequence[Any]) -> Any:
        """Concatenate the instances of several elements; the metainfo is that of the first."""
        return lockstep.structures.InstanceData.cat(instances_list)
