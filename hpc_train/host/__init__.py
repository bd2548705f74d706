"""The host that a process runs on.

allocator.py  keeps freed memory in the process
cgroups.py    the cgroups of this process, whose files say what it may use
commit.py     finds the git commit of a folder
cores.py      counts the physical cores of hardware threads, and what a container may use of them
counters.py   reads what the system counts of a process: page faults, lost processors
memory.py     the memory that this process has used at most, and that its node has left
numa.py       which CPUs share a memory, and how far they are from the others
pages.py      gives pages of memory back to the system, and keeps their addresses
process.py    when a process began, and how long it has run
processor.py  says which library multiplies float32 matrices faster on this kind of processor
programs.py   runs another program, and returns what it prints
"""
