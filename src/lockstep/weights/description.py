"""Describes a model's weights: which are tied, and what `from_pretrained` of the model's library needs beside them.

A description consists of JSON values, so that a checkpoint can keep it, and an exporter needs no model:

```
{"tied": [["wte.weight", "lm_head.weight"]],        # first the name to keep
 "pretrained": [{"prefix": "",                      # where the library's model is in the trained one
                 "stem": "model",                   # name of the file of weights
                 "files": {"config.json": {...}},
                 "names": null}]}                   # weights to write, and their names in the file; null for all
```
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import ConfigError, error_in_words
from lockstep.model.wrapper import inside_wrappers, parts_in_state

_logger = logging.getLogger(__name__)


def describe_model(core: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of a model's weights.

    Models of transformers are described by their configs, models of peft by the adapter that is active.

    Args:
        core: the user's own module.
        state: the model's state, of which only the names are used.
    """
    found = []
    for prefix, model in _pretrained_within(core, ""):
        try:
            found.append(_adapter(model, prefix, state) if _is_peft(model) else _transformer(model, prefix))
        except Exception as error:  # a config of the user's own may raise anything, which must not end a training
            _logger.warning(
                "%s cannot be described for from_pretrained: %s", type(model).__name__, error_in_words(error)
            )
    return {"tied": tied_names(core), "pretrained": found}


def tied_names(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter or buffer that has several; first the one to keep.

    This is the first one, unless the model lists it among those that it fills in from another, as models of
    transformers do.

    Example:
        >>> model = nn.ModuleDict({"words": nn.Embedding(5, 4), "head": nn.Linear(4, 5)})
        >>> model["head"].weight = model["words"].weight
        >>> tied_names(model)
        [['words.weight', 'head.weight']]
    """
    names: dict[Tensor, list[str]] = {}
    filled = set[str]()
    for prefix, module, _ in parts_in_state(model):
        own = {"recurse": False, "remove_duplicate": False}
        # Not methods of the module's own, which may have other signatures.
        tensors = chain(nn.Module.named_parameters(module, "", **own), nn.Module.named_buffers(module, "", **own))
        for name, tensor in tensors:
            names.setdefault(tensor, []).append(prefix + name)
        filled |= {prefix + name for name in getattr(module, "all_tied_weights_keys", None) or ()}
    return [sorted(same, key=filled.__contains__) for same in names.values() if len(same) > 1]


def sized_on_loading(model: nn.Module) -> set[str]:
    """Return the names of buffers that may get another size when they are loaded, since their modules override loading.

    Those are the observers of quantization-aware training, and others that size a buffer at the first batch. Batch
    norms override only what they do with old files.
    """
    usual = (nn.Module._load_from_state_dict, nn.BatchNorm1d._load_from_state_dict)
    return {
        prefix + name
        for prefix, module, _ in parts_in_state(model)
        if type(module)._load_from_state_dict not in usual
        for name, _ in nn.Module.named_buffers(module, recurse=False, remove_duplicate=False)
    }


def _pretrained_within(module: nn.Module, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the outermost models that have a `from_pretrained`, with the prefix of their weights."""
    module = inside_wrappers(module)
    if _is_peft(module) or _is_transformer(module):
        yield prefix, module
        return
    for name, child in module.named_children():
        yield from _pretrained_within(child, f"{prefix}{name}.")


def _is_peft(module: nn.Module) -> bool:
    return hasattr(type(module), "from_pretrained") and isinstance(getattr(module, "peft_config", None), Mapping)


def _is_transformer(module: nn.Module) -> bool:
    config = getattr(module, "config", None)
    has_adapters = getattr(module, "_hf_peft_config_loaded", False)
    return hasattr(type(module), "from_pretrained") and hasattr(config, "to_json_string") and not has_adapters


def _transformer(model: Any, prefix: str) -> dict[str, Any]:
    config = json.loads(model.config.to_json_string())
    config["architectures"] = [_own_class(model).__name__]
    config["dtype" if hasattr(model.config, "dtype") else "torch_dtype"] = None  # that of the weights when written
    files = {"config.json": config}
    if model.can_generate() and getattr(model, "generation_config", None) is not None:
        generation = json.loads(model.generation_config.to_json_string())
        files["generation_config.json"] = {key: generation[key] for key in generation if key != "compile_config"}
    return {"prefix": prefix, "stem": "model", "files": files, "names": None}


def _adapter(model: Any, prefix: str, state: Mapping[str, Any]) -> dict[str, Any]:
    from peft import get_peft_model_state_dict

    adapter = model.active_adapter
    config = model.peft_config[adapter]
    if config.is_prompt_learning:  # peft would compute them from weights, which may be shards
        raise ConfigError(
            f"the prompts of {type(config).__name__} are computed when they are saved, which only peft itself can do. "
            "Load all weights into a model of peft, and save that"
        )
    names = [name for name in state if name.startswith(prefix)]
    # Empty tensors instead of the weights: peft chooses and renames them without reading them, and each is recognised
    # by its id afterwards.
    probes = {name.removeprefix(prefix): torch.empty(0, device="meta") for name in names}
    known = {id(probe): prefix + name for name, probe in probes.items()}
    # Base embeddings are looked up on the web, if asked for by "auto".
    chosen = get_peft_model_state_dict(model, probes, adapter_name=adapter, save_embedding_layers=False)
    if computed := [name for name, probe in chosen.items() if id(probe) not in known]:
        raise ConfigError(f"the adapter computes {computed[0]} when it is saved, which only peft itself can do")
    base = model.base_model.model
    facts = {key: list(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    facts["inference_mode"] = True
    facts["base_model_name_or_path"] = config.base_model_name_or_path or getattr(base, "name_or_path", None) or None
    if config.task_type is None:
        kind = _own_class(base)
        facts["auto_mapping"] = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
    files = {"adapter_config.json": json.loads(json.dumps(facts))}
    chosen_names = {known[id(probe)]: name for name, probe in chosen.items()}
    return {"prefix": prefix, "stem": "adapter_model", "files": files, "names": chosen_names}


def _own_class(module: nn.Module) -> type:
    """Return a module's class, under the one that torch's FSDP puts before it."""
    return next(kind for kind in type(module).__mro__ if not kind.__name__.startswith("FSDP"))
