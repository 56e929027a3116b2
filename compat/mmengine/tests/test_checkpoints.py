"""Files of weights and checkpoints: what MMEngine writes is read here, and the other way round."""

from __future__ import annotations

import os
import sys
from collections import OrderedDict
from pathlib import Path
from pickle import UnpicklingError

import pytest
import torch
from documented.toys import Net, training_only
from environments import REFERENCE, run

from lockstep.errors import place_of
from mmengine.runner import (
    CheckpointLoader,
    Runner,
    export_checkpoint,
    find_latest_checkpoint,
    get_state_dict,
    load_checkpoint,
    load_state_dict,
    save_checkpoint,
    weights_to_cpu,
)
from mmengine.runner.checkpoint import _load_checkpoint, _load_checkpoint_with_prefix
from mmengine.utils import mkdir_or_exist

WRITE = """
import torch
from mmengine.logging import MessageHub
from mmengine.runner import save_checkpoint, weights_to_cpu
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
optimizer = torch.optim.AdamW(net.parameters())
net(torch.randn(4, 2)).sum().backward()
optimizer.step()
hub = MessageHub.get_instance("run")
hub.update_scalar("train/loss", 0.5)
content = dict(state_dict=weights_to_cpu(net.state_dict()), optimizer=optimizer.state_dict())
content["meta"] = dict(epoch=3, iter=7)
if HUB:
    content["message_hub"] = hub.state_dict()
save_checkpoint(content, PATH)
answers["bias"] = net[0].bias.tolist()
"""

READ = """
import torch
from mmengine.runner import load_checkpoint
net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
found = load_checkpoint(net, PATH, map_location="cpu", strict=True)
answers["bias"] = net[0].bias.tolist()
answers["meta"] = found["meta"]
answers["keys"] = sorted(found)
"""


def net():
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))


@pytest.mark.skipif(
    not REFERENCE, reason="MMENGINE_REFERENCE must be the Python of an environment with MMEngine 0.10.7"
)
@pytest.mark.parametrize("hub", [True, False])
def test_a_file_of_mmengine_is_read(tmp_path, hub):
    file = str(tmp_path / "a.pth")
    written = run(REFERENCE, WRITE.replace("PATH", repr(file)).replace("HUB", str(hub)), tmp_path)
    read = run(sys.executable, READ.replace("PATH", repr(file)), tmp_path)
    assert read["bias"] == written["bias"]
    assert read["meta"] == {"epoch": 3, "iter": 7}
    assert ("message_hub" in read["keys"]) is hub


@pytest.mark.skipif(
    not REFERENCE, reason="MMENGINE_REFERENCE must be the Python of an environment with MMEngine 0.10.7"
)
def test_mmengine_reads_a_file_that_is_written_here(tmp_path):
    file = str(tmp_path / "a.pth")
    written = run(sys.executable, WRITE.replace("PATH", repr(file)).replace("HUB", "False"), tmp_path)
    assert run(REFERENCE, READ.replace("PATH", repr(file)), tmp_path)["bias"] == written["bias"]


