"""What an engine needs to run on the planes: remote, on the same machine, or in its own process.

This is the only folder of the package that may import the planes.
"""
