"""What the planes and their clients write for each other: columns, versions, signatures, errors."""
