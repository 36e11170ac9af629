"""Tandem: the `tandem` command and its tools. The links beside them lead to packages at the top of the repository."""

from pathlib import Path

if not (Path(__file__).with_name("wire") / "__init__.py").is_file():
    raise ImportError(
        "src/tandem/ holds symbolic links to the folders at the top, and this checkout has plain files in"
        " their place: clone again with `git clone -c core.symlinks=true`, or copy the tree with `cp -a`"
    )
