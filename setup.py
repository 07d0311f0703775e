"""Everything about the package is in pyproject.toml; compiled extensions, once there are any, are built from here."""

from setuptools import setup

setup()
