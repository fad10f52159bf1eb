"""What icebear says beside a result: a warning of its logger, once."""

from __future__ import annotations

import logging
from functools import lru_cache


@lru_cache(1000)
def say(sentence: str) -> None:
    """Log a sentence, once."""
    logging.getLogger("icebear").warning(sentence)
