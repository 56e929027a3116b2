"""Which parts of a model become units."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import wrap

from lockstep.model import FSDP_WRAP_POLICIES
from lockstep.model.fsdp.units import RepeatedBlocks, choose_units, cut_by_dtype


class Block(nn.Module):
    """Has heads, which are repeated too, but are less than half of it."""

    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(4, 2)) for _ in range(heads))
        self.wide = nn.Linear(4, 32)

    def forward(self, x):
        return x


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.stages = nn.ModuleList([Stage(), Stage()])
        self.extra = nn.ModuleDict({"a": Block(), "b": Block()})
        self.single = nn.ModuleList([Block(heads=0)])
        self.head = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def forward(self, x):
        return x


BLOCKS = [*(f"stages.{s}.blocks.{b}" for s in (0, 1) for b in (0, 1, 2)), "extra.a", "extra.b"]
ALL_BLOCKS = sorted([*BLOCKS, "single.0"])
STAGES = ["stages.0", "stages.1"]


def units(policy, model: nn.Module | None = None, ignored: tuple[str, ...] = ()) -> list[str]:
    model = model or Model()
    names = {module: name for name, module in model.named_modules()}
    chosen = choose_units(model, policy, [model.get_submodule(name) for name in ignored])
    for index, unit in enumerate(chosen):  # bottom-up
        assert not any(inner in chosen[index:] for inner in list(unit.modules())[1:])
    return sorted(names[unit] for unit in chosen)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (None, []),
        ("repeated_blocks", sorted(BLOCKS)),
        (RepeatedBlocks(), sorted(BLOCKS)),
        ("Block", ALL_BLOCKS),
        (Block, ALL_BLOCKS),
        (["Block", Stage], sorted(ALL_BLOCKS + STAGES)),
        (wrap.ModuleWrapPolicy({Stage}), STAGES),
        (lambda module: isinstance(module, Stage), STAGES),
        (partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls={Stage}), STAGES),
        ({"type": "transformer_auto_wrap_policy", "transformer_layer_cls": ["Stage"]}, STAGES),
        ({"type": "ModuleWrapPolicy", "module_classes": "Stage"}, STAGES),
        ({"type": wrap.lambda_auto_wrap_policy, "lambda_fn": lambda m: isinstance(m, Stage)}, STAGES),
    ],
)
def test_every_kind_of_policy_is_understood(policy, expected):
    assert units(policy) == expected


def test_a_size_is_that_of_what_no_inner_unit_has_taken():
    numel = {name: sum(p.numel() for p in module.parameters()) for name, module in Model().named_modules()}
    per_block = numel["extra.a"]
    policy = {"type": "size_based_auto_wrap_policy", "min_num_params": per_block}
    # torch's policy makes no unit of a ModuleList or ModuleDict; a stage has only its norm left over.
    assert units(policy) == sorted(BLOCKS)
    assert units({**policy, "min_num_params": 10**6}) == []


def test_units_have_parameters_and_a_forward():
    chosen = units("always_wrap_policy")
    assert "head.0" in chosen
    assert "head.1" not in chosen  # a ReLU
    assert "stages" not in chosen  # a ModuleList
    assert "" not in chosen


def test_what_is_ignored_has_no_units():
    assert units("Block", ignored=("stages.0", "extra")) == ["single.0", *(f"stages.1.blocks.{b}" for b in (0, 1, 2))]
    policy = partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block})
    assert units(policy, ignored=("stages", "extra")) == ["single.0"]


def test_a_parameter_that_two_share_is_left_to_what_is_around_both():
    model = Model()
    model.stages[0].blocks[0].wide.weight = model.stages[0].blocks[1].wide.weight
    model.extra["a"].wide.weight = model.single[0].wide.weight
    assert units(["Block", "Stage"], model) == sorted(
        ["extra.b", "stages.0", "stages.0.blocks.2", "stages.1", *(f"stages.1.blocks.{b}" for b in (0, 1, 2))]
    )


class Sparse(nn.Module):
    """A layer most of whose parameters are those of experts."""

    def __init__(self, experts: int, width: int = 4) -> None:
        super().__init__()
        self.attention = nn.Linear(width, width)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, 8), nn.Linear(8, width)) for _ in range(experts))

    def forward(self, x):
        return x


def test_experts_are_gathered_with_their_layer_and_blocks_of_stages_by_themselves():
    layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), *(Sparse(3) for _ in range(2))])
    assert units("repeated_blocks", layers) == ["1", "2"]
    stages = nn.ModuleList([Sparse(3, width=4), Sparse(3, width=8)])  # of other sizes, as in a vision transformer
    assert units("repeated_blocks", stages) == [f"{s}.experts.{i}" for s in (0, 1) for i in range(3)]


def test_a_model_may_name_its_blocks_as_huggingfaces_do():
    model = Model()
    model._no_split_modules = ["Stage", "StageOfAnotherModel"]
    assert units("repeated_blocks", model) == STAGES
    model._no_split_modules = ["Unknown"]
    assert units("repeated_blocks", model) == sorted(BLOCKS)


def test_torchs_transformer_is_cut_into_its_layers():
    with torch.device("meta"):
        model = nn.Transformer(8, 2, 2, 3, 16, batch_first=True)
    expected = [f"decoder.layers.{i}" for i in range(3)] + [f"encoder.layers.{i}" for i in range(2)]
    assert units("repeated_blocks", model) == expected


def test_a_policy_of_ones_own_has_a_name():
    class Heads:
        def choose(self, model):
            return [model.head]

    FSDP_WRAP_POLICIES.register_module(name="heads", module=Heads, force=True)
    assert units("heads") == ["head"]
    FSDP_WRAP_POLICIES._entries.pop("heads")


@pytest.mark.parametrize(
    ("policy", "error", "says"),
    [
        (3, TypeError, "`auto_wrap_policy` must be .* but is 3 of type int"),
        ("Bloc", ValueError, "is 'Bloc': did you mean `Block`"),
        ("repeated_block", ValueError, "did you mean `repeated_blocks`"),
        ([3], TypeError, "`auto_wrap_policy` must hold classes of modules or their names, but holds 3"),
        (["Stag"], ValueError, "names 'Stag': did you mean `Stage`"),
        ({"type": "nothing"}, ValueError, "is {'type': 'nothing'}"),
        ({"size": 3}, ValueError, "is {'size': 3}"),
        (wrap.CustomPolicy(lambda m: True), TypeError, "a function, .* of type CustomPolicy"),
    ],
)
def test_what_is_no_policy_is_refused(policy, error, says):
    with pytest.raises(error, match=says):
        units(policy)


def test_a_policy_may_have_the_name_that_torch_1_had():
    size = sum(parameter.numel() for parameter in Block().parameters())
    expected = units({"type": "size_based_auto_wrap_policy", "min_num_params": size})
    assert units({"type": "default_auto_wrap_policy", "min_num_params": size}) == expected


def test_around_ignored_modules_of_another_dtype_there_is_no_unit():
    frozen, trained = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).bfloat16(), nn.Linear(2, 2).bfloat16()
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(frozen), nn.Sequential(trained))
    assert cut_by_dtype(model, [], [*frozen.modules()]) == [model[2]]