GAN = """
import torch
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS
from mmengine.runner import Runner

class Gan(BaseModel):
    def __init__(self):
        super().__init__()
        self.critic = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        self.generator = torch.nn.Linear(4, 2)

    def train_step(self, data, optim_wrapper):
        real, noise = data
        fake = self.generator(noise)
        critic = self.critic(fake.detach()).mean() - self.critic(real).mean()
        optim_wrapper["critic"].zero_grad()  # it has gradients of the generator's last loss
        optim_wrapper["critic"].update_params(critic)
        generator = -self.critic(self.generator(noise)).mean()
        optim_wrapper["generator"].update_params(generator)
        return {"loss": critic.detach(), "loss_generator": generator.detach()}

    def forward(self, *inputs, mode="tensor"):
        raise NotImplementedError

@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class EachOfTwo:
    def __init__(self, optim_wrapper_cfg, paramwise_cfg=None):
        pass

    def __call__(self, model):
        critic = list(model.critic.parameters())
        wrappers = dict(
            generator=OptimWrapper(torch.optim.Adam(model.generator.parameters(), lr=0.01)),
            critic=OptimWrapper(torch.optim.SGD(critic[::-1], lr=0.1, momentum=0.9)),
        )
        return OptimWrapperDict(**{name: wrappers[name] for name in order})

class Losses(Hook):
    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        answers.setdefault("losses", []).append([float(one).hex() for one in outputs.values()])

torch.manual_seed(0)
data = list(zip(torch.randn(12, 2), torch.randn(12, 4)))
epochs, resume, order = ARGUMENTS
model = Gan()
Runner(
    model=model, work_dir="work", train_dataloader=torch.utils.data.DataLoader(data, batch_size=4),
    optim_wrapper=dict(constructor="EachOfTwo"), train_cfg=dict(by_epoch=True, max_epochs=epochs),
    param_scheduler=dict(
        generator=dict(type="ExponentialLR", gamma=0.5), critic=dict(type="MultiStepLR", milestones=[2])
    ),
    custom_hooks=[Losses()], load_from=resume, resume=bool(resume), visualizer=None,
).train()
"""


@pytest.mark.skipif(
    not REFERENCE, reason="MMENGINE_REFERENCE must be the Python of an environment with MMEngine 0.10.7"
)
def test_a_training_with_several_optimizers_resumes_from_mmengine(tmp_path):
    def losses(python, folder, file=None, order=("generator", "critic")):
        return run(python, GAN.replace("ARGUMENTS", repr((4, file, order))), tmp_path / folder)["losses"]

    whole = losses(REFERENCE, "theirs")
    assert len(whole) == 12
    assert losses(sys.executable, "ours") == whole
    file = str(tmp_path / "theirs" / "work" / "epoch_2.pth")
    assert losses(sys.executable, "resumed", file) == whole[6:]
    assert losses(sys.executable, "other_order", file, order=("critic", "generator")) == whole[6:]


GROUPS = """
import torch
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.optim import OptimWrapper
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS
from mmengine.runner import Runner

class Net(BaseModel):
    def __init__(self):
        super().__init__()
        self.stem, self.body, self.head = (torch.nn.Linear(2, 2) for _ in range(3))
        self.norm = torch.nn.BatchNorm1d(2)
        self.stem.requires_grad_(False)

    def forward(self, inputs, mode="loss"):
        return {"loss": self.head(self.norm(self.body(self.stem(inputs))).tanh()).square().mean()}

@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class BiasesFirst:
    def __init__(self, optim_wrapper_cfg, paramwise_cfg=None):
        pass

    def __call__(self, model):
        parts = [[one for name, one in model.named_parameters() if name.endswith(end)] for end in ("bias", "weight")]
        groups = [dict(params=part, lr=lr) for part, lr in zip(parts, (0.05, 0.1))]
        return OptimWrapper(torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01))

class Observe(Hook):
    def before_train(self, runner):
        own = runner.message_hub.log_scalars.get("train/own")
        answers["hub"] = [] if own is None else [float(one) for one in own.data[0]]
        answers["info"] = runner.message_hub.get_info("own")

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        answers.setdefault("losses", []).append(float(outputs["loss"]).hex())
        runner.message_hub.update_scalar("train/own", runner.iter)
        runner.message_hub.update_info("own", [runner.iter])

torch.manual_seed(0)
data = [dict(inputs=one) for one in torch.randn(12, 2)]
resume, options = ARGUMENTS
Runner(
    model=Net(), work_dir="work", train_dataloader=torch.utils.data.DataLoader(data, batch_size=4),
    optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1, momentum=0.9, weight_decay=0.01), **options),
    param_scheduler=[
        dict(type="LinearLR", start_factor=0.1, by_epoch=False, end=4),
        dict(type="CosineAnnealingLR", by_epoch=False, begin=4, end=12),
    ],
    train_cfg=dict(by_epoch=True, max_epochs=4), custom_hooks=[Observe()], load_from=resume, resume=bool(resume),
    visualizer=None,
).train()
"""


