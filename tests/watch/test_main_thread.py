"""Where the main thread is, as the watch asks."""

from __future__ import annotations

import gc
import sys

from lockstep.watch.main_thread import frame_of_main_thread


class _Kept:
    """Refers to itself, so that the garbage collector alone ends it; notes who was running then."""

    interrupted: list[str] = []

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        self.interrupted.append(sys._getframe(1).f_code.co_name)


def test_no_collection_begins_while_the_list_of_threads_is_locked() -> None:
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(50):
            _Kept()
            frame_of_main_thread()
    finally:
        gc.set_threshold(*before)
    gc.collect()
    assert _Kept.interrupted
    assert "frame_of_main_thread" not in _Kept.interrupted
    assert gc.isenabled()
