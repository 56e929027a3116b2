"""Loggers, histories and hubs: MMEngine's documented behaviour."""

from __future__ import annotations

import logging

import pytest
import torch

import lockstep.logging
from mmengine.logging import HistoryBuffer, MessageHub, MMLogger, print_log

SCRIPT = """
from mmengine.logging import HistoryBuffer
buffer = HistoryBuffer()
for index in range(10):
    buffer.update(index * 0.3, index + 1)
for name in ("mean", "max", "min"):
    answers[name] = [getattr(buffer, name)(), getattr(buffer, name)(3), buffer.statistics(name, window_size=5)]
answers["data"] = [one.tolist() for one in buffer.data]
"""


def test_histories_have_the_values_of_mmengine(both):
    ours, theirs = both(SCRIPT)
    assert ours == theirs


def test_histories_take_functions_and_have_a_length():
    buffer = HistoryBuffer(max_length=2)
    for value in (1, 2, 3):
        buffer.update(value)
    assert buffer.data[0].tolist() == [2, 3]

    @HistoryBuffer.register_statistics
    def spread(buffer):
        return buffer.max() - buffer.min()

    assert buffer.statistics("spread") == 1
    with pytest.raises(KeyError):
        buffer.statistics("nothing")
    with pytest.raises(TypeError):
        buffer.update("1")
    with pytest.raises(ValueError, match="empty"):
        HistoryBuffer().current()


def test_a_hub_shares_values_and_keeps_those_that_are_resumed():
    hub = MessageHub.get_instance("first of a test")
    assert MessageHub.get_current_instance() is hub
    assert MessageHub.get_instance("first of a test") is hub
    hub.update_scalar("loss", torch.tensor(0.5), count=2)
    hub.update_scalars({"loss": {"value": 1.0, "count": 2}, "lr": 0.1})
    assert hub.get_scalar("loss").mean() == 0.375
    hub.update_info("iter", 3)
    hub.update_info("task", "x", resumed=False)
    with pytest.raises(AssertionError):
        hub.update_info("task", "x", resumed=True)
    state = hub.state_dict()
    assert sorted(state["log_scalars"]) == ["loss", "lr"]
    assert dict(state["runtime_info"]) == {"iter": 3}
    other = MessageHub("other")
    other.load_state_dict(state)
    assert other.get_info("iter") == 3
    assert other.get_scalar("loss").current() == 1.0


def test_the_hub_of_a_run_of_lockstep_is_the_current_one():
    hub = lockstep.logging.MessageHub("run")
    hub.make_current()
    assert MessageHub.get_current_instance() is hub


def test_loggers_are_loggers_and_are_found_by_name(tmp_path, capsys):
    logger = MMLogger.get_instance("test", logger_name="tool", log_file=tmp_path / "a.log", log_level="INFO")
    assert isinstance(logger, logging.Logger)
    assert MMLogger.get_instance("test") is MMLogger.get_current_instance() is logger
    logger.debug("too quiet")
    print_log("one", logger)
    print_log("two", "test")
    print_log("three", "current", logging.WARNING)
    print_log("four", "silent")
    print_log("five")
    text = (tmp_path / "a.log").read_text()
    assert [word for word in ("quiet", "one", "two", "three", "four", "five") if word in text] == [
        "one",
        "two",
        "three",
    ]
    captured = capsys.readouterr()
    assert captured.out == "five\n"
    assert "three" in captured.err
    with pytest.raises(ValueError, match="nobody"):
        print_log("x", "nobody")
    with pytest.raises(TypeError):
        print_log("x", 3)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
