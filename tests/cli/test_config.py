from __future__ import annotations

import pytest


def test_print_shows_the_whole_config_as_python(here, folder):
    (folder / "child.yaml").write_text("_base_: line.py\nmodel: {width: 7}\n")
    code, out, err = here(
        "config", "print", "child.yaml", "--trust-config", "--cfg-options", "train_cfg.max_epochs=3", "new.key=x"
    )
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "model = dict(type='toy.Line', width=7)",
        "train_dataloader = dict(dataset=dict(type='toy.Points'), batch_size=2)",
        "optim_wrapper = dict(optimizer=dict(type='SGD', lr=0.001))",
        "train_cfg = dict(by_epoch=True, max_epochs=3)",
        "new = dict(key='x')",
    ]


def test_print_takes_changes_by_themselves(here):
    code, out, _ = here("config", "print", "train_cfg.max_epochs=3", "line.py", "optim_wrapper.optimizer.lr=0.5")
    assert code == 0
    assert "max_epochs=3" in out
    assert "lr=0.5" in out


def test_an_error_in_a_config_is_one_line(here, folder):
    (folder / "bad.py").write_text("a = 1\nb = nothing\n")
    code, out, err = here("config", "print", "bad.py")
    assert (code, out) == (1, "")
    assert err == f"error: {folder}/bad.py:2: NameError: name 'nothing' is not defined\n"


def test_check_finds_nothing_in_a_good_config(here):
    assert here("config", "check", "line.py") == (0, "line.py: no faults\n", "")


def test_check_tells_everything_at_once(here, folder):
    (folder / "bad.py").write_text(
        "_base_ = 'line.py'\n"
        "optm_wrapper = dict(clip_grad=None)\n"
        "optim_wrapper = dict(\n"
        "    optimizer=dict(lerning_rate=0.1))\n"
        "model = dict(type='toy.Lien')\n"
    )
    code, out, err = here("config", "check", "bad.py", "--cfg-options", "train_cfg.max_epochs=ten")
    assert (code, out) == (1, "")
    first, *rest = err.splitlines()
    assert first == "error: bad.py has 4 faults:"
    assert rest[0].startswith(
        "  bad.py:5: `model.type` = 'toy.Lien' is no model in the module `toy`: did you mean `Line`?"
    )
    assert rest[1].startswith(
        "  bad.py:4: `optim_wrapper.optimizer.lerning_rate` = 0.1 is not an argument of the optimizer"
    )
    assert rest[1].endswith("did you mean `lr`?")
    assert rest[2:] == [
        "  an option: `train_cfg.max_epochs` = 'ten' must be int, but is text",
        "  bad.py:2: `optm_wrapper` is not an argument of Runner, and nothing reads it: did you mean `optim_wrapper`?",
    ]


@pytest.mark.parametrize("command", ["check", "print"])
def test_the_group_lists_its_commands(here, command):
    assert command in here("config", "--help")[1]
