"""Loggers, message hubs, histories and the log processor, as MMEngine's documentation of logging shows them."""

from __future__ import annotations

import logging
import re
from collections import OrderedDict

import numpy as np
import pytest
import torch

from mmengine.logging import HistoryBuffer, MessageHub, MMLogger, print_log


@pytest.fixture(autouse=True)
def _forget_instances():
    known = dict(MMLogger._instance_dict), dict(MessageHub._instance_dict)
    yield
    for name in MMLogger._instance_dict.keys() - known[0].keys():
        for handler in MMLogger._instance_dict[name].handlers:
            handler.close()
    for cls, instances in zip((MMLogger, MessageHub), known, strict=True):
        cls._instance_dict.clear()
        cls._instance_dict.update(instances)


# Histories.


def test_a_history_keeps_values_and_counts():
    history = HistoryBuffer()
    history.update(1)
    history.update(2, 3)
    values, counts = history.data
    np.testing.assert_array_equal(values, [1, 2])
    np.testing.assert_array_equal(counts, [1, 3])


def test_a_history_begins_with_given_values():
    history = HistoryBuffer([1, 2, 3], [1, 2, 3])
    assert history.mean() == pytest.approx((1 + 2 + 3) / 6)


def test_the_mean_is_over_counts():
    history = HistoryBuffer()
    for value, count in ((10.0, 2), (4.0, 1)):
        history.update(value, count)
    assert history.mean() == pytest.approx(14 / 3)


def test_statistics_of_a_window():
    history = HistoryBuffer([1, 5, 2, 3], [1, 1, 1, 1])
    assert (history.mean(2), history.max(2), history.min(3), history.current()) == (2.5, 3, 2, 3)
    assert (history.mean(), history.max(), history.min()) == (2.75, 5, 1)


def test_statistics_by_name():
    history = HistoryBuffer([1, 2, 3], [1, 1, 1])
    assert history.statistics("mean") == 2
    assert history.statistics("min", window_size=2) == 2
    assert history.statistics("current") == 3
    with pytest.raises(KeyError):
        history.statistics("median")


def test_an_empty_history_has_no_current_value():
    with pytest.raises(ValueError):
        HistoryBuffer().current()


def test_a_history_has_a_greatest_length():
    history = HistoryBuffer(max_length=5)
    for value in range(9):
        history.update(value)
    assert history.data[0].tolist() == [4, 5, 6, 7, 8]


def test_only_numbers_enter_a_history():
    with pytest.raises(TypeError):
        HistoryBuffer().update(torch.ones(2))
    with pytest.raises(TypeError):
        HistoryBuffer().update("loss")


@HistoryBuffer.register_statistics
def spread(self, window_size=None):
    values = self.data[0][-(window_size or 0) :]
    return values.max() - values.min()


def test_a_statistic_of_ones_own():
    history = HistoryBuffer([1, 2, 9, 5], [1, 1, 1, 1])
    assert history.statistics("spread") == 8
    assert history.statistics("spread", window_size=2) == 4


# Hubs.


def test_a_hub_is_found_by_its_name():
    hub = MessageHub.get_instance("documented_hub")
    assert MessageHub.get_instance("documented_hub") is hub
    assert hub.instance_name == "documented_hub"
    assert MessageHub.get_current_instance() is hub


def test_a_hub_holds_histories():
    hub = MessageHub.get_instance("documented_scalars")
    hub.update_scalar("train/loss", 0.5)
    hub.update_scalar("train/loss", 0.25)
    assert hub.get_scalar("train/loss").mean() == 0.375
    assert hub.get_scalar("train/loss").current() == 0.25
    assert list(hub.log_scalars) == ["train/loss"]
    with pytest.raises(KeyError):
        hub.get_scalar("nothing")


@pytest.mark.parametrize("value", [1, 1.0, np.float32(1), np.array(1), torch.tensor(1), torch.tensor([1.0])])
def test_a_hub_takes_numbers_of_any_kind(value):
    hub = MessageHub.get_instance("documented_kinds")
    hub.update_scalar("x", value)
    assert hub.get_scalar("x").current() == 1


def test_a_hub_takes_several_values_at_once():
    hub = MessageHub.get_instance("documented_several")
    hub.update_scalars({"loss": 0.1, "time": {"value": 2.0, "count": 4}, "acc": torch.tensor(0.5)})
    assert hub.get_scalar("time").data[1].tolist() == [4]
    assert hub.get_scalar("acc").current() == 0.5


def test_values_of_several_must_have_a_value():
    hub = MessageHub.get_instance("documented_wrong")
    with pytest.raises((AssertionError, KeyError)):
        hub.update_scalars({"time": {"count": 4}})
    with pytest.raises(AssertionError):
        hub.update_scalars(["loss"])


