"""Times of the Triton kernels beside the least time the card could take; one module per part, see `__main__`."""
