"""``kvplane generate|serve|layout``: its commands."""
