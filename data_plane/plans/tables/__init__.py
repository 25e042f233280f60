"""Plans' changes to the block tables, and the tables' metadata of the blocks."""
