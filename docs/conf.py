"""Sphinx's configuration; the pages are Markdown."""

import hpc_train

project = "hpc_train"
author = "The hpc_train developers"
version = release = hpc_train.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
html_theme = "alabaster"
html_theme_options = {"description": "PyTorch on HPC clusters, over MPI and Horovod"}
autodoc_member_order = "bysource"
autodoc_typehints = "description"
nitpicky = False
suppress_warnings = ["myst.xref_missing"]  # links to files of the repository, outside the pages
