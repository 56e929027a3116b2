"""`MMFullyShardedDataParallel` on real ranks, and what its arguments mean."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from lockstep import dist
from lockstep.dist import all_gather, get_rank, get_world_size, is_distributed
from lockstep.errors import ConfigError
from lockstep.model import MMFullyShardedDataParallel, checkpoint_activations, is_model_wrapper, unwrap_model
from lockstep.model.fsdp.arguments import read_offload, read_precision, read_sharding
from lockstep.optim import OptimWrapper
from lockstep.registry import MODEL_WRAPPERS, BuildError
from lockstep.testing import ranks

pytestmark = pytest.mark.layouts

INPUTS = torch.linspace(-1, 1, 8 * 6).reshape(8, 6)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 5)  # 5 rows: uneven over 2 and 4 ranks
        self.outer = nn.Linear(5, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.tanh(self.inner(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(6, 1)
        self.register_buffer("offset", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return (self.head(x) - self.offset).square().mean()


def seeded(seed: int = 2) -> Net:
    torch.manual_seed(seed)
    return Net()


def own_part() -> Tensor:
    return INPUTS[get_rank() :: get_world_size()].clone()


def wrapped_net(**options: Any) -> MMFullyShardedDataParallel:
    return MMFullyShardedDataParallel(seeded(), **{"auto_wrap_policy": "Block", **options})


def whole(model: nn.Module) -> dict[str, Tensor]:
    state = unwrap_model(model).state_dict()
    return {n: (value.full_tensor() if isinstance(value, DTensor) else value).clone() for n, value in state.items()}


def trained_alone(steps: int = 3, lr: float = 0.1) -> dict[str, Tensor]:
    net = seeded()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        net(INPUTS).backward()
        optimizer.step()
    return whole(net)


def trained(model: nn.Module, steps: int = 3) -> dict[str, Tensor]:
    optim_wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for _ in range(steps):
        logged = model.train_step(own_part(), optim_wrapper)
    assert logged["loss"].shape == ()
    return whole(model)


def assert_close(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.allclose(value, right[name], rtol=1e-5, atol=1e-6), name


@contextmanager
def warned() -> Iterator[list[str]]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("lockstep.model.fsdp")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


@ranks(2, 4)
@pytest.mark.parametrize(
    "options",
    [
        {"auto_wrap_policy": None},
        {"fsdp_auto_wrap_policy": Block, "auto_wrap_policy": None, "forward_prefetch": True},
        {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "cpu_offload": CPUOffload(True)},
        {"sharding_strategy": "no_shard"},
        {"sharding_strategy": "HYBRID_SHARD", "sync_module_states": True},
        {"sharding_strategy": "_HYBRID_SHARD_ZERO2", "device_mesh": (2, -2)},
        {"reshard_after_forward": True, "backward_prefetch": "pre", "cpu_offload": True},
        {"device_id": 0},
    ],
    ids=lambda options: "-".join(options),
)
def test_ranks_train_together_as_one_process_alone(options):
    if "device_mesh" in options:
        options["device_mesh"] = (2, get_world_size() // 2)
    model = wrapped_net(**options)
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
    assert_close(trained(model), trained_alone())


@ranks(4)
def test_a_mesh_whose_groups_span_nodes_is_told_by_rank_0():
    def said(node: int, **options: Any) -> list[str]:
        with patch.object(dist, "get_node_rank", return_value=node), warned() as messages:
            MMFullyShardedDataParallel(nn.Linear(4, 4), **options)
        return messages

    dealt, in_order = get_rank() % 2, get_rank() // 2
    assert said(in_order, device_mesh=(2, 2)) == said(dealt, device_mesh=(1, 4)) == []
    assert said(dealt, sharding_strategy="HYBRID_SHARD") == []
    told = said(dealt, device_mesh=(2, 2))
    assert len(told) == (get_rank() == 0)
    assert all("groups of the axis dp_shard have ranks of several nodes" in one for one in told)


@ranks(4)
def test_the_mesh_is_what_was_asked_for():
    def mesh_of(**options: Any):
        mesh = MMFullyShardedDataParallel(nn.Linear(4, 4), **options).mesh
        return mesh.mesh.tolist(), mesh.mesh_dim_names

    everybody, in_pairs = [0, 1, 2, 3], [[0, 1], [2, 3]]
    assert mesh_of() == mesh_of(sharding_strategy="FULL_SHARD") == (everybody, ("dp_shard",))
    assert mesh_of(device_mesh=(2, 2)) == (in_pairs, ("dp_replicate", "dp_shard"))
    assert mesh_of(sharding_strategy="hybrid_shard") == ([everybody], ("dp_replicate", "dp_shard"))  # one node
    assert mesh_of(sharding_strategy="NO_SHARD")[0] == [[0], [1], [2], [3]]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    assert mesh_of(device_mesh=mesh) == (in_pairs, ("outer", "inner"))
    pair = in_pairs[get_rank() // 2]
    assert mesh_of(process_group=mesh["inner"]) == (pair, ("inner",))
    assert mesh_of(process_group=mesh.get_group("inner")) == (pair, ("dp_shard",))


@ranks(2)
@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"device_mesh": (2, 2)}, ValueError, r"shape for 2 ranks, but is \(2, 2\) \(rank \d of 2\)"),
        ({"device_mesh": (-1, -2)}, ValueError, r"shape for 2 ranks, but is \(-1, -2\)"),
        ({"device_mesh": "all"}, TypeError, "its shape .* but is 'all'"),
        ({"process_group": (None, None)}, TypeError, r"a mesh with one axis or None, but is \(None"),
        ({"process_group": (1, 2)}, TypeError, r"`process_group` must be a ProcessGroup, .* but is \(1, 2\)"),
        ({"device_mesh": (1, 2), "process_group": 3}, ValueError, "not be given both"),
        ({"device_mesh": (1, 2), "sharding_strategy": "NO_SHARD"}, ValueError, "is NO_SHARD. Use MMDistributed"),
        (
            {"device_mesh": (1, 2), "sharding_strategy": "FULL_SHARD"},
            ValueError,
            "wants one axis for the data and the mesh has 2",
        ),
        ({"sharding_strategy": "FULL"}, ValueError, "is 'FULL'.*FULL_SHARD"),
        ({"sharding_strategy": 3}, TypeError, "ShardingStrategy, its name or None, but is 3 of type int"),
        ({"sharding_strategy": "NO_SHARD", "reshard_after_forward": True}, ValueError, "the first implies the second"),
        ({"cpu_offload": 1}, TypeError, "`cpu_offload` must be .* but is 1 of type int"),
        ({"backward_prefetch": "before"}, ValueError, "'pre', 'post'.* but is 'before'"),
        ({"backward_prefetch": True}, TypeError, "but is True of type bool"),
        ({"mixed_precision": "bf17"}, ValueError, "is 'bf17': did you mean `bf16`"),
        ({"mixed_precision": {"param_dtyp": "bf16"}}, ValueError, "'param_dtyp': did you mean `param_dtype`"),
        ({"mixed_precision": {"_module_classes_to_ignore": []}}, ValueError, "unknown key '_module_classes_to_ignore'"),
        ({"mixed_precision": {"param_dtype": 16}}, TypeError, "but is 16 of type int"),
        ({"mixed_precision": 16}, TypeError, "`mixed_precision` must be .* but is 16"),
        ({"ignored_modules": nn.Linear(1, 1)}, TypeError, "a list of modules or None, but is Linear"),
        ({"ignored_modules": ["head"]}, ValueError, "holds a str that is not inside it"),
        ({"ignored_modules": [nn.Linear(1, 1)]}, ValueError, "Linear that is not inside it"),
        ({"param_init_fn": 3}, TypeError, "`param_init_fn` must be a function.* but is 3"),
        ({"device_id": "gpu:0"}, ValueError, "a device that torch knows, but is 'gpu:0'"),
        ({"device_id": torch.device("xpu", 7)}, ValueError, "this process's current device, .* but is xpu:7"),
        ({"device_id": 1.5}, TypeError, "`device_id` must be .* but is 1.5"),
        ({"auto_wrap_policy": Block, "fsdp_auto_wrap_policy": Block}, ValueError, "not be given both"),
        ({"shard_strategy": "FULL_SHARD"}, TypeError, "'shard_strategy': did you mean `sharding_strategy`"),
        ({"module": 3}, TypeError, "`module` must be a torch.nn.Module, but is 3"),
    ],
    ids=str,
)
def test_wrong_values_are_refused_by_name(options, error, says):
    with pytest.raises(error, match=says):
        MMFullyShardedDataParallel(**{"module": seeded(), **options})


def test_sharding_strategies_mean_a_mesh_and_when_to_free():
    assert read_sharding("FULL_SHARD", None) == (False, False, None)
    assert read_sharding(ShardingStrategy.SHARD_GRAD_OP, None) == (False, False, False)
    assert read_sharding(ShardingStrategy.HYBRID_SHARD, None) == (True, False, None)
    assert read_sharding("hybrid_shard_zero2", None) == (True, False, False)
    assert read_sharding(None, 2) == (None, False, 2)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, MixedPrecisionPolicy()),
        (MixedPrecisionPolicy(BF16), MixedPrecisionPolicy(BF16)),
        ("bf16", MixedPrecisionPolicy(BF16, FP32)),
        (FP16, MixedPrecisionPolicy(FP16, FP32)),
        (MixedPrecision(param_dtype=BF16), MixedPrecisionPolicy(BF16)),
        (MixedPrecision(BF16, FP32, cast_root_forward_inputs=False), MixedPrecisionPolicy(BF16, FP32, None, False)),
        ({"type": "MixedPrecision", "param_dtype": "torch.float16"}, MixedPrecisionPolicy(FP16)),
        ({"param_dtype": BF16, "cast_root_forward_inputs": False}, MixedPrecisionPolicy(BF16, None, None, False)),
        ({"output_dtype": "float32", "cast_root_forward_inputs": True}, MixedPrecisionPolicy(output_dtype=FP32)),
    ],
    ids=str,
)
def test_mixed_precision_is_understood_in_every_form(given, expected):
    assert read_precision(given) == expected


def test_offload_is_understood_in_every_form():
    assert type(read_offload(None, "cuda")) is type(read_offload(CPUOffload(False), "cuda")) is OffloadPolicy
    assert read_offload(True, "cuda") == read_offload(CPUOffload(True), "cuda") == CPUOffloadPolicy(pin_memory=True)
    assert read_offload(CPUOffloadPolicy(), "cpu") == CPUOffloadPolicy(pin_memory=False)


@ranks(2)
def test_what_has_no_meaning_any_more_is_said_once_each_by_rank_0():
    old = MixedPrecision(BF16, buffer_dtype=BF16, keep_low_precision_grads=True, _module_classes_to_ignore=(nn.Linear,))
    with warned() as messages:
        wrapped_net(
            mixed_precision=old,
            backward_prefetch=BackwardPrefetch.BACKWARD_POST,
            limit_all_gathers=False,
            use_orig_params=False,
        )
    about = [
        "backward_prefetch", "limit_all_gathers", "use_orig_params", "_module_classes_to_ignore", "buffer_dtype",
        "keep_low_precision_grads",
    ]  # fmt: skip
    assert len(messages) == (6 if get_rank() == 0 else 0)
    for name, message in zip(about, messages, strict=False):
        assert name in message
        assert "no meaning any more" in message
    with warned() as messages:
        wrapped_net(backward_prefetch="pre", mixed_precision=MixedPrecision())
    assert messages == []


@ranks(2)
def test_every_rank_begins_as_the_first_if_asked_to():
    for sync in (True, False):
        net = seeded(seed=get_rank())
        net.offset.fill_(get_rank())
        head = nn.Parameter(net.head.weight.detach() + get_rank())
        model = MMFullyShardedDataParallel(net, sync_module_states=sync, ignored_modules=[net.blocks[1]])
        state, first = whole(model), seeded(seed=0).state_dict()
        same = {name for name, value in first.items() if torch.equal(value, state[name])}
        assert ("blocks.0.outer.weight" in same) is sync
        assert (net.offset.item() == 0) is (sync or get_rank() == 0)
        assert ("blocks.1.outer.weight" in same) is (get_rank() == 0)  # ignored: each rank keeps its own
        assert head.shape == (1, 6)


@ranks(4)
def test_replicas_begin_as_the_first_too():
    model = MMFullyShardedDataParallel(seeded(seed=get_rank()), sync_module_states=True, device_mesh=(2, 2))
    for name, value in whole(model).items():
        assert torch.equal(value, seeded(seed=0).state_dict()[name]), name


@ranks(1, 2)
def test_a_parameter_that_is_added_after_the_model_was_sharded_is_refused():
    net = seeded()
    model = MMFullyShardedDataParallel(net)
    optim_wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    model.train_step(own_part(), optim_wrapper)
    net.blocks.append(late := Block())
    optim_wrapper.optimizer.add_param_group({"params": list(late.parameters())})
    # One rank alone trains it rightly.
    says = r"but blocks\.2\.inner\.weight, .* were added or replaced afterwards \(rank \d of 2\)"
    with pytest.raises(ConfigError, match=says) if get_world_size() == 2 else nullcontext():
        model.train_step(own_part(), optim_wrapper)


@ranks(2)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_ignored_modules_stay_as_they_are(device: str):
    net = seeded()
    net.blocks[1].to(device)
    model = MMFullyShardedDataParallel(net, auto_wrap_policy="Block", ignored_modules=[net.blocks[1]])
    assert [name for name, p in net.named_parameters() if not isinstance(p, DTensor)] == [
        "blocks.1.inner.weight", "blocks.1.inner.bias", "blocks.1.outer.weight", "blocks.1.outer.bias",
    ]  # fmt: skip
    assert not isinstance(net.blocks[1], FSDPModule)
    model(own_part()).backward()
    assert not torch.equal(*all_gather(net.blocks[1].inner.weight.grad))  # not averaged
    norm = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1), clip_grad={"max_norm": 1e9})
    norm.step()  # whole and sharded gradients together
    assert norm.grad_norm.isfinite()


@ranks(1, 2)
def test_ignored_modules_that_each_rank_would_train_alone_are_told():
    for is_frozen in (True, False):
        net = seeded()
        net.blocks[1].requires_grad_(not is_frozen)
        with warned() as messages:
            MMFullyShardedDataParallel(net, ignored_modules=[net.blocks[1]])
        is_told = not is_frozen and get_world_size() > 1 and get_rank() == 0
        assert ["not averaged" in message for message in messages] == [True] * is_told


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 6)
        self.block = Block()
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.words(x))).square().mean()


class Preprocessor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def to(self, device: Any) -> Any:
        self.learnt = torch.device(device)
        return super().to(device)


@ranks(2)
def test_a_preprocessor_on_the_meta_device_is_made_before_it_learns_its_device():
    def init(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            nn.init.constant_(tensor, 3.0 + get_rank())

    with torch.device("meta"):
        module = nn.Linear(3, 2)
        module.data_preprocessor = Preprocessor()
    model = MMFullyShardedDataParallel(module, param_init_fn=init, device_id="cpu", sync_module_states=True)
    assert model.module.data_preprocessor.learnt.type == "cpu"
    assert model.module.data_preprocessor.mean.tolist() == [3.0, 3.0, 3.0]
    assert model.module.weight.full_tensor().unique().tolist() == [3.0]


@ranks(2)
def test_parameters_on_the_meta_device_are_made_before_they_are_sharded():
    with torch.device("meta"):
        empty, tied = Net(), Tied()
    made: list[str] = []

    def init(module: nn.Module) -> None:
        made.append(type(module).__name__)
        module.to_empty(device="cpu", recurse=False)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.fill_(0.25)

    model = MMFullyShardedDataParallel(empty, param_init_fn=init, auto_wrap_policy="Block")
    assert sorted(made) == ["Linear"] * 5 + ["Net"]
    for value in whole(model).values():
        assert (value == 0.25).all()

    torch.manual_seed(get_rank())
    model = MMFullyShardedDataParallel(tied, auto_wrap_policy=["Block", "Embedding"], sync_module_states=True)
    assert tied.head.weight is tied.words.weight  # by their own reset_parameters
    before = whole(model)
    assert torch.equal(*all_gather(before["words.weight"]))
    assert before["block.inner.weight"].std() > 0.1
    model(torch.tensor([[get_rank(), 2, 3]])).backward()
    assert tied.words.weight.grad.full_tensor().abs().sum() > 0


@ranks(2)
def test_hooks_that_see_a_whole_window_are_named_where_there_is_one():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].bias.register_post_accumulate_grad_hook(lambda parameter: None)
    model = MMFullyShardedDataParallel(net)
    said = []
    for syncs in (True, False, False, True):
        with warned() as messages, model.backward_context(model(torch.ones(2, 4)).mean(), syncs=syncs) as loss:
            loss.backward()
        said.append(["once for each window" in message and "that of 1.bias." in message for message in messages])
    assert said == [[], [True] if get_rank() == 0 else [], [], []]


def init_linear(module: nn.Module) -> None:
    module.to_empty(device="cpu", recurse=False)
    module.reset_parameters()


@ranks(2)
def test_parameters_that_nobody_makes_are_named():
    with torch.device("meta"):
        loose, net = nn.Module(), Net()
        loose.weight = nn.Parameter(torch.empty(3))
    with pytest.raises(ValueError, match="Module is on the meta device and has no method reset_parameters"):
        MMFullyShardedDataParallel(loose)
    with pytest.raises(ValueError, match=r"'blocks.0.inner.weight' of Net is still on the meta device. Begin it with"):
        MMFullyShardedDataParallel(net, param_init_fn=lambda module: None)


@ranks(2)
@pytest.mark.parametrize(("on", "options"), [("meta", {}), ("cpu", {}), ("meta", {"param_init_fn": init_linear})])
def test_an_init_weights_that_is_not_called_is_named(on: str, options: dict):
    class Initialised(nn.Linear):
        def init_weights(self) -> None:
            nn.init.constant_(self.weight, 0.5)

    with torch.device(on):
        model = nn.Sequential(Initialised(4, 4), Initialised(4, 4))
    with warned() as messages:
        MMFullyShardedDataParallel(model, **options)
    named = [message for message in messages if "not `init_weights` of Initialised" in message]
    assert len(named) == (get_rank() == 0 and on == "meta" and not options)


@ranks(2)
@pytest.mark.parametrize("options", [{}, {"device_mesh": (2, 1)}], ids=str)
def test_no_sync_reduces_nothing_until_the_window_ends(options):
    model = wrapped_net(**options)
    optim_wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1), accumulative_counts=2)
    reductions = []
    for part in own_part().requires_grad_().chunk(2):  # what counts the traffic warns of inputs without gradient
        with CommDebugMode() as traffic:
            model.train_step(part, optim_wrapper)
        counts = {str(operation): count for operation, count in traffic.get_comm_counts().items()}
        reductions.append(sum(count for name, count in counts.items() if "reduce" in name))
    assert reductions[0] == 0
    assert reductions[1] >= 3  # two blocks and the rest
    assert_close(whole(model), _one_step_alone())
    with model.no_sync(), model.no_sync():
        pass
    model(own_part()).backward()
    assert torch.equal(*all_gather(model.module.head.weight.grad.full_tensor()))


def _one_step_alone() -> dict[str, Tensor]:
    net = seeded()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(INPUTS).backward()
    optimizer.step()
    return whole(net)


@ranks(2)
def test_a_validation_before_or_between_does_not_disturb_the_training():
    model = wrapped_net()
    with torch.inference_mode():  # torch would keep its buffers as inference tensors
        model.eval()
        first = model.val_step(own_part())
        assert not first.is_inference()
        assert torch.equal(model(own_part()), first)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.train()
    assert all(isinstance(parameter, DTensor) for group in optimizer.param_groups for parameter in group["params"])
    optim_wrapper = OptimWrapper(optimizer)
    for _ in range(3):
        model.train_step(own_part(), optim_wrapper)
        model.eval()
        with torch.no_grad():
            assert model.test_step(own_part()).shape == ()
        model.train()
    assert_close(whole(model), trained_alone())


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 1)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.seen.append(x.dtype)
        x = self.norm(x)
        self.seen.append(self.norm.weight.dtype)
        return self.head(x).float().square().mean()


class Translator(nn.Module):
    """Generates as encoder-decoders of transformers do: the encoder by itself, and then the whole module."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.encoder, self.decoder = nn.Linear(6, 6), Net(), Block()
        self.encoder.words = self.words  # shared, so that the encoder uses weights of the outermost unit

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(self.encoder.words(x))

    def forward(self, x: Tensor, encoded: Tensor | None = None) -> Tensor:
        encoded = self.encode(x) if encoded is None else encoded
        return self.decoder(self.words(x)) + encoded

    def prepare_inputs_for_generation(self) -> None:
        """By which `generate` is known."""

    @torch.no_grad()
    def generate(self, x: Tensor) -> Tensor:
        encoded = self.encode(x)
        for _ in range(3):
            x = self(x, encoded)
        return x


