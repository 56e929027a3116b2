"""Converters: functions that change a model's layers before a strategy distributes it."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep.config import Config
from lockstep.errors import ConfigError
from lockstep.lint import find_faults
from lockstep.registry import CONVERTERS
from lockstep.runner import Runner
from lockstep.strategy import build_strategy
from lockstep.testing import ranks

SGD = {"optimizer": {"type": "SGD", "lr": 0.1}}


class LowRank(nn.Module):
    """A frozen layer, and a trained product of two small matrices beside it."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


@CONVERTERS.register_module(force=True)
class LoRA:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __call__(self, model: nn.Module) -> nn.Module:
        for name, layer in list(model.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(model, name, LowRank(layer, self.rank))
        return model


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))).square().mean()


def trained(name: str) -> dict[str, Tensor]:
    torch.manual_seed(1)
    strategy = build_strategy({"type": name, "converters": [{"type": "LoRA", "rank": 2}]})
    model, wrapper = strategy.prepare(Net(), SGD)
    for _ in range(3):
        wrapper.update_params(model(torch.ones(2, 4)))
    state = strategy.model_state()
    return {key: value.full_tensor() if hasattr(value, "full_tensor") else value for key, value in state.items()}


@ranks(1, 2)
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_a_converted_model_trains_alike_under_each_strategy(name: str):
    before, after = Net().state_dict(), trained(name)
    torch.manual_seed(1)
    alone = LoRA(2)(Net())
    optimizer = torch.optim.SGD((own for own in alone.parameters() if own.requires_grad), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        alone(torch.ones(2, 4)).backward()
        optimizer.step()
    for key, value in alone.state_dict().items():
        torch.testing.assert_close(after[key], value)
    assert torch.equal(after["first.layer.weight"], before["first.weight"])
    assert after["first.up.weight"].abs().max() > 0


def test_they_run_in_their_order_before_compilation_and_once():
    seen: list[object] = []

    def note(model: nn.Module) -> nn.Module:
        seen.append(model._compiled_call_impl)
        return nn.Sequential(model)

    strategy = build_strategy({"type": "single", "converters": [note, note]})
    model, _ = strategy.prepare(nn.Linear(2, 1), compile={"backend": "eager"})
    assert isinstance(model[0][0], nn.Linear)
    assert model._compiled_call_impl is not None
    strategy.prepare(model, SGD)  # to train after an evaluation
    assert seen == [None, None]


def test_a_runner_converts_its_model(tmp_path: Path):
    runner = Runner(
        Net(),
        tmp_path,
        strategy={"type": "single", "converters": [{"type": "LoRA", "rank": 1}]},
        train_dataloader=DataLoader(TensorDataset(torch.ones(4, 4)), batch_size=2),
        train_cfg={"max_epochs": 1},
        optim_wrapper=SGD,
    )
    runner.train()
    assert isinstance(runner.model.first, LowRank)


def test_what_has_converted_a_model_does_not_convert_it_again(caplog: pytest.LogCaptureFixture):
    def wrapped(model: nn.Module) -> nn.Module:
        return nn.Sequential(model)

    def prepared(model: nn.Module, *converters: object) -> nn.Module:
        return build_strategy({"type": "single", "converters": [*converters]}).prepare(model)[0]

    model, config = Net(), {"type": "LoRA", "rank": 1}
    first = prepared(model, config, wrapped)
    second = prepared(model, dict(config), wrapped)  # as for a Runner that tests what another one has trained
    assert second is first
    assert prepared(first, config) is first
    assert isinstance(model.first.layer, nn.Linear)
    assert not caplog.messages
    assert isinstance(prepared(model, lambda model: nn.Sequential(model)), nn.Sequential)
    assert "Net has been converted by [" in caplog.text
    assert "and is converted by <function" in caplog.text


def test_a_model_whose_converted_form_is_gone_is_converted_anew():
    model = Net()
    for _ in range(2):
        strategy = build_strategy({"type": "single", "converters": [nn.Sequential]})
        assert isinstance(strategy.prepare(model)[0], nn.Sequential)
        del strategy
        gc.collect()


def test_what_is_no_converter_is_refused():
    for alone in ("LoRA", LoRA(2)):
        with pytest.raises(TypeError, match="`converters` must be a list of converters"):
            build_strategy({"type": "single", "converters": alone})
    with pytest.raises(TypeError, match="`strategy` must be a Strategy, a name or a config dict, but is 2 of type int"):
        build_strategy(2)
    with pytest.raises(TypeError, match="`converters` must be a list of functions of a model"):
        build_strategy({"type": "single", "converters": [3]})


def test_a_config_is_checked(tmp_path: Path):
    def faults(*converters: object) -> list[str]:
        strategy = {"type": "SingleDeviceStrategy", "converters": [*converters]}
        model = {"type": "torch.nn.Linear", "in_features": 1, "out_features": 1}
        return [
            str(fault)
            for fault in find_faults(Config({"model": model, "work_dir": str(tmp_path), "strategy": strategy}))
        ]

    assert faults({"type": "LoRA", "rank": 2}) == []
    (unknown,) = faults({"type": "LaRA", "rank": 2})
    assert "strategy.converters.0" in unknown
    wrong = faults({"type": "LoRA", "ranks": 2})
    assert any("ranks" in fault for fault in wrong)


def test_float8_without_torchao_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lockstep.model.float8.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package torchao, .* pip install 'lockstep-engine\[float8\]'"):
        build_strategy({"type": "single", "converters": ["float8"]})


def test_one_that_changes_the_model_in_place_may_return_nothing():
    strategy, model = build_strategy("single"), nn.Sequential(nn.Linear(2, 2))

    def freeze(model: nn.Module) -> None:
        model.requires_grad_(False)

    strategy.converters = (freeze,)
    assert strategy.convert(model) is model
    assert not model[0].weight.requires_grad
