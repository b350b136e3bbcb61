"""`minidist bench`: our times and those of other libraries, measured in turns in one run.

table.py        rounds of all contestants, peers in processes of their own, rows and how they print
torch_peers.py  PyTorch's steps, eager and compiled; gloo, DDP and pipelines
jax_peers.py    JAX's steps

A suite has a TITLE and `rows(rounds)`, which measures and yields rows:

steps.py        training steps (steps.toml), ours, against their own products, PyTorch and JAX
comm.py         communication against MPICH and gloo, data parallelism against DDP
pipelines.py    two ranks against one process, and against PyTorch's schedules
gpu.py          a GPU: steps and products against PyTorch's, all_reduce against staging
mpi.py          ranks under mpiexec against bare MPI, processes and NuMPItron, which it times, too
checkpoint.py   a save and a load against NumPy's, and what a save takes from a step
"""
