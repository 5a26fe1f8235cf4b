"""`cubatch bench`: cubatch kernels compared with the vendor's; each result is checked before it is timed."""
