"""Builds the wheel, where the engine is ``kvplane.engine``. pyproject.toml has all the rest."""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildPackages(build_py):
    """Puts ``engine`` into ``kvplane``: at the top its name could be anybody's.

    An editable install has the folders as they are.
    """

    def run(self) -> None:
        """Collect the packages, then move that one."""
        super().run()
        if not self.editable_mode:
            built = Path(self.build_lib)
            shutil.rmtree(built / "kvplane" / "engine", ignore_errors=True)
            shutil.move(built / "engine", built / "kvplane" / "engine")


setup(cmdclass={"build_py": BuildPackages})
