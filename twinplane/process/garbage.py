"""How often Python looks for garbage in a process that serves many streams."""

from __future__ import annotations

import gc

YOUNG_OBJECTS = 20_000
"""New objects between two collections.

A step that brings tokens to a thousand streams makes a few thousand objects that all go again when
the streams are sent. By Python's 700 each such step would begin a collection or several, which find
nothing and cost more for each replica that there is.
"""


def settle_collector() -> None:
    """To be called once, when what a server needs for ever is loaded: that is never walked again,
    so that the collector does not stop a step for it."""
    _, *older = gc.get_threshold()
    gc.set_threshold(YOUNG_OBJECTS, *older)
    gc.freeze()
