"""Kernels in C++ for what torch is slow at on CPUs: linear layers over few tokens, attention of decoding."""
