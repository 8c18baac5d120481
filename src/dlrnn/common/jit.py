"""Import numba without the configuration file that it would read in the current folder.

`.numba_config.yaml` could redirect the cache of compiled kernels, which holds pickles.
"""

import os
import sys
import warnings

if "numba" not in sys.modules:
    _yaml = sys.modules.get("yaml")
    sys.modules["yaml"] = None  # type: ignore[assignment]  # without yaml numba reads no such file
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns about a file that it cannot read
            import numba
        numba.core.config._config_fname = os.devnull
    finally:
        del sys.modules["yaml"]
        if _yaml is not None:
            sys.modules["yaml"] = _yaml

import numba

__all__ = ["numba"]
