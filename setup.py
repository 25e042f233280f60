"""Which packages there are, and the commit that they are built from. All else is in pyproject.toml.

The folders ``engine`` and ``integrations`` are installed inside ``kvplane``: at the top their names
could be anybody's.
"""

from __future__ import annotations

import os
import runpy
from pathlib import Path

from setuptools import find_namespace_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

AT_THE_TOP = ("kvplane", "control_plane", "data_plane")
INSIDE_KVPLANE = ("engine", "integrations")


def packages_in(folder: str) -> list[str]:
    """The package in ``folder``, and those below it."""
    found = find_namespace_packages(include=[folder, f"{folder}.*"])
    return [
        name for name in found if not {"__pycache__", "tests", "benchmarks"} & {*name.split(".")}
    ]


def write_commit(folder: str) -> None:
    """Write the commit where ``kvplane.release`` looks for it. A build without git, as of an image,
    takes it from KVPLANE_COMMIT.
    """
    release = runpy.run_path("kvplane/release.py")
    if commit := os.environ.get("KVPLANE_COMMIT") or release["commit"]():
        Path(folder, "kvplane", release["COMMIT_FILE"]).write_text(f"{commit}\n")


class BuildWithCommit(build_py):
    """Adds the commit to a wheel; an editable install asks git."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            write_commit(self.build_lib)


class SourcesWithCommit(sdist):
    """Adds the commit to a source distribution, for the wheels that are built from it."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        write_commit(base_dir)


setup(
    cmdclass={"build_py": BuildWithCommit, "sdist": SourcesWithCommit},
    packages=[
        *(name for folder in AT_THE_TOP for name in packages_in(folder)),
        *(f"kvplane.{name}" for folder in INSIDE_KVPLANE for name in packages_in(folder)),
    ],
    package_dir={f"kvplane.{folder}": folder for folder in INSIDE_KVPLANE},
)
