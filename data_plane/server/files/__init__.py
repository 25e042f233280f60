"""The file tier of a data plane: what is used twice is written, and loaded when it is asked for."""
