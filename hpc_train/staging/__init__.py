"""Brings an environment and data sets to the nodes' own disks, from node to node over MPI.

listing.py      what is to be copied, as one table that all nodes get
stream.py       the bytes of all files as one stream, and its chunks
environment.py  the environment to copy, what it leaves behind, and the script that switches to it
relay.py        the chunks pass from node to node, while others are read and written
copy.py         the copy on one node
stage.py        all of it on all ranks
"""
