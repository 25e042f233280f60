"""One engine's session: its lease, its numbered requests and the plans in flight."""
