"""Ship ``conf/`` and ``triton_repo/`` inside the wheel, so that an installed package works in an empty folder."""

from pathlib import Path
from shutil import copytree, ignore_patterns

from setuptools import setup
from setuptools.command.build_py import build_py

SHIPPED = ("conf", "triton_repo")


class BuildWithShippedFolders(build_py):
    """Copy the top-level data folders to ``pipeline/_shipped``; an editable install reads them in place."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        root = Path(__file__).parent
        for name in SHIPPED:
            target = Path(self.build_lib, "pipeline", "_shipped", name)
            copytree(root / name, target, dirs_exist_ok=True, ignore=ignore_patterns("__pycache__"))


setup(cmdclass={"build_py": BuildWithShippedFolders})
