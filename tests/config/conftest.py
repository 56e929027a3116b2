from __future__ import annotations

import sys
from textwrap import dedent

import pytest


@pytest.fixture
def write(tmp_path):
    """Return a function that writes a file below a folder of this test and returns its path."""
    before = set(sys.modules)

    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
        return path

    yield write
    for name in set(sys.modules) - before:  # the configs themselves, and modules beside them
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
