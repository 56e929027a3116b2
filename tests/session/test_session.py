"""Loops written by hand, on the ranks and strategies of a session."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from tests.runs import Losses
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Runner, Session
from lockstep.dist import all_gather, get_rank, get_world_size
from lockstep.errors import ConfigError
from lockstep.hooks import Hook
from lockstep.testing import ranks

from .by_hand import STRATEGIES, X8, Trained, X, Y, loader, network, session_of


@pytest.mark.parametrize(
    "options", [{}, {"accumulative_counts": 2, "clip_grad": {"max_norm": 0.1}}, {"amp": "bfloat16"}]
)
@ranks(1, 2)
def test_a_hand_written_loop_computes_what_a_runner_does(tmp_path, options):
    by_hand = Trained(tmp_path / "session", **options)
    losses = Losses()
    wrapper = {key: value for key, value in options.items() if key != "amp"}
    if "amp" in options:
        wrapper |= {"type": "AmpOptimWrapper", "dtype": "bfloat16"}
    schedule = {"type": "StepLR", "step_size": 3, "gamma": 0.5, "by_epoch": False}
    runner = Runner(
        network(),
        tmp_path / "runner",
        train_dataloader=loader(),
        loss=nn.CrossEntropyLoss(),
        optim_wrapper={"optimizer": {"type": "AdamW", "lr": 0.05}, **wrapper},
        param_scheduler=None if "accumulative_counts" in options else schedule,
        train_cfg={"max_epochs": 2},
        randomness={"seed": 0},
        custom_hooks=[losses],
        strategy="single" if get_world_size() == 1 else {"type": "ddp", "find_unused_parameters": False},
    )
    if "accumulative_counts" in options:
        runner.register_hook(StepsAtUpdates())
    runner.train()
    assert by_hand.losses == losses.by_iter
    assert_same_weights(by_hand.weights(), runner.run.strategy.model_state().values())


class StepsAtUpdates(Hook):
    """Halves the learning rate after every third update, which no schedule of a Runner counts."""

    def before_train(self, runner):
        self.schedule = torch.optim.lr_scheduler.StepLR(runner.optim_wrapper.optimizer, 3, 0.5)

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.optim_wrapper.should_update():
            self.schedule.step()


def assert_same_weights(one, other):
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_each_strategy_trains_the_same_weights(tmp_path, strategy):
    one, other = Trained(tmp_path / "ddp", strategy="ddp"), Trained(tmp_path / strategy, strategy=strategy)
    assert one.losses == pytest.approx(other.losses, abs=1e-6)
    for a, b in zip(one.weights(), other.weights(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_models_with_an_optimizer_each_are_trained_in_turn(tmp_path, strategy):
    found = {}
    for kind in ("ddp", strategy):
        session = session_of(tmp_path / kind, strategy=kind)
        torch.manual_seed(0)
        parts = {"one": nn.Linear(4, 4), "two": nn.Linear(4, 2)}
        optimizers = {name: torch.optim.SGD(part.parameters(), lr=0.1) for name, part in parts.items()}
        model, optims, batches = session.prepare(parts, optimizers, loader())
        for _ in session.epochs(2):
            for x, y in batches:
                optims["two"].update_params(F.cross_entropy(model["two"](model["one"](x).detach()), y))
                loss = F.cross_entropy(model["two"](model["one"](x)), y)
                optims["two"].zero_grad()
                optims["one"].update_params(loss)
                optims["two"].zero_grad()
                session.log(loss_one=loss)
                assert optims["one"].should_update()
                with pytest.raises(
                    TypeError, match=r"is_update is for one .* Call optimizers\['one'\]\.should_update\(\)"
                ):
                    _ = session.is_update
        found[kind] = session.run.strategy.model_state()
        with pytest.raises(TypeError, match=r"call one of the models \(one, two\), as in model\['one'\]"):
            model(X)
    for a, b in zip(found["ddp"].values(), found[strategy].values(), strict=True):
        torch.testing.assert_close(a, b.full_tensor() if hasattr(b, "full_tensor") else b, rtol=0, atol=1e-6)


@ranks(2)
def test_a_part_that_is_called_by_itself_is_averaged_too(tmp_path):
    session = session_of(tmp_path)
    model = network()
    model, _, batches = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader())
    for _ in session.epochs(1):
        for x, y in batches:
            hidden = model[0](x)
            session.step(F.cross_entropy(model[3](hidden.tanh()), y))
    for weight in model.parameters():
        one, other = all_gather(weight.detach())
        assert torch.equal(one, other)


@ranks(1, 2)
def test_a_penalty_on_gradients_is_that_of_a_loop_for_one_process(tmp_path):
    session = session_of(tmp_path)
    model, plain = network()[3], network()[3]
    model, _, batches = session.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(X8, batch_size=4 // get_world_size())
    )
    for _ in session.epochs(2):
        for x in batches:
            session.step(with_penalty(model, x))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for x in (X8[:4], X8[4:]) * 2:
        optimizer.zero_grad()
        with_penalty(plain, x).backward()
        optimizer.step()
    torch.testing.assert_close(model.weight, plain.weight)


def with_penalty(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    outputs = model(x).tanh()
    (slopes,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
    return outputs.square().mean() + slopes.square().sum(1).mean()


class Bypassing(nn.Sequential):
    """Has a `__call__` of its own, which goes past nn.Module's, as models of gpytorch do."""

    def __call__(self, x: Tensor) -> Tensor:
        return x @ self[0].weight.T


