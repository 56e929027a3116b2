"""States: from every stage to every other, and to the strategies of PyTorch's, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep.checkpoint import load_state
from lockstep.dist import get_rank
from lockstep.errors import ConfigError
from lockstep.model import predict_step
from lockstep.testing import ranks, run_ranks

from ...strategy.transformer import ADAMW, optim_config, own_batches, seeded
from ..training import assert_equal, whole
from .training import ADAM, STAGES, Training, load_after, save_after, strategy_of

ROUTES = [
    *[("ddp", f"zero{stage}") for stage in STAGES],
    *[(f"zero{stage}", "ddp") for stage in STAGES],
    ("zero1", "zero3"), ("zero3", "zero2"), ("zero3", "fsdp"), ("fsdp", "zero2"),
]  # fmt: skip


@pytest.mark.parametrize(("saved_by", "loaded_by"), ROUTES, ids=str)
def test_a_checkpoint_of_one_strategy_is_loaded_by_another(saved_by: str, loaded_by: str, tmp_path: Path):
    saved = run_ranks(2, save_after, saved_by, tmp_path / "checkpoint", 4)
    loaded = run_ranks(2, load_after, loaded_by, tmp_path / "checkpoint", 4)
    state, losses = saved[0]
    assert state["optimizer"]["state"]["layers.0.linear1.weight"].keys() == ADAM
    for other, other_losses in (*saved, *loaded):
        assert_equal(other["model"], state["model"])
        assert_equal(other["optimizer"]["state"], state["optimizer"]["state"])
        assert_equal(other["optimizer"]["param_groups"], state["optimizer"]["param_groups"])
        assert other_losses == pytest.approx(losses, abs=1e-5, rel=0)


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_goes_on_exactly(stage: int, tmp_path: Path):
    saved = run_ranks(2, save_after, f"zero{stage}", tmp_path / "checkpoint", 4)
    loaded = run_ranks(2, load_after, f"zero{stage}", tmp_path / "checkpoint", 4)
    assert [losses for _, losses in loaded] == [losses for _, losses in saved]


@pytest.mark.parametrize(("kind", "options"), [("zero2", {"bf16": True}), ("zero3", {"bf16": True, "offload": True})])
def test_full_weights_behind_half_precision_are_saved_and_loaded(kind: str, options: dict, tmp_path: Path):
    saved = run_ranks(2, save_after, kind, tmp_path / "checkpoint", 4, **options)
    loaded = run_ranks(2, load_after, kind, tmp_path / "checkpoint", 4, **options)
    assert_equal(loaded[0], saved[0])
    weights = saved[0][0]["model"]["head.weight"]
    assert weights.dtype == torch.float32
    assert not torch.equal(weights, weights.bfloat16().float())


@pytest.mark.parametrize(("wrote", "reads"), [(1, 2), (2, 1)])
def test_another_number_of_ranks_goes_on(wrote: int, reads: int, tmp_path: Path):
    saved = run_ranks(wrote, save_after, "zero3", tmp_path / "checkpoint", 4)
    loaded = run_ranks(reads, load_after, "zero3", tmp_path / "checkpoint", 4)
    for state, losses in loaded:
        assert_equal(state, saved[0][0])
        assert losses == pytest.approx(saved[0][1], abs=1e-5, rel=0)


@ranks(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_each_rank_keeps_its_rows_of_what_is_gathered_and_reads_no_more(stage: int, tmp_path: Path):
    training = Training(f"zero{stage}")
    training.run(0, 1)
    state = training.state()
    moments = [value for entry in state["optimizer"]["state"].values() for value in entry.values() if value.dim()]
    assert all(isinstance(moment, DTensor) and moment.device.type == "cpu" for moment in moments)
    total = sum(moment.numel() for moment in moments)
    assert sum(moment.to_local().numel() for moment in moments) == pytest.approx(total / 2, rel=0.02)
    assert all(isinstance(value, DTensor) == (stage == 3) for value in state["model"].values())
    training.save(tmp_path / "checkpoint")
    read = load_state(tmp_path / "checkpoint", {"optimizer": {}}, training.strategy.optim_template())
    for name, entry in read["optimizer"]["state"].items():
        for key in ("exp_avg", "exp_avg_sq"):
            saved = state["optimizer"]["state"][name][key]
            assert torch.equal(entry[key].to_local(), saved.to_local())


class Odd(nn.Module):
    """Tied and frozen parameters, buffers, and sizes that two ranks can't halve."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(5)
        self.frozen = nn.Linear(5, 3)
        self.frozen.requires_grad_(False)
        self.last = nn.Linear(3, 5, bias=False)
        self.last.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor([1.5]))

    def forward(self, x: Tensor) -> Tensor:
        return (self.scale * self.last(self.frozen(self.norm(self.first(x))))).square().mean()


X = torch.randn(8, 4, 3, generator=torch.Generator().manual_seed(3))
GROUPS = [{"params": ["first.weight", "norm.weight"], "lr": 0.02}, {"params": ["first.bias", "norm.bias", "scale"]}]


def train_odd(kind: str, steps: range, state: dict[str, Any] | None = None) -> tuple[dict[str, Any], list[float]]:
    torch.manual_seed(2 if state is None else 9)
    model = Odd()
    parameters = dict(model.named_parameters())
    groups = [{**group, "params": [parameters[name] for name in group["params"]]} for group in GROUPS]
    strategy = strategy_of(kind)
    model, optim_wrapper = strategy.prepare(model, torch.optim.AdamW(groups, lr=0.05, weight_decay=0.1))
    if state is not None:
        strategy.load_state(state["model"], state["optimizer"])
    losses = [model.train_step(X[index], optim_wrapper)["loss"].item() for index in steps]
    return whole({"model": strategy.model_state(), "optimizer": strategy.optim_state()}), losses


