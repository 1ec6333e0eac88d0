"""Packaging of unidist: the folder ``backends/`` is imported as ``unidist.backends``.

Everything that is not about that mapping lives in pyproject.toml. Packages are listed by hand:
a bare ``find_packages()`` would install ``tests`` and ``examples`` as top-level packages.
"""

from setuptools import setup

setup(
    packages=["unidist", "unidist.backends", "unidist.backends.algorithms"],
    package_dir={
        "unidist": "unidist",
        "unidist.backends": "backends",
        "unidist.backends.algorithms": "backends/algorithms",
    },
    package_data={"unidist": ["py.typed"], "unidist.backends": ["py.typed"]},
)
