"""A job's life on its ranks: how it starts, what it tells, and how it stops.

program.py        the frame around a program: start, errors as one line, the same exit code
run_directory.py  the directory of a run, which one job has at a time
preflight.py      checks before the first step: versions, clocks, disk, memory, links
devices.py        the devices that ranks compute on: shared, idle and distant GPUs
slow_ranks.py     lets ranks exchange numbers, and names the one that the others wait for
reporting.py      writes the records and events of a run
profiling.py      profiles some steps of a job
heartbeat.py      reports progress to `hpc-train launch`, and how long a step may take
preemption.py     collects the requests to stop: signals, the time limit, the file STOP
deadline.py       when the scheduler ends the job
jobs.py           which jobs the scheduler knows
leaving.py        ranks leave a block of code together
exhausted.py      what to do when memory runs out, or torch.compile fails
communication/    times the collectives of a machine
"""
