"""Ranks with a GPU each: NCCL moves the arrays of collectives from GPU to GPU."""
