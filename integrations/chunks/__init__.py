"""Keeps an engine's chunks of KV in a kvplane pool of opaque pages: what all plug-ins share."""

from .cache import ChunkCache, Found
from .settings import ChunkSettings, namespace_of

__all__ = ["ChunkCache", "ChunkSettings", "Found", "namespace_of"]
