"""`minidist bench`: our times and those of other libraries, measured in turns in one run.

steps.py        a training step against PyTorch eager (`torch_eager.py`)
comm.py         communication against MPICH and gloo, data parallelism against DDP (`peers.py`)
pipelines.py    two ranks against one process, and against PyTorch's schedules (`peers.py`)
gpu.py          a GPU: steps and products against PyTorch's, all_reduce against staging
mpi.py          ranks under mpiexec against bare MPI, processes and NuMPItron (`peers.py`)
run_peer.py     a peer in separate processes: its times, or why there are none
"""
