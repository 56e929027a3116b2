"""Small data sets that can be learned, drawn from a seed; and the number by which outputs are compared."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor
from torch.utils.data import Dataset

from lockstep.evaluator import BaseMetric

VOCABULARY, LENGTH = 64, 12
CLASSES = 4

Batch = dict[str, Tensor]


class Samples(Dataset[Batch]):
    """Samples that are dicts of tensors.

    Args:
        columns: every value of one name, along the first dim.
    """

    def __init__(self, columns: Batch) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> Batch:
        return {name: column[index] for name, column in self.columns.items()}

    def batch(self, begin: int, end: int) -> Batch:
        """Return the samples from `begin` up to `end`, in one batch."""
        return {name: column[begin:end] for name, column in self.columns.items()}


class OutputSize(BaseMetric):
    """Mean over all samples of the root mean square of a sample's output: no sample may be missing, or count twice."""

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results += output_sizes(data_samples)

    def compute_metrics(self, results: list[float]) -> dict[str, float]:
        return {"output_size": sum(results) / len(results)}


def output_sizes(outputs: Any) -> list[float]:
    """Return the root mean square of each sample's output."""
    values: Tensor = getattr(outputs, "logits", outputs)
    sizes: list[float] = values.detach().double().flatten(1).square().mean(1).sqrt().tolist()
    return sizes


def token_columns(count: int, generator: Generator) -> Batch:
    """Return texts in which each token follows from the one before; the labels are the texts."""
    tokens = [torch.randint(VOCABULARY, (count,), generator=generator)]
    for _ in range(LENGTH - 1):
        tokens.append((3 * tokens[-1] + 1) % VOCABULARY)
    texts = torch.stack(tokens, dim=1)
    return {"input_ids": texts, "labels": texts.clone()}


def pair_columns(count: int, generator: Generator) -> Batch:
    """Return texts, and as labels the same backwards."""
    texts = token_columns(count, generator)["input_ids"]
    return {"input_ids": texts, "labels": texts.flip(1).contiguous()}


def sentence_columns(count: int, generator: Generator) -> Batch:
    """Return texts of `CLASSES` kinds."""
    texts = token_columns(count, generator)["input_ids"]
    return {"input_ids": texts, "labels": texts[:, 0] % CLASSES}


