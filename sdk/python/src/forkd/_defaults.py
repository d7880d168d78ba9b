"""Who shares a default client: an event loop's connections are of no use to another."""

from __future__ import annotations

import asyncio
import weakref
from typing import Any

_loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, object] = weakref.WeakKeyDictionary()


def async_owner(clients: dict[Any, Any]) -> object:
    """This event loop's key; what loops that are closed have left in ``clients`` is dropped."""
    for loop in [loop for loop in _loops if loop.is_closed()]:
        gone = _loops.pop(loop)
        for key in [k for k in clients if k[0] is gone]:
            del clients[key]
    return _loops.setdefault(asyncio.get_running_loop(), object())


def sync_owner(clients: dict[Any, Any]) -> object:
    """All threads share theirs."""
    return None
