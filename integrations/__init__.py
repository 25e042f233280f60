"""What connects kvplane to other systems. Each folder is a package of its own, stands on public
interfaces alone, and is ``kvplane.integrations.NAME`` when it is installed.
"""
