"""What a run prints."""

from __future__ import annotations

import warnings

from lockstep.logging import warnings_once


def test_a_warning_is_shown_once_although_filters_change():
    def warn(line: int, file: str = "one.py") -> None:
        warnings.warn_explicit("the same", UserWarning, file, line)
        with warnings.catch_warnings():  # makes Python forget what it has shown
            warnings.simplefilter("ignore")

    distributed = "/lib/torch/distributed/fsdp.py"
    with warnings.catch_warnings(record=True) as caught, warnings_once(speaks=True):
        warnings.simplefilter("always")
        for line in (1, 1, 2, 1):
            warn(line)
        warn(1, distributed)
    assert [(warning.filename, warning.lineno) for warning in caught] == [
        ("one.py", 1),
        ("one.py", 2),
        (distributed, 1),
    ]
    with warnings.catch_warnings(record=True) as caught, warnings_once(speaks=False):
        warnings.simplefilter("always")
        warn(1)
        warn(1, distributed)
    assert [warning.filename for warning in caught] == ["one.py"]