@ranks(2)
def test_weights_that_a_loop_uses_outside_of_their_unit_say_what_to_do(tmp_path):
    def train() -> None:
        net = Bypassing(nn.Linear(8, 4))
        with session_of(tmp_path, strategy="fsdp") as session:
            model, _, _ = session.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), DataLoader(X8, batch_size=2))
            for x in session.iterations(1):
                session.step(model(x).mean())

    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor") as raised:
        train()
    first, second = raised.value.__notes__
    assert first.startswith("weights must be used inside the forward pass of their unit under FSDP")
    assert second == f"(rank {get_rank()} of 2, after 0 iterations)"


@ranks(2)
def test_a_penalty_on_gradients_is_refused_under_fsdp(tmp_path):
    session = session_of(tmp_path, strategy={"type": "fsdp", "auto_wrap_policy": {nn.Linear}})
    model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    model, _, batches = session.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(X8, batch_size=4 // get_world_size())
    )
    for _ in session.epochs(1):
        for x in batches:
            with pytest.raises(ConfigError, match=r"must not be differentiated again .* FSDP .* Use strategy 'ddp'"):
                with_penalty(model, x)
            if get_world_size() > 1:  # torch's state of that pass remains, and would keep gradients on their ranks
                with pytest.raises(ConfigError, match="After a backward pass that has failed, FSDP can't go on"):
                    session.step(model(x).square().mean())
            break


@ranks(1, 2)
def test_batches_of_an_update_may_become_more_with_the_epochs(tmp_path):
    session = session_of(tmp_path)
    model, by_hand = network(), network()
    model[1].p = by_hand[1].p = 0.0
    batches = DataLoader(TensorDataset(X[:20], Y[:20]), batch_size=4 // get_world_size())
    model, optimizer, batches = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), batches)
    updates = []
    for epoch in session.epochs(3):
        optimizer.accumulative_counts = epoch + 1
        for x, y in batches:
            session.step(F.cross_entropy(model(x), y))
            updates += [session.iter + 1] * session.is_update
    assert updates == [1, 2, 3, 4, 5, 7, 9, 11, 14, 15]  # a window of two goes on over the end of its epoch
    plain, done = torch.optim.SGD(by_hand.parameters(), lr=0.1), 0
    for end in updates:
        places = [i % 5 for i in range(done, end)]
        loss = sum(F.cross_entropy(by_hand(X[4 * i : 4 * i + 4]), Y[4 * i : 4 * i + 4]) for i in places) / len(places)
        plain.zero_grad()
        loss.backward()
        plain.step()
        done = end
    for own, other in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(own, other)


