"""The site that `make docs` has built: what readers look for is there."""

from __future__ import annotations

import importlib
import pkgutil
import zlib
from pathlib import Path

import pytest

import lockstep

ROOT = Path(__file__).parents[2]
SITE = ROOT / "site"
# Nobody imports these.
NOT_DOCUMENTED = {
    "__main__", "calls", "cli", "diagnostics", "engines", "groups", "location", "masking", "output", "transport",
    "tree", "version", "watch",
}  # fmt: skip


@pytest.fixture(scope="module")
def inventory() -> set[str]:
    """Return the names that the reference has an entry for."""
    lines = (SITE / "objects.inv").read_bytes().split(b"\n", 4)
    return {line.split()[0] for line in zlib.decompress(lines[4]).decode().splitlines() if line}


PUBLIC = ["lockstep", *(f"lockstep.{module.name}" for module in pkgutil.iter_modules(lockstep.__path__))]


@pytest.mark.parametrize("name", [name for name in PUBLIC if name.rpartition(".")[2] not in NOT_DOCUMENTED])
def test_every_public_name_is_in_the_reference(name: str, inventory: set[str]):
    module = importlib.import_module(name)
    # A module without a list of public names has those that it defines.
    public = getattr(module, "__all__", None) or [
        key for key, value in vars(module).items() if getattr(value, "__module__", None) == name and key[0] != "_"
    ]
    assert public
    text = (SITE / "reference" / f"{name.rpartition('.')[2]}.html").read_text()
    assert [
        key
        for key in public
        # A function may have the name of its module.
        if not {f"{name}.{key}", f"{name}.{key}.{key}"} & inventory and f"{name}.{key}</code> is torch's" not in text
    ] == []


@pytest.mark.parametrize("page", ["runner", "first-steps", "own-loop", "reference/dist"])
def test_nothing_of_the_markup_is_left_in_the_text(page: str):
    text = (SITE / f"{page}.html").read_text()
    assert "<p>```" not in text
    assert "--8&lt;--" not in text
