"""Packages that only one of normstream's extras installs."""

import importlib
from types import ModuleType


def import_extra(module: str, extra: str) -> ModuleType:
    """The module; ImportError that names the extra if it is not installed.

    >>> import_extra("json", "parquet").__name__
    'json'
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"this needs {module}: pip install 'normstream[{extra}]' ({error})") from error
