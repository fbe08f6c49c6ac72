"""Linear, attention, norm, rope and MLP: each with its eager reference and, beside it, its Triton form."""
