"""`lockstep export`: write the weights of a checkpoint in a form that others read."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import typer
from rich.filesize import decimal

from lockstep.errors import counted
from lockstep.launch.notices import loading_torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """Write the weights of a checkpoint in a form that others read.

    CKPT is a checkpoint, the folder of a run, or a work dir, of which the last checkpoint is taken. OUT is a new or
    empty folder; or a new file for --to torch, or if its name ends in .safetensors. It needs no GPU and no model, and
    memory for one tensor at a time; for --to torch, for all.
    """

    ckpt: Annotated[str, typer.Argument(metavar="CKPT", help="A checkpoint, the folder of a run, or a work dir.")]
    out: Annotated[str, typer.Argument(metavar="OUT", help="What to write; also a URL, as s3://BUCKET/NAME.")]
    to: Annotated[
        Literal["safetensors", "hf", "torch"],
        typer.Option(
            help="All weights; what from_pretrained of transformers or peft loads; or a state_dict for torch.load.",
        ),
    ] = "safetensors"
    best: Annotated[
        bool, typer.Option("--best", help="Of a run or a work dir, the best checkpoint, as kept by save_best.")
    ] = False
    max_shard_size: Annotated[
        str, typer.Option(metavar="SIZE", help="The most bytes of a file, as 5GB or 500MB; more are several files.")
    ] = "5GB"
    dtype: Annotated[
        str | None, typer.Option(metavar="[float32|float16|bfloat16|float64]", help="Convert floating-point weights.")
    ] = None
    prefix: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only the part of the model with this name, without the name.")
    ] = None
    ema: Annotated[
        bool | None,
        typer.Option(
            "--ema/--no-ema",
            help="Of a run with EMAHook, the averaged or the trained weights. Default: as tested, thus the averaged.",
            show_default=False,
        ),
    ] = None
    files_from: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Copy the tokenizer, and a config if CKPT has none, from there."),
    ] = None

    def run(self) -> None:
        """Write the weights, and print what has been written."""
        with loading_torch("loading torch"):
            from lockstep.weights import describe_left_out, export_checkpoint  # imports torch
        options = asdict(self)  # the arguments have these names, too
        done = export_checkpoint(options.pop("ckpt"), **options)
        if done.left_out:
            print(f"not in it: {describe_left_out(done.left_out)}")
        print(f"{done.out}: {counted(done.tensors, 'weight')}, {decimal(done.nbytes)}, of {done.checkpoint}")
