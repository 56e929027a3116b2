"""One optimizer update: accumulation and clipping."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lockstep.errors import ConfigError
from lockstep.optim import OptimWrapper, build_optim_wrapper
from lockstep.registry import OPTIM_WRAPPERS, BuildError

BATCHES = torch.arange(1.0, 31.0).reshape(10, 3)


def make(accumulative_counts: int = 1, **kwargs) -> tuple[nn.Linear, OptimWrapper]:
    model = nn.Linear(3, 1, bias=False)
    nn.init.constant_(model.weight, 0.5)
    return model, OptimWrapper(torch.optim.SGD(model.parameters(), lr=1e-3), accumulative_counts, **kwargs)


@given(batches=st.integers(1, 10), counts=st.integers(1, 5))
def test_every_window_is_the_mean_over_its_own_batches(batches: int, counts: int):
    model, wrapper = make(counts)
    wrapper.initialize_count_status(model, 0, batches)
    for batch in BATCHES[:batches]:
        wrapper.update_params(model(batch).square().mean())

    by_hand, _ = make()
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=1e-3)
    for start in range(0, batches, counts):
        window = BATCHES[start : min(start + counts, batches)]
        optimizer.zero_grad()
        by_hand(window).square().mean().backward()
        optimizer.step()
    assert torch.allclose(model.weight, by_hand.weight, rtol=1e-5)


@given(counts=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), max_size=4))
def test_a_number_that_is_set_within_a_training_holds_from_the_next_window_on(counts: list[tuple[int, int]]):
    model, wrapper = make(2)
    by_hand, plain = make()
    sizes, window, size, later = dict(counts), [], 2, 2
    wrapper.initialize_count_status(model, 0, len(BATCHES))
    for index, batch in enumerate(BATCHES):
        if index in sizes:
            wrapper.accumulative_counts = later = sizes[index]
        size = size if window else later
        weight = index % 2 + 1
        wrapper.count_samples(weight, weight)
        wrapper.update_params(model(batch).square().mean())
        window.append(weight * by_hand(batch).square().mean())
        assert wrapper.should_update() == (len(window) == size or index == len(BATCHES) - 1)
        if wrapper.should_update():
            used = [i % 2 + 1 for i in range(index + 1 - len(window), index + 1)]
            plain.optimizer.zero_grad()
            (sum(window) / sum(used)).backward()
            plain.optimizer.step()
            window = []
    torch.testing.assert_close(model.weight, by_hand.weight)


def test_a_loss_of_a_batch_that_counts_otherwise_must_be_scaled_before_backward():
    model, wrapper = make()
    for own, mean in [(2, 2), (0, 2), (3, 2)]:
        wrapper.count_samples(own, mean)
        if own == mean:
            wrapper.backward(model(BATCHES[0]).sum())
        else:
            with pytest.raises(RuntimeError, match=rf"counts for {own}, that of the mean rank for 2 .*scale_loss"):
                wrapper.backward(model(BATCHES[0]).sum())
        wrapper.optimizer.zero_grad()
        scaled = wrapper.scale_loss(model(BATCHES[0]).sum())
        wrapper.backward(scaled / 2, retain_graph=True)
        wrapper.backward(scaled / 2)  # its parts
        torch.testing.assert_close(model.weight.grad, own / mean * BATCHES[:1])
        wrapper.optimizer.zero_grad()


def test_a_training_does_not_begin_with_the_gradients_of_one_that_ended_inside_a_window():
    model, wrapper = make(2)
    wrapper.initialize_count_status(model, 0, 4)
    wrapper.update_params(50 * model(BATCHES[0]).sum())
    wrapper.initialize_count_status(model, 0, 4)
    before = model.weight.clone()
    for _ in range(2):
        wrapper.update_params(model(torch.ones(3)).sum())
    assert torch.allclose(before - model.weight, torch.full((1, 3), 1e-3))


@pytest.mark.parametrize(("size", "updates"), [(4, [3, 7]), (3, [3, 6, 9])])
def test_a_window_that_was_open_goes_on_unless_windows_have_another_size_now(size: int, updates: list[int]):
    _, former = make(4)
    former.update_params(torch.ones(1, requires_grad=True).sum())
    model, wrapper = make(size)
    wrapper.load_extra_state(former.extra_state())
    wrapper.initialize_count_status(model, 1)
    due = []
    for batch in BATCHES[:9]:
        wrapper.update_params(model(batch).sum())
        due.append(wrapper.should_update())
    assert [index for index, is_due in enumerate(due, 1) if is_due] == updates


@pytest.mark.parametrize("further", [0, 1])
def test_a_window_in_which_a_training_was_resumed_twice_ends_where_it_would_have(further: int):
    model, first = make(4)
    for batch in BATCHES[:2]:
        first.update_params(model(batch).sum())
    model, second = make(4)
    second.load_extra_state(first.extra_state())
    second.initialize_count_status(model, 2)
    for batch in BATCHES[2 : 2 + further]:
        second.update_params(model(batch).sum())
    model, third = make(4)
    third.load_extra_state(second.extra_state())
    third.initialize_count_status(model, 2 + further)
    due = []
    for number, batch in enumerate(BATCHES[2 + further : 8], 3 + further):
        third.update_params(model(batch).sum())
        due += [number] * third.should_update()
    assert due == [4, 8]


def test_without_a_known_end_an_open_window_is_kept():
    model, wrapper = make(4)
    before = model.weight.clone()
    for batch in BATCHES[:3]:
        wrapper.update_params(model(batch).square().mean())
    assert torch.equal(model.weight, before)
    assert wrapper.inner_count == 3
    assert wrapper.should_sync()
    assert not wrapper.should_update()


@pytest.mark.parametrize(("before", "after"), [(2, 4), (1, 4), (4, 1)])
def test_a_number_that_is_set_between_the_last_backward_and_its_step_leaves_that_update_alone(before: int, after: int):
    def trained(sets_early: bool) -> torch.Tensor:
        model, wrapper = make(before)
        for batch in BATCHES[:before]:
            wrapper.backward(wrapper.scale_loss(model(batch).square().mean()))
        if sets_early:
            wrapper.accumulative_counts = after
        wrapper.step()
        wrapper.zero_grad()
        wrapper.accumulative_counts = after
        for batch in BATCHES[:4]:
            wrapper.update_params(model(batch).square().mean())
        return model.weight.detach()

    assert torch.equal(trained(True), trained(False))


def test_a_batch_counts_when_its_backward_pass_has_succeeded():
    """One that runs out of memory may be tried again, and one whose loss is no number may be left out."""

    class OutOfMemory(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise MemoryError

    def trained(fails: bool) -> torch.Tensor:
        model, wrapper = make(2)
        wrapper.update_params(model(BATCHES[0]).square().mean())
        if fails:
            with pytest.raises(MemoryError):
                wrapper.update_params(OutOfMemory.apply(model(BATCHES[1]).square().mean()))
            wrapper.scale_loss(model(BATCHES[1]).square().mean() * float("nan"))
        wrapper.update_params(model(BATCHES[1]).square().mean())
        return model.weight.detach()

    assert torch.equal(trained(True), trained(False))


def test_no_sync_is_entered_only_between_updates():
    entered = []

    class Model(nn.Linear):
        def no_sync(self):
            entered.append(len(seen))
            return torch.no_grad()  # any context

    seen: list[int] = []
    model, wrapper = Model(3, 1), None
    wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1), accumulative_counts=3)
    wrapper.initialize_count_status(model, 0, 5)
    for index in range(5):
        with wrapper.optim_context(model):
            pass
        wrapper.update_params(model(BATCHES[index]).mean())
        seen.append(index)
    assert entered == [0, 0, 1, 1, 3, 3]  # for the forward and for the backward pass


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clipping_by_norm_is_torchs_and_shows_the_norm(norm_type):
    model, wrapper = make(clip_grad={"max_norm": 0.5, "norm_type": norm_type})
    by_hand, _ = make()
    by_hand(BATCHES[0]).square().mean().backward()
    norm = nn.utils.clip_grad_norm_(by_hand.parameters(), 0.5, norm_type)
    torch.optim.SGD(by_hand.parameters(), lr=1e-3).step()

    assert wrapper.grad_norm is None
    wrapper.update_params(model(BATCHES[0]).square().mean())
    assert torch.equal(model.weight, by_hand.weight)
    assert torch.equal(wrapper.grad_norm, norm)


def test_clipping_by_value_bounds_every_gradient():
    model, wrapper = make(clip_grad={"type": "value", "clip_value": 0.25})
    wrapper.update_params(model(BATCHES[0]).square().mean())
    assert torch.allclose(model.weight, torch.full((1, 3), 0.5 - 0.25e-3))


def test_accumulation_over_batch_norm_and_resuming_inside_a_window_are_said(caplog):
    _, wrapper = make(4)
    with caplog.at_level(logging.WARNING, logger="lockstep"):
        wrapper.initialize_count_status(nn.BatchNorm1d(3), init_counts=6, max_counts=12)
    assert "inside an accumulation window: the gradients of its first 2 backward passes are lost" in caplog.text
    assert "BatchNorm" in caplog.text


def test_accumulation_over_the_batch_norm_of_a_frozen_teacher_is_not(caplog):
    teacher = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).requires_grad_(False)
    _, wrapper = make(4)
    with caplog.at_level(logging.WARNING, logger="lockstep"):
        wrapper.initialize_count_status(teacher, max_counts=12)
    assert not caplog.records


@pytest.mark.parametrize(
    ("kwargs", "error", "says"),
    [
        ({"accumulative_counts": 0}, ValueError, "at least 1, but is 0"),
        ({"clip_grad": 1.0}, TypeError, r"dict\(max_norm=1.0\)"),
        ({"clip_grad": {"norm": 1.0}}, ConfigError, "`max_norm`, but has only"),
        ({"clip_grad": {"max_nrm": 1.0}}, ConfigError, "did you mean `max_norm` by `max_nrm`"),
        ({"clip_grad": {"max_norm": 1.0, "norm_typ": 1}}, ConfigError, "did you mean `norm_type`"),
        ({"clip_grad": {"type": "global", "max_norm": 1}}, ValueError, "'norm' or 'value'"),
    ],
)
def test_wrong_arguments_are_refused(kwargs, error, says):
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    with pytest.raises(error, match=says):
        OptimWrapper(optimizer, **kwargs)


def test_a_loss_that_two_wrappers_are_given_says_so():
    model, first = make()
    second = OptimWrapper(torch.optim.SGD(model.parameters(), lr=1e-3))
    loss = model(BATCHES[0]).square().mean()
    first.update_params(loss)
    with pytest.raises(RuntimeError, match="a second time") as caught:
        second.update_params(loss)
    assert "If two optimizers were given one loss" in caught.value.__notes__[0]


def test_state_goes_through():
    _, wrapper = make()
    model = nn.Linear(3, 1)
    other = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9))
    assert other.get_lr() == {"lr": [0.7]}
    assert other.get_momentum() == {"momentum": [0.9]}
    adam = OptimWrapper(torch.optim.AdamW(model.parameters(), betas=(0.8, 0.9)))
    assert adam.get_momentum() == {"momentum": [0.8]}
    twin = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    twin.load_state_dict(other.state_dict())
    assert twin.get_lr() == {"lr": [0.7]}
    assert wrapper.get_momentum() == {"momentum": [0.0]}


@pytest.mark.parametrize("remake", [lambda wrapper: wrapper, copy.copy, copy.deepcopy])
def test_what_the_optimizer_alone_has_can_be_reached(remake):
    class Averaging(torch.optim.SGD):
        is_averaged = False

        def train(self):
            self.is_averaged = True

    weight = nn.Parameter(torch.ones(1))
    wrapper = remake(OptimWrapper(Averaging([weight], lr=1.0)))
    wrapper.train()
    assert wrapper.optimizer.is_averaged
    assert wrapper.state is wrapper.optimizer.state
    with pytest.raises(AttributeError, match="'Averaging' object has no attribute 'trian'"):
        wrapper.trian()


@pytest.mark.parametrize("kind", [torch.optim.SGD, "SGD"])
def test_a_config_names_the_optimizer_by_class_or_name(kind):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1).requires_grad_(False))
    wrapper = build_optim_wrapper(
        model, {"optimizer": {"type": kind, "lr": 0.3}, "accumulative_counts": 2, "clip_grad": {"max_norm": 1}}
    )
    assert type(wrapper) is OptimWrapper
    assert type(wrapper.optimizer) is torch.optim.SGD
    # The frozen ones, too, which may be unfrozen later.
    assert [id(p) for p in wrapper.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    assert "accumulative_counts=2" in repr(wrapper)


def test_objects_are_taken_as_they_are():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    wrapper = build_optim_wrapper(model, optimizer)
    assert wrapper.optimizer is optimizer
    assert build_optim_wrapper(model, wrapper) is wrapper
    assert build_optim_wrapper(model, {"optimizer": optimizer}).optimizer is optimizer


@pytest.mark.parametrize(
    ("cfg", "error", "says"),
    [
        ({"type": "SGD", "lr": 0.1}, ConfigError, "key `optimizer`.*but has only"),
        ({"optimizer": {"type": "SGD", "learning_rate": 0.1}}, BuildError, "did you mean `lr`"),
        ({"optimizer": {"type": "SDG", "lr": 0.1}}, KeyError, "did you mean `SGD`"),
        ("SGD", TypeError, "OptimWrapper, an optimizer or a config dict"),
    ],
)
def test_wrong_configs_are_refused(cfg, error, says):
    with pytest.raises(error, match=says):
        build_optim_wrapper(nn.Linear(1, 1), cfg)


def test_a_model_with_nothing_to_train_is_refused():
    with pytest.raises(ConfigError, match="require a gradient, but Linear has none"):
        build_optim_wrapper(nn.Linear(1, 1).requires_grad_(False), {"optimizer": {"type": "SGD", "lr": 1}})


def test_the_wrapper_has_a_name():
    assert OPTIM_WRAPPERS["OptimWrapper"] is OptimWrapper
