"""Small functions that MMEngine offers to everybody."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from mmengine.utils.manager import ManagerMeta, ManagerMixin
from mmengine.utils.misc import (
    apply_to,
    check_prerequisites,
    concat_list,
    deprecated_api_warning,
    deprecated_function,
    get_object_from_string,
    has_method,
    import_modules_from_strings,
    is_list_of,
    is_method_overridden,
    is_seq_of,
    is_str,
    is_tuple_of,
    iter_cast,
    list_cast,
    requires_executable,
    requires_package,
    slice_list,
    to_1tuple,
    to_2tuple,
    to_3tuple,
    to_4tuple,
    to_ntuple,
    tuple_cast,
)
from mmengine.utils.package_utils import call_command, get_installed_path, install_package, is_installed
from mmengine.utils.path import check_file_exist, fopen, is_abs, is_filepath, mkdir_or_exist, scandir, symlink
from mmengine.utils.progressbar import ProgressBar, track_iter_progress, track_parallel_progress, track_progress
from mmengine.utils.progressbar_rich import track_progress_rich
from mmengine.utils.timer import Timer, TimerError, check_time
from mmengine.utils.version_utils import digit_version, get_git_hash

__all__ = [
    "ManagerMeta",
    "ManagerMixin",
    "ProgressBar",
    "Timer",
    "TimerError",
    "apply_to",
    "call_command",
    "check_file_exist",
    "check_prerequisites",
    "check_time",
    "concat_list",
    "deprecated_api_warning",
    "deprecated_function",
    "digit_version",
    "fopen",
    "get_git_hash",
    "get_installed_path",
    "get_object_from_string",
    "has_method",
    "import_modules_from_strings",
    "install_package",
    "is_abs",
    "is_filepath",
    "is_installed",
    "is_list_of",
    "is_method_overridden",
    "is_seq_of",
    "is_str",
    "is_tuple_of",
    "iter_cast",
    "list_cast",
    "mkdir_or_exist",
    "requires_executable",
    "requires_package",
    "scandir",
    "slice_list",
    "symlink",
    "to_1tuple",
    "to_2tuple",
    "to_3tuple",
    "to_4tuple",
    "to_ntuple",
    "track_iter_progress",
    "track_parallel_progress",
    "track_progress",
    "track_progress_rich",
    "tuple_cast",
]


def __getattr__(name: str) -> Any:
    if name == "dl_utils":  # imports torch
        return import_module("mmengine.utils.dl_utils")
    raise AttributeError(f"module 'mmengine.utils' has no attribute {name!r}")
