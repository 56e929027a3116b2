"""Models of Diffusers, made from configs: denoisers of images and latents, and an autoencoder between the two."""

from __future__ import annotations

from functools import partial
from typing import Any

import diffusers
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from benchmarks.models import data
from benchmarks.models.data import CLASSES
from benchmarks.models.row import Row


class Denoiser(nn.Module):
    """Finds the noise in what it was mixed into."""

    def __init__(self, net: nn.Module, *, knows_classes: bool = False) -> None:
        super().__init__()
        self.net = net
        self.knows_classes = knows_classes

    def forward(self, images: Tensor, noise: Tensor, times: Tensor, classes: Tensor, mode: str = "tensor") -> Any:
        angles = (times / 1000 * torch.pi / 2)[:, None, None, None]
        mixed = angles.cos() * images + angles.sin() * noise
        further = {"class_labels": classes} if self.knows_classes else {}
        found = self.net(mixed, timestep=times, **further).sample
        return {"loss": mse_loss(found, noise)} if mode == "loss" else found


def unet() -> nn.Module:
    net = diffusers.UNet2DModel(
        sample_size=16, in_channels=3, out_channels=3, block_out_channels=(8, 16), layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4, attention_head_dim=4,
    )  # fmt: skip
    return Denoiser(net)


def dit() -> nn.Module:
    net = diffusers.DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=8, in_channels=4, num_layers=2, sample_size=8, patch_size=2,
        num_embeds_ada_norm=CLASSES, norm_num_groups=4,
    )  # fmt: skip
    for module in net.modules():
        if hasattr(module, "dropout_prob"):
            module.dropout_prob = 0.0  # of classes, which no argument turns off
    return Denoiser(net, knows_classes=True)


class Autoencoder(nn.Module):
    """Brings images through few numbers; the step calls `encode` and `decode`, as users of Diffusers do."""

    def __init__(self) -> None:
        super().__init__()
        self.vae = diffusers.AutoencoderKL(
            in_channels=3, out_channels=3, block_out_channels=(8, 16), layers_per_block=1, latent_channels=4,
            down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, norm_num_groups=4,
            sample_size=16,
        )  # fmt: skip

    def forward(self, images: Tensor, noise: Tensor, mode: str = "tensor", **_: Tensor) -> Any:
        drawn_from = self.vae.encode(images).latent_dist
        drawn = drawn_from.mean + drawn_from.std * noise.reshape(len(noise), -1)[:, : 4 * 8 * 8].view(-1, 4, 8, 8)
        found = self.vae.decode(drawn).sample
        return {"loss": mse_loss(found, images) + 1e-3 * drawn_from.kl().mean()} if mode == "loss" else found


_IMAGES = partial(data.noisy_columns, channels=3, size=16)
_LATENTS = partial(data.noisy_columns, channels=4, size=8)
_DIT_UNITS = ["BasicTransformerBlock", "CombinedTimestepLabelEmbeddings"]

ROWS = (
    Row(
        "UNet2D",
        unet,
        _IMAGES,
        plan={"*.time_embedding.linear_1": "colwise", "*.time_embedding.linear_2": "rowwise"},
        note="of Diffusers, as the next two; the embedding of times is what tensor parallelism splits.",
    ),
    Row(
        "DiT",
        dit,
        _LATENTS,
        plan={"*.ff.net.0.proj": "colwise", "*.ff.net.2": "rowwise"},
        options={name: {"auto_wrap_policy": _DIT_UNITS} for name in ("FSDP-2", "FSDP-4", "HSDP-2x2", "TP-2")},
        note="its last layer calls an embedding inside the first block, which under FSDP must be a unit of its own: "
        f"`auto_wrap_policy={_DIT_UNITS}`.",
    ),
    Row("VAE", Autoencoder, _IMAGES, note="its `forward` calls `encode` and `decode` of the autoencoder inside it."),
)
