"""Products with weights of 8 and 4 bits as a quantiser stored them."""
