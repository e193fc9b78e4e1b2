"""HOW is the command started without its script?  `python -m lightning_3d ...` is `lightning-3d ...`."""

import sys

from lightning_3d.cli import main

sys.exit(main())
