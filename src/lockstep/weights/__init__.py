"""Weights in and out: from checkpoints, files and HuggingFace's folders into models, and back."""

from __future__ import annotations

from lockstep.weights.description import describe_model, sized_on_loading
from lockstep.weights.export import Exported, describe_left_out, export_checkpoint, save_pretrained
from lockstep.weights.loading import Weights, load_checkpoint, load_weights
from lockstep.weights.source import best_checkpoint_in, check_weights, find_checkpoint, open_source

__all__ = [
    "Exported",
    "Weights",
    "best_checkpoint_in",
    "check_weights",
    "describe_left_out",
    "describe_model",
    "export_checkpoint",
    "find_checkpoint",
    "load_checkpoint",
    "load_weights",
    "open_source",
    "save_pretrained",
    "sized_on_loading",
]
