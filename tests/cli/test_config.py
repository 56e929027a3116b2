from __future__ import annotations


def test_print_shows_the_whole_config_as_python(lockstep, tmp_path):
    (tmp_path / "child.yaml").write_text("_base_: line.py\nmodel: {fails_on_rank: 7}\n")
    code, out, err = lockstep("config", "print", "child.yaml", "--cfg-options", "train_cfg.max_epochs=3", "new.key=x")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "model = dict(type='toy.Line', fails_on_rank=7)",
        "train_dataloader = dict(dataset=dict(type='toy.Points'), batch_size=2)",
        "optim_wrapper = dict(optimizer=dict(type='SGD', lr=0.001))",
        "train_cfg = dict(by_epoch=True, max_epochs=3)",
        "new = dict(key='x')",
    ]


def test_an_error_in_a_config_is_one_line(lockstep, tmp_path):
    (tmp_path / "bad.py").write_text("a = 1\nb = nothing\n")
    code, out, err = lockstep("config", "print", "bad.py")
    assert (code, out) == (1, "")
    assert err == f"error: {tmp_path}/bad.py:2: NameError: name 'nothing' is not defined\n"
