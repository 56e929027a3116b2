"""Models in stages: the numbers of one process, its checkpoints, and what is refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.checkpoint import load_state, save_state
from lockstep.errors import CheckpointError, ConfigError
from lockstep.evaluator import BaseMetric
from lockstep.hooks import Hook
from lockstep.model import predict_step, train_step
from lockstep.runner import Runner
from lockstep.strategy import Strategy, build_strategy
from lockstep.testing import close_pools, ranks, run_ranks

from ...strategy.transformer import mean_over_ranks
from ..training import assert_equal, whole
from .training import kept

STEPS, SAMPLES, LENGTH, WORDS = 10, 8, 12, 99  # 99 words are padded to 128
# Each text counts on from a random number.
TEXT = torch.randint(1, 20, (STEPS * SAMPLES, 1), generator=torch.Generator().manual_seed(2)) + torch.arange(LENGTH)
HYBRID = {"type": "colossalai", "plugin": "hybrid"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {"type": "SingleDeviceStrategy"},
    "ddp": {"type": "DDPStrategy"},
    "pp2": {"pp_size": 2},
    "pp2-tp2": {"pp_size": 2, "tp_size": 2},
    "pp2-dp2": {"pp_size": 2},
    "pp4": {"pp_size": 4},  # of three layers: the first stage has the words alone
}
SIZES = {"single": 1, "pp2": 2, "pp2-tp2": 4, "pp2-dp2": 4, "pp4": 4}


def strategy_of(layout: str, **options: Any) -> Strategy:
    return kept(build_strategy(config_of(layout, **options)))


def config_of(layout: str, **options: Any) -> dict[str, Any]:
    return LAYOUTS[layout] if layout in ("single", "ddp") else {**HYBRID, **LAYOUTS[layout], **options}


def llama(tied: bool = False) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied, attention_dropout=0.0,
    )  # fmt: skip
    torch.manual_seed(4)
    return LlamaForCausalLM(config)


class Training:
    """A model and its optimizer under a strategy."""

    def __init__(self, layout: str, counts: int = 1, tied: bool = False, lr: float = 1e-2, **options: Any) -> None:
        self.strategy = strategy_of(layout, **options)
        optim = {"optimizer": {"type": "AdamW", "lr": lr}, "clip_grad": {"max_norm": 0.5}}
        paramwise = {"norm_decay_mult": 0.0}  # makes two groups
        self.model, self.optim_wrapper = self.strategy.prepare(
            llama(tied), {**optim, "accumulative_counts": counts, "paramwise_cfg": paramwise}
        )
        self.counts = counts

    def run(self, start: int = 0, stop: int = STEPS) -> tuple[list[float], list[float]]:
        """Return losses and norms; each step is cut into as many batches as are accumulated."""
        rank, shares = self.strategy.data_shard
        losses, norms = [], []
        for batch in TEXT[start * SAMPLES : stop * SAMPLES].split(SAMPLES // self.counts):
            words = batch[rank::shares]
            losses.append(self.step({"input_ids": words, "labels": words}))
            if self.optim_wrapper.inner_count % self.counts == 0:
                norms.append(self.optim_wrapper.grad_norm.item())
        return losses, norms

    def step(self, batch: dict[str, Tensor]) -> float:
        step = getattr(self.model, "train_step", partial(train_step, self.model))
        return step(batch, self.optim_wrapper)["loss"].item()

    def predict(self, batch: dict[str, Tensor]) -> Any:
        self.model.eval()
        with torch.no_grad():
            return getattr(self.model, "val_step", partial(predict_step, self.model))(batch)

    def state(self) -> dict[str, Any]:
        return {"model": self.strategy.model_state(), "optimizer": self.strategy.optim_state()}


def train(layout: str, counts: int, tied: bool, **options: Any) -> tuple[list[float], list[float]]:
    losses, norms = Training(layout, counts, tied, **options).run()
    return mean_over_ranks(losses), norms


@pytest.mark.parametrize(("counts", "tied"), [(1, False), (4, True)], ids=["", "accumulated-tied"])
@pytest.mark.parametrize("layout", ["pp2", "pp2-tp2", "pp2-dp2", "pp4"])
def test_losses_and_global_gradient_norms_are_those_of_one_process(layout: str, counts: int, tied: bool):
    losses, norms = run_ranks(1, train, "single", counts, tied)[0]
    assert losses[-1] < losses[0]
    assert len(norms) == STEPS
    for rank_losses, rank_norms in run_ranks(SIZES[layout], train, layout, counts, tied):
        assert rank_losses == pytest.approx(losses, abs=1e-5 if "tp" in layout else 5e-6, rel=0)
        assert rank_norms == pytest.approx(norms, rel=1e-5)


def save_trained(layout: str, tied: bool, path: Path) -> tuple[Any, list[float]]:
    training = Training(layout, tied=tied)
    training.run(0, 4)
    save_state(path, training.state(), {})
    return whole(training.state()), mean_over_ranks(training.run(4)[0])


def load_and_train(layout: str, tied: bool, path: Path) -> tuple[Any, list[float]]:
    training = Training(layout, tied=tied, lr=1.0)  # the saved one counts
    training.run(0, 2)  # to be overwritten
    state = load_state(path, training.state())
    training.strategy.load_state(state["model"], state["optimizer"])
    return whole(training.state()), mean_over_ranks(training.run(4)[0])


@pytest.mark.parametrize(("layout", "tied"), [("pp2", False), ("pp2-tp2", True), ("pp2-dp2", True)])
def test_a_checkpoint_of_one_process_is_resumed_and_the_other_way_round(layout: str, tied: bool, tmp_path: Path):
    for saved_by, loaded_by in (("single", layout), (layout, "single"), (layout, layout)):
        path = tmp_path / f"{saved_by}-{loaded_by}"
        saved = run_ranks(SIZES[saved_by], save_trained, saved_by, tied, path)
        loaded = run_ranks(SIZES[loaded_by], load_and_train, loaded_by, tied, path)
        state, losses = saved[0]
        assert ("lm_head.weight" in state["optimizer"]["state"]) != tied
        assert {"exp_avg", "exp_avg_sq", "step"} == state["optimizer"]["state"]["model.norm.weight"].keys()
        assert [group["lr"] for group in state["optimizer"]["param_groups"]] == [1e-2, 1e-2]
        for rank_state, rank_losses in (*saved[1:], *loaded):
            assert_equal(rank_state["model"], state["model"])
            assert_equal(rank_state["optimizer"]["state"], state["optimizer"]["state"])
            assert rank_losses == pytest.approx(losses, abs=1e-5 if "tp" in layout else 5e-6, rel=0)


def shapes_of_states(layout: str, tied: bool) -> Any:
    training = Training(layout, tied=tied)
    fresh = training.state()
    groups = [{**group, "params": list(group["params"])} for group in fresh["optimizer"]["param_groups"]]
    shapes = {name: value.shape for name, value in fresh["model"].items()}
    return shapes, {name: set(entry) for name, entry in fresh["optimizer"]["state"].items()}, groups


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_the_state_has_the_names_shapes_and_groups_of_one_process(tied: bool):
    single = run_ranks(1, shapes_of_states, "single", tied)[0]
    for layout in ("pp2", "pp2-tp2"):
        for shapes, entries, groups in run_ranks(SIZES[layout], shapes_of_states, layout, tied):
            assert (shapes, entries) == single[:2]
            assert [group["params"] for group in groups] == [group["params"] for group in single[2]]


def odd_batches(layout: str, **options: Any) -> tuple[list[float], list[Any]]:
    """Train on batches of unequal lengths and sizes, with padding and labels that do not count, and predict."""
    training = Training(layout, **options)
    losses, predictions = [], []
    for samples, length in ((8, 12), (3, 5), (1, 7), (6, 12), (2, 9)):
        words = TEXT[:samples, :length]
        lengths = torch.arange(samples) % length + (samples > 1)
        mask = (torch.arange(length) < lengths[:, None]).long() if samples > 1 else torch.ones(1, length).long()
        labels = words.masked_fill(mask == 0, -100)
        labels[0, : length // 2] = -100
        batch = {"input_ids": words, "attention_mask": mask, "labels": labels}
        losses.append(training.step(batch))
        predicted = training.predict(batch)
        predictions.append({"loss": predicted.loss, "logits": predicted["logits"] * mask[..., None]})
        training.model.train()
    return losses, predictions


@pytest.mark.parametrize(("layout", "options"), [
    ("pp2", {}), ("pp2", {"microbatch_size": 3}), ("pp2", {"num_microbatches": 1}), ("pp2-tp2", {}), ("pp4", {}),
])  # fmt: skip
def test_odd_batches_are_trained_on_and_predicted_as_in_one_process(layout: str, options: dict[str, Any]):
    losses, predictions = run_ranks(1, odd_batches, "single")[0]
    for rank_losses, rank_predictions in run_ranks(SIZES[layout], odd_batches, layout, **options):
        assert rank_losses == pytest.approx(losses, abs=1e-5, rel=0)
        for ours, theirs in zip(rank_predictions, predictions, strict=True):
            for name, value in theirs.items():
                assert torch.allclose(ours[name], value, atol=1e-4), name


def train_in_bf16(layout: str, tied: bool, path: Path, **options: Any) -> tuple[list[float], list[float], Any]:
    training = Training(layout, counts=2, tied=tied, precision="bf16", **options)
    losses, norms = training.run(0, 5)
    state = whole(training.state())
    again = Training(layout, counts=2, tied=tied, lr=1.0, precision="bf16", **options)
    again.strategy.load_state(training.strategy.model_state(), training.strategy.optim_state())
    assert_equal(whole(again.state()["model"]), state["model"])
    assert_equal(whole(again.state()["optimizer"]["state"]), state["optimizer"]["state"])
    assert training.run(5) == again.run(5)
    return mean_over_ranks(losses), norms, state


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_bf16_with_and_without_zero_1_keeps_float32_weights(tied: bool, tmp_path: Path):
    losses, norms = run_ranks(1, train, "single", 2, tied)[0]
    plain = run_ranks(4, train_in_bf16, "pp2-dp2", tied, tmp_path)
    zero = run_ranks(4, train_in_bf16, "pp2-dp2", tied, tmp_path, zero_stage=1)
    assert zero[0][1][0] == pytest.approx(plain[0][1][0], rel=1e-5)
    # The two add in different orders. A last bit of a weight may then be another bfloat16, on some processors.
    assert zero[0][1] == pytest.approx(plain[0][1], rel=1e-3)
    for results in (plain, zero):
        for rank_losses, rank_norms, state in results:
            assert rank_losses == pytest.approx(losses[:10], abs=0.05)
            assert rank_norms == pytest.approx(norms[:5], rel=0.05)
            assert {value.dtype for value in state["model"].values()} == {torch.float32}
            weight = state["model"]["model.norm.weight"]
            assert not torch.equal(weight, weight.bfloat16().float())


class Texts(list[dict[str, Tensor]]):
    """A dataset: texts to be continued."""


class Losses(Hook):
    def __init__(self) -> None:
        self.by_iter: dict[int, float] = {}

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        self.by_iter[runner.iter] = outputs["loss"].item()


class Metrics(Hook):
    def __init__(self, seen: list[Any]) -> None:
        self.seen = seen

    def after_val_epoch(self, runner, metrics=None) -> None:
        self.seen += metrics.values()


def texts(begin: int, end: int) -> Texts:
    return Texts({"input_ids": text, "labels": text} for text in TEXT[begin:end])


class NextWord(BaseMetric):
    """The share of words that were predicted, and the mean loss over batches."""

    def process(self, data_batch: Any, data_samples: Any) -> None:
        right = data_samples.logits[:, :-1].argmax(-1) == data_batch["labels"][:, 1:]
        self.results += [(share, data_samples.loss.item()) for share in right.float().mean(-1).tolist()]

    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        shares, losses = zip(*results, strict=True)
        return {"right": sum(shares) / len(shares), "loss": sum(losses) / len(losses)}


def run(work_dir: Path, layout: str, batch_size: int, **changes: Any) -> tuple[dict[int, float], list[Any]]:
    """Return losses by iteration and metrics of a Runner that saves after each epoch; the last batch is short."""
    losses, metrics = Losses(), []
    runner = Runner(
        llama(tied=True),
        work_dir,
        train_dataloader={"dataset": texts(0, 43), "batch_size": batch_size, "num_workers": 0},
        train_cfg={"max_epochs": 3},
        val_dataloader={"dataset": texts(40, 51), "batch_size": 11},
        val_evaluator=NextWord(),
        optim_wrapper={
            "optimizer": {"type": "AdamW", "lr": 0.02}, "clip_grad": {"max_norm": 0.5}, "accumulative_counts": 2,
        },
        param_scheduler={"type": "CosineAnnealingLR"},
        default_hooks={"checkpoint": {"interval": 1}},
        custom_hooks=[losses, Metrics(metrics)],
        strategy=config_of(layout),
        randomness={"seed": 3},
        **changes,
    )  # fmt: skip
    runner.train()
    return losses.by_iter, metrics


def test_a_runner_trains_validates_saves_and_resumes(tmp_path: Path):
    single, single_metrics = run_ranks(1, run, tmp_path / "single", "single", 8)[0]
    for layout in ("pp2", "pp2-tp2"):
        whole_run = run_ranks(SIZES[layout], run, tmp_path / layout, layout, 8)
        close_pools()
        (checkpoint,) = (tmp_path / layout).glob("*/epoch_2")
        resumed = run_ranks(
            SIZES[layout], run, tmp_path / f"{layout}-resumed", layout, 8, load_from=checkpoint, resume=True
        )
        for (losses, metrics), (rest, _) in zip(whole_run, resumed, strict=True):
            assert losses == pytest.approx(single, abs=2e-5, rel=0)
            assert metrics == pytest.approx(single_metrics, abs=2e-5)
            assert rest == {step: loss for step, loss in losses.items() if step >= 12}
    # Replicas see other samples than one process does: the last of an epoch are dealt out twice.
    _, replicas_metrics = run_ranks(2, run, tmp_path / "ddp", "ddp", 4)[0]
    for _, metrics in run_ranks(4, run, tmp_path / "pp2-dp2", "pp2-dp2", 4):
        assert metrics == pytest.approx(replicas_metrics, abs=2e-5)
    (checkpoint,) = (tmp_path / "pp2").glob("*/epoch_2")
    rest, _ = run_ranks(1, run, tmp_path / "back", "single", 8, load_from=checkpoint, resume=True)[0]
    assert rest == pytest.approx({step: loss for step, loss in single.items() if step >= 12}, abs=2e-5, rel=0)


@ranks(2)
def test_states_that_do_not_fit_are_refused_on_every_stage():
    training = Training("pp2")
    training.run(0, 1)
    strategy = training.strategy
    for name in ("model.embed_tokens.weight", "lm_head.weight"):  # of the first and of the last stage
        state = strategy.optim_state()
        del state["state"][name]["exp_avg"]
        with pytest.raises(ConfigError, match=rf"state of '{name}' must have \['exp_avg', .*but has \['exp_avg_sq'"):
            strategy.load_state(optim_state=state)
        state = strategy.model_state()
        state[name] = state[name][:50]
        with pytest.raises(
            ConfigError, match=rf"`{name}` must have the shape of the model's, .* but has \(50, 16\) in the state"
        ):
            strategy.load_state(state)
        del state[name]
        with pytest.raises(ConfigError, match=rf"must fit the model, but lacks \['{name}'\] and has \[\] besides"):
            strategy.load_state(state)
        state = strategy.optim_state()
        state["state"][name]["exp_avg"] = torch.zeros(1, 1, 1)  # so that an older checkpoint is taken
        with pytest.raises(CheckpointError, match=rf"state of '{name}' must have `exp_avg` with 2 dims"):
            strategy.load_state(optim_state=state)
    state = strategy.optim_state()
    group = state["param_groups"][0]
    state["param_groups"].append({**group, "params": [group["params"].pop()]})
    with pytest.raises(ConfigError, match=r"which has 3, but .* are in one group here"):
        strategy.load_state(optim_state=state)
