"""Which packages there are. All else is in pyproject.toml.

The folders ``engine`` and ``integrations`` are installed inside ``kvplane``: at the top their names
could be anybody's.
"""

from __future__ import annotations

from setuptools import find_namespace_packages, setup

AT_THE_TOP = ("kvplane", "control_plane", "data_plane")
INSIDE_KVPLANE = ("engine", "integrations")


def packages_in(folder: str) -> list[str]:
    """The package in ``folder``, and those below it."""
    found = find_namespace_packages(include=[folder, f"{folder}.*"])
    return [
        name for name in found if not {"__pycache__", "tests", "benchmarks"} & {*name.split(".")}
    ]


setup(
    packages=[
        *(name for folder in AT_THE_TOP for name in packages_in(folder)),
        *(f"kvplane.{name}" for folder in INSIDE_KVPLANE for name in packages_in(folder)),
    ],
    package_dir={f"kvplane.{folder}": folder for folder in INSIDE_KVPLANE},
)
