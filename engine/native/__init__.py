"""C sources of the CPU kernels, and the script that compiles them."""
