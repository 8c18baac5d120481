"""`python -m dlrnn`."""

import os
import sys

if not sys.flags.safe_path and sys.path and sys.path[0] in ("", os.path.realpath(os.curdir)):
    del sys.path[0]  # the current folder, which must not shadow installed packages

from dlrnn.cli import main

sys.exit(main())
