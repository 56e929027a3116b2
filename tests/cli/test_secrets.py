"""A run uses the secrets of its config, and nothing that it leaves or shows has them."""

from __future__ import annotations

import json

import pytest

from lockstep.report import read_run

KEY, PASSWORD, OPTION, VARIABLE = "k3y-of-a-service", "pa55-of-a-bucket", "t0ken-from-options", "s3cret-of-the-shell"
HF = "hf_" + "aB3" * 11
CONFIG = f"""
import logging
import os
import toy

class Login(toy.Line):
    def __init__(self, api_key, token, url, note):
        super().__init__()
        assert api_key == {KEY!r}
        assert token == {OPTION!r}
        assert {PASSWORD!r} in url
        assert note == {HF!r}
        told = f"login with {{api_key}} and {{token}} at {{url}} as {{os.environ['MY_PASSWORD']}}, {{note}}"
        logging.getLogger("lockstep.login").info(told)

_base_ = "line.py"
model = dict(_delete_=True, type=Login, api_key={KEY!r}, token="", url="s3://me:{PASSWORD}@bucket/x", note={HF!r})
default_hooks = dict(checkpoint=dict(interval=1))
visualizer = []
"""


@pytest.mark.parametrize("nproc", ["1", "2"])
def test_what_a_run_leaves_has_no_secrets(lockstep, folder, nproc):
    (folder / "login.py").write_text(CONFIG)
    words = ["train", "login.py", "--nproc", nproc, "--work-dir", "runs", f"model.token={OPTION}"]
    code, out, err = lockstep(*words, env={"MY_PASSWORD": VARIABLE})
    assert code == 0, err
    (run,) = folder.glob("runs/*/environment.json")
    assert json.loads(run.read_text())["command"].endswith("--work-dir runs 'model.token=***'")
    config = (run.parent / "config.py").read_text()
    assert "api_key='***', token='***', url='s3://me:***@bucket/x', note='***'" in config.replace("\n    ", " ")
    log = (run.parent / "log.txt").read_text()
    assert "login with *** and *** at s3://me:***@bucket/x as ***, ***" in log
    assert lockstep("report", str(run.parent))[0] == 0
    left = [file for file in (folder / "runs").rglob("*") if file.is_file()]
    assert {"report.html", "log.txt", "config.py", "manifest.json"} <= {file.name for file in left}
    shown = [out, err, *(file.read_bytes().decode(errors="replace") for file in left)]
    for secret in (KEY, PASSWORD, OPTION, VARIABLE, HF):
        assert [text for text in shown if secret in text] == []
    # The run goes on from its checkpoint with the real ones.
    code, out, err = lockstep(*words, "--resume", "train_cfg.max_epochs=2", env={"MY_PASSWORD": VARIABLE})
    assert code == 0, err
    assert "resum" in out


def test_a_saved_config_cannot_be_run_without_its_secrets(here, folder):
    text = "model = dict(type='toy.Line', api_key={!r}, url='s3://me:{}@host/x')\n_base_ = 'line.py'\n"
    (folder / "own.py").write_text(text.format(KEY, PASSWORD))
    (folder / "saved.py").write_text(text.format("***", "***"))
    code, out, err = here("config", "print", "own.py")
    assert (code, err) == (0, "")
    assert "api_key='***', url='s3://me:***@host/x'" in out
    code, out, err = here("config", "check", "saved.py")
    assert (code, out) == (1, "")
    assert "saved.py:1: `model.api_key` = '***' was masked when the config was saved. Give the secret again" in err
    assert "`model.url` = 's3://me:***@host/x' was masked" in err
    _, _, err = here("config", "check", "saved.py", f"model.api_key={KEY}")
    assert "`model.api_key` = '***' was masked" not in err


def test_a_webhook_is_masked(here, folder):
    text = "model = dict(type='toy.Line', webhook='https://hooks.slack.com/services/{}')\n_base_ = 'line.py'\n"
    (folder / "own.py").write_text(text.format("T000/B000/XXXX"))
    (folder / "saved.py").write_text(text.format("***"))
    code, out, err = here("config", "print", "own.py")
    assert (code, err) == (0, "")
    assert "webhook='https://hooks.slack.com/services/***'" in out
    _, _, err = here("config", "check", "saved.py")
    assert "`model.webhook` = 'https://hooks.slack.com/services/***' was masked" in err


RAISES = f"""
import atexit
import sys
import toy
from lockstep.hooks import Hook

class Posts(Hook):
    def before_train(self, runner):
        if AT_EXIT:
            atexit.register(lambda: sys.excepthook(OSError, OSError("late: api_key={KEY}"), None))
        raise RuntimeError("no answer of https://me:{PASSWORD}@host/api?api_key={KEY}, {HF}\x1b[2J")

_base_ = "line.py"
custom_hooks = [dict(type=Posts)]
"""


@pytest.mark.parametrize("at_exit", [False, True])
def test_an_error_of_one_process_shows_no_secrets(lockstep, folder, at_exit):
    (folder / "posts.py").write_text(RAISES.replace("AT_EXIT", str(at_exit)))
    code, out, err = lockstep("train", "posts.py", "--nproc", "1")
    assert code == 1
    assert r"RuntimeError: no answer of https://me:***@host/api?api_key=***, ***\x1b[2J" in err
    assert "posts.py" in err  # the traceback
    assert ("OSError: late: api_key=***" in err) == at_exit
    assert [secret for secret in (KEY, PASSWORD, HF) if secret in out + err] == []


def test_messages_about_a_config_have_no_secrets(here, folder):
    (folder / "own.py").write_text(f"_base_ = 'line.py'\nmodel = dict(api_key={KEY!r}, url='s3://me:{PASSWORD}@h/x')\n")
    code, _, err = here("config", "check", "own.py")
    assert code == 1
    assert "`model.api_key` = '***' is not an argument" in err
    code, _, err = here("train", "own.py", "--no-check", f"load_from=s3://me:{PASSWORD}@")
    assert code == 1
    assert PASSWORD not in err


def test_the_report_of_an_older_run_has_no_secrets(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"mode": "train", "epoch": 1, "iter": 10, "loss": 1.5}\n')
    (tmp_path / "config.py").write_text(
        f"visualizer = dict(\n    type='Wandb',\n    api_key={KEY!r},\n    pad_token='<pad>')\n"
    )
    (tmp_path / "environment.json").write_text(json.dumps({"command": f"lockstep train --token {OPTION}", "seed": 3}))
    run = read_run(tmp_path)
    assert run.config == "visualizer = dict(\n    type='Wandb',\n    api_key='***',\n    pad_token='<pad>')\n"
    assert run.environment == {"command": "lockstep train --token ***", "seed": 3}
