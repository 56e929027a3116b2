"""What lockstep costs beside bare torch.distributed, measured in one run, interleaved: ``python -m benchmarks``."""
