"""kvpress as an oracle: ``make oracle`` compares what it keeps with what we keep.

Two scripts for two environments, so that plain ``pytest`` finds nothing here and needs no kvpress:
``kvpress_indices.py`` writes what kvpress keeps, ``compare.py`` compares.
"""

from tests.tiny import torchvision_shim

torchvision_shim.install()
