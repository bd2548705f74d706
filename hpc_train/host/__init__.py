"""The host that a process runs on.

allocator.py  keeps freed memory in the process
counters.py   reads what the system counts of a process: page faults, lost processors
cores.py      counts the physical cores of hardware threads
programs.py   runs another program, and returns what it prints
processor.py  says which library multiplies float32 matrices faster on this kind of processor
"""
