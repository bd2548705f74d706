"""From a job (nodes, ranks, time, command) to launcher lines and batch scripts, on login nodes.

hosts.py      which hosts and slots there are: -H, host files, SLURM, PBS, LSF
launchers.py  mpirun, mpiexec, srun or horovodrun, with the ranks bound to cores
"""
