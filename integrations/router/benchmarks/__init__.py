"""Simulates a router before several engines, on a trace of requests."""