@pytest.mark.skipif(
    not REFERENCE, reason="MMENGINE_REFERENCE must be the Python of an environment with MMEngine 0.10.7"
)
@pytest.mark.parametrize(
    "options",
    [
        {"paramwise_cfg": {"custom_keys": {"body": {"lr_mult": 0.1}}, "norm_decay_mult": 0.0}},
        {"paramwise_cfg": {"norm_decay_mult": 1.0}},  # one group here, one for each parameter there
        {"constructor": "BiasesFirst"},
    ],
)
def test_a_training_with_several_groups_resumes_from_the_other_with_its_schedule_and_hub(tmp_path, options):
    def trained(python, folder, file=None):
        return run(python, GROUPS.replace("ARGUMENTS", repr((file, options))), tmp_path / folder)

    whole = trained(REFERENCE, "theirs")["losses"]
    assert len(whole) == 12
    assert trained(sys.executable, "ours")["losses"] == whole
    theirs = str(tmp_path / "theirs" / "work" / "epoch_2.pth")
    ours = tmp_path / "ours" / "work"
    export_checkpoint(next(ours.glob("*/epoch_2")), tmp_path / "ours.pth", histories=True)
    for python, folder, file in (
        (sys.executable, "ours_from_theirs", theirs),
        (REFERENCE, "theirs_from_ours", str(tmp_path / "ours.pth")),
        (sys.executable, "ours_from_ours", str(next(ours.glob("*/epoch_2")))),
    ):
        on = trained(python, folder, file)
        assert on["losses"] == whole[6:], folder
        assert (on["hub"], on["info"]) == ([0, 1, 2, 3, 4, 5], [5]), folder


# Trainings of two epochs that go on for four, with each kind of schedule.
LONGER = """
import torch
from mmengine.evaluator import BaseMetric
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.runner import Runner

class Net(BaseModel):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Linear(2, 2)

    def forward(self, inputs, mode="loss"):
        loss = self.body(inputs).square().mean()
        return {"loss": loss} if mode == "loss" else [float(loss)]

class Worse(BaseMetric):
    def process(self, data_batch, data_samples):
        self.results.append(1)

    def compute_metrics(self, results):
        Worse.value += 1.0
        return {"worse": Worse.value}

class Rates(Hook):
    def before_train_iter(self, runner, batch_idx, data_batch=None):
        group = runner.optim_wrapper.optimizer.param_groups[0]
        self.seen.append([float(one).hex() for one in (group["lr"], group["weight_decay"], *group["betas"])])

cases = dict(
    constant=dict(type="ConstantLR", factor=0.3),
    linear=dict(type="LinearLR", start_factor=0.1),
    cosine=dict(type="CosineAnnealingLR", eta_min=1e-3),
    converted=dict(type="CosineAnnealingLR", convert_to_iter_based=True),
    steps=dict(type="MultiStepLR", milestones=[1, 3]),
    step=dict(type="StepLR", step_size=2),
    poly=dict(type="PolyLR", power=0.9, by_epoch=False),
    exponential=dict(type="ExponentialLR", gamma=0.9, by_epoch=False),
    cycle=dict(type="OneCycleLR", eta_max=0.5, total_steps=13, by_epoch=False),
    restarts=dict(type="CosineRestartLR", periods=[5, 8], restart_weights=[1, 0.5], eta_min=1e-3, by_epoch=False),
    momentum=dict(type="CosineAnnealingMomentum", eta_min=0.2, by_epoch=False),
    decay=dict(type="PolyParamScheduler", param_name="weight_decay", power=2, by_epoch=False),
    two=[dict(type="LinearLR", start_factor=0.1, by_epoch=False, end=2), dict(type="CosineAnnealingLR", begin=1)],
    plateau=dict(type="ReduceOnPlateauLR", monitor="worse", patience=1, factor=0.5),
)
torch.manual_seed(0)
data = [dict(inputs=one) for one in torch.randn(12, 2)]
first, epochs, resume, more = ARGUMENTS
for name, schedule in cases.items():
    Worse.value, rates = float(first), Rates()
    rates.seen = answers[name] = []
    Runner(
        model=Net(), work_dir=f"{name}/work", train_dataloader=torch.utils.data.DataLoader(data, batch_size=4),
        val_dataloader=torch.utils.data.DataLoader(data, batch_size=4), val_cfg=dict(), val_evaluator=[Worse()],
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=0.1, weight_decay=0.05)), param_scheduler=schedule,
        train_cfg=dict(by_epoch=True, max_epochs=epochs, val_interval=1), custom_hooks=[rates], visualizer=None,
        load_from=resume and resume.replace("NAME", name), resume=bool(resume),
        experiment_name=f"{name}_{epochs}", **more,
    ).train()
"""


