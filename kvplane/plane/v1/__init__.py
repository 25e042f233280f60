"""Stubs generated from ``protos/kvplane/plane/v1`` by ``make protos``. Do not edit."""
