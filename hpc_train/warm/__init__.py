"""Ranks that start warm: one process per node imports everything, and forks the ranks.

stand_in.py  the process that the launcher starts: sends a request to the fork server, and waits
meeting.py   finds the node's fork server, or starts it
key.py       the settings that all ranks of one server must share
server.py    imports once, forks a rank for each stand-in, tells it how the rank ended
beside.py    asks the server to fork another process for a rank that uses MPI
rank.py      turns a fork into the process that a cold start would have made

docs/explanation/warm-start.md has the protocol. Nothing here imports MPI.
"""
