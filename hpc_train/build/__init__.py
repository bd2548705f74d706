"""Modules that set-up needs before any library is installed. They use only the standard library.

horovod.py      builds Horovod for the PyTorch and the MPI that are installed
toolchain.py    checks compilers, headers and disk space
wheel_cache.py  keeps built wheels
"""
