"""DeepSpeed and ColossalAI on an accelerator, parts of `make test-gpu`, each where its package is; rarely both are.

Their bodies run on the CPU in `make test-deepspeed` and `make test-colossalai`, but for those in float16.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from lockstep.device import get_device

from . import bodies
from .test_bodies import check_case, check_moved
from .test_gpu import on

pytestmark = pytest.mark.gpu


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"needs the package {package}")


@needs("deepspeed")
@pytest.mark.parametrize("size", on(1, 2))
@pytest.mark.parametrize("case", [*bodies.DEEPSPEED, *bodies.DEEPSPEED_ON_DEVICE])
def test_losses_under_deepspeed_are_those_of_a_plain_loop_on_the_cpu(case: str, size: int, tmp_path: Path):
    assert check_case(case, size, tmp_path) == get_device()


@needs("colossalai")
@pytest.mark.parametrize("size", on(1, 2))
@pytest.mark.parametrize("case", bodies.COLOSSALAI)
def test_losses_under_colossalai_are_those_of_a_plain_loop_on_the_cpu(case: str, size: int, tmp_path: Path):
    assert check_case(case, size, tmp_path) == get_device()


@needs("deepspeed")
@pytest.mark.parametrize("size", on(1, 2))
@pytest.mark.parametrize(("before", "after"), bodies.MOVES["deepspeed"])
def test_a_run_under_deepspeed_goes_on_elsewhere(before: str, after: str, size: int, tmp_path: Path):
    check_moved(before, after, size, tmp_path)


@needs("colossalai")
@pytest.mark.parametrize("size", on(1, 2))
@pytest.mark.parametrize(("before", "after"), bodies.MOVES["colossalai"])
def test_a_run_under_colossalai_goes_on_elsewhere(before: str, after: str, size: int, tmp_path: Path):
    check_moved(before, after, size, tmp_path)
