"""Linear layers that multiply in float8, by torchao."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from importlib.util import find_spec

import torch
from torch import nn

from lockstep.device import get_device
from lockstep.errors import ConfigError, require_one_of
from lockstep.groups import this_rank
from lockstep.registry import CONVERTERS

_MULTIPLE = 16  # of both sizes of a matrix, for float8 kernels
_CAPABILITY = (8, 9)  # of NVIDIA's first devices that multiply in float8
# Names of AMD's that do: MI300, MI350 and RDNA 4. Capabilities say nothing there: MI200, which does not, has (9, 0).
# For training, torchao asks for neither (0.18).
_ARCHITECTURES = ("gfx94", "gfx95", "gfx12")


@CONVERTERS.register_module(name=["Float8", "float8"])
class Float8:
    """Replace linear layers by such that convert what they multiply to float8; weights and gradients keep their dtype.

    Layers of a subclass of `torch.nn.Linear`, those that are replaced already, and those whose sizes are no multiples
    of 16 stay as they are. Use it with `compile`, without which it is no faster. It was tried without tensor
    parallelism: emulated on the CPU, under `single`, `ddp` and `fsdp`; and on one H100 (torch 2.11, torchao 0.18),
    under `single` and `fsdp`. There a GPT of 124 M parameters, compiled, in bfloat16, with 16 sequences of 1,024
    tokens, had the loss of bfloat16 to four places (10.8632 for 10.8631), but took 39.5 ms per step for 35.9: layers of
    768 are too small to gain.

    Args:
        recipe: how values are scaled: `"tensorwise"`, `"rowwise"` or `"rowwise_with_gw_hp"`, as torchao names them.
        skip: names of layers, or patterns of names, that stay as they are, such as `"head"` or `"*.gate"`.
        emulate: round to float8, but multiply in the original dtype; by default on everything but CUDA and ROCm
            devices.

    Raises:
        ConfigError: torchao is not installed; or, when called, the model has no such layer, or a CUDA or ROCm device
            has no float8.

    **Source**: `torchao.float8.convert_to_float8_training` (0.18). Micikevicius et al., FP8 Formats for Deep Learning,
    2022.
    """

    def __init__(self, recipe: str = "tensorwise", skip: Sequence[str] = (), emulate: bool | None = None) -> None:
        if find_spec("torchao") is None:
            raise ConfigError(
                "the converter 'float8' needs the package torchao, which is not installed. Install it with: "
                "pip install 'lockstep-engine[float8]'"
            )
        require_one_of("recipe", recipe, ("tensorwise", "rowwise", "rowwise_with_gw_hp"))
        self._recipe = recipe
        self._skip = (skip,) if isinstance(skip, str) else tuple(skip)
        self._emulate = get_device() != "cuda" if emulate is None else emulate

    def __call__(self, model: nn.Module) -> nn.Module:
        """Replace the layers of a model."""
        if not self._emulate and get_device() == "cuda":
            _require_float8()
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        replaced: dict[str, nn.Module] = {}

        def fits(module: nn.Module, name: str) -> bool:
            found = (
                type(module) is nn.Linear  # a subclass has a forward of its own
                and module.in_features % _MULTIPLE == module.out_features % _MULTIPLE == 0
                and not any(fnmatchcase(name, pattern) for pattern in self._skip)
            )
            replaced.update({name: module} if found else {})
            return found

        config = replace(Float8LinearConfig.from_recipe_name(self._recipe), emulate=self._emulate)
        converted: nn.Module = convert_to_float8_training(model, module_filter_fn=fits, config=config)
        for name, module in replaced.items():  # hooks and buffers, of which torchao takes none over
            vars(converted.get_submodule(name)).update(vars(module))
        # Also by another strategy, whose model this one is handed; torchao has no public name for its layers.
        if not any(type(module).__module__.startswith("torchao.float8.") for module in converted.modules()):
            raise ConfigError(
                f"the converter 'float8' must find linear layers whose sizes are multiples of {_MULTIPLE}, but finds "
                f"none in {type(model).__name__} outside of `skip`, {list(self._skip)}. Leave the converter out"
            )
        return converted


def _require_float8() -> None:
    """Refuse a CUDA or ROCm device that cannot multiply in float8."""
    if torch.version.hip is None:
        wanted = f"compute capability {_CAPABILITY[0]}.{_CAPABILITY[1]} or later"
        capability = torch.cuda.get_device_capability()
        found, fits = f"has {capability[0]}.{capability[1]}", capability >= _CAPABILITY
    else:
        wanted = f"an architecture {', '.join(f'{start}*' for start in _ARCHITECTURES)}"
        name = torch.cuda.get_device_properties().gcnArchName
        found, fits = f"is {name}", name.startswith(_ARCHITECTURES)
    if not fits:
        raise ConfigError(
            f"the converter 'float8' needs a device of {wanted}, but this one {found} ({this_rank()}). Leave the "
            "converter out, or try it with dict(type='Float8', emulate=True)"
        )
