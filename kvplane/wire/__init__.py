"""Encodings that planes and clients share: columns, versions, signatures, errors."""
