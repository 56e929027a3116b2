"""The command line, `lockstep`: the only room that reads it. Its help does not import torch."""
