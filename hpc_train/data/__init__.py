"""HDF5 shards, sample order and the loader; ranks appear only as two integers."""
