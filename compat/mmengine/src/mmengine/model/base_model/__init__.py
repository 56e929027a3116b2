"""Base classes of models and data preprocessors."""

from __future__ import annotations

from mmengine.model.base_model.base_model import BaseModel
from mmengine.model.base_model.data_preprocessor import BaseDataPreprocessor, ImgDataPreprocessor

__all__ = ["BaseDataPreprocessor", "BaseModel", "ImgDataPreprocessor"]
