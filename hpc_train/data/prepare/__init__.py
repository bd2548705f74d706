"""Turns texts, or token files of other programs, into the shards of a data folder."""