@pytest.mark.skipif(
    not REFERENCE, reason="MMENGINE_REFERENCE must be the Python of an environment with MMEngine 0.10.7"
)
def test_a_training_that_is_longer_when_it_resumes_has_the_schedules_of_mmengine_or_of_the_config(tmp_path):
    def rates(python, folder, first, epochs, resume=None, **more):
        return run(python, LONGER.replace("ARGUMENTS", repr((first, epochs, resume, more))), tmp_path / folder)

    short = rates(REFERENCE, "theirs", 0, 2)
    assert rates(sys.executable, "ours", 0, 2) == short
    file = str(tmp_path / "theirs" / "NAME" / "work" / "epoch_2.pth")
    saved = rates(REFERENCE, "theirs_resumed", 2, 4, file)
    assert len(saved) == 14
    ours = {name: next((tmp_path / "ours" / name / "work").glob("*/epoch_2")) for name in saved}
    link = tmp_path / "links"
    link.mkdir()
    for name, folder in ours.items():
        (link / name).symlink_to(folder)
        export_checkpoint(folder, tmp_path / f"{name}.pth")
    assert rates(sys.executable, "ours_from_theirs", 2, 4, file) == saved
    assert rates(REFERENCE, "theirs_from_ours", 2, 4, str(tmp_path / "NAME.pth")) == saved
    assert rates(sys.executable, "ours_from_ours", 2, 4, str(link / "NAME")) == saved

    whole = rates(REFERENCE, "theirs_whole", 0, 4)
    as_config = rates(sys.executable, "as_config", 2, 4, str(link / "NAME"), resume_options="config")
    assert as_config == {name: values[6:] for name, values in whole.items()}
    differ = {name for name in whole if saved[name] != whole[name][6:]}
    assert {"linear", "cosine", "converted", "poly", "momentum", "decay", "two"} <= differ


def test_counts_beside_an_average_are_those_of_the_trained_model(tmp_path):
    def trained(folder, epochs, **options):
        model = Net()
        model.layers.append(torch.nn.BatchNorm1d(2))
        hook = {"type": "EMAHook", "momentum": 0.1, "update_buffers": True}
        cfg = {"by_epoch": True, "max_epochs": epochs}
        arguments = training_only(folder, model=model, train_cfg=cfg, custom_hooks=[hook], visualizer=[], **options)
        Runner(**arguments).train()
        return model.layers[-1].num_batches_tracked.item()

    assert trained(tmp_path / "first", 1) == 3
    export_checkpoint(str(tmp_path / "first"), str(tmp_path / "epoch_1.pth"))
    content = torch.load(tmp_path / "epoch_1.pth", weights_only=False)
    content["state_dict"]["layers.3.num_batches_tracked"] = torch.tensor(1)  # where the average of MMEngine stays
    torch.save(content, tmp_path / "epoch_1.pth")
    assert trained(tmp_path / "second", 2, load_from=str(tmp_path / "epoch_1.pth"), resume=True) == 6


