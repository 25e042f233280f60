"""Plans' changes to the block tables, and what the tables say of the blocks."""
