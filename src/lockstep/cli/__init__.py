"""The command line `lockstep`: the only package that reads argv. Printing its help does not import torch."""
