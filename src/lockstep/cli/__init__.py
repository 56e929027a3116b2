"""The command line, `lockstep`: the only package that reads argv. Its help does not import torch."""
