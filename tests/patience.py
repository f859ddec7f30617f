"""How long a test waits for what must come: many times what it takes, so that a busy machine fails nothing."""

from __future__ import annotations

from typing import Final

#: Seconds. Only what never comes costs them.
PATIENCE_S: Final = 180.0
