"""`OptimWrapperDict`: several optimizers by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lockstep.errors import ConfigError
from lockstep.optim import OptimWrapper, OptimWrapperDict, build_optim_wrapper
from lockstep.registry import OPTIM_WRAPPERS


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(2, 1), nn.Linear(2, 1)


def make(pair: Pair | None = None, **kwargs) -> OptimWrapperDict:
    pair = pair or Pair()
    return OptimWrapperDict(
        left=OptimWrapper(torch.optim.SGD(pair.left.parameters(), lr=0.1, momentum=0.5), **kwargs),
        right=OptimWrapper(torch.optim.Adam(pair.right.parameters(), lr=0.2)),
    )


def test_wrappers_are_found_by_name():
    wrapper = make()
    assert list(wrapper) == list(wrapper.keys()) == ["left", "right"]
    assert len(wrapper) == 2
    assert "left" in wrapper
    assert "middle" not in wrapper
    assert dict(wrapper.items())["right"] is wrapper["right"] is list(wrapper.values())[1]
    assert wrapper.optimizers == [wrapper["left"].optimizer, wrapper["right"].optimizer]
    with pytest.raises(KeyError, match="did you mean `right`"):
        wrapper["rigt"]
    assert OPTIM_WRAPPERS["OptimWrapperDict"] is OptimWrapperDict


def test_rates_groups_and_states_are_those_of_all():
    wrapper = make()
    assert wrapper.get_lr() == {"left.lr": [0.1], "right.lr": [0.2]}
    assert wrapper.get_momentum() == {"left.momentum": [0.5], "right.momentum": [0.9]}
    assert [group["lr"] for group in wrapper.param_groups] == [0.1, 0.2]
    assert wrapper.grad_norm is None
    other = make()
    for group in other.param_groups:
        group["lr"] = 7.0
    other.load_state_dict(wrapper.state_dict())
    assert other.get_lr() == wrapper.get_lr()
    with pytest.raises(KeyError, match=r"must have the keys \['left', 'right'\], but has \['left'\]"):
        other.load_state_dict({"left": wrapper["left"].state_dict()})


def test_each_counts_its_own_batches_and_all_contexts_are_entered_together():
    entered = []

    class Model(Pair):
        def no_sync(self):
            entered.append(1)
            return torch.enable_grad()  # any context

    model = Model()
    wrapper = make(model, accumulative_counts=2)
    wrapper.initialize_count_status(model, 0, 3)
    with wrapper.optim_context(model):
        loss = model.left(torch.ones(2)).sum()
    assert entered == [1]  # only the left one accumulates
    wrapper["left"].update_params(loss)
    assert (wrapper["left"].inner_count, wrapper["right"].inner_count, wrapper.inner_count) == (1, 0, 1)
    assert model.left.weight.grad is not None
    with pytest.raises(RuntimeError, match="zero_grad of SGD comes within a window of accumulation, of which 1 of 2"):
        wrapper.zero_grad()
    wrapper["left"].update_params(model.left(torch.ones(2)).sum())
    model.left(torch.ones(2)).sum().backward()
    wrapper.zero_grad()
    assert model.left.weight.grad is None


@pytest.mark.parametrize("method", ["update_params", "backward", "scale_loss", "add_param_group"])
def test_what_only_one_of_them_can_do_is_refused(method):
    with pytest.raises(
        NotImplementedError, match=rf"{method} must be called on one of the optim wrappers \(left, right\)"
    ):
        getattr(make(), method)(torch.tensor(1.0))


@pytest.mark.parametrize("method", ["step", "should_sync", "should_update"])
def test_so_is_what_would_have_no_single_answer(method):
    with pytest.raises(NotImplementedError, match=rf"optim_wrapper\['left'\].{method}\("):
        getattr(make(), method)()


def test_wrong_contents_are_refused():
    with pytest.raises(TypeError, match="`left` must be an OptimWrapper, but is 3 of type int"):
        OptimWrapperDict(left=3)
    with pytest.raises(TypeError, match="`left` must be an OptimWrapper"):
        OptimWrapperDict(left=make())
    with pytest.raises(ValueError, match="at least one"):
        OptimWrapperDict()


def test_a_config_by_parts_builds_one_for_each():
    pair = Pair()
    wrapper = build_optim_wrapper(
        pair,
        {
            "left": {"optimizer": {"type": "SGD", "lr": 0.1}, "accumulative_counts": 2},
            "right": torch.optim.Adam(pair.right.parameters()),
        },
    )
    assert isinstance(wrapper, OptimWrapperDict)
    assert [id(p) for p in wrapper["left"].param_groups[0]["params"]] == [id(p) for p in pair.left.parameters()]
    assert "accumulative_counts=2" in repr(wrapper)
    with pytest.raises(ConfigError, match="key `optimizer`"):
        build_optim_wrapper(pair, {"left": {}, "middle": {}})
