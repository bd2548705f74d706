"""Ranks that start warm: forked from one process per node that has imported everything.

stand_in.py  the process that the launcher started: hands all over to the fork server, and waits
meeting.py   finds the node's fork server, or starts it
key.py       what ranks of one server have in common
server.py    imports once, forks a rank for each stand-in, tells how it ended
beside.py    has the server fork another process for a rank that uses MPI
rank.py      makes of a fork the process that a cold start would have made

docs/explanation/warm-start.md has the protocol. Nothing here imports MPI.
"""
