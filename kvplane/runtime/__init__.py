"""Connects an engine to the planes, which run remotely, on the same machine, or in its process.

This is the only folder of the package that may import the planes: in the modules ``embedded`` and
``probe_planes``, which others import inside of functions.
"""
