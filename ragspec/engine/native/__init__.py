"""C++ kernels for what torch does slowly on CPUs: linear layers over few tokens, decode attention, whole layers."""