@pytest.mark.parametrize("kind", ["zero1", "zero2", "zero3"])
def test_odd_models_keep_every_part_of_their_state(kind: str):
    state, _ = run_ranks(2, train_odd, "ddp", range(3))[0]
    assert [set(group["params"]) for group in state["optimizer"]["param_groups"]] == [
        set(group["params"]) for group in GROUPS
    ]
    expected = run_ranks(2, train_odd, "ddp", range(3, 6), state)
    found = run_ranks(2, train_odd, kind, range(3, 6), state)
    for (end, losses), (own_end, own_losses) in zip(expected, found, strict=True):
        assert own_losses == pytest.approx(losses, abs=1e-5)
        assert own_end["model"].keys() == end["model"].keys()
        for name, value in end["model"].items():
            torch.testing.assert_close(own_end["model"][name], value, atol=1e-6, rtol=1e-5)
        for name, entry in end["optimizer"]["state"].items():
            assert own_end["optimizer"]["state"][name]["step"] == entry["step"] == 6
            torch.testing.assert_close(own_end["optimizer"]["state"][name], entry, atol=1e-6, rtol=1e-4)
        assert [group["lr"] for group in own_end["optimizer"]["param_groups"]] == [0.02, 0.05]


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_all_ranks_begin_with_the_parameters_and_buffers_of_rank_0(stage: int):
    torch.manual_seed(get_rank())
    model = Odd()
    model.norm.running_mean.fill_(get_rank() + 1)
    strategy = strategy_of(f"zero{stage}")
    strategy.prepare(model, {"optimizer": {"type": "AdamW"}})
    torch.manual_seed(0)
    expected = Odd()
    expected.norm.running_mean.fill_(1)
    assert_equal(whole(strategy.model_state()), whole(dict(expected.state_dict())))


@ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_state_is_a_copy_where_it_is_not_the_models_own(stage: int):
    training = Training(f"zero{stage}")
    training.run(0, 2)
    entries = training.state()["optimizer"]["state"]
    entries["head.weight"]["step"].fill_(7)
    assert entries["places"]["step"] == 2
    assert training.state()["optimizer"]["state"]["head.weight"]["step"] == 2


@ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_state_before_the_first_step_changes_nothing(stage: int):
    expected = Training(f"zero{stage}").run(0, 3)
    training = Training(f"zero{stage}")
    assert training.state()["optimizer"]["state"] == {}
    assert training.run(0, 3) == expected


@ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_state_that_does_not_fit_is_refused_by_name(stage: int):
    strategy = strategy_of(f"zero{stage}")
    with pytest.raises(RuntimeError, match=r"prepare\(\) must be called first"):
        strategy.model_state()
    model, optim_wrapper = strategy.prepare(seeded(), optim_config())
    model.train_step(own_batches()[0], optim_wrapper)
    state = whole({"model": strategy.model_state(), "optimizer": strategy.optim_state()})
    with pytest.raises(ConfigError, match=r"lacks \[head.weight\] and has \[tail\] besides"):
        strategy.load_state({**{k: v for k, v in state["model"].items() if k != "head.weight"}, "tail": X})
    with pytest.raises(
        ConfigError, match=r"`places` must have the shape of the model's, \(12, 16\), but has \(8, 4, 3\)"
    ):
        strategy.load_state({**state["model"], "places": X})
    entries = state["optimizer"]["state"]
    entries["places"]["step"] = torch.tensor(5.0)
    with pytest.raises(ConfigError, match=r"'step' must be the same for all parameters of a group.*'places'"):
        strategy.load_state(optim_state=state["optimizer"])
    entries["places"]["step"] = entries["head.weight"]["step"]
    rest = [name for name in entries if name != "places"]
    groups = [{**ADAMW, "params": ["places"]}, {**ADAMW, "params": rest}]
    with pytest.raises(
        ConfigError, match=r"must have the parameter groups of the state .* which has 2, but .*'places'"
    ):
        strategy.load_state(optim_state={"state": entries, "param_groups": groups})


@ranks(2)
@pytest.mark.parametrize("kind", ["zero2", "zero3"])
def test_a_model_is_evaluated_whole_without_an_optimizer_and_then_trained(kind: str):
    alone = seeded()
    strategy = strategy_of(kind)
    model, no_wrapper = strategy.prepare(seeded())
    assert no_wrapper is None
    with torch.no_grad():
        assert torch.allclose(predict_step(model, own_batches()[0]), alone(*own_batches()[0]))
    assert_equal(whole(strategy.model_state()), whole(dict(alone.state_dict())))
    strategy.load_state({name: torch.zeros_like(value) for name, value in alone.state_dict().items()})
    assert not any(value.any() for value in whole(strategy.model_state()).values())
    with pytest.raises(RuntimeError, match="with an optim wrapper first"):
        strategy.optim_state()
    strategy.load_state(dict(alone.state_dict()))
    model, optim_wrapper = strategy.prepare(model, optim_config())
    losses = [model.train_step(batch, optim_wrapper)["loss"].item() for batch in own_batches()[:2]]
    other, other_wrapper = strategy_of(kind).prepare(seeded(), optim_config())
    assert losses == [other.train_step(batch, other_wrapper)["loss"].item() for batch in own_batches()[:2]]
