"""``python -m conduit_kv.cli``."""

import sys

from conduit_kv.cli import main

sys.exit(main())