def test_a_hub_holds_infos():
    hub = MessageHub.get_instance("documented_infos")
    hub.update_info("iter", 3)
    hub.update_info_dict({"epoch": 1, "meta": {"classes": ["a"]}})
    assert (hub.get_info("iter"), hub.get_info("epoch"), hub.get_info("nothing", 7)) == (3, 1, 7)
    assert hub.pop_info("iter") == 3
    assert hub.get_info("iter") is None


def test_what_is_kept_in_checkpoints():
    hub = MessageHub.get_instance("documented_kept")
    hub.update_scalar("loss", 0.1)
    hub.update_scalar("lr", 0.01, resumed=False)
    hub.update_info("iter", 3)
    hub.update_info("seen", 4, resumed=False)
    state = hub.state_dict()
    assert set(state) == {"log_scalars", "runtime_info", "resumed_keys"}
    assert (list(state["log_scalars"]), dict(state["runtime_info"])) == (["loss"], {"iter": 3})

    other = MessageHub.get_instance("documented_loaded")
    other.load_state_dict(state)
    assert other.get_scalar("loss").current() == 0.1
    assert other.get_info("iter") == 3


def test_resumed_must_not_change():
    hub = MessageHub.get_instance("documented_resumed")
    hub.update_scalar("loss", 0.1, resumed=True)
    with pytest.raises(AssertionError):
        hub.update_scalar("loss", 0.1, resumed=False)


def test_a_hub_may_load_another():
    one = MessageHub.get_instance("documented_one")
    one.update_scalar("loss", 4.0)
    two = MessageHub.get_instance("documented_two")
    two.load_state_dict(one)
    one.update_scalar("loss", 5.0)
    assert two.get_scalar("loss").current() == 4.0


def test_a_hub_begins_with_given_values():
    hub = MessageHub(
        "documented_given",
        log_scalars=OrderedDict(loss=HistoryBuffer([1.0], [1])),
        runtime_info=OrderedDict(iter=2),
        resumed_keys=OrderedDict(loss=True, iter=False),
    )
    assert hub.get_scalar("loss").current() == 1
    assert "iter" not in hub.state_dict()["runtime_info"]


# Loggers.


def test_a_logger_is_found_by_its_name(tmp_path):
    logger = MMLogger.get_instance("documented_logger", log_level="INFO")
    assert isinstance(logger, logging.Logger)
    assert MMLogger.get_instance("documented_logger") is logger
    assert logger.instance_name == "documented_logger"
    assert MMLogger.get_current_instance() is logger


def test_a_logger_writes_to_a_file(tmp_path):
    file = tmp_path / "run.log"
    logger = MMLogger.get_instance("documented_file", logger_name="documented", log_file=str(file), log_level="INFO")
    logger.info("trained %d steps", 3)
    logger.debug("too small to tell")
    text = file.read_text()
    assert "documented" in text
    assert "INFO - trained 3 steps" in text
    assert "too small" not in text
    assert str(logger.log_file) == str(file)


def test_the_level_of_a_logger_is_a_number_or_a_name(tmp_path):
    by_number = MMLogger.get_instance("documented_b", log_file=str(tmp_path / "b.log"), log_level=logging.ERROR)
    by_number.warning("unheard")
    by_number.error("heard")
    assert "unheard" not in (tmp_path / "b.log").read_text()
    logger = MMLogger.get_instance("documented_c", log_file=str(tmp_path / "c.log"), log_level="NOTSET")
    logger.setLevel("ERROR")
    logger.warning("unheard")
    logger.error("heard")
    assert "unheard" not in (tmp_path / "c.log").read_text()
    assert "heard" in (tmp_path / "c.log").read_text()


def test_print_log_prints(capsys):
    print_log("to the screen", logger=None)
    assert capsys.readouterr().out == "to the screen\n"


def test_print_log_may_be_silent(capsys):
    print_log("nowhere", logger="silent")
    assert capsys.readouterr().out == ""


def test_print_log_logs(tmp_path):
    file = tmp_path / "printed.log"
    logger = MMLogger.get_instance("documented_print", log_file=str(file))
    print_log("by name", logger="documented_print")
    print_log("by logger", logger=logger, level=logging.ERROR)
    print_log("by current", logger="current")
    print_log("unheard", logger=logger, level=logging.DEBUG)
    text = file.read_text()
    assert "INFO - by name" in text
    assert re.search("ERROR - .*by logger", text)
    assert "by current" in text
    assert "unheard" not in text


def test_print_log_knows_only_loggers():
    with pytest.raises(ValueError):
        print_log("x", logger="documented_unknown")
    with pytest.raises(TypeError):
        print_log("x", logger=3)