@pytest.mark.parametrize(
    ("loss", "values", "error", "says"),
    [
        (lambda loss: loss.detach(), {}, ValueError, r"requires no gradient \(rank 0 of 1\)"),
        (lambda loss: loss.item(), {}, TypeError, r"must be a scalar tensor, but is the number .* \(rank 0 of 1\)"),
        (lambda loss: loss.expand(3), {}, ValueError, r"the loss must be a scalar, but has shape \(3,\)"),
        (lambda loss: {"accuracy": loss}, {}, TypeError, "at least one entry whose name contains 'loss'"),
        (lambda loss: loss, {"name": "cat"}, TypeError, "`name` must be a number or a scalar tensor to be recorded"),
        (lambda loss: loss, {"all": torch.ones(2)}, TypeError, r"`all` must be .* but is of shape \(2,\)"),
        (lambda loss: loss * float("nan"), {}, FloatingPointError, "the loss must be finite"),
    ],
)
def test_what_is_no_loss_says_so(tmp_path, loss, values, error, says):
    session = session_of(tmp_path)
    model = network()
    model, _, batches = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader())

    def train() -> None:
        for _ in session.epochs(1):
            for x, y in batches:
                session.step(loss(F.cross_entropy(model(x), y)), **values)

    with pytest.raises(error, match=says):
        train()


def test_what_a_model_returns_is_a_loss_too(tmp_path):
    session = session_of(tmp_path, default_hooks={"logger": {"interval": 1}})
    model = network()
    model, _, batches = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader())
    for _ in session.epochs(1):
        for x, y in batches:
            session.step({"loss_a": F.cross_entropy(model(x), y), "loss_b": model(x).square().mean()})
    record = json.loads((session.run_dir / "metrics.jsonl").read_text().splitlines()[0])
    assert record["loss"] == pytest.approx(record["loss_a"] + record["loss_b"])


