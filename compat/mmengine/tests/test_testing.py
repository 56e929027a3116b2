"""mmengine.testing: helpers for the tests of others."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from mmengine.testing import (
    RunnerTestCase,
    assert_allclose,
    assert_attrs_equal,
    assert_dict_contains_subset,
    assert_dict_has_keys,
    assert_is_norm_layer,
    assert_keys_equal,
    assert_params_all_zeros,
    check_python_script,
)


def test_values_close_to_each_other() -> None:
    assert_allclose(torch.ones(2), torch.ones(2) + 1e-7)
    assert_allclose([1.0, np.ones(2)], [1.0, np.ones(2)])
    assert_allclose(torch.tensor(float("nan")), torch.tensor(float("nan")))
    with pytest.raises(AssertionError):
        assert_allclose(1, 2)
    with pytest.raises(AssertionError, match="other words"):
        assert_allclose(1.0, 2.0, msg="other words")


def test_dicts_keys_and_attributes() -> None:
    assert assert_dict_contains_subset({"a": 1, "b": np.ones(2)}, {"b": np.ones(2)})
    assert not assert_dict_contains_subset({"a": 1}, {"a": 2})
    assert not assert_dict_contains_subset({"a": 1}, {"c": 2})
    assert assert_attrs_equal(nn.Linear(2, 3), {"in_features": 2, "out_features": 3})
    assert not assert_attrs_equal(nn.Linear(2, 3), {"in_features": 3})
    assert not assert_attrs_equal(nn.Linear(2, 3), {"other": 3})
    assert assert_dict_has_keys({"a": 1, "b": 2}, ["a"])
    assert not assert_dict_has_keys({"a": 1}, ["b"])
    assert assert_keys_equal(["a", "b"], ["b", "a"])
    assert not assert_keys_equal(["a"], ["b", "a"])


def test_modules() -> None:
    for norm in (nn.BatchNorm2d(1), nn.InstanceNorm2d(1), nn.GroupNorm(1, 1), nn.LayerNorm(1)):
        assert assert_is_norm_layer(norm)
    layer = nn.Linear(1, 1)
    assert not assert_is_norm_layer(layer)
    assert not assert_params_all_zeros(layer)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    assert assert_params_all_zeros(layer)


def test_a_script_runs(tmp_path: Path, capsys) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint(sys.argv[1:], __name__)\n")
    check_python_script(f"{script} a 'b c'")
    assert capsys.readouterr().out == "['a', 'b c'] __main__\n"
    script.write_text("1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        check_python_script(f"python {script}")


# torch (2.13) warns of its own code when `torch.distributed.optim` is imported.
@pytest.mark.filterwarnings(r"ignore:`torch\.jit\.\w+` is deprecated:DeprecationWarning")
class TestRuns(RunnerTestCase):
    def tearDown(self) -> None:
        super().tearDown()
        assert not Path(self.temp_dir).exists()

    def test_by_epoch(self) -> None:
        runner = self.build_runner(self.epoch_based_cfg)
        runner.train()
        assert (runner.epoch, runner.iter) == (2, 8)

    def test_by_iteration(self) -> None:
        runner = self.build_runner(self.iter_based_cfg)
        runner.train()
        assert runner.iter == 12

    def test_names_and_ports_of_their_own(self) -> None:
        assert self.experiment_name != self.experiment_name
        self.setup_dist_env()
        first = os.environ["MASTER_PORT"]
        self.setup_dist_env()
        assert os.environ["MASTER_PORT"] != first
