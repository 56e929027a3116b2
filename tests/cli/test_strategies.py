from __future__ import annotations


def test_a_word_changes_the_strategy_of_a_config_on_all_ranks(lockstep):
    code, out, _ = lockstep("train", "line.py", "--nproc", "2", "--strategy", "fsdp")
    assert code == 0
    assert "FSDPStrategy" in out


def test_options_come_on_top_of_the_word(lockstep):
    code, out, _ = lockstep("train", "line.py", "--nproc", "2", "--strategy", "fsdp", "strategy.device_mesh=[2,1]")
    assert code == 0
    assert "FSDPStrategy" in out


def test_a_misspelt_strategy_is_told_before_anything_starts(here):
    code, _, err = here("train", "line.py", "--strategy", "fdsp")
    assert code == 1
    assert "fdsp" in err
    assert "did you mean" in err
