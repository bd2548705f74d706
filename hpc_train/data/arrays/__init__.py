"""Samples of other people's HDF5 and NetCDF-4 files, read without the HDF5 library."""
