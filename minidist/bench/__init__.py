"""`minidist bench`: our times and those of other libraries, measured in turns in one run.

workloads.py    the table of training steps and products, ours
torch_peers.py  PyTorch's steps, eager and compiled; gloo, DDP and pipelines
jax_peers.py    JAX's steps
run_peer.py     a peer in separate processes: its times, or why there are none
rows.py         rounds of all contestants, a row that compares two of them, a row as a line

A suite has a TITLE and `rows(rounds)`, which measures and yields rows:

steps.py        a training step against its own products, PyTorch and JAX; table.py: as Markdown
comm.py         communication against MPICH and gloo, data parallelism against DDP
pipelines.py    two ranks against one process, and against PyTorch's schedules
gpu.py          a GPU: steps and products against PyTorch's, all_reduce against staging
mpi.py          ranks under mpiexec against bare MPI, processes and NuMPItron, which it times, too
checkpoint.py   a save and a load against NumPy's, and what a save takes from a step
"""