def test_weights_that_do_not_fit_are_named_or_raised():
    state = net().state_dict()
    state["0.weight"] = torch.ones(5, 5)
    state["more"] = torch.ones(1)
    del state["1.bias"]
    model = net()
    with pytest.raises(RuntimeError, match=r"(?s)0\.weight.*more.*1\.bias"):
        load_state_dict(model, state, strict=True)
    load_state_dict(model, state)
    assert torch.equal(model[0].bias, state["0.bias"])


def test_names_are_revised_and_the_whole_file_is_returned(tmp_path):
    source = net()
    state = OrderedDict((f"module.{name}", value) for name, value in source.state_dict().items())
    save_checkpoint({"state_dict": state, "meta": {"a": 1}}, tmp_path / "a.pth")
    model = net()
    assert load_checkpoint(model, tmp_path / "a.pth")["meta"] == {"a": 1}
    assert torch.equal(model[0].weight, source[0].weight)
    part = _load_checkpoint_with_prefix("module.0", tmp_path / "a.pth")
    assert sorted(part) == ["bias", "weight"]


def test_no_code_of_a_file_is_run(tmp_path):
    class Evil:
        def __init__(self, function):
            self.function = function

        def __reduce__(self):
            return self.function, (str(tmp_path / "made"),)

    torch.save({"state_dict": {"a": torch.ones(1)}, "evil": Evil(mkdir_or_exist)}, tmp_path / "a.pth")
    assert _load_checkpoint(tmp_path / "a.pth")["state_dict"]["a"].item() == 1
    torch.save({"state_dict": {"a": torch.ones(1)}, "evil": Evil(os.mkdir)}, tmp_path / "b.pth")
    with pytest.raises(UnpicklingError, match="mkdir"):  # torch refuses this module whatever it is replaced by
        _load_checkpoint(tmp_path / "b.pth")
    assert not (tmp_path / "made").exists()


def test_schemes_are_ones_own_and_missing_files_are_named(tmp_path):
    @CheckpointLoader.register_scheme("shelf://", force=True)
    def load_from_shelf(filename, map_location=None):
        return {"state_dict": {"name": filename}}

    assert CheckpointLoader.load_checkpoint("shelf://a")["state_dict"]["name"] == "shelf://a"
    with pytest.raises(KeyError):
        CheckpointLoader.register_scheme("shelf://", load_from_shelf)
    with pytest.raises(FileNotFoundError, match=r"missing\.pth"):
        CheckpointLoader.load_checkpoint(tmp_path / "missing.pth")
    (tmp_path / "run" / "best_acc_epoch_3").mkdir(parents=True)
    (tmp_path / "run" / "best_acc_epoch_3" / "manifest.json").touch()
    with pytest.raises(FileNotFoundError, match=r"/best_acc_epoch_3\.pth`\. There is .*/run/best_acc_epoch_3$"):
        CheckpointLoader.load_checkpoint(tmp_path / "best_acc_epoch_3.pth")
    with pytest.raises(ValueError, match="register_scheme"):
        CheckpointLoader.load_checkpoint("open-mmlab://resnet50")


def test_versions_of_modules_are_kept():
    state = weights_to_cpu(get_state_dict(net()))
    assert state._metadata["1"]["version"] == 2
    assert not state["0.weight"].requires_grad


def test_the_last_checkpoint_is_found(tmp_path):
    assert find_latest_checkpoint(tmp_path) is None
    Path(tmp_path, "last_checkpoint").write_text("epoch_3.pth")
    assert find_latest_checkpoint(tmp_path) == "epoch_3.pth"


def test_the_place_of_an_error_is_the_line_of_the_user() -> None:
    with pytest.raises(FileNotFoundError) as caught:
        CheckpointLoader.load_checkpoint("nowhere.pth")
    assert place_of(caught.value.__traceback__).startswith("test_checkpoints.py:")
