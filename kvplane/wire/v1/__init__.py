"""Stubs generated from ``protos/kvplane/v1`` by ``make protos``. Do not edit."""
