"""The ``kvplane`` command."""
