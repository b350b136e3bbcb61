"""Ranks that `mpiexec` has started, on one machine or several: MPI moves the bytes."""
