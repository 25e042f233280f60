"""Which of several control planes leads: one interface, and what holds the election."""