def image_columns(count: int, generator: Generator, name: str = "pixel_values") -> Batch:
    """Return images [3, 16, 16] of `CLASSES` kinds, each brighter in another quarter."""
    images = torch.randn(count, 3, 16, 16, generator=generator)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    for image, label in zip(images, labels.tolist(), strict=True):
        image[:, 8 * (label // 2) :, 8 * (label % 2) :][:, :8, :8] += 1
    return {name: images, "labels": labels}


def speech_columns(count: int, generator: Generator) -> Batch:
    """Return spectra [8, 32], louder in the bands that the tokens of the labels stand for."""
    labels = token_columns(count, generator)["labels"]
    spectra = torch.randn(count, 8, 32, generator=generator)
    for spectrum, text in zip(spectra, labels.tolist(), strict=True):
        for time, token in enumerate(text):
            spectrum[token % 8, 2 * time : 2 * time + 2] += 1
    return {"input_features": spectra, "labels": labels}


def vector_columns(count: int, generator: Generator) -> Batch:
    """Return vectors [16] of `CLASSES` kinds, each about a centre of its own; neighbours are of different kinds."""
    labels = torch.arange(count) % CLASSES
    centres = 2.0 * torch.eye(CLASSES, 16)
    return {"inputs": centres[labels] + 0.3 * torch.randn(count, 16, generator=generator), "labels": labels}


def mixed_columns(count: int, generator: Generator) -> Batch:
    """Return vectors with a partner each and how much of it is mixed in, so that no batch decides about it."""
    columns = vector_columns(count, generator)
    partners = torch.randperm(count, generator=generator)
    return {
        **columns,
        "partners": columns["inputs"][partners],
        "partner_labels": columns["labels"][partners],
        "share": 0.5 + 0.5 * torch.rand(count, generator=generator),
    }


def noise_columns(count: int, generator: Generator) -> Batch:
    """Return vectors [16], and noise [8] to draw some from."""
    return {
        "inputs": vector_columns(count, generator)["inputs"],
        "noise": torch.randn(count, 8, generator=generator),
    }


def view_columns(count: int, generator: Generator) -> Batch:
    """Return two views of the same things: an image [16] and a caption [12] each."""
    things = torch.randn(count, 8, generator=generator)
    to_image, to_caption = torch.randn(8, 16, generator=generator), torch.randn(8, 12, generator=generator)
    return {"images": things @ to_image, "captions": things @ to_caption}


def word_columns(count: int, generator: Generator) -> Batch:
    """Return bags of eight words, most of which are of one of `CLASSES` kinds."""
    labels = torch.randint(CLASSES, (count,), generator=generator)
    words = torch.randint(VOCABULARY // CLASSES, (count, 8), generator=generator) * CLASSES + labels[:, None]
    return {"inputs": words, "labels": labels}


def padded_columns(count: int, generator: Generator) -> Batch:
    """Return texts of which a few tokens or many are to be predicted; the labels of the others are -100."""
    columns = token_columns(count, generator)
    lengths = torch.randint(1, LENGTH, (count, 1), generator=generator)
    return {**columns, "labels": columns["labels"].where(torch.arange(LENGTH) <= lengths, -100)}


def count_labels(batch: Batch) -> int:
    """Return how many tokens are to be predicted; the first one of a text never is."""
    return int((batch["labels"][:, 1:] != -100).sum())


def waveform_columns(count: int, generator: Generator) -> Batch:
    """Return waveforms [160] of five tones each; the labels say which."""
    labels = torch.randint(1, 8, (count, 5), generator=generator)
    times = torch.arange(160 // 5) / 8
    tones = torch.sin(labels[:, :, None] * times).flatten(1)
    return {"input_values": tones + 0.1 * torch.randn(count, 160, generator=generator), "labels": labels}


def box_columns(count: int, generator: Generator) -> Batch:
    """Return images [3, 32, 32] with two bright boxes each; boxes by centre and size relative to the image."""
    images = 0.3 * torch.randn(count, 3, 32, 32, generator=generator)
    classes = torch.randint(CLASSES, (count, 2), generator=generator)
    sizes = torch.randint(8, 15, (count, 2, 2), generator=generator)
    corners = torch.randint(0, 32 - 14, (count, 2, 2), generator=generator)
    for image, kinds, begins, extents in zip(images, classes, corners, sizes, strict=True):
        for kind, (x, y), (width, height) in zip(kinds, begins, extents, strict=True):
            image[int(kind) % 3, y : y + height, x : x + width] += 1 + 0.5 * kind
    return {"images": images, "boxes": torch.cat([corners + sizes / 2, sizes], 2) / 32, "classes": classes}


def noisy_columns(count: int, generator: Generator, channels: int, size: int, noisy: str = "images") -> Batch:
    """Return images of `CLASSES` kinds, and noise and a time to mix it in at; no batch decides about them."""
    classes = torch.randint(CLASSES, (count,), generator=generator)
    images = (
        0.3 * torch.randn(count, channels, size, size, generator=generator) + classes[:, None, None, None] / CLASSES
    )
    noise = torch.randn(count, channels, size, size, generator=generator)
    times = torch.randint(1000, (count,), generator=generator)
    return {"images": images, "noise": noise, "times": times, "classes": classes}


def task_columns(count: int, generator: Generator) -> Batch:
    """Return tasks: lines of a slope each, by a few points to learn them from and others to be asked for."""
    slopes = torch.randn(count, 1, 1, generator=generator)
    given, asked = (torch.randn(count, 4, 1, generator=generator) for _ in range(2))
    return {"given": given, "given_values": slopes * given, "asked": asked, "values": slopes * asked}


def episode_columns(count: int, generator: Generator) -> Batch:
    """Return episodes of `LENGTH` steps: what was seen [6], the action of `CLASSES` taken, and what it brought."""
    seen = torch.randn(count, LENGTH, 6, generator=generator)
    actions = torch.randint(CLASSES, (count, LENGTH), generator=generator)
    brought = seen[..., :CLASSES].gather(2, actions[..., None])[..., 0]
    return {"seen": seen, "actions": actions, "advantages": brought, "returns": brought.flip(1).cumsum(1).flip(1)}
