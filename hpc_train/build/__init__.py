"""What set-up needs before any library is installed: the standard library alone.

horovod.py    builds Horovod for the PyTorch and the MPI that are here
toolchain.py  checks compilers, headers and disk space
"""
