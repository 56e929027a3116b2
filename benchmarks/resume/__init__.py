"""Runs that stop and resume on other ranks, with other batches, under another strategy: what is the same afterwards."""
