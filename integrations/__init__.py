"""Connects kvplane to other systems. Each folder is a package of its own, uses public interfaces
only, and is ``kvplane.integrations.NAME`` when it is installed.
"""
