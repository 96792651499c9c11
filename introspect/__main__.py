"""`python -m introspect`, the same as the `introspect` command."""

import sys

from introspect.cli import main

sys.exit(main())
