"""HDF5 shards, sample order and the loader. The rank and their number are passed as integers."""
