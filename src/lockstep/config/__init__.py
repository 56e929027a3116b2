"""Configs: files in Python, YAML or JSON that describe a run.

`Config.fromfile` reads one with its bases, `Config.merge_from_dict` changes it by dotted keys, and `parse_options`
reads these from ``a.b=1 c=[1,2]`` on a command line. Importing this package does not import torch.
"""

from __future__ import annotations

from lockstep.config.config import Config
from lockstep.config.dictionary import ConfigDict
from lockstep.config.options import DictAction, parse_options
from lockstep.config.python_file import read_base

__all__ = [
    "Config",
    "ConfigDict",
    "DictAction",
    "parse_options",
    "read_base",
]
