"""Products with weights: of any size, of one row, in parts that a norm adds up, on Hopper, of experts, and on the
CPU."""
