"""`cubatch bench`: our kernels beside the vendor's, each result checked before it is timed."""
