"""`python -m cluster` is `halfmoon`."""

import sys

from cluster.cli import main

sys.exit(main())
