"""The compiled CPU kernels: C++ sources, their build, and the Python that calls them."""
