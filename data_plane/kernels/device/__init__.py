"""The device that kernels run on: choosing it, ordering its work, detecting its failure."""
