"""What pyproject.toml cannot say: docs/ is packed as the manual that `tandem docs` shows."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

DOCS = Path(__file__).with_name("docs")


class BuildWithManual(build_py):
    """Copies the pages beside the code that shows them."""

    def run(self) -> None:
        """Build; an editable install reads docs/ itself."""
        super().run()
        if self.editable_mode:
            return
        packed = Path(self.build_lib, "tandem", "manual", "text")
        for page in DOCS.rglob("*.md"):
            target = packed / page.relative_to(DOCS)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(page, target)


setup(cmdclass={"build_py": BuildWithManual})
