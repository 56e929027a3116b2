"""`Visualizer`: draws on images, and shows what was drawn and a run's values in several backends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from torch import Tensor

import lockstep.visualization
from lockstep.registry.signatures import accepted
from mmengine.dist import master_only
from mmengine.registry import VISBACKENDS, VISUALIZERS
from mmengine.utils import ManagerMixin
from mmengine.visualization.drawing import Canvas
from mmengine.visualization.utils import convert_overlay_heatmap, featmap_channels, img_from_canvas, resized
from mmengine.visualization.utils import wait_continue as _wait_continue
from mmengine.visualization.vis_backend import BaseVisBackend


@VISUALIZERS.register_module()
class Visualizer(ManagerMixin, Canvas, lockstep.visualization.Visualizers):
    """Draws on images (see `Canvas`), and passes images, values and configs on to backends.

    A Runner opens it on rank 0, where only it shows anything. A backend that fails does not end the training: its first
    failure is a warning.

    Args:
        name: the instance's name; see `get_instance`.
        image: the image to draw on.
        vis_backends: the backends, or their configs, which may have a `name`.
        save_dir: the folder in which the backends get `vis_data`; by default that of the run.
        fig_save_cfg: arguments of matplotlib's figure that is drawn on.
        fig_show_cfg: arguments of matplotlib's figure that is shown.

    Example:
        >>> import torch
        >>> visualizer = Visualizer(image=np.zeros((8, 8, 3), dtype=np.uint8))
        >>> _ = visualizer.draw_bboxes(torch.tensor([2, 2, 6, 6]), edge_colors="r", line_widths=1)
        >>> visualizer.get_image().shape
        (8, 8, 3)
    """

    def __init__(
        self,
        name: str = "visualizer",
        image: Any = None,
        vis_backends: Sequence[Any] | Mapping[str, Any] | None = None,
        save_dir: str | Path | None = None,
        fig_save_cfg: Mapping[str, Any] = {"frameon": False},
        fig_show_cfg: Mapping[str, Any] = {"frameon": False},
    ) -> None:
        ManagerMixin.__init__(self, name, fig_save_cfg=dict(fig_save_cfg))  # hands the others on to Canvas
        lockstep.visualization.Visualizers.__init__(self, (), save_dir, name)
        self.fig_show_cfg = dict(fig_show_cfg)
        self._dataset_meta: dict[str, Any] | None = None
        self._named: dict[str, Any] = {}
        given = [vis_backends] if isinstance(vis_backends, Mapping | BaseVisBackend) else list(vis_backends or ())
        for item in given:
            self._add_backend(item)
        if image is not None:
            self.set_image(image)

    @classmethod
    def get_instance(cls, name: str, **kwargs: Any) -> Self:
        """Return the instance of that name, which is created if there is none, also as `Visualizer`'s."""
        instance = super().get_instance(name, **kwargs)
        Visualizer._instance_dict[name] = instance
        return instance

    def make_current(self) -> None:
        """Let `get_current_instance` return this one from now on."""
        super().make_current()
        for table in {id(kind): kind._instance_dict for kind in (type(self), Visualizer)}.values():
            table.pop(self.instance_name, None)
            table[self.instance_name] = self

    @property
    def dataset_meta(self) -> dict[str, Any] | None:
        """The metainfo of the dataset whose images are drawn: its classes, colours, and so on."""
        return self._dataset_meta

    @dataset_meta.setter
    def dataset_meta(self, dataset_meta: dict[str, Any] | None) -> None:
        self._dataset_meta = dataset_meta

    @property
    def _vis_backends(self) -> dict[str, Any]:
        return {name: backend for name, backend in self._named.items() if backend in self.parts}

    def get_backend(self, name: str) -> Any:
        """Return a backend by its name, or None."""
        return self._vis_backends.get(name)

    @master_only
    def show(
        self,
        drawn_img: Any = None,
        win_name: str = "image",
        wait_time: float = 0.0,
        continue_key: str = " ",
        backend: str = "matplotlib",
    ) -> None:
        """Show an image in a window, and wait for a key.

        Args:
            drawn_img: the image; by default what was drawn.
            win_name: title of the window.
            wait_time: seconds to wait at most; 0 for no limit.
            continue_key: the key; for matplotlib only.
            backend: ``"matplotlib"`` or ``"cv2"``.

        Raises:
            ValueError: `backend` is neither of them.
        """
        picture = self.get_image() if drawn_img is None else np.asarray(drawn_img)
        if backend == "matplotlib":
            self._show_by_matplotlib(picture, win_name, wait_time, continue_key)
        elif backend == "cv2":
            import cv2

            cv2.namedWindow(win_name, cv2.WINDOW_AUTOSIZE)
            cv2.imshow(win_name, picture[..., ::-1])
            cv2.waitKey(int(np.ceil(wait_time * 1000)))
        else:
            raise ValueError(f"`backend` must be 'matplotlib' or 'cv2', but is {backend!r}")

    @staticmethod
    def draw_featmap(
        featmap: Tensor,
        overlaid_image: Any = None,
        channel_reduction: str | None = "squeeze_mean",
        topk: int = 20,
        arrangement: tuple[int, int] = (4, 5),
        resize_shape: tuple[int, int] | None = None,
        alpha: float = 0.5,
    ) -> Any:
        """Return a feature map as an image in colours, blue for its least and red for its greatest value.

        Args:
            featmap: the feature map.
            overlaid_image: an image to lay it over, in whose size it is shown.
            channel_reduction: ``"squeeze_mean"`` shows the mean of all channels, ``"select_max"`` the channel with the
                greatest sum, None as many channels as `topk` says.
            topk: how many channels, those with the greatest mean; -1 shows 1 or 3 channels as one image.
            arrangement: rows and columns of the channels.
            resize_shape: height and width in which it is shown.
            alpha: share of the colours, where they lie over `overlaid_image`.

        **Shapes**: `featmap` [channels, height, width]; the result [height, width, 3], or as many times greater as
        there are rows and columns.

        Raises:
            AssertionError: `featmap` has another form, or `arrangement` has too few places.
        """
        if not isinstance(featmap, Tensor) or featmap.dim() != 3:
            form = tuple(featmap.shape) if hasattr(featmap, "shape") else type(featmap).__name__
            raise AssertionError(f"`featmap` must be a tensor [channels, height, width], but is {form}")
        featmap = featmap.detach().float().cpu()
        if overlaid_image is not None and overlaid_image.ndim == 2:
            overlaid_image = np.repeat(overlaid_image[..., None], 3, axis=-1)
        size = resize_shape or (None if overlaid_image is None else overlaid_image.shape[:2])
        if size is not None:
            featmap = Tensor(np.stack([resized(channel.numpy(), size) for channel in featmap]))
            overlaid_image = None if overlaid_image is None else resized(overlaid_image, size)
        rows, columns = arrangement
        if channel_reduction is None and topk > rows * columns:
            raise AssertionError(
                f"`arrangement` must have places for {topk} channels, but has {rows} x {columns}. Make it greater, or "
                "`topk` smaller"
            )
        shown, numbers = featmap_channels(featmap, channel_reduction, topk)
        if not numbers:
            return convert_overlay_heatmap(shown if len(shown) > 1 else shown[0], overlaid_image, alpha)
        maps = [convert_overlay_heatmap(channel, overlaid_image, alpha) for channel in shown]
        return _grid(maps, numbers, rows, columns)

    @master_only
    def add_config(self, config: Any, **kwargs: Any) -> None:
        """Show the config of the run."""
        for backend in self._showing("add_config"):
            with self._failure_as_warning(backend):
                backend.add_config(config, **kwargs)

    @master_only
    def add_graph(self, model: Any, data_batch: Sequence[Any], **kwargs: Any) -> None:
        """Show the graph of a model."""
        for backend in self._showing("add_graph"):
            with self._failure_as_warning(backend):
                backend.add_graph(model, data_batch, **kwargs)

    @master_only
    def add_image(self, name: str, image: Any, step: int = 0) -> None:
        """Show an image [height, width, 3] of 0 to 255, red first."""
        for backend in self._showing("add_image"):
            with self._failure_as_warning(backend):
                backend.add_image(name, image, step)

    @master_only
    def add_scalar(self, name: str, value: Any, step: int = 0, **kwargs: Any) -> None:
        """Show one value."""
        self.add_scalars({name: value}, step, **kwargs)

    @master_only
    def add_scalars(
        self, scalar_dict: dict[str, Any], step: int = 0, file_path: str | None = None, **kwargs: Any
    ) -> None:
        """Show values that belong to one step.

        Args:
            scalar_dict: the values by name.
            step: the step.
            file_path: for `LocalVisBackend`, a file for a line of its own.
            kwargs: for backends of one's own.
        """
        for backend in self._showing("add_scalars"):
            with self._failure_as_warning(backend):
                if isinstance(backend, BaseVisBackend):
                    backend.add_scalars(scalar_dict, step, file_path, **kwargs)
                else:
                    backend.add_scalars(scalar_dict, step)

    @master_only
    def add_datasample(
        self,
        name: str,
        image: Any,
        data_sample: Any = None,
        draw_gt: bool = True,
        draw_pred: bool = True,
        show: bool = False,
        wait_time: float = 0,
        step: int = 0,
    ) -> None:
        """Draw a sample; for subclasses, which know what is in it."""

    def _add_backend(self, item: Any) -> None:
        name = type(item).__name__
        if isinstance(item, Mapping):
            arguments = dict(item)
            kind = arguments["type"]
            name = arguments.pop("name", kind if isinstance(kind, str) else kind.__name__).rpartition(".")[2]
            with VISBACKENDS.switch_scope_and_registry(arguments.get("_scope_")) as there:
                backend = there.get(kind) if isinstance(kind, str) else kind
            if self._save_dir is not None and backend is not None and "save_dir" in accepted(backend):
                arguments.setdefault("save_dir", str(self._save_dir / "vis_data"))
            item = (VISUALIZERS if backend is None else VISBACKENDS).build(arguments)
        if name in self._named:
            raise RuntimeError(f"`vis_backends` must have different names, but two are called {name!r}. Add a `name`")
        self._named[name] = item
        self.parts.append(item)

    def _showing(self, method: str) -> list[Any]:
        return [backend for backend in self.parts if hasattr(backend, method)]

    def _show_by_matplotlib(self, picture: Any, win_name: str, wait_time: float, continue_key: str) -> None:
        from matplotlib import pyplot

        figure = pyplot.figure(win_name, **self.fig_show_cfg)
        try:
            axes = figure.add_subplot()
            axes.axis(False)
            figure.subplots_adjust(left=0, right=1, bottom=0, top=1)
            axes.imshow(picture)
            figure.canvas.draw()
            if figure.canvas.manager is not None and hasattr(figure.canvas, "start_event_loop"):
                pyplot.show(block=False)
                _wait_continue(figure, timeout=wait_time, continue_key=continue_key)
        finally:
            pyplot.close(figure)


def _grid(maps: list[Any], numbers: list[int], rows: int, columns: int) -> Any:
    """Return images in rows and columns, each with its number."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height, width = maps[0].shape[:2]
    figure = Figure(frameon=False)
    canvas = FigureCanvasAgg(figure)
    dpi = figure.get_dpi()
    figure.set_size_inches((columns * width + 1e-2) / dpi, (rows * height + 1e-2) / dpi)
    figure.subplots_adjust(left=0, right=1, bottom=0, top=1, wspace=0, hspace=0)
    for place, (picture, number) in enumerate(zip(maps, numbers, strict=True), 1):
        axes = figure.add_subplot(rows, columns, place)
        axes.axis("off")
        axes.text(2, 15, f"channel: {number}", fontsize=10)
        axes.imshow(picture)
    return img_from_canvas(canvas)