class OfTransformers(nn.Linear):
    """Computes its loss of labels alone, as models of transformers do."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> SimpleNamespace:
        logits = super().forward(x)
        return SimpleNamespace(logits=logits, loss=None if labels is None else F.cross_entropy(logits, labels))


def test_a_batch_without_labels_for_a_model_that_needs_them_is_told(tmp_path):
    session = session_of(tmp_path)
    model = OfTransformers(4, 2)
    data = [{"x": x} for x in X]
    model, _, batches = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, 4))
    says = r"only of `labels`, but the batch has only x\. .* \(rank 0 of 1\)"

    def train() -> None:
        for _ in session.epochs(1):
            for batch in batches:
                session.step(model(**batch))

    with pytest.raises(TypeError, match=says):
        train()


@ranks(2)
def test_a_backward_pass_around_the_session_is_an_error(tmp_path):
    session = session_of(tmp_path)
    model = network()
    model, _, batches = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader())
    next(session.epochs(1))
    turns = iter(batches)
    x, y = next(turns)
    F.cross_entropy(model[3](model[0](x)), y).backward()
    with torch.no_grad():
        model[0].weight -= 0.1 * model[0].weight.grad
    with pytest.raises(RuntimeError, match="with gradients that were not averaged"):
        next(turns)


class CallsItsBase(torch.optim.SGD):
    def step(self) -> None:
        super().step()


@pytest.mark.parametrize("kind", [torch.optim.SGD, CallsItsBase])
@ranks(1, 2)
def test_a_step_after_that_of_the_session_is_an_error_where_it_finds_gradients(tmp_path, kind):
    session = session_of(tmp_path)
    model = network()
    model, optimizer, batches = session.prepare(model, kind(model.parameters(), lr=0.1), loader())
    for epoch in session.epochs(2):
        for x, y in batches:
            session.step(F.cross_entropy(model(x), y))
            optimizer.step()  # of an older loop: does nothing
            if epoch:
                model(x).square().mean().backward()
                for step in (optimizer.step, optimizer.optimizer.step):
                    with pytest.raises(RuntimeError, match="but there has been none since the last step"):
                        step()
                optimizer.zero_grad()


@ranks(1, 2)
def test_a_backward_pass_of_one_optimizer_allows_no_step_of_another(tmp_path):
    session = session_of(tmp_path)
    parts = {"one": nn.Linear(4, 4), "two": nn.Linear(4, 2)}
    optimizers = {name: torch.optim.SGD(part.parameters(), lr=0.1) for name, part in parts.items()}
    model, optims, batches = session.prepare(parts, optimizers, loader())
    for _ in session.epochs(1):
        for x, _ in batches:
            optims["one"].update_params(model["one"](x).square().mean())
            optims["two"].backward(optims["two"].scale_loss(model["two"](x).square().mean()))
            optims["two"].step()
            optims["two"].zero_grad()
            for parameter in model["two"].parameters():
                parameter.grad = torch.ones_like(parameter)
            with pytest.raises(RuntimeError, match=r"none since the last step .* Call optimizers\['two'\]"):
                optims["two"].step()
            optims["two"].zero_grad()


def test_data_without_a_batch_and_what_is_no_model_are_refused(tmp_path):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"`dataloader` must yield .*, but yields none: .* drop_last"):
        session_of(tmp_path).prepare(model, optimizer, DataLoader(X[:1], batch_size=2, drop_last=True))
    for wrong in (3, {"one": 3}):
        with pytest.raises(TypeError, match=r"`model` must be a torch\.nn\.Module or a dict of modules"):
            session_of(tmp_path).prepare(wrong, optimizer, loader())


def test_parts_in_the_places_of_others_are_refused(tmp_path):
    one, other = nn.Linear(4, 4), nn.Linear(4, 2)
    optimizer, second = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, other))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for given, says in (
        ((one, other, optimizer, loader()), "a model as the optimizer"),
        ((one, other, optimizer, second, loader()), "a model as the optimizer"),
        ((one, optimizer, other, second, loader()), "a model as the data loader"),
        ((one, optimizer, schedule), "a schedule as the data loader"),
        ((optimizer, one, loader()), "an optimizer as the model"),
        (([one, other], optimizer, loader()), "a list of several as the model"),
        (({"one": one, "other": other}, (optimizer, second), loader()), "a tuple of several as the optimizer"),
        ((one, optimizer, loader(), schedule, loader()), "a data loader as a further argument"),
    ):
        with pytest.raises(TypeError, match=rf"but has {says}\. Several models go in as a dict.*\{{'a': net_a"):
            session_of(tmp_path).prepare(*given)


@pytest.mark.parametrize("strategy", [None, "fsdp"])
@ranks(2)
def test_an_optimizer_of_another_model_is_refused(tmp_path, strategy):
    for is_joined in (False, True):
        model, optimizer = network(), torch.optim.SGD(network().parameters(), lr=0.1)
        given = [torch.optim.SGD(model.parameters(), lr=0.1), optimizer] if is_joined else optimizer
        session = session_of(tmp_path, strategy=strategy)
        with pytest.raises(ConfigError, match=r"`optimizer` must .*(SGD updates none of|parameters of another model)"):
            session.prepare(model, given, loader())


def test_wrong_options_are_refused_before_anything_is_made(tmp_path):
    for name in ("optim_wrapper", "val_cfg", "data_preprocessor", "max_epochs", "sed"):
        with pytest.raises(TypeError, match=rf"a Session has no argument `{name}`\. What .*session\.epochs\(count\)"):
            Session(tmp_path, **{name: {}})
    for name, meant in (("accumulative_count", "accumulative_counts"), ("precision", "amp")):
        with pytest.raises(TypeError, match=f"a Session has no argument `{name}`: did you mean `{meant}`"):
            Session(tmp_path, **{name: 3})
    for name, wrong in (("amp", "fp8"), ("accumulative_counts", 0), ("clip_grad", {"max_nrm": 1.0})):
        with pytest.raises(ConfigError, match="must"):
            Session(tmp_path, **{name: wrong})
    assert not list(tmp_path.iterdir())


def test_optimizers_by_names_that_no_part_of_the_model_has_are_refused(tmp_path):
    model = network()
    optimizers = {"0": torch.optim.Adam(model[0].parameters()), "last": torch.optim.SGD(model[3].parameters())}
    with pytest.raises(ConfigError, match=r"parts of the model, 0, 1, 2, 3, but has others: last"):
        session_of(tmp_path).prepare(model, optimizers, loader())


def test_the_name_of_an_optimizer_may_not_be_a_key_of_configs(tmp_path):
    model = nn.ModuleDict({"optimizer": nn.Linear(4, 2)})
    with pytest.raises(ConfigError, match=r"must not have the name 'optimizer', a key of configs\. Rename that part"):
        session_of(tmp_path).prepare(model, {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}, loader())


def test_a_compiled_model_has_optimizers_by_the_names_of_its_parts(tmp_path):
    model = network()
    optimizers = {name: torch.optim.SGD(model[int(name)].parameters(), lr=0.1) for name in ("0", "3")}
    session = session_of(tmp_path)
    prepared, wrapper, _ = session.prepare(torch.compile(model, backend="eager"), optimizers, loader())
    assert prepared is model
    assert list(wrapper) == ["0", "3"]


def test_a_hook_that_steps_schedules_is_refused_beside_a_loop_that_does(tmp_path):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooks = {"param_scheduler": {"type": "ParamSchedulerHook"}}
    session = session_of(tmp_path, default_hooks=hooks)
    session.prepare(model, optimizer, loader(), schedulers=torch.optim.lr_scheduler.StepLR(optimizer, 2))
    with pytest.raises(ConfigError, match="ParamSchedulerHook must be left out where the loop itself steps its StepLR"):
        next(session.epochs(1))


def test_names_of_accelerate_are_told_what_to_do_instead(tmp_path):
    session = Session(tmp_path, log_level="ERROR")
    with pytest.raises(AttributeError, match=r"no attribute 'backward': did you mean `step`"):
        session.backward(torch.ones(1))
    with pytest.raises(AttributeError, match="no attribute 'prepar': did you mean `prepare`"):
        _ = session.prepar
    with pytest.raises(AttributeError, match=r"no attribute 'gathered'(?!.*__)"):
        _ = session.gathered
    with pytest.raises(AttributeError, match=r"no attribute 'reduce'\. .* see docs/side-by-side"):
        _ = session.reduce
    model = network()
    _, _, batches = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader())
    assert batches.batch_size == batches.loader.batch_size
    with pytest.raises(TypeError, match=r"got a tuple .*\. Hand them in one by one, as in predictions, labels = "):
        session.gather((torch.ones(2), torch.ones(2)))


def test_an_attribute_error_within_a_property_is_the_one_that_is_raised(tmp_path):
    class Own(Session):
        @property
        def best(self) -> float:
            return self.nothing_like_it

    with pytest.raises(AttributeError, match="no attribute 'nothing_like_it'"):
        _ = Own(tmp_path, log_level="ERROR").best


class OfAccelerate(torch.optim.SGD):
    """Stands for an optimizer that accelerate has prepared."""

    __module__ = "accelerate.optimizer"


def test_what_has_been_prepared_already_is_refused(tmp_path):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = session_of(tmp_path)
    model, wrapper, batches = session.prepare(model, optimizer, loader())
    for given, name in ((wrapper, "optimizer"), (batches, "dataloader")):
        with pytest.raises(TypeError, match=rf"`{name}` must be your own, .*, which prepare\(\) has returned before"):
            session_of(tmp_path).prepare(network(), **{"optimizer": optimizer, "dataloader": loader(), name: given})
    with pytest.raises(TypeError, match="there is one loader to train on: join several sets"):
        session_of(tmp_path).prepare(network(), optimizer, loader(), loader())
    prepared = OfAccelerate(model.parameters(), lr=0.1)
    says = r" must be your own, but is accelerate's OfAccelerate\. Hand in what you gave to its prepare\(\)"
    with pytest.raises(TypeError, match="`optimizer`" + says):
        session_of(tmp_path).prepare(network(), prepared)
    with pytest.raises(TypeError, match="`optim_wrapper`" + says):
        Runner(model, tmp_path, optim_wrapper=prepared)


def test_a_model_that_a_session_has_prepared_can_be_trained_by_a_runner(tmp_path):
    """As in the next cell of a notebook; also a copy of it, and where the loop has failed."""
    model = network()
    session = session_of(tmp_path / "session")
    model, _, batches = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader())
    for _ in session.epochs(1):
        for x, y in batches:
            session.step(F.cross_entropy(model(x), y))
    options = {"optim_wrapper": {"optimizer": {"type": "SGD", "lr": 0.1}}, "train_cfg": {"max_epochs": 1}}
    options |= {"loss": nn.CrossEntropyLoss(), "log_level": "ERROR"}
    for number, one in enumerate((copy.deepcopy(model), model)):
        Runner(one, tmp_path / str(number), train_dataloader=loader(), **options).train()


@ranks(1, 2)
def test_an_update_is_the_mean_over_what_batch_size_of_counts(tmp_path: Path) -> None:
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(2))
    tokens = torch.arange(6) < 1 + torch.arange(16)[:, None] % 6  # from one to six of each sample count

    def loss_of(model: nn.Module, values: Tensor, counted: Tensor) -> Tensor:
        return model(values[counted][:, None]).square().mean()

    session = session_of(tmp_path, accumulative_counts=2, batch_size_of=lambda batch: int(batch[1].sum()))
    model = nn.Linear(1, 1)
    plain = nn.Linear(1, 1)
    plain.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = DataLoader(TensorDataset(x, tokens), batch_size=8 // get_world_size())
    model, _, batches = session.prepare(model, optimizer, data)
    for _ in session.epochs(1):
        for batch in batches:
            session.step(loss_of(model, *batch))
    loss_of(plain, x, tokens).backward()
    for own, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own, expected - 0.1 * expected.grad)


@ranks(2)
def test_weights_are_averaged_under_fsdp_after_a_validation_within_a_window(tmp_path):
    average = {"type": "EMAHook", "momentum": 0.5}
    session = session_of(tmp_path, strategy="fsdp", accumulative_counts=4, custom_hooks=[average])
    model, data = nn.Linear(8, 1), DataLoader(X8, batch_size=1)
    model, _, _ = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
    held_out = session.prepare_evaluation(data)
    for x in session.iterations(4):
        session.step(model(x).square().mean())
        model.eval()
        with torch.no_grad():
            _ = [model(one) for one in held_out]
        model.train()
    assert session.iter == 4


class Around(torch.optim.Optimizer):
    """An optimizer that does not set itself up as one, as those around another one do in some packages."""

    def __init__(self, inner):
        self.inner, self.param_groups, self.defaults, self.state = inner, inner.param_groups, {}, inner.state

    def step(self, closure=None):
        self.inner.step(closure)


def test_an_optimizer_that_is_not_set_up_as_one_is_refused_by_name(tmp_path):
    model = network()
    with session_of(tmp_path) as session, pytest.raises(ConfigError, match=r"but Around of .*test_session does not"):
        session.prepare(model, Around(torch.optim.SGD(model.parameters(), 0.1)), loader())
