"""Plans under which a module would compute something else, or get the gradients of a part, are found at the start."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from warnings import catch_warnings, filterwarnings

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint

from lockstep.dist import get_rank
from lockstep.errors import ConfigError
from lockstep.model.shards import gather_full
from lockstep.strategy import FSDPStrategy
from lockstep.testing import ranks

WIDTH = 16


class FixedHeads(nn.Module):
    """Divides what it gets by a number of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.heads_of_keys = 4
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (self.heads_of_keys, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.o(scaled_dot_product_attention(self.norm(q), k, v).transpose(1, 2).flatten(2))


class Fused(nn.Module):
    """Cuts what one layer returns in two."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.q(x).chunk(2, dim=-1)
        return self.o(silu(gate) * up)


class Listed(Fused):
    """The same, with its layers in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.q, self.o])
        del self.q, self.o

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.layers[0](x).chunk(2, dim=-1)
        return self.layers[1](silu(gate) * up)


class Noisy(nn.Module):
    """Adds noise to what the ranks compute in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.q(x)
        return self.o(hidden + torch.randn(hidden.shape))


class NormedHeads(FixedHeads):
    """Heads of a fixed width, and a norm whose weight each rank uses for its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.o(scaled_dot_product_attention(self.norm(q), k, v).transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def _first_step(block: type[nn.Module], plan: dict[str, str], **options: Any) -> float:
    torch.manual_seed(0)
    strategy = FSDPStrategy(tensor_parallel={"degree": 2, "plan": plan}, **options)
    model, optimizer = strategy.prepare(Model(block), {"optimizer": {"type": "SGD", "lr": 0.1}})
    with catch_warnings():
        # What FSDP says of layers of DTensor that are units.
        filterwarnings("ignore", ".* returned a view tensor", UserWarning)
        loss = model(torch.randn(2, 5, WIDTH))
    optimizer.update_params(loss)
    return float(loss.detach())


def _alone(block: type[nn.Module]) -> float:
    torch.manual_seed(0)
    return float(Model(block)(torch.randn(2, 5, WIDTH)).detach())


PLAN = {"blocks.*.[qkv]": "colwise", "blocks.*.o": "rowwise"}
UNITS = [
    {},
    {"auto_wrap_policy": ["NormedHeads"]},
    {"auto_wrap_policy": ["RMSNorm"]},
    {"activation_checkpointing": ["NormedHeads"]},
]
UNIT_IDS = ["whole", "units", "units-inside", "recomputing"]


@pytest.mark.parametrize("options", UNITS, ids=UNIT_IDS)
@ranks(2)
def test_a_plan_that_keeps_every_gradient_whole_is_taken(options: dict):
    plan = {**PLAN, "blocks.*.norm": "replicated_with_grad_allreduce"}
    assert _first_step(NormedHeads, plan, **options) == pytest.approx(_alone(NormedHeads), rel=1e-5)


@pytest.mark.parametrize("options", UNITS, ids=UNIT_IDS)
@ranks(2)
def test_a_weight_with_the_gradient_of_some_heads_is_refused(options: dict):
    with pytest.raises(
        ConfigError, match=r"`blocks\.0\.norm\.weight` must get the gradient.*'blocks\.\*\.norm': 'repl"
    ):
        _first_step(NormedHeads, PLAN, **options)


@pytest.mark.parametrize("block", [FixedHeads, Fused])
@pytest.mark.parametrize("are_units", [False, True])
@ranks(2)
def test_a_module_that_returns_something_else_is_refused(block: type[nn.Module], are_units: bool):
    options = {"auto_wrap_policy": [block.__name__]} if are_units else {}
    with pytest.raises(ConfigError, match=rf"split `blocks\.0` so that it returns.* {block.__name__} may divide"):
        _first_step(block, PLAN, **options)


@ranks(2)
def test_layers_that_are_units_themselves_are_split():
    plan = {**PLAN, "blocks.*.norm": "replicated_with_grad_allreduce"}
    assert _first_step(NormedHeads, plan, auto_wrap_policy=["Linear"]) == pytest.approx(_alone(NormedHeads), rel=1e-5)


@ranks(2)
def test_a_module_whose_layers_are_units_is_tried():
    with pytest.raises(ConfigError, match=r"must split `blocks\.0` so that it returns"):
        _first_step(Fused, PLAN, auto_wrap_policy=["Linear"])


@ranks(2)
def test_layers_in_a_list_are_tried_in_the_module_that_calls_them():
    with pytest.raises(ConfigError, match=r"split `blocks\.0` so that it returns.* Listed may divide"):
        _first_step(Listed, {"blocks.*.layers.0": "colwise", "blocks.*.layers.1": "rowwise"})


@ranks(2)
def test_a_module_that_draws_random_numbers_is_let_through():
    _first_step(Noisy, {"blocks.*.q": "colwise", "blocks.*.o": "rowwise"})


def _weights(wrap: Callable[[nn.Module], Any]) -> list[float]:
    """Return the sums of the weights after one step, of blocks with another `forward`."""
    torch.manual_seed(0)
    model = Model(NormedHeads)
    for block in model.blocks:
        block.forward = wrap(block)
    plan = {**PLAN, "blocks.*.norm": "replicated_with_grad_allreduce"}
    strategy = FSDPStrategy(
        tensor_parallel={"degree": 2, "plan": plan}, auto_wrap_policy=["NormedHeads"], reshard_after_forward=False
    )
    laid, optimizer = strategy.prepare(model, {"optimizer": {"type": "SGD", "lr": 0.1}})
    optimizer.update_params(laid(torch.randn(2, 5, WIDTH)))
    return [float(whole.sum()) for whole in gather_full(strategy.model_state()).values()]


def _bound(block: nn.Module) -> Any:
    return type(block).forward.__get__(block)


def _of_its_own(block: nn.Module) -> Any:
    return partial(type(block).forward, block)


def _recomputed(block: nn.Module) -> Any:
    return partial(checkpoint, _bound(block), use_reentrant=False)


@pytest.mark.parametrize("wrap", [_of_its_own, _recomputed])
@ranks(2)
def test_a_forward_of_the_instances_own_adds_no_gradients(wrap: Callable[[nn.Module], Any]):
    """A copy of it would compute with the module itself."""
    assert _weights(wrap) == pytest.approx(_weights(_bound), rel=1e-6)


@ranks(2)
def test_a_first_evaluation_does_not_end_the_trial():
    torch.manual_seed(0)
    strategy = FSDPStrategy(tensor_parallel={"degree": 2, "plan": PLAN})
    model, _ = strategy.prepare(Model(FixedHeads), {"optimizer": {"type": "SGD", "lr": 0.1}})
    model.eval()
    with torch.no_grad():
        model(torch.randn(2, 5, WIDTH))
    model.train()
    with pytest.raises(ConfigError, match="FixedHeads may divide"):
        model(torch.randn(2, 5, WIDTH))


class Sequence(nn.Module):
    """A model whose plan splits the sequence around a norm, and whose head is outside of every block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(10, WIDTH), nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(self.head(self.norm(self.embed(tokens))).flatten(0, 1), targets.flatten())


def _step_of_a_sequence(plan: dict[str, Any], seed: int = 0, **options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    strategy = FSDPStrategy(tensor_parallel={"degree": 2, "plan": plan}, auto_wrap_policy=None, **options)
    model, optimizer = strategy.prepare(Sequence(), {"optimizer": {"type": "SGD", "lr": 0.1}})
    torch.manual_seed(seed)
    for _ in range(2):
        optimizer.update_params(model(torch.randint(10, (2, 6)), torch.randint(4, (2, 6))))
    return [gather_full(parameter).detach() for parameter in model.module.parameters()]


IN_SEQUENCE = {
    "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": "sequence_parallel",
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


@ranks(2)
def test_what_is_outside_of_every_block_must_be_split_so_that_ranks_have_the_same_loss_and_gradients():
    whole = _step_of_a_sequence({"head": "colwise_rep"})
    for one, other in zip(whole, _step_of_a_sequence(IN_SEQUENCE), strict=True):
        torch.testing.assert_close(one, other)
    with pytest.raises(ConfigError, match=r"must get the same gradients .* those of norm\.weight differ"):
        _step_of_a_sequence({name: style for name, style in IN_SEQUENCE.items() if name != "norm"})
    with pytest.raises(ConfigError, match=r"must have the same loss, but in the first step .* write 'colwise_rep'"):
        _step_of_a_sequence({"head": "colwise"})  # half of the classes on each rank, and targets among them


@ranks(2)
def test_ranks_that_compute_together_must_have_the_same_samples():
    with pytest.raises(ConfigError, match="must have the same loss"):
        _step_of_a_sequence({"head": "colwise_rep"}, seed=get_rank())
