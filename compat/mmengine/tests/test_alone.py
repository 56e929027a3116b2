"""The package is plain about what it is, and does not run beside MMEngine."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import lockstep.version
import mmengine


def test_versions_say_whose_names_and_what_runs():
    assert mmengine.utils.digit_version(mmengine.__version__) >= mmengine.utils.digit_version("0.10.7")
    assert mmengine.version.lockstep == lockstep.version.__version__
    assert mmengine.version_info == (0, 10, 7)


@pytest.mark.parametrize("name", ["mmengine", "mmengine-lite"])
def test_beside_mmengine_the_import_says_what_to_do(tmp_path, name):
    installed = tmp_path / f"{name.replace('-', '_')}-0.10.7.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.10.7\n")
    done = subprocess.run(
        [sys.executable, "-c", "import mmengine"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 1
    assert f"ImportError: lockstep-mmengine cannot run beside {name} 0.10.7" in done.stderr
    assert "pip uninstall mmengine mmengine-lite lockstep-mmengine" in done.stderr
    assert "pip install lockstep-mmengine" in done.stderr


def test_names_of_the_package_come_from_its_rooms():
    assert mmengine.Config is mmengine.config.Config
    assert mmengine.load is mmengine.fileio.load
    assert {"Config", "load", "is_str", "MMLogger", "Registry"} <= set(dir(mmengine))
    with pytest.raises(AttributeError, match="no_such_name"):
        mmengine.no_such_name  # noqa: B018 - the access raises
