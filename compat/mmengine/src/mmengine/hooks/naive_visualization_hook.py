"""`NaiveVisualizationHook`: shows predictions of a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lockstep.hooks import Hook
from mmengine.registry import HOOKS

__all__ = ["NaiveVisualizationHook"]


@HOOKS.register_module()
class NaiveVisualizationHook(Hook):
    """Show the samples of a test and what is predicted for them, by the visualizer's `add_datasample`.

    A sample is a dict with the image in `inputs` and a data element in `data_sample`, whose metainfo may have
    `img_path`, which names the image, and `img_norm_cfg`, by which it was normalised.

    Args:
        interval: batches from one that is shown to the next.
        draw_gt: draw the ground truth.
        draw_pred: draw the prediction.
    """

    priority = "NORMAL"

    def __init__(self, interval: int = 50, draw_gt: bool = True, draw_pred: bool = True) -> None:
        self._interval, self.draw_gt, self.draw_pred = interval, draw_gt, draw_pred

    def after_test_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Show a batch when it is due."""
        if not self.every_n_inner_iters(batch_idx, self._interval):
            return
        from mmengine.utils.dl_utils import tensor2imgs
        from mmengine.visualization import Visualizer

        visualizer = Visualizer.get_current_instance()
        for number, (data, output) in enumerate(zip(data_batch, outputs, strict=True)):
            sample = data["data_sample"]
            image = tensor2imgs(data["inputs"][None], **sample.get("img_norm_cfg", {}))[0]
            name = Path(sample.get("img_path", f"{batch_idx}_{number}")).name
            visualizer.add_datasample(name, image, sample, output, self.draw_gt, self.draw_pred)
