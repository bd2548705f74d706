"""What layouts cost, told before any rank is started; on login nodes, without torch and MPI.

model.py      the model of a configuration: its shape, and how ranks divide it
state.py      the memory of a rank's share of the training state, by ZeRO's stages
buffers.py    what a rank keeps for compression, local steps and saves
fits.py       whether a training fits in the memory of its nodes
schedules.py  bubble and memory of each pipeline schedule under a layout
machine.py    a machine as numbers: compute, memory, links (training/measure.py measures them)
assumed.py    a machine without a description: what was measured alone, and what is assumed
layouts.py    all layouts of a job's ranks, placed on its nodes
predict.py    the time of a step under a layout, on a machine
choose.py     the fastest first
"""