@ranks(2)
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": True}, {"mixed_precision": "bf16"}], ids=str)
def test_an_encoder_that_generate_calls_by_itself_finds_the_shared_weights(options):
    def steps(model: nn.Module) -> Tensor:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            generated.append(unwrap_model(model).generate(INPUTS))
            model(INPUTS).square().mean().backward()
            optimizer.step()
        with torch.no_grad():
            return model(INPUTS)

    generated: list[Tensor] = []
    torch.manual_seed(0)
    alone = Translator()
    wrapped = MMFullyShardedDataParallel(copy.deepcopy(alone), auto_wrap_policy="Block", **options)
    tolerance = 5e-2 if options.get("mixed_precision") else 1e-5
    torch.testing.assert_close(steps(wrapped).float(), steps(alone), rtol=tolerance, atol=tolerance)
    for ours, theirs in zip(generated[:3], generated[3:], strict=True):
        torch.testing.assert_close(ours.float(), theirs, rtol=tolerance, atol=tolerance)


class Around(nn.Module):
    """Hands on what it lacks to the model inside, as peft's do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Evaluates()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "inner":
                raise
            return getattr(self.inner, name)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Evaluates(Translator):
    def val_step(self, x: Tensor) -> Tensor:
        return self(x)

    def test_step(self, x: Tensor) -> Tensor:
        return self.generate(x)


@ranks(2)
def test_the_steps_of_a_model_inside_of_another_one_find_their_weights():
    torch.manual_seed(0)
    alone = Around()
    wrapped = MMFullyShardedDataParallel(copy.deepcopy(alone), auto_wrap_policy="Block")
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(wrapped.val_step(INPUTS), alone.val_step(INPUTS))
            torch.testing.assert_close(wrapped.test_step(INPUTS), alone.test_step(INPUTS))
            torch.testing.assert_close(wrapped(INPUTS), alone(INPUTS))
    for name in ("val_step", "test_step", "generate"):
        assert inspect.signature(getattr(wrapped.module, name)) == inspect.signature(getattr(alone, name))


@ranks(2)
def test_parts_that_share_a_module_are_refused_where_nobody_calls_them_as_a_whole():
    class Parts(nn.ModuleDict):
        def train_step(self, data: Any, optim_wrapper: Any) -> Any:
            raise AssertionError

        def forward(self) -> None:
            raise AssertionError

    trunk = nn.Linear(2, 2)
    parts = Parts({"actor": nn.Sequential(trunk, nn.Linear(2, 1)), "critic": nn.Sequential(trunk, nn.Linear(2, 1))})
    with pytest.raises(ConfigError, match=r"`actor\.0\.weight` is `critic\.0\.weight`\. Hand in what they share"):
        MMFullyShardedDataParallel(parts)


@ranks(2)
def test_mixed_precision_computes_in_half_and_keeps_parameters_and_norms_in_full():
    net = Normed()
    model = MMFullyShardedDataParallel(net, mixed_precision=MixedPrecision(param_dtype=BF16))
    model(own_part()).backward()
    assert net.seen[0] is BF16
    for parameter in model.parameters():
        assert parameter.dtype is parameter.grad.dtype is FP32
    assert net.norm.running_mean.dtype is FP32
    assert isinstance(net.norm, FSDPModule)  # a unit of its own, with a precision of its own


@ranks(2)
def test_state_dicts_have_the_modules_own_names():
    model, other = wrapped_net(), wrapped_net()
    with torch.no_grad():
        other.module.head.weight.zero_()
    assert list(model.state_dict()) == list(Net().state_dict())
    other.load_state_dict(model.state_dict())
    assert_close(whole(other), whole(model))


@ranks(2)
def test_it_is_a_wrapper_by_its_name_and_shards_only_once():
    model = MODEL_WRAPPERS.build({"type": "MMFullyShardedDataParallel"}, module=seeded())
    assert is_model_wrapper(model)
    assert isinstance(unwrap_model(model), Net)
    with pytest.raises(ValueError, match="`module` must not be sharded yet, but FSDPNet is"):
        MMFullyShardedDataParallel(model.module)
    with pytest.raises(BuildError, match="did you mean `cpu_offload`"):
        MODEL_WRAPPERS.build({"type": "MMFullyShardedDataParallel", "cpu_ofload": True}, module=seeded())


@ranks(2)
def test_activations_are_computed_again():
    calls: list[int] = []

    class Counting(Block):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(1)
            return super().forward(x)

    net = seeded()
    for block in net.blocks:
        block.__class__ = Counting
    assert checkpoint_activations(net, ["Counting"]) == ["blocks.0", "blocks.1"]
    model = MMFullyShardedDataParallel(net, auto_wrap_policy="Counting")
    model(own_part()).backward()
    assert len(calls) == 4
    assert model.state_dict().keys() == Net().state_dict().keys()
    with torch.no_grad():
        model(own_part())
    assert len(calls) == 6
    assert_close(trained(model), trained_alone_from_gradient())


def trained_alone_from_gradient() -> dict[str, Tensor]:
    net = seeded()
    net(INPUTS).backward()  # the first step adds to this gradient
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        net(INPUTS).backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(net)


def test_what_is_to_be_computed_again_is_found_or_missed_by_name():
    assert checkpoint_activations(seeded(), lambda module: isinstance(module, nn.Linear))[0] == "blocks.0.inner"
    assert checkpoint_activations(seeded(), [Block, nn.Linear]) == ["blocks.0", "blocks.1", "head"]
    with pytest.raises(ValueError, match="accepts none of those in Net: Block, Linear, ModuleList, Net"):
        checkpoint_activations(seeded(), lambda module: False)
    with pytest.raises(ValueError, match="`check` must name classes of modules in Net, but names 'Blok'"):
        checkpoint_activations(seeded(), ["Blok"])


def test_what_is_computed_again_keeps_no_cache_where_gradients_follow():
    class Cached(Net):
        config = SimpleNamespace(use_cache=True)  # as models of transformers have

        def forward(self, x: Tensor, use_cache: bool | None = None) -> tuple[Tensor, bool | None]:
            return super().forward(x), use_cache

    net = Cached()
    with pytest.raises(ValueError, match="accepts none of those"):
        checkpoint_activations(net, lambda module: False)
    assert net(INPUTS)[1] is None
    checkpoint_activations(net, [Block])
    assert net(INPUTS)[1] is net(INPUTS, use_cache=True)[1] is False
    with torch.no_grad():
        assert net(INPUTS)[1] is None
    assert net.config.use_cache


@ranks(1, fresh=True)
def test_without_a_group_it_is_a_group_of_one():
    assert not is_distributed()
    assert_close(trained(wrapped_net()), trained_alone())


@ranks(2)
def test_layer_drop_is_warned_of():
    net = Net()
    net.config = SimpleNamespace(layerdrop=0.0)
    with warned() as messages:
        MMFullyShardedDataParallel(net)
    assert messages == []
    net = Net()
    net.config = SimpleNamespace(layerdrop=0.1)
    with warned() as messages:
        MMFullyShardedDataParallel(net)
    assert [message[:41] for message in messages] == ["the config of Net has layerdrop=0.1. Unde"] * (get_rank() == 0)
