"""Imported by every Python that has this folder on its path: the stand-ins are there, whatever program is started."""

import stubs  # noqa: F401 - its import is all that is needed
