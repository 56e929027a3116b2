"""mmengine.infer: from a config and weights to predictions."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mmengine.config import Config, ConfigDict
from mmengine.dataset import pseudo_collate
from mmengine.infer import BaseInferencer
from mmengine.model import BaseModel
from mmengine.registry import FUNCTIONS, MODELS
from mmengine.visualization import Visualizer


@MODELS.register_module(name="ScalingOfTest", force=True)
class Scaling(BaseModel):
    def __init__(self, pretrained: str | None = None) -> None:
        super().__init__()
        assert pretrained is None
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.norm = nn.SyncBatchNorm(1)

    def forward(self, inputs, data_samples=None, mode="tensor"):
        assert not self.training
        assert not torch.is_grad_enabled()
        return [self.scale * value for value in inputs]


class Numbers(BaseInferencer):
    """Inputs are numbers, or files that hold one."""

    preprocess_kwargs = {"offset"}
    visualize_kwargs = {"show"}
    postprocess_kwargs = {"digits"}

    def _init_pipeline(self, cfg: Any) -> Any:
        def number_of(item: Any) -> dict[str, Any]:
            value = float(Path(item).read_text()) if isinstance(item, str) else float(item)
            return {"inputs": torch.tensor(value)}

        return number_of

    def preprocess(self, inputs, batch_size=1, offset=0.0, **kwargs):
        for batch in super().preprocess(inputs, batch_size):
            self.batches.append(len(batch["inputs"]))
            yield {"inputs": [value + offset for value in batch["inputs"]]}

    def visualize(self, inputs, preds, show=False, **kwargs):
        return ["shown"] * len(preds) if show else None

    def postprocess(self, preds, visualization, return_datasamples=False, digits=1, **kwargs):
        return {"predictions": [round(value.item(), digits) for value in preds], "visualization": visualization}

    def __call__(self, *args, **kwargs):
        self.batches: list[int] = []
        return super().__call__(*args, **kwargs)


CFG = {"model": {"type": "ScalingOfTest", "pretrained": "somewhere.pth"}, "test_dataloader": {}}


@pytest.fixture
def weights(tmp_path: Path) -> str:
    model = Scaling()
    nn.init.constant_(model.scale, 3.0)
    path = tmp_path / "weights.pth"
    meta = {"cfg": "model = dict(type='ScalingOfTest')\n"}
    torch.save({"state_dict": model.state_dict(), "meta": meta}, path)
    return str(path)


@pytest.fixture
def inferencer(weights: str) -> Numbers:
    return Numbers(CFG, weights, show_progress=False)


class TestBuilding:
    @pytest.mark.parametrize("form", [dict, ConfigDict, Config, "file"])
    def test_from_a_config(self, tmp_path: Path, weights: str, form: Any) -> None:
        model: Any = str(tmp_path / "net.py") if form == "file" else form(CFG)
        if form == "file":
            Config(CFG).dump(model)
        built = Numbers(model, weights, show_progress=False)
        assert built([1])["predictions"] == [3.0]
        assert isinstance(built.model.norm, nn.modules.batchnorm._BatchNorm)
        assert not isinstance(built.model.norm, nn.SyncBatchNorm)
        assert built.model.cfg["model"]["type"] == "ScalingOfTest"
        assert CFG["model"]["pretrained"] == "somewhere.pth"

    def test_from_weights_alone(self, weights: str) -> None:
        assert Numbers(weights=weights, show_progress=False)(1.0)["predictions"] == [3.0]

    def test_random_weights_are_told(self) -> None:
        with pytest.warns(UserWarning, match="random"):
            assert Numbers(CFG, show_progress=False)(1.0)["predictions"] == [2.0]

    def test_neither(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="weights"):
            Numbers()
        with pytest.raises(TypeError, match="model"):
            Numbers(model=[1])
        torch.save({"state_dict": Scaling().state_dict()}, tmp_path / "bare.pth")
        with pytest.raises(ValueError, match="config"):
            Numbers(weights=str(tmp_path / "bare.pth"))

    def test_by_name_from_the_metafiles_of_a_package(self, tmp_path: Path, weights: str, monkeypatch) -> None:
        package = tmp_path / "zooxyz"
        (package / ".mim" / "configs").mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / ".mim" / "model-index.yml").write_text("Import:\n  - configs/metafile.yml\n")
        Config(CFG).dump(str(package / ".mim" / "configs" / "net.py"))
        (package / ".mim" / "configs" / "metafile.yml").write_text(
            f"Models:\n  - Name: scaling-small\n    Alias: small\n    Config: configs/net.py\n    Weights: {weights}\n"
        )
        monkeypatch.syspath_prepend(str(tmp_path))
        try:
            for name in ("scaling-small", "SMALL"):
                assert Numbers(name, scope="zooxyz", show_progress=False)(1.0)["predictions"] == [3.0]
            assert BaseInferencer.list_models("zooxyz") == ["scaling-small", "small"]
            assert BaseInferencer.list_models("zooxyz", "scal.*") == ["scaling-small"]
            with pytest.raises(ValueError, match="did you mean `scaling-small`"):
                Numbers("scaling-smal", scope="zooxyz")
        finally:
            sys.modules.pop("zooxyz", None)
        with pytest.raises(ValueError, match="installed package"):
            BaseInferencer.list_models("zooxyz_that_is_not")


class TestCalling:
    def test_forms_of_inputs(self, inferencer: Numbers, tmp_path: Path) -> None:
        folder = tmp_path / "inputs"
        folder.mkdir()
        for number in (1, 2):
            (folder / f"{number}.txt").write_text(str(number))
        assert inferencer(1)["predictions"] == [3.0]
        assert inferencer([1, 2])["predictions"] == [3.0, 6.0]
        assert inferencer((1, np.float32(4)))["predictions"] == [3.0, 12.0]
        assert inferencer(str(folder / "2.txt"))["predictions"] == [6.0]
        assert inferencer(str(folder))["predictions"] == [3.0, 6.0]

    def test_batches(self, inferencer: Numbers) -> None:
        assert len(inferencer(list(range(5)), batch_size=2)["predictions"]) == 5
        assert inferencer.batches == [2, 2, 1]

    def test_arguments_go_to_their_steps(self, inferencer: Numbers) -> None:
        result = inferencer([1.26], offset=1.0, show=True, digits=2)
        assert result == {"predictions": [6.78], "visualization": ["shown"]}
        with pytest.raises(ValueError, match="`colour`"):
            inferencer([1], colour="red")

    def test_a_bar_does_not_change_the_result(self, weights: str) -> None:
        assert Numbers(CFG, weights)([1, 2])["predictions"] == [3.0, 6.0]

    def test_one_set_for_each_argument(self) -> None:
        with pytest.raises(AssertionError, match="`size`"):
            type("Wrong", (Numbers,), {"forward_kwargs": {"size"}, "visualize_kwargs": {"size"}})
        with pytest.raises(TypeError, match="forward_kwargs"):
            type("Wrong", (Numbers,), {"forward_kwargs": ["size"]})

    def test_the_collate_function_of_the_config(self, weights: str) -> None:
        assert Numbers(CFG, weights).collate_fn is pseudo_collate

        @FUNCTIONS.register_module(name="stacking_of_test", force=True)
        def stacking(samples: list[Any], factor: float = 1) -> Any:
            return {"inputs": factor * torch.stack([sample["inputs"] for sample in samples])}

        for named, expected in (
            ({"type": "stacking_of_test", "factor": 10}, 30.0),
            (stacking, 3.0),
            ("stacking_of_test", 3.0),
        ):
            cfg = {**CFG, "test_dataloader": {"collate_fn": named}}
            assert Numbers(cfg, weights, show_progress=False)(1)["predictions"] == [expected]

    def test_the_visualizer_of_the_config(self, inferencer: Numbers, weights: str) -> None:
        assert inferencer.visualizer is None
        with_one = Numbers({**CFG, "visualizer": {"type": "Visualizer"}}, weights)
        assert isinstance(with_one.visualizer, Visualizer)
        another = Numbers({**CFG, "visualizer": {"type": "Visualizer"}}, weights)
        assert another.visualizer is not with_one.visualizer
