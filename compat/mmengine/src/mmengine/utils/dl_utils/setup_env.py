"""Processes that load data."""

from __future__ import annotations

import os
import platform
import warnings

from torch import multiprocessing as mp

__all__ = ["set_multi_processing"]


def set_multi_processing(mp_start_method: str = "fork", opencv_num_threads: int = 0, distributed: bool = False) -> None:
    """Set how processes start, and how many threads each has.

    Args:
        mp_start_method: as for `multiprocessing.set_start_method`; not on Windows.
        opencv_num_threads: threads of OpenCV in each process.
        distributed: whether several ranks train: then OMP_NUM_THREADS and MKL_NUM_THREADS are 1 unless they are set.
    """
    if platform.system() != "Windows":
        current = mp.get_start_method(allow_none=True)
        if current not in (None, mp_start_method):
            warnings.warn(f"processes will start by {mp_start_method!r}, and no longer by {current!r}", stacklevel=2)
        mp.set_start_method(mp_start_method, force=True)
    try:
        import cv2
    except ImportError:
        pass
    else:
        cv2.setNumThreads(opencv_num_threads)
    if distributed:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("MKL_NUM_THREADS", "1")
