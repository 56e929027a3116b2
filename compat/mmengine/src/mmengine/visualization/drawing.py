"""`Canvas`: boxes, lines, text and masks over an image, drawn by matplotlib."""

from __future__ import annotations

import math
import warnings
from typing import Any, Self

import cv2
import numpy as np
from torch import Tensor

from mmengine.visualization.utils import (
    as_uint8_image,
    check_type,
    check_type_and_length,
    color_str2rgb,
    color_val_matplotlib,
    img_from_canvas,
    tensor2ndarray,
    value2list,
)

_MARGIN = 1e-2  # matplotlib rounds the size of a figure down
_ARRAYS = (np.ndarray, Tensor)


class Canvas:
    """An image, and what is drawn over it; every `draw_...` returns the object itself.

    Positions are in pixels, x before y, from the upper left corner. Colours are names that matplotlib knows, or tuples
    of red, green and blue from 0 to 255. Where many things are drawn at once, an argument for their look may be one
    value for all, or a list with one for each.

    Attributes:
        width: the image's width in pixels.
        height: the image's height in pixels.
        fig_save: matplotlib's figure.
        ax_save: its axes, to draw whatever there is no method for.
    """

    def __init__(self, fig_save_cfg: dict[str, Any]) -> None:
        self.fig_save_cfg = fig_save_cfg
        self.width = self.height = 0
        self._default_font_size = 10
        self._figure: Any = None
        self._axes: Any = None

    @property
    def fig_save(self) -> Any:
        """The figure; created when it is first used, because that takes a second."""
        self._prepare()
        return self._figure

    @property
    def ax_save(self) -> Any:
        """The figure's axes."""
        self._prepare()
        return self._axes

    @property
    def dpi(self) -> float:
        """The figure's resolution."""
        return float(self.fig_save.get_dpi())

    def set_image(self, image: Any) -> None:
        """Begin anew with an image [height, width, 3] of 0 to 255, red first."""
        picture = as_uint8_image(image)
        self._image = picture
        self.height, self.width = picture.shape[:2]
        self._default_font_size = max(int(math.sqrt(self.height * self.width)) // 90, 10)
        self.fig_save.set_size_inches((self.width + _MARGIN) / self.dpi, (self.height + _MARGIN) / self.dpi)
        axes = self.ax_save
        axes.cla()
        axes.axis(False)
        axes.imshow(
            picture, extent=(0, self.width, self.height, 0), interpolation="none", cmap="gray", vmin=0, vmax=255
        )
        axes.autoscale(False)  # what lies outside is cut off, and does not make the image smaller

    def get_image(self) -> Any:
        """Return the image with all that was drawn over it: an array [height, width, 3] of 0 to 255."""
        self._require_image()
        return img_from_canvas(self._figure.canvas)

    def draw_points(self, positions: Any, colors: Any = "g", marker: str | None = None, sizes: Any = None) -> Self:
        """Draw points.

        **Shapes**: `positions` [points, 2] or [2]; `sizes` [points].
        """
        points = self._rows("positions", positions, 2)
        if sizes is not None:
            sizes = tensor2ndarray(sizes)
        shades = color_val_matplotlib(colors)
        self.ax_save.scatter(points[:, 0], points[:, 1], c=shades, s=sizes, marker=marker)
        return self

    def draw_texts(
        self,
        texts: str | list[str],
        positions: Any,
        font_sizes: int | list[int] | None = None,
        colors: Any = "g",
        vertical_alignments: str | list[str] = "top",
        horizontal_alignments: str | list[str] = "left",
        font_families: str | list[str] = "sans-serif",
        bboxes: dict[str, Any] | list[dict[str, Any]] | None = None,
        font_properties: Any = None,
    ) -> Self:
        """Write texts.

        Args:
            texts: one text or several.
            positions: where each begins.
            font_sizes: sizes in points; by default one that fits the image.
            colors: colours.
            vertical_alignments: ``"center"``, ``"top"``, ``"bottom"`` or ``"baseline"``.
            horizontal_alignments: ``"center"``, ``"left"`` or ``"right"``.
            font_families: names of fonts or of families.
            bboxes: matplotlib's arguments for a box behind the text.
            font_properties: matplotlib's `FontProperties`, for other fonts.

        **Shapes**: `positions` [texts, 2] or [2].
        """
        check_type("texts", texts, (str, list))
        texts = value2list(texts, str, 1)
        count = len(texts)
        places = self._rows("positions", positions, 2)
        if len(places) != count:
            raise AssertionError(f"`positions` must have one row for each of {count} texts, but has {len(places)}")
        looks = {
            "size": (self._default_font_size if font_sizes is None else font_sizes, (int, float)),
            "color": (color_val_matplotlib(colors), (str, tuple)),
            "verticalalignment": (vertical_alignments, str),
            "horizontalalignment": (horizontal_alignments, str),
            "family": (font_families, str),
            "bbox": (bboxes, (dict, type(None))),
        }
        if font_properties is not None:
            looks["fontproperties"] = (font_properties, object if not isinstance(font_properties, list) else ())
        each: dict[str, list[Any]] = {}
        for name, (value, kind) in looks.items():
            each[name] = value2list(value, kind, count)  # type: ignore[arg-type]
            check_type_and_length(name, each[name], list, count)
        for number, text in enumerate(texts):
            options = {name: values[number] for name, values in each.items()}
            if options["bbox"] is None:
                del options["bbox"]
            self.ax_save.text(places[number, 0], places[number, 1], text, **options)
        return self

    def draw_lines(
        self, x_datas: Any, y_datas: Any, colors: Any = "g", line_styles: Any = "-", line_widths: Any = 2
    ) -> Self:
        """Draw lines from (x1, y1) to (x2, y2).

        **Shapes**: `x_datas` and `y_datas` [lines, 2] or [2].
        """
        from matplotlib.collections import LineCollection

        check_type("x_datas", x_datas, _ARRAYS)
        check_type("y_datas", y_datas, _ARRAYS)
        xs, ys = np.atleast_2d(tensor2ndarray(x_datas)), np.atleast_2d(tensor2ndarray(y_datas))
        if xs.shape != ys.shape or xs.shape[1] != 2:
            raise AssertionError(f"`x_datas` and `y_datas` must be of shape [lines, 2], but are {xs.shape}, {ys.shape}")
        self._warn_outside(np.stack([xs.ravel(), ys.ravel()], axis=1))
        self.ax_save.add_collection(
            LineCollection(
                list(np.stack([xs, ys], axis=-1)),
                colors=color_val_matplotlib(colors),
                linestyles=line_styles,
                linewidths=self._line_widths(line_widths, len(xs)),
            )
        )
        return self

    def draw_circles(
        self,
        center: Any,
        radius: Any,
        edge_colors: Any = "g",
        line_styles: Any = "-",
        line_widths: Any = 2,
        face_colors: Any = "none",
        alpha: float = 0.8,
    ) -> Self:
        """Draw circles.

        **Shapes**: `center` [circles, 2] or [2], `radius` [circles].
        """
        from matplotlib.collections import PatchCollection
        from matplotlib.patches import Circle

        check_type("radius", radius, (*_ARRAYS, int, float))
        radii = np.atleast_1d(tensor2ndarray(radius))
        centers = self._rows("center", center, 2)
        if len(centers) != len(radii):
            raise AssertionError(f"`center` must have one row for each of {len(radii)} radii, but has {len(centers)}")
        circles = [Circle(tuple(place), float(size)) for place, size in zip(centers, radii, strict=True)]
        return self._draw_shapes(PatchCollection, circles, edge_colors, line_styles, line_widths, face_colors, alpha)

    def draw_bboxes(
        self,
        bboxes: Any,
        edge_colors: Any = "g",
        line_styles: Any = "-",
        line_widths: Any = 2,
        face_colors: Any = "none",
        alpha: float = 0.8,
    ) -> Self:
        """Draw boxes, given by their upper left and lower right corners.

        **Shapes**: `bboxes` [boxes, 4] or [4].
        """
        boxes = self._rows("bboxes", bboxes, 4)
        if not ((boxes[:, 0] <= boxes[:, 2]).all() and (boxes[:, 1] <= boxes[:, 3]).all()):
            raise AssertionError(
                "`bboxes` must be [left, top, right, bottom], but some have right < left or bottom < top"
            )
        corners = [[(x1, y1), (x2, y1), (x2, y2), (x1, y2)] for x1, y1, x2, y2 in boxes.tolist()]
        outlines = [np.array(corner) for corner in corners]
        return self._draw_outlines(outlines, edge_colors, line_styles, line_widths, face_colors, alpha)

    def draw_polygons(
        self,
        polygons: Any,
        edge_colors: Any = "g",
        line_styles: Any = "-",
        line_widths: Any = 2,
        face_colors: Any = "none",
        alpha: float = 0.8,
    ) -> Self:
        """Draw closed polygons.

        **Shapes**: `polygons` is [corners, 2], or a list of those.
        """
        check_type("polygons", polygons, (list, *_ARRAYS))
        outlines = [self._rows("polygons", one, 2) for one in (polygons if isinstance(polygons, list) else [polygons])]
        return self._draw_outlines(outlines, edge_colors, line_styles, line_widths, face_colors, alpha)

    def _draw_outlines(self, outlines: list[Any], *looks: Any) -> Self:
        from matplotlib.collections import PolyCollection

        return self._draw_shapes(PolyCollection, outlines, *looks)

    def _draw_shapes(
        self,
        collection: Any,
        shapes: list[Any],
        edge_colors: Any,
        line_styles: Any,
        line_widths: Any,
        face_colors: Any,
        alpha: float,
    ) -> Self:
        """Draw shapes of one kind as a collection of matplotlib's."""
        self.ax_save.add_collection(
            collection(
                shapes,
                alpha=alpha,
                facecolors=color_val_matplotlib(face_colors),
                edgecolors=color_val_matplotlib(edge_colors),
                linestyles=line_styles,
                linewidths=self._line_widths(line_widths, len(shapes)),
            )
        )
        return self

    def draw_binary_masks(self, binary_masks: Any, colors: Any = "g", alphas: Any = 0.8) -> Self:
        """Colour the pixels of masks.

        **Shapes**: `binary_masks` [masks, height, width] or [height, width], of bools.
        """
        check_type("binary_masks", binary_masks, _ARRAYS)
        masks = tensor2ndarray(binary_masks)
        if masks.dtype != np.bool_:
            raise AssertionError(f"`binary_masks` must be of bools, but is of {masks.dtype}")
        masks = masks[None] if masks.ndim == 2 else masks
        picture = self.get_image()
        if masks.shape[1:] != picture.shape[:2]:
            raise AssertionError(
                f"`binary_masks` must be of the image's size {picture.shape[:2]}, but is {masks.shape}"
            )
        count = len(masks)
        shades = value2list(colors, (str, tuple), count)
        check_type_and_length("colors", shades, list, count)
        shares = value2list(alphas, float, count)
        check_type_and_length("alphas", shares, list, count)
        for mask, shade, share in zip(masks, shades, shares, strict=False):
            color = np.empty_like(picture)
            color[:] = color_str2rgb(shade) if isinstance(shade, str) else shade
            picture[mask] = cv2.addWeighted(picture, 1 - share, color, share, 0)[mask]
        self.ax_save.imshow(picture, extent=(0, self.width, self.height, 0), interpolation="nearest")
        return self

    def _prepare(self) -> None:
        if self._figure is not None:
            return
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        self._figure = Figure(**self.fig_save_cfg)
        FigureCanvasAgg(self._figure)
        self._axes = self._figure.add_subplot()
        self._axes.axis(False)
        self._figure.subplots_adjust(left=0, right=1, bottom=0, top=1)

    def _require_image(self) -> None:
        if not self.width:
            raise AttributeError("there is no image to draw on. Call set_image(image) first")

    def _rows(self, name: str, values: Any, width: int) -> Any:
        """Return values as an array [any, width]; a single row may come without the first dim."""
        self._require_image()
        check_type(name, values, _ARRAYS)
        rows = np.atleast_2d(tensor2ndarray(values))
        if rows.ndim != 2 or rows.shape[-1] != width:
            raise AssertionError(f"`{name}` must be of shape [..., {width}], but is {rows.shape}")
        self._warn_outside(rows.reshape(-1, 2))
        return rows

    def _warn_outside(self, positions: Any) -> None:
        limit = np.array([self.width, self.height])
        if len(positions) and not ((positions >= 0) & (positions <= limit)).all():
            warnings.warn(
                f"some of what is drawn lies outside the image of {self.width} x {self.height} pixels", stacklevel=4
            )

    def _line_widths(self, widths: Any, count: int) -> list[float]:
        given = value2list(widths, (int, float), count)
        check_type_and_length("line_widths", given, list, 0)
        return [min(max(width, 1), self._default_font_size / 4) for width in given]
