"""Packaging of unidist: the folder ``backends/`` is imported as ``unidist.backends``.

Everything that is not about that mapping lives in pyproject.toml. Packages are listed by hand:
a bare ``find_packages()`` would install ``tests`` and ``examples`` as top-level packages.
"""

from setuptools import setup

setup(
    packages=[
        "unidist",
        "unidist.elastic",
        # The folder horovod_shim is no package; runs of unidist.horovod have it on sys.path.
        "unidist.horovod_shim.horovod",
        "unidist.horovod_shim.horovod.common",
        "unidist.horovod_shim.horovod.torch",
        "unidist.horovod_shim.horovod.torch.elastic",
        "unidist.backends",
        "unidist.backends.algorithms",
    ],
    package_dir={
        "unidist": "unidist",
        "unidist.backends": "backends",
        "unidist.backends.algorithms": "backends/algorithms",
    },
    package_data={"unidist": ["py.typed"], "unidist.backends": ["py.typed"]},
)
