from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

import lockstep.registry
from lockstep.registry import DATA_SAMPLERS, OPTIMIZERS, Registry

STANDARD = {name: value for name, value in vars(lockstep.registry).items() if isinstance(value, Registry)}


def test_the_standard_registries_are_there():
    assert set(STANDARD) == {
        *("MODELS", "MODEL_WRAPPERS", "OPTIMIZERS", "OPTIM_WRAPPERS", "OPTIM_WRAPPER_CONSTRUCTORS", "PARAM_SCHEDULERS"),
        *("CONVERTERS", "DATASETS", "DATA_SAMPLERS", "METRICS", "EVALUATOR", "HOOKS", "LOOPS", "STRATEGIES"),
        *("VISUALIZERS", "VISBACKENDS", "RUNNERS", "FUNCTIONS", "TRANSFORMS", "TASK_UTILS"),
    }
    assert set(STANDARD) <= set(lockstep.registry.__all__)


@pytest.mark.parametrize("name", STANDARD.keys() - {"TASK_UTILS"})
def test_their_locations_exist(name):
    assert STANDARD[name]._locations
    for location in STANDARD[name]._locations:
        import_module(location)


def test_names_of_torch_resolve_without_being_registered():
    import torch

    assert OPTIMIZERS["SGD"] is torch.optim.SGD
    assert OPTIMIZERS["lockstep.AdamW"] is torch.optim.AdamW
    assert DATA_SAMPLERS["RandomSampler"] is torch.utils.data.RandomSampler
    parameter = torch.nn.Parameter(torch.zeros(1))
    assert OPTIMIZERS.build({"type": "SGD", "lr": 0.1}, params=[parameter]).defaults["lr"] == 0.1


def test_importing_the_registries_imports_neither_torch_nor_the_rooms_above():
    code = (
        "import sys, lockstep.registry\n"
        "loaded = [m for m in sys.modules if m == 'torch' or m.startswith('lockstep.')]\n"
        "print(sorted({m.split('.')[1] if '.' in m else m for m in loaded}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['errors', 'registry', 'version']"


@pytest.mark.parametrize("name", STANDARD.keys())
def test_locations_register_the_names_that_stand_beside_them(name):
    registry = STANDARD[name]
    for location, names in registry._locations.items():
        import_module(location)
        assert set(names) <= registry.module_dict.keys()
        assert all(registry.module_dict[key].__module__.startswith(location) for key in names)


def test_a_strategy_is_imported_when_it_is_asked_for():
    code = (
        "import sys\n"
        "from lockstep import Runner\n"
        "from lockstep.registry import STRATEGIES\n"
        "STRATEGIES.get('ddp'), STRATEGIES.get('sdp')\n"
        "heavy = ('torch.distributed.tensor', 'torch.distributed.fsdp', 'torch.distributed.checkpoint')\n"
        "print([m for m in heavy if m in sys.modules], STRATEGIES.suggest('fspd'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[] in the registry of scope `lockstep`: did you mean `fsdp`?\n"
