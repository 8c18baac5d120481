"""`python -m dlrnn`."""

import sys

from dlrnn.cli import main

sys.exit(main())
